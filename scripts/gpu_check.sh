#!/usr/bin/env bash
# The Triton backend on this machine's GPU: `make gpu-check`. Set-up, conformance suite, calibration, benchmark and what
# replaces the documentation's estimates, as build/gpu-check.json to share. It has an environment of its own, .venv-gpu.
#
# PyPI's torch for Linux is the CUDA build. For other cards, and for drivers older than that build, choose the index:
#
#   PIP_INDEX_URL=(the index of torch's build) PIP_EXTRA_INDEX_URL=(that of everything else) make gpu-check
#
# TORCH chooses the version, `TORCH=torch==2.12.1`; by default it is that of constraints.txt. `TORCH=installed` takes the
# torch of PYTHON's own environment, with its Triton: for containers that bring the build for their card. No Triton is
# asked for in any case: torch's builds for GPUs bring the one that fits them.
#
# Arguments are those of `python -m sparge_tools.studies.gpu_check`; --dry-run needs no GPU and no set-up, and runs in PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."

stop() {
    echo "gpu-check: $*" >&2
    exit 3
}

case " $* " in
*" --dry-run "*) mkdir -p build && exec "${PYTHON:-python3}" -m sparge_tools.studies.gpu_check "$@" ;;
esac

vendor=""
if nvidia-smi -L 2>/dev/null | grep --quiet GPU; then
    vendor=NVIDIA
elif [ -e /dev/kfd ]; then
    vendor=AMD
elif grep --quiet --no-messages 0x8086 /sys/class/drm/renderD*/device/vendor; then
    vendor=Intel
fi
[ -n "$vendor" ] || stop "no GPU found: nvidia-smi lists none, and there is neither /dev/kfd (AMD) nor a render device" \
    "of Intel. Nothing was installed or run. Without a GPU, \`make test\` and \`sparge bench --static\` check what can be."
torch="${TORCH:-$(grep '^torch==' constraints.txt)}"
if [ "$vendor" != NVIDIA ] && [ "$torch" != installed ] && [ -z "${PIP_INDEX_URL:-}" ] && [ ! -e .venv-gpu/.done ]; then
    stop "an $vendor card needs a torch that was built for it. Set PIP_INDEX_URL to its index (pytorch.org lists them)" \
        "and PIP_EXTRA_INDEX_URL to that of everything else, or TORCH=installed, then run it again. Nothing was" \
        "installed or run."
fi

venv=.venv-gpu
bin=$venv/bin
made_for="$torch ${PIP_INDEX_URL:-}"
# The constraints name the torch of `make test`; here it is the one that was asked for.
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT
export PIP_DISABLE_PIP_VERSION_CHECK=1

set_up() {
    if [ "$torch" = installed ]; then
        "${PYTHON:-python3}" -m venv --clear --system-site-packages "$venv"
        "$bin/python" -c "import torch; print(f'torch=={torch.__version__}')" >"$venv/constraints.txt" ||
            stop "TORCH=installed, but ${PYTHON:-python3} has no torch, or is that of a virtual environment itself"
    else
        "${PYTHON:-python3}" -m venv --clear "$venv"
        "$bin/pip" install --quiet "$torch"
        "$bin/pip" freeze | grep -E '^torch(==| @)' >"$venv/constraints.txt"
    fi
    # Nothing that is installed from here on may replace the torch for the card.
    export PIP_CONSTRAINT="$PWD/$venv/constraints.txt"
    "$bin/pip" install --quiet --requirement requirements-build.txt
    # A build directory of its own, too: a native core is built against one torch.
    SKBUILD_BUILD_DIR="build/gpu/{wheel_tag}" "$bin/pip" install --quiet --no-build-isolation \
        --editable ".[test]" --editable ./tools
    echo "$made_for" >"$venv/.done"
}

newer() { # whether a file that the environment is made from changed since
    [ -n "$(find scripts/gpu_check.sh pyproject.toml tools/pyproject.toml constraints.txt requirements-build.txt CMakeLists.txt csrc \
        -newer "$venv/.done" -print -quit)" ]
}

if [ ! -e "$venv/.done" ] || [ "$(cat "$venv/.done")" != "$made_for" ] || newer; then
    set_up
fi
mkdir -p build
exec "$bin/python" -m sparge_tools.studies.gpu_check "$@"
