"""Packed sequences of different lengths through all four stages at once: one native call for each
step of a stage, however many sequences there are (csrc/pack.h). Each result is, bit for bit, that
of its sequence alone.

Intermediate tensors concatenate the sequences, `[rows of all sequences, H, …]`; each slice has the
layout of a separate call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import BLOCK_K, BLOCK_Q, Call, Inputs
from ...values.recipe import PRECISIONS, PREDICTORS, QUANTIZED, KeepError
from ...values.stages import AttendedPack, ChosenSequences
from ...values.tokenmask import TokenMask
from . import library
from .attend import pv_skip_of
from .library import min_similarity
from .prepare import Wanted, finite, results_wanted
from .select import amount_of

FAR = 2**36
"""Larger than any length: a number of blocks or a place of a token beyond it says the same."""


@dataclass(frozen=True)
class PackTables:
    """Of the sequences that are attended. rows int64 `[n, 2]`: first row and number of rows
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


@dataclass(frozen=True)
class RowResults:
    """Results of a pass. rows: codes, or the caller's tensor itself, which has no scale."""

    rows: Tensor
    scale: Tensor | None = None
    pooled: Tensor | None = None
    similarity: Tensor | None = None
    lse_shift: Tensor | None = None


@dataclass(frozen=True)
class PreparedPack:
    """What the later ops read of queries, keys and values. entries: pooled ones, as
    `pooled_key, pooled_value, pooled_k_scale, pooled_v_scale, pool_group`."""

    q: RowResults
    k: RowResults
    v: RowResults
    entries: tuple[Any, ...] = (None, None, None, None, 1)

    def scored(self) -> tuple[Tensor | None, ...]:
        """`query, key, q_scale, k_scale`."""
        return self.q.rows, self.k.rows, self.q.scale, self.k.scale

    def attended(self) -> tuple[Any, ...]:
        """`query, key, value`, their scales, the pooled entries, `lse_shift`."""
        scales = (self.q.scale, self.k.scale, self.v.scale)
        return self.q.rows, self.k.rows, self.v.rows, *scales, *self.entries, self.q.lse_shift


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
    some: ChosenSequences | None = None,
) -> AttendedPack:
    """`call` and `inputs`: the whole pack as one sequence `[1, H, T, D]`."""
    pack = _tables(cuts, align, None if some is None else some.numbers)
    with stage("prepare"):
        prepared = _prepare(call, inputs, pack.q_rows, pack.k_rows)
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


def _tables(cuts: tuple[list[int], list[int]], align: str, numbers: list[int] | None) -> PackTables:
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
    return PackTables(q_rows, k_rows, offsets, _cuts(n_q), _cuts(n_k), _cuts(n_q * n_k))


def _cuts(numbers: Tensor) -> Tensor:
    """Sums before each number, and of all of them."""
    return torch.nn.functional.pad(numbers.cumsum(0), (1, 0))


def _prepare(call: Call, inputs: Inputs, q_rows: Tensor, k_rows: Tensor) -> PreparedPack:
    """As the stages of prepare.py do, to plan and to attend."""
    query, key, value = inputs.query, inputs.key, inputs.value
    assert value is not None
    wanted, mean = results_wanted(call, to_plan=True, to_attend=True), None
    if wanted.anything:
        mean = torch.empty((len(k_rows), call.Hk, call.D))
        library.ops().packed_key_mean(key, k_rows, mean, library.isa_number())
    key_mean = mean if wanted.codes else None
    q = _pass_over_rows(query, q_rows, BLOCK_Q, wanted, scale=call.scale, key_mean=key_mean)
    k = _pass_over_rows(key, k_rows, BLOCK_K, wanted, scale=call.scale, mean=mean)
    fast = call.recipe.precision == "int8-fast"
    v = _code_channels(value, k_rows) if fast else RowResults(value)
    if not call.recipe.pools:
        return PreparedPack(q, k, v)
    return PreparedPack(q, k, v, _pool(call, key, value, k_rows, mean=mean, k=k))


