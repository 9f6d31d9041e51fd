"""The kept blocks of a mass map, one program for each query block of a head.

    need      = τ · Σ mass, or a number of blocks
    threshold = the largest mass m such that the blocks of at least m reach the need: found by
                halving the range of fp32's bit patterns, which order as positive numbers do
    kept      = blocks above the threshold, then as many at the threshold, smallest index first, as
                the need takes; forced blocks; everything where the prediction is not known

No sort and no memory beyond the lists. Sums are fp64, so that equal masses tie exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import Call
from ...values.recipe import KeepAll, KeepError, KeepFraction, KeepMass
from ...values.stages import Prepared
from ...values.tokenmask import TokenMask
from .arguments import per_head, sizes_of
from .blocks import (
    AT_ONCE,
    Forced,
    SelectedLists,
    allowed_of,
    append_kept,
    end_list,
    forced_blocks,
    hides,
    is_forced,
    is_open,
    kinds_of_row,
    kinds_under,
    plan_of,
)
from .launch import launch
from .operands import empty_lists, keys_of
from .primitives import BLOCK_K, BLOCK_Q, causal_stop, sequence_of

ALL, MASS, FRACTION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_mass(mass_row, j, may):
    """`(mass, its bit pattern)`, 0 where nothing may attend; bit patterns order as the masses."""
    m = tl.load(mass_row + j, mask=may, other=0.0)
    return m, m.to(tl.int32, bitcast=True)


@triton.jit
def weight_from(mass_row, kinds_row, stop, least, RULE: tl.constexpr):
    """What counts towards the need, mass or number, of the blocks whose bit pattern is at least
    `least`."""
    total = tl.zeros([], tl.float64)
    for start in tl.range(0, stop, AT_ONCE):
        j = start + tl.arange(0, AT_ONCE)
        may = allowed_of(j, stop, kinds_row)
        m, bits = load_mass(mass_row, j, may)
        w = m.to(tl.float64)
        if RULE == FRACTION:
            w = w * 0.0 + 1.0
        total += tl.sum(tl.where(may & (bits >= least), w, 0.0), 0)
    return total


@triton.jit(
    do_not_specialize=[
        "Lq", "Lk", "n_q", "n_k", "n_blocks_k", "offset", "sink", "reach", "n_ranges"
    ]
)  # fmt: skip
def select_blocks(
    mass, amounts, q_similarity, k_similarity, least, ranges, made, pack, kinds, Hq,
    group, Lq, Lk, n_q, n_k, n_blocks_k, offset, sink, reach, n_ranges,
    RULE: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One query block of one head, into `made`, the `SelectedLists`. least: of each head, the
    self-similarity below which a block is kept; None judges none."""
    force = Forced(sink, reach, n_ranges)
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq = 0
    if pack.table is not None:
        seq = tl.load(pack.seq_of_block + i)
    own = sequence_of(pack, seq, Lq, Lk, offset)
    row = (b * Hq + h) * n_q + i
    i_q = i - own.q_block0
    own_n_k = tl.cdiv(own.Lk, BLOCK_K)
    mass_row = mass
    if RULE != ALL:
        mass_row = mass + row * n_k
    kinds_row = kinds_of_row(kinds, h, b, i_q, n_k)
    n = tl.arange(0, AT_ONCE)
    stop = own_n_k
    if CAUSAL:
        last_row = tl.minimum((i_q + 1) * BLOCK_Q, own.Lq) - 1
        stop = causal_stop(last_row, own.offset, own_n_k)

    unknown = i < 0
    if RULE == ALL:
        unknown = i >= 0
    threshold, n_ties = 0, 0
    if RULE != ALL:
        amount = tl.load(amounts + h)
        whole = tl.zeros([], tl.float64)
        n_may, n_odd, most = 0, 0, 0
        for start in tl.range(0, stop, AT_ONCE):
            j = start + n
            may = allowed_of(j, stop, kinds_row)
            m, bits = load_mass(mass_row, j, may)
            whole += tl.sum(m.to(tl.float64), 0)
            n_may += tl.sum(may.to(tl.int32), 0)
            n_odd += tl.sum(((m >= 0.0) & (m < float("inf"))).to(tl.int32) ^ 1, 0)
            most = tl.maximum(most, tl.max(bits, 0))
        unknown = (n_odd > 0) | (whole <= 0.0)
        if RULE == MASS:
            need = amount * whole
            # A mass of 1 takes every block, however small the mass of the last ones.
            unknown = unknown | (amount >= 1.0)
        else:
            # 0.7 · 10 is a little over 7 in binary; 7 is meant.
            need = tl.maximum(tl.math.ceil(amount * n_may.to(tl.float64) - 1e-9), 1.0)
        low, high = 0, most + 1
        for _ in tl.range(0, 31):
            middle = low + (high - low) // 2
            enough = weight_from(mass_row, kinds_row, stop, middle, RULE) >= need
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        threshold = low
        above = weight_from(mass_row, kinds_row, stop, threshold + 1, RULE)
        tie = threshold.to(tl.float32, bitcast=True).to(tl.float64)
        if RULE == FRACTION:
            tie = tie * 0.0 + 1.0
        # The fewest ties that reach the need, by the additions that a count of them stands for.
        n_ties = tl.math.ceil((need - above) / tl.where(tie > 0.0, tie, 1.0))
        n_ties = tl.maximum(n_ties, 1.0).to(tl.int32)
        n_ties = tl.where(above + (n_ties - 1).to(tl.float64) * tie >= need, n_ties - 1, n_ties)
        n_ties = tl.where(above + n_ties.to(tl.float64) * tie < need, n_ties + 1, n_ties)
    if least is not None:
        alike = tl.load(least + h)
        unknown = unknown | ((tl.load(q_similarity + row) >= alike) == 0)

    n_kept, n_allowed, ties_before = 0, 0, 0
    for start in tl.range(0, own_n_k, AT_ONCE):
        j = start + n
        may = allowed_of(j, stop, kinds_row)
        kept = may & (j * 0 + unknown.to(tl.int32) != 0)
        if RULE != ALL:
            m, bits = load_mass(mass_row, j, may)
            ties = (may & (bits == threshold)).to(tl.int32)
            rank = ties_before + tl.cumsum(ties, 0) - ties
            ties_before += tl.sum(ties, 0)
            kept = kept | (may & ((bits > threshold) | ((ties != 0) & (rank < n_ties))))
            kept = kept | (may & is_forced(i_q, j, own, ranges, force, CAUSAL=CAUSAL, NEAR=NEAR))
            if least is not None:
                at = k_similarity + (b * (Hq // group) + h // group) * n_blocks_k
                at = at + own.k_block0 + j
                kept = kept | (may & ((tl.load(at, mask=may, other=1.0) >= alike) == 0))
        opens = is_open(i_q, j, own, kinds_row, may, CAUSAL=CAUSAL)
        n_kept = append_kept(made, row, j, kept, opens, n_kept, n_k, own_n_k)
        n_allowed += tl.sum(may.to(tl.int32), 0)
    end_list(made, row, n_kept, n_k)
    tl.store(made.allowed + row, n_allowed)


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    if isinstance(call.recipe.keep, KeepError):
        from .budget import select_by_error

        assert mass is not None
        return select_by_error(call, prepared, mass, tokens)
    return plan_of(select_lists(call, prepared, mass, tokens), tokens)


def select_lists(
    call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask
) -> SelectedLists:
    packed, lists = keys_of(prepared).packed, empty_lists(call, prepared)
    device = lists.counts.device
    rule, amounts = _amount(call, device)
    least = call.recipe.min_similarity
    judged = least is not None and call.predicts
    sizes = sizes_of(call, packed, tokens.offset)
    launch(
        select_blocks,
        (sizes.n_q, call.Hq, call.B),
        {"num_warps": 4},
        mass=mass,
        amounts=amounts,
        q_similarity=prepared.queries.similarity if judged else None,
        k_similarity=prepared.keys.similarity if judged else None,
        least=per_head(least, call.Hq, -1.0, 1.0, torch.float32, device) if judged else None,
        made=lists,
        pack=packed.of_queries,
        kinds=kinds_under(tokens),
        **sizes._asdict(),
        Hq=call.Hq,
        group=call.Hq // call.Hk,
        RULE=rule,
        CAUSAL=hides(tokens, packed),
        **forced_blocks(call, tokens, device),
    )
    return lists


def _amount(call: Call, device: torch.device) -> tuple[int, Tensor | None]:
    keep = call.recipe.keep
    if isinstance(keep, KeepAll):
        return ALL.value, None
    assert isinstance(keep, KeepMass | KeepFraction)
    rule, amount = (MASS, keep.mass) if isinstance(keep, KeepMass) else (FRACTION, keep.fraction)
    return rule.value, per_head(amount, call.Hq, 1.0, 1.0, torch.float64, device)
