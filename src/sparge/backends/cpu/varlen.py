"""Packed sequences of different lengths in one native call, however many there are: each is a call
of its own (csrc/call.h), and its result is, bit for bit, that of the sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import BLOCK_K, BLOCK_Q, Call, Inputs
from ...values.stages import AttendedPack, ChosenSequences
from ...values.tokenmask import TokenMask
from . import library
from .stages import ATTEND, TIMED, native_facts, native_recipe


@dataclass(frozen=True)
class _Tables:
    """Of the sequences that are attended. rows int64 `[n, 2]`: first row and number of rows
    of each, of the queries and of the keys; offsets `[n]`: key position of its first query.
    q_cuts, pair_cuts `[n + 1]`: query blocks, and pairs of them and key blocks, before each."""

    q_rows: Tensor
    k_rows: Tensor
    offsets: Tensor
    q_cuts: list[int]
    pair_cuts: list[int]


class _Lists(NamedTuple):
    """The plans of the pack: indices `[pairs, Hq]`, the others `[query blocks, Hq]`."""

    counts: Tensor
    indices: Tensor
    allowed: Tensor
    pv_skips: Tensor


def why_not_packed(call: Call, *, whole: bool) -> str | None:
    return None


def attend_packed(
    call: Call,
    inputs: Inputs,
    cuts: tuple[list[int], list[int]],
    align: str,
    stage: Callable[[str], AbstractContextManager[None]],
    some: ChosenSequences | None = None,
) -> AttendedPack:
    """`call` and `inputs`: the whole pack as one sequence `[1, H, T, D]`. Stages overlap, so that
    none can be timed from here: the native core tells what each took."""
    query = inputs.query
    pack = _tables(cuts, align, None if some is None else some.numbers)
    counts = query.new_empty((pack.q_cuts[-1], call.Hq), dtype=torch.int32)
    indices = counts.new_empty((pack.pair_cuts[-1], call.Hq))
    lists = _Lists(counts, indices, torch.empty_like(counts), torch.zeros_like(counts))
    if some is None:
        out = query.new_empty((call.Lq, call.Hq, call.Dv))
        lse = query.new_empty((call.Hq, call.Lq), dtype=torch.float32)
    else:
        out, lse = some.into
    limits = None if some is None else [some.limits[number] for number in some.numbers]
    most = [0.0 if limit is None else limit.most_kept for limit in limits or ()]
    measured = None
    if call.measures_error:
        measured = torch.empty((len(pack.offsets), 3, call.Hq), dtype=torch.float64)
    attended = query.new_empty(len(pack.offsets), dtype=torch.bool)
    seconds = query.new_zeros(len(TIMED), dtype=torch.float64)
    costs = max((limit[1:] for limit in limits or () if limit), default=(0.0, 1.0))
    library.run(
        dict(
            query=query,
            key=inputs.key,
            value=inputs.value,
            last=ATTEND,
            q_rows=pack.q_rows,
            k_rows=pack.k_rows,
            offsets=pack.offsets,
            limits=torch.tensor(most, dtype=torch.float64) if most else None,
            pooled_cost=costs[0],
            raised_cost=costs[1],
            **native_facts(call),
            **native_recipe(call.recipe, call.Hq, call.is_causal),
            **lists._asdict(),
            measured=measured,
            out=out,
            lse=lse,
            attended=attended,
            seconds=seconds,
        )
    )
    left = () if some is None else _numbers_left(some.numbers, attended)
    spent = dict(zip(TIMED, seconds.tolist(), strict=True))
    plans = partial(_plans, call, lists, measured, pack)
    return AttendedPack(out, lse, lambda: list(plans()), left, spent)


def _numbers_left(numbers: list[int], attended: Tensor) -> tuple[int, ...]:
    return tuple(n for n, ran in zip(numbers, attended.tolist(), strict=True) if not ran)


def _tables(cuts: tuple[list[int], list[int]], align: str, numbers: list[int] | None) -> _Tables:
    rows = []
    for of_rows in cuts:
        bounds = torch.tensor(of_rows)
        table = torch.stack([bounds[:-1], bounds.diff()], 1)
        rows.append(table if numbers is None else table[torch.tensor(numbers)])
    q_rows, k_rows = rows
    # As `diagonal_offset` says, of all sequences at once.
    offsets = k_rows[:, 1] - q_rows[:, 1]
    if align != "bottom_right":
        offsets = torch.zeros_like(offsets)
    n_q, n_k = -(q_rows[:, 1] // -BLOCK_Q), -(k_rows[:, 1] // -BLOCK_K)
    return _Tables(q_rows, k_rows, offsets, _sums_before(n_q), _sums_before(n_q * n_k))


def _sums_before(numbers: Tensor) -> list[int]:
    """Of each number, and of all of them."""
    return [0, *numbers.cumsum(0).tolist()]


def _plans(
    call: Call, lists: _Lists, measured: Tensor | None, pack: _Tables
) -> Iterator[tuple[BlockPlan, Tensor]]:
    """The plan of each sequence and its skips, cut out of those of the pack."""
    blocks, pairs = pack.q_cuts, pack.pair_cuts
    lengths = torch.stack([pack.q_rows[:, 1], pack.k_rows[:, 1], pack.offsets], 1)
    for i, (Lq, Lk, offset) in enumerate(lengths.tolist()):
        tokens = TokenMask(Lq, Lk, call.is_causal, offset)
        shape = (1, call.Hq, blocks[i + 1] - blocks[i])
        counts, allowed, skips = (
            x[blocks[i] : blocks[i + 1]].view(shape)
            for x in (lists.counts, lists.allowed, lists.pv_skips)
        )
        indices = lists.indices[pairs[i] : pairs[i + 1]].view(*shape, -1)
        own = None if measured is None else measured[i].unsqueeze(1)
        yield plan_from_lists(counts, indices, allowed, tokens, measured=own), skips
