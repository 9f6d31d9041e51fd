"""The third stage: the kept blocks of a mass map, by select_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import Call
from ...values.recipe import KeepAll, KeepError, KeepFraction, KeepMass
from ...values.stages import Prepared
from ...values.tokenmask import TokenMask
from . import select_kernel
from .arguments import forced_blocks, hides, kinds_under, per_head, plan_of, sizes_of
from .launch import launch
from .operands import empty_lists, packed_of
from .select_kernel import ALL, FRACTION, MASS, SelectedLists


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    if isinstance(call.recipe.keep, KeepError):
        from .budget import select_by_error

        assert mass is not None
        return select_by_error(call, prepared, mass, tokens)
    return plan_of(select_lists(call, prepared, mass, tokens), tokens)


def select_lists(
    call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask
) -> SelectedLists:
    packed, lists = packed_of(prepared), empty_lists(call, prepared)
    device = lists.counts.device
    rule, amounts = _amount(call, device)
    least = call.recipe.min_similarity
    judged = least is not None and call.predicts
    sizes, kinds = sizes_of(call, packed, tokens.offset), kinds_under(tokens)
    launch(
        select_kernel.select_blocks,
        (sizes.n_q, call.Hq, call.B),
        {"num_warps": 4},
        mass=mass,
        amounts=amounts,
        q_similarity=prepared.queries.similarity if judged else None,
        k_similarity=prepared.keys.similarity if judged else None,
        least=per_head(least, call.Hq, -1.0, 1.0, torch.float32, device) if judged else None,
        kinds=kinds.data,
        kind_strides=kinds.strides,
        made=lists,
        pack=packed.of_queries(),
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
