"""Attend to packed sequences of different lengths, and to keys that arrive in parts.

python examples/varlen.py [tokens]
"""

import sys

import torch

import sparge
from sparge import KeepAll, Recipe
from sparge.synthetic import structured_qkv

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
lengths = [tokens, tokens // 2, 77]
parts = [structured_qkv(Hq=4, Hk=2, L=length, seed=i) for i, length in enumerate(lengths)]
# Packed: [T, H, D], one sequence behind another, and the boundaries between them.
query, key, value = (torch.cat([part[j][0].transpose(0, 1) for part in parts]) for j in range(3))
cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()

options = {"is_causal": True, "enable_gqa": True, "backend": "cpu"}
packed = sparge.attention_varlen(query, key, value, cu_seqlens, cu_seqlens, **options)
print("packed:", tuple(packed.shape))
for i, (part, own) in enumerate(zip(parts, packed.split(lengths), strict=True)):
    alone = sparge.attention(*part, **options)[0].transpose(0, 1)
    print(f"sequence {i} of {lengths[i]} tokens, as if alone: {torch.equal(own, alone)}")

# Keys in two parts, merged by their LSE: equal to attention over all keys at once.
query, key, value = structured_qkv(Hq=2, Hk=2, L=tokens)
exact = {"recipe": Recipe(KeepAll(), precision="exact"), "return_lse": True}
halves = [
    sparge.attention(query, key[:, :, keys], value[:, :, keys], **exact)
    for keys in (slice(None, tokens // 2), slice(tokens // 2, None))
]
merged, _ = sparge.merge(*halves[0], *halves[1])
whole, _ = sparge.attention(query, key, value, **exact)
print("merged equals whole:", torch.allclose(merged, whole, atol=1e-5))
