"""A backend of your own: the reference's stages, with the heads attended in a pool of threads.

Run the conformance suite on it: PYTHONPATH=examples pytest -p custom_backend -k headwise tests
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

import sparge
from sparge.backends.reference import stages as reference
from sparge.values.qtensor import Operands, QTensor
from sparge.values.stages import Attended, Prepared


def cut(x, heads):
    """Some heads of a tensor, or of codes and their scales."""
    if isinstance(x, QTensor):
        return replace(x, codes=x.codes[:, heads], scale=x.scale[:, heads])
    return None if x is None else x[:, heads]


class Heads:
    """The four stages and the gradient, as `sparge.values.stages.Stages` describes them."""

    prepare, predict = staticmethod(reference.prepare), staticmethod(reference.predict)
    select, backward = staticmethod(reference.select), staticmethod(reference.backward)

    @staticmethod
    def attend(call, prepared, plan, tokens):
        group, given, mask = call.Hq // call.Hk, prepared.operands, tokens.attn_mask

        @torch.no_grad()  # of each thread its own
        def one(h_k):
            q, k = slice(h_k * group, (h_k + 1) * group), slice(h_k, h_k + 1)
            parts = cut(given.query, q), cut(given.key, k), cut(given.value, k)
            operands = Operands(*parts, cut(given.lse_shift, q))
            lists = {name: getattr(plan, name)[:, q] for name in ("counts", "indices", "allowed")}
            own = tokens if mask is None else replace(tokens, attn_mask=cut(mask, q))
            own = tokens if mask is not None and mask.shape[1] == 1 else own
            small = replace(call, Hq=group, Hk=1, recipe=call.recipe.heads(q.start, q.stop))
            return reference.attend(small, Prepared(operands), replace(plan, **lists), own)

        with ThreadPoolExecutor() as pool:
            done = list(pool.map(one, range(call.Hk)))
        names = ("out", "lse", "pv_skips")
        return Attended(*(torch.cat([getattr(part, name) for part in done], 1) for name in names))


slow = sparge.FixedCost(False, "written to be read; dense attention is faster")
sparge.register_backend(sparge.Backend("headwise", "reference by heads", Heads, cost=slow))
