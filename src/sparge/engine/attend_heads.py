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
        recipe = call.recipe.heads(own.queries.start, own.queries.stop)
        if is_raised:
            recipe = replace(recipe, precision=call.own_precision)
        Hq = own.queries.stop - own.queries.start
        part = replace(call, Hq=Hq, Hk=len(heads), recipe=recipe)
        if is_raised:
            its = prepare(stages, part, own.inputs(prepared), to_plan=False, to_attend=True)
        else:
            its = prepared.heads(own.keys, own.queries)
        parts.append(stages.attend(part, its, own.plan(plan), tokens.heads(own.queries)))
    return Attended(
        torch.cat([part.out for part in parts], 1),
        torch.cat([part.lse for part in parts], 1),
        torch.cat([part.pv_skips for part in parts], 1),
    )


class HeadRange:
    """Key heads `start … stop-1` and their query heads, cut out of what a stage reads."""

    def __init__(self, start: int, stop: int, group: int) -> None:
        self.keys, self.queries = slice(start, stop), slice(start * group, stop * group)

    def inputs(self, prepared: Prepared) -> Inputs:
        """The caller's own tensors."""
        query, key, value = prepared.queries.own, prepared.keys.own_key, prepared.keys.own_value
        assert query is not None
        assert key is not None
        assert value is not None
        return Inputs(query[:, self.queries], key[:, self.keys], value[:, self.keys])

    def plan(self, plan: BlockPlan) -> BlockPlan:
        def cut(x: Tensor) -> Tensor:
            return x[:, self.queries].contiguous()

        counts, indices, allowed = cut(plan.counts), cut(plan.indices), cut(plan.allowed)
        lists = replace(plan, counts=counts, indices=indices, allowed=allowed, measured=None)
        return lists.trust()
