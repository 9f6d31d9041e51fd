"""Give an error instead of a sparsity: each head keeps what it needs to stay under it.

python examples/error_budget.py [tokens]
"""

import sys

import sparge
from sparge import KeepError, Recipe
from sparge.synthetic import structured_qkv

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
query, key, value = structured_qkv(Hq=4, Hk=4, L=tokens)

for max_error in (0.01, 0.03, 0.1):
    recipe = Recipe(KeepError(max_error))
    with sparge.record() as runs:
        out = sparge.attention(query, key, value, is_causal=True, recipe=recipe, backend="cpu")
    run = runs[0]
    # Measured in the call, on rows that the selection did not use: the error of skipping alone.
    measured = max(run.error_by_head)
    # Measured afterwards on other rows: skipping and quantization together.
    total = sparge.output_error(query, key, value, out, is_causal=True).max()
    heads = ", ".join(f"{density:.2f}" for density in run.density_by_head)
    print(
        f"max_error {max_error}: density {run.density:.3f} (by head {heads}), "
        f"measured {measured:.4f}, with quantization {total:.4f}"
    )
