"""A backend of your own: the reference's stages, with the heads attended in a pool of threads.

Run the conformance suite on it: PYTHONPATH=examples pytest -p custom_backend -k headwise tests
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

import sparge
from sparge.backends.reference import REFERENCE
from sparge.backends.reference import stages as reference
from sparge.values.stages import Attended


class Heads:
    """The stages and the gradient, as `sparge.values.stages.Stages` describes them."""

    prepare_keys = staticmethod(reference.prepare_keys)
    prepare_queries = staticmethod(reference.prepare_queries)
    predict, select = staticmethod(reference.predict), staticmethod(reference.select)
    backward = staticmethod(reference.backward)

    @staticmethod
    def attend(call, prepared, plan, tokens):
        group = call.Hq // call.Hk

        @torch.no_grad()  # of each thread its own
        def attend_key_head(h_k):
            queries, keys = slice(h_k * group, (h_k + 1) * group), slice(h_k, h_k + 1)
            lists = {
                name: getattr(plan, name)[:, queries] for name in ("counts", "indices", "allowed")
            }
            recipe = call.recipe.heads(queries.start, queries.stop)
            small = replace(call, Hq=group, Hk=1, recipe=recipe)
            part = replace(plan, **lists, measured=None)
            own = prepared.heads(keys, queries)
            return reference.attend(small, own, part, tokens.heads(queries))

        with ThreadPoolExecutor() as pool:
            done = list(pool.map(attend_key_head, range(call.Hk)))
        names = ("out", "lse", "pv_skips")
        return Attended(*(torch.cat([getattr(part, name) for part in done], 1) for name in names))


slow = sparge.FixedCost(False, "written to be read; dense attention is faster")
sparge.register_backend(
    sparge.Backend("headwise", "reference by heads", Heads, REFERENCE.refusal, slow)
)
