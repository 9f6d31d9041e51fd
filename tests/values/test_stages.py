"""What passes between stages: queries cut at blocks, keys that outlive them, masks by heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from calls import call_of
from oracle import make_qkv
from sparge import KeepFraction, Recipe
from sparge.engine.execute import with_kinds
from sparge.routing import get_backend
from sparge.values.call import Inputs
from sparge.values.stages import Prepared, QTensor, prepare
from sparge.values.tokenmask import TokenMask

RECIPES = {
    "int8": Recipe(KeepFraction(0.5), precision="int8", skipped="pool"),
    "int8-fast": Recipe(KeepFraction(0.5), "mean", precision="int8-fast", min_similarity=0.3),
    "exact": Recipe(KeepFraction(0.5), precision="exact"),
}


def parts(x):
    return [x.codes, x.scale] if isinstance(x, QTensor) else [] if x is None else [x]


def run(stages, call, prepared):
    tokens = TokenMask(call.Lq, call.Lk, call.is_causal, call.offset)
    plan = stages.select(call, prepared, stages.predict(call, prepared, tokens), tokens)
    done = stages.attend(call, prepared, plan, tokens)
    return plan.counts, plan.indices, done.out, done.lse


@pytest.mark.parametrize("name", RECIPES)
def test_prepared_keys_serve_the_queries_of_several_calls(backend, name):
    """As chunks of a prefill do: each chunk is planned and attended as its rows of the whole."""
    q, k, v = make_qkv(Hq=4, Hk=2, Lq=300, Lk=300, D=32)
    call = call_of(q, k, v, recipe=RECIPES[name], is_causal=True)
    stages = get_backend(backend).stages()
    whole = prepare(stages, call, Inputs(q, k, v), to_plan=True, to_attend=True)
    expected = run(stages, call, whole)
    for i in range(call.n_q):
        rows, blocks = slice(128 * i, min(128 * (i + 1), 300)), slice(i, i + 1)
        chunk = replace(call, Lq=rows.stop - rows.start, offset=rows.start)
        queries = stages.prepare_queries(
            chunk, q[:, :, rows], mean=whole.keys.mean, to_plan=True, to_attend=True
        )
        cut = whole.queries.blocks(i, i + 1)
        for field in ("rows", "lse_shift", "pooled", "similarity"):
            pairs = zip(parts(getattr(cut, field)), parts(getattr(queries, field)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), field
        found = run(stages, chunk, Prepared(queries, whole.keys))
        for x, want in zip(found, expected, strict=True):
            want = want[:, :, blocks if want.dtype == torch.int32 else rows]
            assert torch.equal(x, want)


@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_kinds_are_computed_once(kind):
    g = torch.Generator().manual_seed(0)
    mask = torch.randn((2, 4, 300, 200), generator=g)
    mask[:, 1, :128] = -torch.inf
    mask[:, 2] = 0.0
    mask = mask > -3.0 if kind == "bool" else mask
    tokens = TokenMask(300, 200, True, 50, mask)
    ahead = with_kinds(get_backend("cpu"), tokens)
    assert torch.equal(ahead.kinds, tokens.block_kinds(torch.device("cpu")))
    assert ahead.diagonal == TokenMask(300, 200, True, 50)
    assert with_kinds(get_backend("cpu"), ahead.diagonal).kinds is None
    assert with_kinds(get_backend("reference"), tokens) is tokens
