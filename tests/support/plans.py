"""Plans to try things on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from sparge import BlockPlan, KeepAll, Recipe

EXACT = Recipe(keep=KeepAll(), precision="exact")


ALIGNS = ("top_left", "bottom_right")


def random_mask(B, H, Lq, Lk, seed=0, share=0.5):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(B, H, -(-Lq // 128), -(-Lk // 64), generator=g) < share


def allowed_blocks(Lq, Lk, is_causal, align):
    """Blocks that hold an allowed pair, found by looking at every pair."""
    offset = Lk - Lq if align == "bottom_right" else 0
    pairs = torch.ones(Lq, Lk, dtype=torch.bool)
    if is_causal:
        pairs = torch.arange(Lk) <= torch.arange(Lq)[:, None] + offset
    pairs = F.pad(pairs, (0, -Lk % 64, 0, -Lq % 128))
    return pairs.unflatten(0, (-1, 128)).unflatten(2, (-1, 64)).any(3).any(1)


def a_plan(Lq=300, Lk=500, *, is_causal=False, align="top_left", seed=0, B=2, H=3):
    mask = random_mask(B, H, Lq, Lk, seed)
    return BlockPlan.from_mask(mask, Lq=Lq, Lk=Lk, is_causal=is_causal, causal_align=align)


lengths = st.integers(1, 600)


call = {"Lq": lengths, "Lk": lengths, "is_causal": st.booleans(), "align": st.sampled_from(ALIGNS)}
