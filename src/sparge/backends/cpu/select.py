"""The kept blocks of a mass map, in the native core (csrc/select.h and budget.h)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ...blockplan import BlockPlan
from ...qtensor import Operands
from ...recipe import PRECISIONS, KeepError, KeepFraction, KeepMass, Recipe, heads_of
from ...tokenmask import TokenMask
from ..budget import checked_rows, masses_of, take_step
from ..forced import forced_blocks
from . import library as native
from .arguments import empty_map, min_similarity, scored_parts, token_parts
from .prepare import Statistics

ALL, MASS, FRACTION = 0, 1, 2
CPU = torch.device("cpu")
SMALL = 2**14
"""Maps of up to this many blocks cache their forced blocks, which take 60 µs to compute."""
_cached_forced = lru_cache(maxsize=64)(forced_blocks)


def select(
    operands: Operands,
    statistics: Statistics,
    mass: Tensor | None,
    tokens: TokenMask,
    *,
    scale: float,
    recipe: Recipe,
    value: Tensor | None = None,
) -> BlockPlan:
    """The plan of a mass map. `KeepAll` needs no map, `KeepError` reads the caller's value."""
    indices = empty_map(operands, tokens, torch.int32)
    counts = indices.new_empty(indices.shape[:3])
    allowed = torch.empty_like(counts)
    forced = _forced(tokens, recipe, indices.shape[2:].numel())
    error = None
    if isinstance(recipe.keep, KeepError):
        assert value is not None
        masses = torch.tensor(masses_of(recipe.keep, indices.shape[1]), dtype=torch.float64)
        whole = masses.new_empty(indices.shape[:2])
        wrong = masses.new_empty((*whole.shape, masses.shape[1]))
        native.ops().select_steps(
            mass,
            masses,
            *scored_parts(operands),
            PRECISIONS.index(recipe.precision),
            scale,
            value,
            torch.tensor(checked_rows(tokens.Lq, recipe.sample_rows)),
            forced,
            *token_parts(tokens),
            wrong,
            whole,
            indices,
            allowed,
            native.isa_number(),
        )
        step, error = take_step(wrong, whole, recipe.keep)
        native.ops().take_steps(step, counts, indices, native.isa_number())
    else:
        native.ops().select(
            mass,
            *_amount(recipe, indices.shape[1]),
            statistics.q_similarity,
            statistics.k_similarity,
            min_similarity(recipe, indices.shape[1]),
            forced,
            *token_parts(tokens),
            tokens.Lq,
            tokens.Lk,
            counts,
            indices,
            allowed,
            native.isa_number(),
        )
    return BlockPlan(
        counts,
        indices,
        allowed,
        Lq=tokens.Lq,
        Lk=tokens.Lk,
        is_causal=tokens.is_causal,
        causal_align=tokens.causal_align,
        has_mask=tokens.attn_mask is not None,
        error=error,
    ).trust()


def _forced(tokens: TokenMask, recipe: Recipe, n: int) -> Tensor:
    """The forced blocks, which follow from lengths and recipe; `n` is the size of the map."""
    find = _cached_forced if n <= SMALL else forced_blocks
    return find(replace(tokens, attn_mask=None), recipe, CPU)


def _amount(recipe: Recipe, Hq: int) -> tuple[int, Tensor]:
    """The rule's number and its amount for each query head."""
    rule, amounts = ALL, [1.0] * Hq
    if isinstance(recipe.keep, KeepMass):
        rule, amounts = MASS, heads_of(recipe.keep.mass, Hq, none=1.0)
    elif isinstance(recipe.keep, KeepFraction):
        rule, amounts = FRACTION, heads_of(recipe.keep.fraction, Hq, none=1.0)
    return rule, torch.tensor(amounts, dtype=torch.float64)
