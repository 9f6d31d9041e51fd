"""The attend stage over heads of different precision: an error budget may raise some of them.

Key heads that need more than 8 bits run, with their query heads, in the caller's own precision;
neighbours of one kind run as one call of the stage.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from ..values.blockplan import BlockPlan
from ..values.call import Call, Inputs
from ..values.stages import Attended, Prepared, Stages, prepare, raised_key_heads
from ..values.tokenmask import TokenMask


def attend_heads(
    stages: Stages, call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask
) -> Attended:
    """`Stages.attend`, with raised heads in `call.own_precision`."""
    raised = raised_key_heads(plan, call.Hk) if call.recipe.quantized else [False]
    if not any(raised):
        return stages.attend(call, prepared, plan, tokens)
    parts = []
    for is_raised, run in groupby(range(call.Hk), key=raised.__getitem__):
        heads = list(run)
        own = HeadRange(heads[0], heads[-1] + 1, call.Hq // call.Hk)
        recipe = call.recipe.heads(own.q_start, own.q_stop)
        if is_raised:
            recipe = replace(recipe, precision=call.own_precision)
        part = replace(call, Hq=own.q_stop - own.q_start, Hk=len(heads), recipe=recipe)
        if is_raised:
            its = prepare(stages, part, own.inputs(prepared), to_plan=False, to_attend=True)
        else:
            its = prepared.heads(slice(own.start, own.stop), slice(own.q_start, own.q_stop))
        parts.append(stages.attend(part, its, own.plan(plan), own.tokens(tokens)))
    return Attended(
        torch.cat([part.out for part in parts], 1),
        torch.cat([part.lse for part in parts], 1),
        torch.cat([part.pv_skips for part in parts], 1),
    )


class HeadRange:
    """Key heads `start … stop-1` and their query heads, cut out of what a stage reads."""

    def __init__(self, start: int, stop: int, group: int) -> None:
        self.start, self.stop = start, stop
        self.q_start, self.q_stop = start * group, stop * group

    def inputs(self, prepared: Prepared) -> Inputs:
        """The caller's own tensors."""
        query, key, value = prepared.queries.own, prepared.keys.own_key, prepared.keys.own_value
        assert query is not None
        assert key is not None
        assert value is not None
        queries, keys = slice(self.q_start, self.q_stop), slice(self.start, self.stop)
        return Inputs(query[:, queries], key[:, keys], value[:, keys])

    def plan(self, plan: BlockPlan) -> BlockPlan:
        def cut(x: Tensor) -> Tensor:
            return x[:, self.q_start : self.q_stop].contiguous()

        counts, indices, allowed = cut(plan.counts), cut(plan.indices), cut(plan.allowed)
        lists = replace(plan, counts=counts, indices=indices, allowed=allowed, measured=None)
        return lists.trust()

    def tokens(self, tokens: TokenMask) -> TokenMask:
        mask = tokens.attn_mask
        if mask is None or mask.shape[1] == 1:
            return tokens
        return replace(tokens, attn_mask=mask[:, self.q_start : self.q_stop])
