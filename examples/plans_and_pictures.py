"""Look at plans: print them, count them, save them, and hand one to FlexAttention.

python examples/plans_and_pictures.py [tokens]
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import sparge
from sparge import BlockPlan, KeepMass, Recipe
from sparge.synthetic import structured_qkv

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
query, key, value = structured_qkv(Hq=2, Hk=2, L=tokens)

for mass in (0.98, 0.9):
    plan = sparge.make_plan(query, key, is_causal=True, recipe=Recipe(KeepMass(mass)))
    print(f"mass {mass}: density {plan.density:.3f}")
print(plan)  # one picture per head

# A plan is a value: it can be saved, compared and used later.
with TemporaryDirectory() as folder:
    path = Path(folder) / "plan.safetensors"
    plan.save(path)
    same = BlockPlan.load(path)
print("loaded plan equals the saved one:", same == plan)
out, lse = sparge.attend(query, key, value, same)

# A plan of your own, from a bool mask of blocks: here a sliding window of two key blocks.
n_q, n_k = plan.to_mask().shape[2:]
i_q, i_k = torch.arange(n_q)[:, None], torch.arange(n_k)
window = ((i_k - 2 * i_q).abs() <= 2).expand(1, 2, n_q, n_k)
own = BlockPlan.from_mask(window, Lq=tokens, Lk=tokens, is_causal=True)
out, lse = sparge.attend(query, key, value, own)
print(f"window: density {own.density:.3f}, output {tuple(out.shape)}")
