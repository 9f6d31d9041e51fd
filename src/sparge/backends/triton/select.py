"""The third stage: the kept blocks of a mass map, by select_kernel.py."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import Call
from ...values.recipe import KeepAll, KeepError, KeepFraction, KeepMass
from ...values.stages import Prepared
from ...values.tokenmask import TokenMask
from . import select_kernel
from .arguments import forced_blocks, hides, kinds_under, per_head, sizes_of
from .launch import launch
from .operands import packed_of
from .select_kernel import ALL, FRACTION, MASS, SelectedLists


@dataclass(frozen=True, eq=False)
class PooledPlan(BlockPlan):
    """A plan that `attend` of the same call reads. pools: of each block, whether it is skipped and
    open, so that its pooled entries are attended, uint8 `[B, Hq, n_q, n_k]`."""

    pools: Tensor | None = None


def plan_of(
    lists: SelectedLists, tokens: TokenMask, *, measured: Tensor | None = None
) -> BlockPlan:
    plan = plan_from_lists(lists.counts, lists.indices, lists.allowed, tokens, measured=measured)
    if lists.pools is None:
        return plan
    own = {field.name: getattr(plan, field.name) for field in fields(plan) if field.init}
    return PooledPlan(**own, pools=lists.pools).trust()


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    if isinstance(call.recipe.keep, KeepError):
        from .budget import select_by_error

        assert mass is not None
        return select_by_error(call, prepared, mass, tokens)
    return plan_of(select_lists(call, prepared, mass, tokens), tokens)


def empty_lists(call: Call, prepared: Prepared) -> SelectedLists:
    """To be written; pools only where there are pooled entries to attend."""
    sizes = sizes_of(call, packed_of(prepared))
    device = prepared.queries.rows.device
    counts = torch.empty((call.B, call.Hq, sizes.n_q), dtype=torch.int32, device=device)
    indices = counts.new_empty((*counts.shape, sizes.n_k))
    pools = None
    if prepared.keys.entries is not None:
        pools = counts.new_empty(indices.shape, dtype=torch.uint8)
    return SelectedLists(counts, indices, torch.empty_like(counts), pools)


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
