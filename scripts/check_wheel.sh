#!/usr/bin/env bash
# `pip wheel .`, then the wheel in an empty environment where there is no compiler: `make wheel`.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist build/empty
python -m pip wheel --quiet --no-deps --wheel-dir dist .
wheel=$(echo dist/sparge-*-py3-none-*.whl)
python -m venv build/empty
build/empty/bin/pip install --quiet "$wheel"
# Nothing to compile with: only the environment's own programs are on the path.
cd build/empty
env -i HOME="$HOME" SPARGE_CACHE="$PWD/cache" PATH="$PWD/bin" bin/python - <<'PYTHON'
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
print("without a compiler:", torch.__version__, native.chosen_isa(native.available()))
PYTHON
ls -l "../../$wheel"
