"""The kept blocks of a mass map, by csrc/select.h and budget.h."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ...blockplan import BlockPlan, plan_from_lists
from ...call import Call
from ...recipe import PRECISIONS, KeepError, KeepFraction, KeepMass, heads_of
from ...stages import Prepared
from ...tokenmask import TokenMask
from ..budget import checked_rows, masses_of, take_step
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
        error = _select_by_error(call, prepared, mass, tokens, lists)
        return plan_from_lists(*lists, tokens, error=error)
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
    return plan_from_lists(*lists, tokens, error=None)


def _select_by_error(
    call: Call,
    prepared: Prepared,
    mass: Tensor,
    tokens: TokenMask,
    lists: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Measures every step in one pass, then writes the lists of the step that each head takes."""
    assert isinstance(call.recipe.keep, KeepError)
    counts, indices, allowed = lists
    masses = torch.tensor(masses_of(call.recipe.keep, call.Hq), dtype=torch.float64)
    wrong = masses.new_empty((call.B, *masses.shape))
    whole = masses.new_empty((call.B, call.Hq))
    library.ops().select_steps(
        mass,
        masses,
        *scored_parts(prepared.operands),
        PRECISIONS.index(call.recipe.precision),
        call.scale,
        prepared.value,
        torch.tensor(checked_rows(call.Lq, call.recipe.sample_rows)),
        _forced(call, tokens),
        *token_parts(tokens),
        wrong,
        whole,
        indices,
        allowed,
        library.isa_number(),
    )
    step, error = take_step(wrong, whole, call.recipe.keep)
    library.ops().take_steps(step, counts, indices, library.isa_number())
    return error


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
