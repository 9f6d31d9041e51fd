#!/usr/bin/env bash
# The static check with every Triton that users have: `make tritons`. Each version is unpacked beside the environment,
# in build/tritons, and shadows the one that is installed there. Arguments are those of `sparge bench --static`:
#
#   scripts/tritons.sh --update-ratchet "why the numbers change"
set -euo pipefail
cd "$(dirname "$0")/.."

# `env -u`: the constraints of the environment hold for its own packages.
failed=""
versions=$(.venv/bin/python -c "from sparge_tools.static.ratchet import VERSIONS; print(*VERSIONS)")
for version in $versions; do
    there="$PWD/build/tritons/$version"
    if [ ! -e "$there/.done" ]; then
        rm -rf "$there"
        env -u PIP_CONSTRAINT .venv/bin/pip install --quiet --target "$there" --no-deps "triton==$version"
        touch "$there/.done"
    fi
    PYTHONPATH="$there" .venv/bin/sparge bench --static "$@" || failed="$failed $version"
done
[ -z "$failed" ] || { echo "tritons: red with$failed" >&2; exit 1; }