def _pool(
    call: Call, key: Tensor, value: Tensor, rows: Tensor, *, mean: Tensor | None, k: RowResults
) -> tuple[Any, ...]:
    """Means over groups of keys and values, as the precision holds keys and values."""
    group, precision = call.recipe.pool_group, call.recipe.precision
    dtype = torch.float32 if precision == "exact" else key.dtype
    entries = _blocks(rows, group)
    v = _group_means(value, rows, group)
    values = _code_channels(v, entries) if precision == "int8-fast" else RowResults(v.to(dtype))
    if precision in QUANTIZED:
        # Blocks of keys are pooled already where prediction needs them.
        known = k.pooled if group == BLOCK_K else None
        means = _group_means(key, rows, group, mean=mean) if known is None else finite(known)
        keys = _pass_over_rows(means, entries, BLOCK_K, Wanted(codes=True), scale=1.0)
    else:
        keys = RowResults(_group_means(key, rows, group).to(dtype))
    return keys.rows, values.rows, keys.scale, values.scale, group


def _group_means(x: Tensor, rows: Tensor, group: int, *, mean: Tensor | None = None) -> Tensor:
    """Mean of each `group` rows of a sequence, less `mean`, fp32; 0 where it is not finite."""
    pooled = _pass_over_rows(x, rows, group, Wanted(pooled=True), scale=1.0, mean=mean).pooled
    assert pooled is not None
    return finite(pooled)


def _blocks(rows: Tensor, block: int) -> Tensor:
    """Rows of the sequences once each `block` of them is one."""
    numbers = -(rows[:, 1] // -block)
    return torch.stack([numbers.cumsum(0) - numbers, numbers], 1)


def _pass_over_rows(
    x: Tensor,
    rows: Tensor,
    block: int,
    wanted: Wanted,
    *,
    scale: float,
    mean: Tensor | None = None,
    key_mean: Tensor | None = None,
) -> RowResults:
    """x: `[1, H, T, D]`, or in the order of the pack. mean: subtracted from every row of a
    sequence. key_mean: of the keys, for the queries' `lse_shift`."""
    if not wanted.anything:
        return RowResults(x)
    H, D = x.shape[1], x.shape[-1]
    L, n = int(rows[:, 1].sum()), int((-(rows[:, 1] // -block)).sum())

    def empty_if(when: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return x.new_empty(shape, dtype=dtype) if when else None

    codes, row_scale = (
        empty_if(wanted.codes, L, H, D, dtype=torch.int8),
        empty_if(wanted.codes, L, H),
    )
    pooled, similarity = empty_if(wanted.pooled, n, H, D), empty_if(wanted.similarity, n, H)
    lse_shift = empty_if(key_mean is not None, L, H)
    library.ops().packed_statistics(
        x,
        rows,
        block,
        mean,
        codes,
        row_scale,
        pooled,
        similarity,
        key_mean,
        scale,
        lse_shift,
        library.isa_number(),
    )
    return RowResults(x if codes is None else codes, row_scale, pooled, similarity, lse_shift)


def _code_channels(value: Tensor, rows: Tensor) -> RowResults:
    H, D = value.shape[1], value.shape[-1]
    L, n = int(rows[:, 1].sum()), int((-(rows[:, 1] // -BLOCK_K)).sum())
    codes, scale = torch.empty((L, H, D), dtype=torch.int8), torch.empty((n, H, D))
    library.ops().packed_channels(value, rows, codes, scale, library.isa_number())
    return RowResults(codes, scale)


def _predict(call: Call, prepared: PreparedPack, pack: PackTables) -> Tensor:
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


def _select(call: Call, prepared: PreparedPack, mass: Tensor | None, pack: PackTables) -> Lists:
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


def _left_to_dense(lists: Lists, pack: PackTables, some: ChosenSequences) -> tuple[int, ...]:
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
    call: Call, lists: Lists, pv_skips: Tensor, pack: PackTables
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
