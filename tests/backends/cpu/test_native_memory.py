"""What a call needs beside its inputs and outputs, as the system counts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparge.backends.cpu import library as native

CODE = """
import resource, torch, sparge
from sparge import KeepFraction, Recipe
torch.set_num_threads(1)
B, H, L, D = 1, 2, 16384, 64
q, k, v = (torch.randn(B, H, L, D).to(torch.bfloat16) for _ in range(3))
recipe = Recipe(KeepFraction(0.05), predictor="{predictor}", precision="{precision}")
small = [x[:, :, :300] for x in (q, k, v)]
sparge.attention(*small, recipe=recipe, backend="cpu")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
sparge.attention(q, k, v, recipe=recipe, backend="cpu")
print(peak() - before, q.nbytes)
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="ru_maxrss counts other units there")
@pytest.mark.skipif(native.why_missing() is not None, reason="no native core")
@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
@pytest.mark.parametrize("predictor", ["mean", "blend"])
def test_memory_is_that_of_the_8_bit_copies(predictor, precision):
    """Scores of one head alone would be 1 GB in fp32; nothing of size Lq x Lk is ever made."""
    code = CODE.format(predictor=predictor, precision=precision)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    used, of_query = map(int, done.stdout.split())
    # The output; codes of q, k and v are half of them each; V transposed for tiles once more.
    most = of_query * (1 + 1.5 + 1) if "int8" in precision else of_query * 2
    plan = 2 * 128 * 256 * 4
    assert used < most + plan + 8 * 2**20
