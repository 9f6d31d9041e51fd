"""The kept blocks of a mass map, by csrc/select.h and budget.h."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...blockplan import BlockPlan, plan_from_lists
from ...call import Call
from ...qtensor import QTensor
from ...recipe import PRECISIONS, KeepError, KeepFraction, KeepMass, heads_of
from ...stages import Prepared
from ...tokenmask import TokenMask
from ..budget import (
    N_STEPS,
    Measured,
    Survey,
    choose_rows,
    decide,
    draw_measured,
    step_masses,
)
from ..forced import forced_blocks
from . import library
from .op_arguments import min_similarity, scored_parts, token_parts

ALL, MASS, FRACTION = 0, 1, 2
SMALL = 2**14
"""Maps of up to this many blocks cache their forced blocks, which take 60 µs to compute."""
_cached_forced = lru_cache(maxsize=64)(forced_blocks)


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    counts = torch.empty((call.B, call.Hq, call.n_q), dtype=torch.int32)
    indices = counts.new_empty((*counts.shape, call.n_k))
    lists = counts, indices, torch.empty_like(counts)
    if isinstance(call.recipe.keep, KeepError):
        assert mass is not None
        measured = _select_by_error(call, prepared, mass, tokens, lists)
        return plan_from_lists(*lists, tokens, measured=measured)
    found = prepared.statistics
    library.ops().select(
        mass,
        *_amount(call),
        found.q_similarity,
        found.k_similarity,
        min_similarity(call),
        _forced(call, tokens),
        *token_parts(tokens),
        call.Lq,
        call.Lk,
        *lists,
        library.isa_number(),
    )
    return plan_from_lists(*lists, tokens)


def _select_by_error(
    call: Call,
    prepared: Prepared,
    mass: Tensor,
    tokens: TokenMask,
    lists: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Measures every step, then writes the lists of the step that each head takes."""
    keep, isa = call.recipe.keep, library.isa_number()
    assert isinstance(keep, KeepError)
    assert prepared.query is not None
    counts, indices, allowed = lists
    ops, where = library.ops(), token_parts(tokens)
    masses = torch.tensor(step_masses(), dtype=torch.float64)
    forced = _forced(call, tokens)
    ops.first_steps(mass, masses, forced, *where, call.Lq, call.Lk, indices, allowed, isa)
    deviation = torch.empty((call.B, call.Hq, call.Lq))
    energy = torch.empty((call.B, call.Hq, call.n_q))
    ops.deviations(prepared.query, deviation, energy, isa)
    surveyed = choose_rows(deviation, energy, keep, call.recipe.sample_rows)
    scored = scored_parts(prepared.operands)
    scored = (*scored, PRECISIONS.index(call.recipe.precision), call.scale)
    dropped = torch.empty((*surveyed.rows.shape, N_STEPS))
    facts = torch.empty((3, 2, call.B, call.Hq, N_STEPS), dtype=torch.float64).unbind()
    given = (surveyed.rows, surveyed.weights.contiguous())
    ops.survey(*scored, indices, *given, *where, dropped, *facts, isa)
    survey = Survey(dropped, *facts)
    rows, weights, of_rows = draw_measured(surveyed, survey, call.n_q)
    sums = _step_errors(call, prepared, scored, indices, rows, tokens)
    decision = decide(
        survey,
        Measured(*sums, weights, of_rows),
        keep,
        call.Hk,
        may_raise=call.recipe.quantized,
    )
    ops.take_steps(decision.step, counts, indices, isa)
    return decision.measured


def _step_errors(
    call: Call,
    prepared: Prepared,
    scored: tuple[Any, ...],
    first: Tensor,
    rows: Tensor,
    tokens: TokenMask,
) -> tuple[Tensor, Tensor, Tensor]:
    own: tuple[Tensor | None, ...] = (prepared.query, prepared.key)
    if call.recipe.precision in ("exact", call.own_precision):
        own = (None, None)  # what is computed is exact
    codes = v_scale = None
    if isinstance(prepared.operands.value, QTensor):
        codes, v_scale = prepared.operands.value.codes, prepared.operands.value.scale.contiguous()
    skipping = torch.empty((*rows.shape, N_STEPS), dtype=torch.float64)
    total = torch.empty((*rows.shape, N_STEPS + 1), dtype=torch.float64)
    whole = torch.empty(rows.shape, dtype=torch.float64)
    library.ops().step_errors(
        *scored,
        *own,
        prepared.value,
        codes,
        v_scale,
        first,
        rows.contiguous(),
        *token_parts(tokens),
        skipping,
        total,
        whole,
        library.isa_number(),
    )
    return skipping, total, whole


def _forced(call: Call, tokens: TokenMask) -> Tensor:
    """The forced blocks; they follow from lengths and recipe."""
    find = _cached_forced if call.n_q * call.n_k <= SMALL else forced_blocks
    return find(replace(tokens, attn_mask=None), call.recipe, torch.device("cpu"))


def _amount(call: Call) -> tuple[int, Tensor]:
    """The rule's number, and its amount for each query head."""
    rule, amounts = ALL, [1.0] * call.Hq
    if isinstance(call.recipe.keep, KeepMass):
        rule, amounts = MASS, heads_of(call.recipe.keep.mass, call.Hq, none=1.0)
    elif isinstance(call.recipe.keep, KeepFraction):
        rule, amounts = FRACTION, heads_of(call.recipe.keep.fraction, call.Hq, none=1.0)
    return rule, torch.tensor(amounts, dtype=torch.float64)
