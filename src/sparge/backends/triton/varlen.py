"""Packed sequences of different lengths through all four stages at once: each kernel is launched
once, however many sequences there are. Each result is, bit for bit, that of its sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise

import torch
from torch import Tensor

from ...support.errors import Unsupported
from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import BLOCK_K, BLOCK_Q, Call, Inputs, diagonal_offset, n_blocks
from ...values.recipe import KeepError
from ...values.stages import AttendedPack, ChosenSequences, Prepared
from ...values.tokenmask import TokenMask
from .architectures import why_too_many
from .arguments import Packed, pack
from .attend import attend_lists
from .blocks import Lists
from .predict import predict
from .prepare import prepare_keys, prepare_queries
from .select import select_lists

Stage = Callable[[str], AbstractContextManager[None]]


def why_not_packed(call: Call, *, whole: bool) -> str | None:
    """Why sequences of this recipe run one after another, or None."""
    if not whole:
        return "its tables number the blocks of the whole pack"
    if isinstance(call.recipe.keep, KeepError):
        return "an error budget measures rows of each sequence"
    if call.recipe.protect:
        return "protected ranges count from the end of each sequence"
    return None


def attend_packed(
    call: Call,
    inputs: Inputs,
    cuts: tuple[list[int], list[int]],
    align: str,
    stage: Stage,
    some: ChosenSequences | None = None,
) -> AttendedPack:
    """`call` and `inputs`: the whole pack as one sequence `[1, H, T, D]`."""
    assert some is None, "see why_not_packed"
    if (why := why_too_many(len(cuts[0]) - 1)) is not None:
        raise Unsupported("the triton backend cannot attend this pack:", {"triton": why})
    packed = pack(*map(tuple, cuts), align, inputs.query.device)
    tokens = TokenMask(call.Lq, call.Lk, call.is_causal)
    with stage("prepare"):
        keys = prepare_keys(
            call, inputs.key, inputs.value, to_plan=True, to_attend=True, packed=packed
        )
        queries = prepare_queries(
            call, inputs.query, mean=keys.mean, to_plan=True, to_attend=True, packed=packed
        )
        prepared = Prepared(queries, keys)
    mass = None
    if call.predicts:
        with stage("predict"):
            mass = predict(call, prepared, tokens)
    with stage("select"):
        found = select_lists(call, prepared, mass, tokens)
    # The output is written as it is packed.
    out = found.counts.new_empty((call.Lq, call.Hq, call.Dv), dtype=call.dtype)
    lse = found.counts.new_empty((1, call.Hq, call.Lq), dtype=torch.float32)
    with stage("attend"):
        lists = Lists(found.counts, found.indices, pools=found.pools)
        into = out.transpose(0, 1).unsqueeze(0), lse
        done = attend_lists(call, queries, keys, lists, tokens, into=into)
    parts = (found.counts, found.indices, found.allowed, done.pv_skips)
    return AttendedPack(out, lse[0], lambda: list(_plans(call, parts, packed)))


def _plans(
    call: Call, parts: tuple[Tensor, ...], packed: Packed
) -> Iterator[tuple[BlockPlan, Tensor]]:
    """The plan of each sequence and its skips, cut out of those of the pack."""
    first = 0
    for (q0, q1), (k0, k1) in zip(*map(pairwise, packed.cuts), strict=True):
        Lq, Lk = q1 - q0, k1 - k0
        blocks = slice(first, first + n_blocks(Lq, BLOCK_Q))
        counts, indices, allowed, skips = (x[:, :, blocks] for x in parts)
        offset = diagonal_offset(Lq, Lk, packed.align)
        tokens = TokenMask(Lq, Lk, call.is_causal, offset)
        lists = indices[..., : n_blocks(Lk, BLOCK_K)].contiguous()
        yield plan_from_lists(counts.contiguous(), lists, allowed.contiguous(), tokens), skips
        first = blocks.stop
