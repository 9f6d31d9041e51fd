#!/usr/bin/env bash
# Whether pip can install sparge[gpu] beside each torch that sparge takes: `make resolve`. Arguments are versions of
# torch. pip itself resolves, against the registry: nothing is installed, and of each wheel only its metadata is read.
# Prints the Triton that each torch gets; fails if one does not resolve, or gets none.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/resolve
[ -e "$venv/.done" ] || {
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet "pip>=25" "scikit-build-core>=0.10"
    touch "$venv/.done"
}
# The constraints name the torch of `make test`, which is the question here; local wheels are often its CPU build.
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT PIP_FIND_LINKS PIP_EXTRA_INDEX_URL

[ $# -gt 0 ] || set -- 2.10.0 2.11.0 2.12.1 2.13.0 2.14.0 2.15.0
failed=0
for version in "$@"; do
    report="$venv/$version.json"
    rm -f "$report"
    PIP_CONFIG_FILE=/dev/null "$venv/bin/pip" install --quiet --dry-run --ignore-installed --no-build-isolation \
        --use-feature=fast-deps --report "$report" ".[gpu]" "torch==$version" 2>"$venv/$version.log" || true
    "$venv/bin/python" - "$version" "$report" <<'PY' || failed=1
import json
import pathlib
import sys

version, report = sys.argv[1], pathlib.Path(sys.argv[2])
if not report.exists():
    log = report.with_suffix(".log").read_text(encoding="utf-8")
    sys.exit(f"torch {version}: pip does not resolve sparge[gpu]:\n{log}")
found = [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
versions = {item["name"].lower(): item["version"] for item in found}
if "triton" not in versions:
    sys.exit(f"torch {version}: pip resolves sparge[gpu] without triton; is it a build for CPUs?")
print(f"torch {versions['torch']}: triton {versions['triton']}, sparge {versions['sparge']}")
PY
done
exit "$failed"
