"""Replace `scaled_dot_product_attention`, and compare with it.

python examples/drop_in_sdpa.py [tokens]
"""

import sys

import torch
import torch.nn.functional as F

import sparge
from sparge.synthetic import structured_qkv

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
query, key, value = structured_qkv(Hq=4, Hk=4, L=tokens)  # [B, H, L, D]

dense = F.scaled_dot_product_attention(query, key, value, is_causal=True)
with sparge.record() as runs:
    out = sparge.attention(query, key, value, is_causal=True)

error = (out - dense).abs().sum() / dense.abs().sum()
print(runs[0])
print(f"backend {runs[0].backend}, density {runs[0].density:.3f}, relative L1 error {error:.4f}")

# "auto" may decide that dense attention is faster. explain() shows the reasons without running.
print(sparge.explain(query, key, value, is_causal=True))

# A named backend is used or refused, never replaced.
exact = sparge.Recipe(sparge.KeepAll(), precision="exact")
same = sparge.attention(query, key, value, is_causal=True, recipe=exact, backend="cpu")
print("all blocks in fp32 equal SDPA:", torch.allclose(same, dense, atol=1e-5))
