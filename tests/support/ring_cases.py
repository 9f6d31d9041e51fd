"""Calls of `ring_attention` beside one process's `attention`, run in every rank of a group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import sparge
from sparge import KeepAll, KeepError, KeepFraction, KeepMass, Recipe
from sparge.parallel import ring_attention, ring_plan, shard, unshard


@dataclass(frozen=True)
class Case:
    """lengths: of the ranks' queries and keys, where they are not cut evenly."""

    recipe: Recipe
    shape: tuple[int, ...] = (1, 4, 2, 700, 700, 32, 24)
    dtype: torch.dtype = torch.float32
    causal: bool = False
    align: str = "top_left"
    layout: str = "contiguous"
    balance: bool = True
    core: str = "cpu"
    bad_key: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


EXACT = Recipe(KeepMass(0.6), precision="exact")
INT8 = Recipe(KeepMass(0.6))
POOL = Recipe(KeepMass(0.6), skipped="pool", pool_group=16)
CASES = {
    "exact": Case(EXACT),
    "exact, causal": Case(EXACT, causal=True),
    "int8, causal, not balanced": Case(INT8, causal=True, balance=False),
    "int8, causal, zigzag": Case(INT8, causal=True, layout="zigzag"),
    "bf16, pooled, zigzag": Case(POOL, dtype=torch.bfloat16, layout="zigzag"),
    "fp16, causal": Case(INT8, dtype=torch.float16, causal=True),
    "half": Case(Recipe(KeepFraction(0.4), precision="half"), dtype=torch.bfloat16),
    "int8-fast, pooled": Case(Recipe(KeepMass(0.6), precision="int8-fast", skipped="pool")),
    "mean, with a judge": Case(
        Recipe(KeepMass(0.7), "mean", min_similarity=0.04, pv_skip=3.0), causal=True
    ),
    "rows": Case(Recipe(KeepMass(0.7), "rows", sample_rows=7, precision="exact")),
    "chunk, bottom right": Case(
        EXACT, (2, 4, 1, 300, 1000, 32, 32), causal=True, align="bottom_right"
    ),
    "chunk, top left": Case(INT8, (1, 2, 2, 300, 1000, 16, 16), causal=True),
    "more queries than keys": Case(EXACT, (1, 4, 1, 1000, 300, 32, 32), causal=True),
    "rows that see nothing": Case(
        EXACT, (1, 2, 1, 900, 200, 16, 16), causal=True, align="bottom_right"
    ),
    "shorter than a block for each": Case(POOL, (1, 2, 1, 90, 90, 16, 16), causal=True),
    "a row for each": Case(EXACT, (1, 1, 1, 4, 4, 8, 8)),
    "per head, protected": Case(
        Recipe(KeepMass((0.2, 0.5, 0.7, 0.9)), protect=((100, 200),), sink_blocks=0)
    ),
    "everything": Case(Recipe(KeepAll()), causal=True),
    "everything, exact": Case(Recipe(KeepAll(), precision="exact")),
    "budget": Case(Recipe(KeepError(0.2)), causal=True),
    "budget, pooled": Case(Recipe(KeepError(0.3), skipped="pool", pool_group=8)),
    "a key that is not finite": Case(INT8, bad_key=333),
    "a key that is not finite, pooled": Case(POOL, bad_key=333),
    "reference, fp64": Case(
        Recipe(KeepFraction(0.4), precision="exact", skipped="pool"),
        (1, 2, 1, 400, 400, 16, 16),
        torch.float64,
        causal=True,
        core="reference",
    ),
    "reference, int8": Case(
        Recipe(KeepFraction(0.4), skipped="pool"), (1, 2, 1, 400, 400, 16, 16), core="reference"
    ),
    "dense": Case(Recipe(), (1, 2, 2, 64, 64, 16, 16), core="auto"),
}


@dataclass(frozen=True)
class Found:
    """What a rank found: whether the plan is one process's, and the output's distance from it."""

    same_plan: bool
    error: float
    lse_error: float
    same_nan: bool
    density: float
    run: Any


def tensors_of(case: Case) -> list[torch.Tensor]:
    B, Hq, Hk, Lq, Lk, D, Dv = case.shape
    g = torch.Generator().manual_seed(3)
    base = torch.randn(B, Hk, 1, D, generator=g)
    q = 2.5 * torch.randn(B, Hq, Lq, D, generator=g)
    k = torch.randn(B, Hk, Lk, D, generator=g) + 2.0 * base
    v = torch.randn(B, Hk, Lk, Dv, generator=g)
    if case.bad_key is not None:
        k[0, 0, case.bad_key, 3] = float("inf")
    return [x.to(case.dtype) for x in (q, k, v)]


def run_case(case: Case) -> Found:
    qkv = tensors_of(case)
    one = {
        "is_causal": case.causal,
        "causal_align": case.align,
        "enable_gqa": case.shape[1] != case.shape[2],
        "recipe": case.recipe,
        "backend": case.core,
    }
    ring = {**one, "layout": case.layout, "balance": case.balance}
    parts = [shard(x, layout=case.layout) for x in qkv]
    with sparge.record() as runs:
        out, lse = ring_attention(*parts, return_lse=True, **ring)
    out = unshard(out, layout=case.layout)
    lse = unshard(lse.unsqueeze(-1), layout=case.layout).squeeze(-1)
    want, want_lse = sparge.attention(*qkv, return_lse=True, **one)
    plan_options = {**one, "backend": "cpu"} if case.core == "auto" else one
    plan = sparge.make_plan(*qkv[:2], value=qkv[2], **plan_options)
    parts_of_plan = ring_plan(*parts, **ring)
    kept = plan.to_mask()
    same = all(
        torch.equal(part.to_mask(), kept[:, :, first : first + part.counts.shape[2]])
        and torch.equal(part.allowed, plan.allowed[:, :, first : first + part.counts.shape[2]])
        for first, part in parts_of_plan
    )
    good = want.isfinite()
    difference = (out.double() - want.double())[good].abs().sum()
    close = want_lse.isfinite() & lse.isfinite()
    return Found(
        same or case.core == "auto",
        float(difference / want.double()[good].abs().sum().clamp(min=1e-12)),
        float((lse - want_lse)[close].abs().max()) if close.any() else 0.0,
        bool(torch.equal(out.isnan(), want.isnan()) and torch.equal(lse.isinf(), want_lse.isinf())),
        plan.density,
        runs[-1],
    )


def run_cases(rank: int, world: int, names: list[str]) -> dict[str, Found]:
    return {name: run_case(CASES[name]) for name in names if CASES[name].shape[3] >= world}
