"""Small calls, and a backend of another name, for the tests of choosing and recording."""

from __future__ import annotations

import torch

from sparge import KeepFraction, Recipe
from sparge.dispatch.choose import Backend, modules_of

HALF = Recipe(keep=KeepFraction(0.5), precision="half")


EXACT = Recipe(keep=KeepFraction(0.5), precision="exact")


def tensors(B=1, Hq=2, Hk=2, Lq=140, Lk=200, D=16, Dv=16, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = ((B, Hq, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv))
    return [torch.randn(size, generator=g).to(dtype) for size in sizes]


def block_mask(n_q=2, n_k=4):
    mask = torch.ones(n_q, n_k, dtype=torch.bool)
    mask[0, 1] = False
    return mask


def fake(name="fake", refusal=lambda h, c: None, slower=lambda h, c: None):
    modules = modules_of("reference")
    return Backend(
        name, "the reference by another name", refusal, slower, modules, lambda h, c: "fake-isa"
    )


def only(runs):
    (run,) = runs
    return run
