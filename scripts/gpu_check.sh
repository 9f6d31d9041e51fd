#!/usr/bin/env bash
# The Triton backend on this machine's GPU: `make gpu-check`. Conformance suite, calibration and benchmark; writes
# build/gpu-check.json to share. It has an environment of its own, .venv-gpu: that of the other targets may hold a
# torch without GPU support. PyPI's torch for Linux is the CUDA build; for other cards choose the index:
#
#   PIP_INDEX_URL=(the index of torch for ROCm) PIP_EXTRA_INDEX_URL=(that of everything else) make gpu-check
#
# Arguments are those of `python -m benchmarks.gpu_check`.
set -euo pipefail
cd "$(dirname "$0")/.."

stop() {
    echo "gpu-check: $*" >&2
    exit 3
}

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
if [ "$vendor" != NVIDIA ] && [ -z "${PIP_INDEX_URL:-}" ] && [ ! -e .venv-gpu/.done ]; then
    stop "an $vendor card needs a torch that was built for it. Set PIP_INDEX_URL to its index (pytorch.org lists them)" \
        "and PIP_EXTRA_INDEX_URL to that of everything else, then run it again. Nothing was installed or run."
fi

# A build directory of its own, too: a native core is built against one torch.
SKBUILD_BUILD_DIR="build/gpu/{wheel_tag}" "${MAKE:-make}" VENV=.venv-gpu setup
mkdir -p build
exec .venv-gpu/bin/python -m benchmarks.gpu_check "$@"
