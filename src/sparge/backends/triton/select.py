"""The third stage: the kept blocks of a mass map, by select_kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import Call
from ...values.recipe import KeepAll, KeepError, KeepFraction, KeepMass
from ...values.tokenmask import TokenMask
from . import select_kernel
from .launch import launch
from .masks import forced_arguments, is_causal, kind_arguments, mask_arguments
from .one_pass import Prepared
from .packed import NOT_PACKED, Packed
from .shapes import per_head, within

ALL, MASS, FRACTION = 0, 1, 2
Lists = tuple[Tensor, Tensor, Tensor]


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    if isinstance(call.recipe.keep, KeepError):
        from .budget import select_by_error

        assert mass is not None
        return select_by_error(call, prepared, mass, tokens)
    return plan_from_lists(*select_lists(call, prepared, mass, tokens), tokens)


def select_lists(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> Lists:
    """`(counts, indices, allowed)`; which blocks are pooled is left for `attend` to find."""
    packed: Packed = getattr(prepared, "packed", NOT_PACKED)
    found, device = prepared.statistics, prepared.operands.query.device
    n_q, n_k = packed.n_q or call.n_q, packed.most_k or call.n_k
    counts = torch.empty((call.B, call.Hq, n_q), dtype=torch.int32, device=device)
    indices = counts.new_empty((*counts.shape, n_k))
    allowed = torch.empty_like(counts)
    pools = None
    if call.recipe.pools and hasattr(prepared, "notes"):
        pools = counts.new_empty((*counts.shape, n_k), dtype=torch.uint8)
        prepared.notes["pools"] = (indices, pools)
    rule, amounts = _amount(call, device)
    least = call.recipe.min_similarity
    judged = least is not None and call.predicts
    launch(
        select_kernel.select_blocks,
        (n_q, call.Hq, call.B),
        {"num_warps": 4},
        mass=mass,
        amounts=amounts,
        q_similarity=found.q_similarity if judged else None,
        k_similarity=found.k_similarity if judged else None,
        least=per_head(least, call.Hq, -1.0, 1.0, torch.float32, device) if judged else None,
        counts=counts,
        indices=indices,
        allowed=allowed,
        pools=pools,
        **kind_arguments(tokens),
        **forced_arguments(call, tokens, device),
        Hq=call.Hq,
        group=call.Hq // call.Hk,
        Lq=call.Lq,
        Lk=call.Lk,
        n_q=n_q,
        n_k=n_k,
        n_blocks_k=packed.n_k or call.n_k,
        offset=within(tokens.offset, call.Lq, call.Lk),
        RULE=rule,
        CAUSAL=tokens.is_causal if packed else is_causal(tokens),
        MASK=mask_arguments(tokens)["MASK"],
        JUDGE=judged,
        POOL=pools is not None,
        **packed.arguments(of="queries"),
    )
    return counts, indices, allowed


def _amount(call: Call, device: torch.device) -> tuple[int, Tensor | None]:
    keep = call.recipe.keep
    if isinstance(keep, KeepAll):
        return ALL, None
    assert isinstance(keep, KeepMass | KeepFraction)
    rule, amount = (MASS, keep.mass) if isinstance(keep, KeepMass) else (FRACTION, keep.fraction)
    return rule, per_head(amount, call.Hq, 1.0, 1.0, torch.float64, device)
