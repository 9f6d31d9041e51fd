"""Packed sequences of different lengths through all four stages at once: one native call for each
step of a stage, however many sequences there are (csrc/pack.h). Each result is, bit for bit, that
of its sequence alone.

What one call hands to the next holds the sequences one after another, each as it lies alone; its
shape is `[rows of all sequences, H, …]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import Call, Inputs
from ...values.geometry import BLOCK_K, BLOCK_Q
from ...values.recipe import PRECISIONS, PREDICTORS, KeepError
from ...values.stages import AttendedPack, SomeOf
from ...values.tokenmask import TokenMask
from . import library
from .attend import pv_skip_of
from .op_arguments import min_similarity
from .packed_prepare import PreparedPack, prepare
from .select import amount_of

FAR = 2**36
"""Larger than any length: a number of blocks or a place of a token beyond it says the same."""


@dataclass(frozen=True)
class Pack:
    """Tables of the sequences that are attended. rows int64 `[n, 2]`: first row and number of rows
    of each, of the queries and of the keys; offsets `[n]`: key position of its first query.
    q_cuts, k_cuts, pair_cuts `[n + 1]`: query blocks, key blocks and pairs of them before each."""

    q_rows: Tensor
    k_rows: Tensor
    offsets: Tensor
    q_cuts: Tensor
    k_cuts: Tensor
    pair_cuts: Tensor

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_rows, self.k_rows, self.offsets


@dataclass(frozen=True)
class Lists:
    """The plan of the pack: counts and allowed `[query blocks, Hq]`, indices `[pairs, Hq]`."""

    counts: Tensor
    indices: Tensor
    allowed: Tensor


def why_not_packed(call: Call, *, whole: bool) -> str | None:
    """Why sequences of this recipe run one after another, or None."""
    if isinstance(call.recipe.keep, KeepError):
        return "an error budget measures rows of each sequence"
    return None


def attend_packed(
    call: Call,
    inputs: Inputs,
    cuts: tuple[list[int], list[int]],
    align: str,
    stage: Callable[[str], AbstractContextManager[None]],
    some: SomeOf | None = None,
) -> AttendedPack:
    """`call` and `inputs`: the whole pack as one sequence `[1, H, T, D]`."""
    pack = _tables(cuts, align, None if some is None else some.numbers)
    with stage("prepare"):
        prepared = prepare(call, inputs, pack.q_rows, pack.k_rows)
    mass = None
    if call.predicts:
        with stage("predict"):
            mass = _predict(call, prepared, pack)
    with stage("select"):
        lists = _select(call, prepared, mass, pack)
    left = () if some is None else _left_to_dense(lists, pack, some)
    if some is None:
        out = torch.empty((call.Lq, call.Hq, call.Dv), dtype=call.dtype)
        lse = torch.empty((call.Hq, call.Lq), dtype=torch.float32)
    else:
        out, lse = some.into
    pv_skips = torch.zeros_like(lists.counts)
    attends = None
    if some is not None and left:
        attends = torch.isin(torch.tensor(some.numbers), torch.tensor(left), invert=True)
    with stage("attend"):
        library.ops().packed_attend(
            *prepared.attended(),
            pv_skip_of(call),
            lists.counts,
            lists.indices,
            *pack.tables,
            call.is_causal,
            attends,
            PRECISIONS.index(call.recipe.precision),
            call.scale,
            out,
            lse,
            pv_skips,
            library.isa_number(),
        )
    return AttendedPack(out, lse, lambda: list(_plans(call, lists, pv_skips, pack)), left)


def _tables(cuts: tuple[list[int], list[int]], align: str, numbers: list[int] | None) -> Pack:
    rows = []
    for each in cuts:
        bounds = torch.tensor(each)
        table = torch.stack([bounds[:-1], bounds.diff()], 1)
        rows.append(table if numbers is None else table[torch.tensor(numbers)])
    q_rows, k_rows = rows
    # As `diagonal_offset` says, of all sequences at once.
    offsets = k_rows[:, 1] - q_rows[:, 1]
    if align != "bottom_right":
        offsets = torch.zeros_like(offsets)
    n_q, n_k = -(q_rows[:, 1] // -BLOCK_Q), -(k_rows[:, 1] // -BLOCK_K)
    return Pack(q_rows, k_rows, offsets, _cuts(n_q), _cuts(n_k), _cuts(n_q * n_k))


def _cuts(numbers: Tensor) -> Tensor:
    """Sums before each number, and of all of them."""
    return torch.nn.functional.pad(numbers.cumsum(0), (1, 0))


def _predict(call: Call, prepared: PreparedPack, pack: Pack) -> Tensor:
    recipe = call.recipe
    mass = torch.empty((int(pack.pair_cuts[-1]), call.Hq))
    library.ops().packed_predict(
        *prepared.scored(),
        PRECISIONS.index(recipe.precision),
        call.scale,
        prepared.q.pooled,
        prepared.k.pooled,
        prepared.k.similarity,
        min_similarity(call),
        *pack.tables,
        call.is_causal,
        PREDICTORS.index(recipe.predictor),
        recipe.sample_rows,
        mass,
        library.isa_number(),
    )
    return mass


def _select(call: Call, prepared: PreparedPack, mass: Tensor | None, pack: Pack) -> Lists:
    recipe = call.recipe
    counts = torch.empty((int(pack.q_cuts[-1]), call.Hq), dtype=torch.int32)
    indices = counts.new_empty((int(pack.pair_cuts[-1]), call.Hq))
    lists = Lists(counts, indices, torch.empty_like(counts))
    library.ops().packed_select(
        mass,
        *amount_of(call),
        prepared.q.similarity,
        prepared.k.similarity,
        min_similarity(call),
        *pack.tables,
        call.is_causal,
        min(recipe.sink_blocks, FAR),
        min(recipe.window(call.is_causal), FAR),
        _protected(call),
        lists.counts,
        lists.indices,
        lists.allowed,
        library.isa_number(),
    )
    return lists


def _protected(call: Call) -> Tensor | None:
    ranges = [
        [max(-FAR, min(x, FAR)) for x in (start, FAR if stop is None else stop)]
        for start, stop in call.recipe.protect
    ]
    return torch.tensor(ranges) if ranges else None


def _left_to_dense(lists: Lists, pack: Pack, some: SomeOf) -> tuple[int, ...]:
    """Sequences whose plan keeps so much that dense attention is faster."""
    sums = [
        _cuts(x.sum(1, dtype=torch.int64))[pack.q_cuts].diff().tolist()
        for x in (lists.counts, lists.allowed)
    ]
    return tuple(
        number
        for number, kept, allowed in zip(some.numbers, *sums, strict=True)
        if some.leaves(number, kept, allowed)
    )


def _plans(
    call: Call, lists: Lists, pv_skips: Tensor, pack: Pack
) -> Iterator[tuple[BlockPlan, Tensor]]:
    """The plan of each sequence and its skips, cut out of those of the pack."""
    blocks, pairs = pack.q_cuts.tolist(), pack.pair_cuts.tolist()
    lengths = torch.stack([pack.q_rows[:, 1], pack.k_rows[:, 1], pack.offsets], 1)
    for i, (Lq, Lk, offset) in enumerate(lengths.tolist()):
        tokens = TokenMask(Lq, Lk, call.is_causal, offset)
        shape = (1, call.Hq, blocks[i + 1] - blocks[i])
        counts, allowed, skips = (
            x[blocks[i] : blocks[i + 1]].view(shape)
            for x in (lists.counts, lists.allowed, pv_skips)
        )
        indices = lists.indices[pairs[i] : pairs[i + 1]].view(*shape, -1)
        yield plan_from_lists(counts, indices, allowed, tokens), skips
