"""The kept blocks of a mass map, by csrc/select.h and budget.h."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...rules import error_budget as budget
from ...rules.forced_blocks import forced_blocks
from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import Call
from ...values.recipe import PRECISIONS, KeepError, KeepFraction, KeepMass, Recipe, heads_of
from ...values.stages import Pooled, Prepared, QTensor
from ...values.tokenmask import TokenMask
from . import library
from .library import min_similarity, parts_of, scored_parts, token_parts

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
    library.ops().select(
        mass,
        *amount_of(call.recipe, call.Hq),
        prepared.queries.similarity,
        prepared.keys.similarity,
        min_similarity(call.recipe, call.Hq),
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
    assert prepared.queries.own is not None
    counts, indices, allowed = lists
    ops, where = library.ops(), token_parts(tokens)
    forced = _forced(call, tokens)
    ops.first_steps(mass, _step_masses(), forced, *where, call.Lq, call.Lk, indices, allowed, isa)
    surveyed = _choose_rows(call, prepared.queries.own, keep)
    scored = (*scored_parts(prepared), PRECISIONS.index(call.recipe.precision), call.scale)
    dropped = torch.empty((*surveyed.rows.shape, budget.N_STEPS))
    facts = torch.empty((3, 2, call.B, call.Hq, budget.N_STEPS), dtype=torch.float64).unbind()
    given = (surveyed.rows, surveyed.weights)
    ops.survey(*scored, indices, *given, *where, dropped, *facts, isa)
    rows, *drawn = _draw_measured(surveyed, budget.Survey(dropped, *facts))
    sums = _step_errors(call, prepared, scored, indices, rows, tokens)
    step = torch.empty((call.B, call.Hq), dtype=torch.int64)
    measured = torch.empty((3, *step.shape), dtype=torch.float64)
    ops.decide(
        *facts,
        *sums,
        *drawn,
        _budgets(keep, call.Hq),
        call.Hk,
        call.recipe.quantized,
        *_rules(),
        step,
        measured,
        isa,
    )
    ops.take_steps(step, counts, indices, isa)
    return measured


def _budgets(keep: KeepError, Hq: int) -> Tensor:
    return torch.tensor(heads_of(keep.max_error, Hq), dtype=torch.float64)


@lru_cache(maxsize=1)
def _step_masses() -> Tensor:
    return torch.tensor(budget.step_masses(), dtype=torch.float64)


@lru_cache(maxsize=1)
def _measured_steps() -> Tensor:
    return torch.tensor(budget.MEASURED_STEPS, dtype=torch.int32)


@lru_cache(maxsize=1)
def _rules() -> tuple[Any, ...]:
    """The numbers of rules/error_budget.py, in the order of the op."""
    return (
        torch.tensor(budget.NEXT_MEASURED, dtype=torch.int32),
        torch.tensor(budget.SPARSER, dtype=torch.int32),
        budget.SPARSE_STEPS,
        budget.Z,
        budget.TAIL,
        budget.LEAN,
        budget.RESOLVED,
        budget.LEAST_ERROR,
        budget.RAISE_FROM,
        budget.SMALL_BUDGET,
        budget.PRIOR,
        budget.LEAST_RATE,
        budget.SPARSE_RATE,
        budget.MOST_RATE,
    )


def _choose_rows(call: Call, query: Tensor, keep: KeepError) -> budget.SurveyedRows:
    ops, isa = library.ops(), library.isa_number()
    deviation = torch.empty((call.B, call.Hq, call.Lq))
    energy = torch.empty((call.B, call.Hq, call.n_q))
    ops.deviations(query, deviation, energy, isa)
    places = budget.checked_places(call.Lq, call.recipe.sample_rows)
    rows, most = budget.rows_of_blocks(call.n_q)
    n = len(places.starts) * most
    out = torch.empty((call.B, call.Hq, n), dtype=torch.int64)
    weights = torch.empty((2, *out.shape), dtype=torch.float64)
    ops.choose_rows(
        deviation,
        energy,
        _budgets(keep, call.Hq),
        places.starts,
        places.may,
        places.n_far,
        places.n_near,
        places.far_ranks,
        places.near_places,
        rows,
        most,
        budget.DISAGREES,
        budget.SMALL_BUDGET,
        out,
        weights,
        isa,
    )
    return budget.SurveyedRows(out, weights)


def _draw_measured(
    surveyed: budget.SurveyedRows, survey: budget.Survey
) -> tuple[Tensor, Tensor, Tensor]:
    steps = _measured_steps()
    rows = surveyed.rows.new_empty((*surveyed.rows.shape[:2], budget.MEASURED_ROWS))
    weights = torch.empty(rows.shape, dtype=torch.float64)
    dropped = torch.empty((*rows.shape, len(steps)))
    library.ops().draw_measured(
        surveyed.rows,
        surveyed.weights,
        survey.dropped,
        survey.mean,
        steps,
        budget.REFERENCE,
        budget.PHASE,
        budget.STRATA,
        rows,
        weights,
        dropped,
        library.isa_number(),
    )
    return rows, weights, dropped


def _step_errors(
    call: Call,
    prepared: Prepared,
    scored: tuple[Any, ...],
    first: Tensor,
    rows: Tensor,
    tokens: TokenMask,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = prepared.keys
    own = (prepared.queries.own, keys.own_key) if call.rounds else (None, None)
    codes, v_scale = parts_of(keys.value) if isinstance(keys.value, QTensor) else (None, None)
    steps = _measured_steps()
    skipping = torch.empty((*rows.shape, len(steps)), dtype=torch.float64)
    total = torch.empty((*rows.shape, len(steps) + 1), dtype=torch.float64)
    whole = torch.empty(rows.shape, dtype=torch.float64)
    library.ops().step_errors(
        *scored,
        *own,
        keys.own_value,
        codes,
        v_scale,
        *_pooled_parts(keys.entries),
        first,
        budget.N_STEPS,
        steps,
        rows,
        *token_parts(tokens),
        skipping,
        total,
        whole,
        library.isa_number(),
    )
    return skipping, total, whole


def _pooled_parts(
    pooled: Pooled | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """`pooled_key, pooled_k_scale, pooled_value, pool_group`; 8-bit values as numbers."""
    if pooled is None:
        return None, None, None, 1
    key, k_scale = parts_of(pooled.key)
    value = pooled.value
    value = value.dequantize() if isinstance(value, QTensor) else value
    return key, k_scale, value, pooled.group


def _forced(call: Call, tokens: TokenMask) -> Tensor:
    """The forced blocks; they follow from lengths and recipe."""
    find = _cached_forced if call.n_q * call.n_k <= SMALL else forced_blocks
    return find(tokens.diagonal, call.recipe, torch.device("cpu"))


def amount_of(recipe: Recipe, Hq: int) -> tuple[int, Tensor]:
    """The rule's number, and its amount for each query head."""
    rule, amounts = ALL, [1.0] * Hq
    if isinstance(recipe.keep, KeepMass):
        rule, amounts = MASS, heads_of(recipe.keep.mass, Hq, none=1.0)
    elif isinstance(recipe.keep, KeepFraction):
        rule, amounts = FRACTION, heads_of(recipe.keep.fraction, Hq, none=1.0)
    return rule, torch.tensor(amounts, dtype=torch.float64)
