"""Small calls, and a backend of another name, for the tests of choosing and recording."""

from __future__ import annotations

import torch

from sparge import KeepFraction, Recipe
from sparge.backend import FixedCost
from sparge.backends.reference import REFERENCE
from sparge.call import Call, Inputs
from sparge.check import check_call
from sparge.dispatch import Backend, get_backend

SLOW = FixedCost(False, "slow")
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


def a_call(L=2048, **facts):
    common = {"B": 1, "Hq": 2, "Hk": 2, "Lq": L, "Lk": L, "D": 64, "Dv": 64}
    plain = {"dtype": torch.float32, "device": "cpu", "scale": 0.125, "recipe": Recipe()}
    return Call(**{**common, **plain, **facts})


def fake(name="fake", refusal=lambda h, c: None, slower=None):
    """The reference by another name; `slower` is why dense attention is faster."""
    cost = FixedCost(slower is None, slower or "fast")
    about = "the reference by another name"
    return Backend(name, about, REFERENCE.stages, refusal, cost, lambda h, c: "fake-isa")


def call_of(q, k, v, **facts):
    """The metadata of a call on these tensors."""
    return check_call(q, k, v, enable_gqa=True, **facts)


def operands_of(q, k, v, precision, backend, scale=None):
    """What the attend stage of a backend reads."""
    call = call_of(q, k, v, recipe=Recipe(precision=precision), scale=scale)
    stages = get_backend(backend).stages()
    return stages.prepare(call, Inputs(q, k, v), to_plan=False, to_attend=True).operands


def only(runs):
    (run,) = runs
    return run
