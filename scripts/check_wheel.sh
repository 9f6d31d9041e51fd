#!/usr/bin/env bash
# `pip wheel . ./tools`, then both wheels in an empty environment where there is no compiler: `make wheel`.
# First the library alone: README's first snippet runs, and `sparge bench` says what to install. Then with the tools.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist build/empty
python -m pip wheel --quiet --no-deps --wheel-dir dist . ./tools
library=$(echo dist/sparge-*-py3-none-*.whl)
tools=$(echo dist/sparge_tools-*-py3-none-any.whl)
python -m venv build/empty
build/empty/bin/pip install --quiet "$library"

# Only the environment's own programs are on the path: there is nothing to compile with.
alone() {
    env -i HOME="$HOME" SPARGE_CACHE="$PWD/build/empty/cache" PATH="$PWD/build/empty/bin" "$@"
}
alone python - <<'PYTHON'
import pathlib
import re
import shutil

import torch

import sparge
from sparge import KeepAll, Recipe
from sparge.backends.cpu import library as native

assert not any(shutil.which(name) for name in ("cc", "gcc", "g++", "clang", "cmake"))
assert native.why_missing() is None, native.why_missing()
x = torch.randn(1, 2, 300, 64)
truth = torch.nn.functional.scaled_dot_product_attention(x, x, x)
out = sparge.attention(x, x, x, recipe=Recipe(KeepAll(), precision="exact"), backend="cpu")
assert torch.allclose(out, truth, atol=1e-5)
snippet = re.findall(r"```python\n(.*?)```", pathlib.Path("README.md").read_text(), re.DOTALL)[0]
exec(snippet, {})
print("without a compiler:", torch.__version__, native.chosen_isa(native.available()))
PYTHON
for command in bench demo eval trace tune; do
    said=$(alone sparge "$command" 2>&1) && code=0 || code=$?
    [ "$code" = 2 ] && [[ "$said" == *'pip install "sparge[tools]"'* ]] || {
        echo "sparge $command without the tools: exit code $code: $said" >&2
        exit 1
    }
done

build/empty/bin/pip install --quiet --find-links dist "$tools"
alone sparge bench --help >build/empty/help.txt
alone sparge tune --help >>build/empty/help.txt
alone python -c "from sparge_tools import zoo; zoo.profile('smollm2-135m-instruct'); zoo.models()"
ls -l "$library" "$tools"
