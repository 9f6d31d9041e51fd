"""A backend of your own: the reference's stages, with query blocks attended in a pool of threads.

Run the conformance suite on it: PYTHONPATH=examples pytest -p custom_backend -k blockwise tests
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

import sparge
from sparge.backends.reference import REFERENCE
from sparge.backends.reference import stages as reference
from sparge.values.call import BLOCK_Q
from sparge.values.stages import Attended


class Blocks:
    """The stages and the gradient, as `sparge.values.stages.Stages` describes them."""

    prepare_keys = staticmethod(reference.prepare_keys)
    prepare_queries = staticmethod(reference.prepare_queries)
    predict, select = staticmethod(reference.predict), staticmethod(reference.select)
    backward = staticmethod(reference.backward)

    @staticmethod
    def attend(call, prepared, plan, tokens):
        @torch.no_grad()  # of each thread its own
        def attend_block(i):
            start = i * BLOCK_Q
            rows = slice(start, min(start + BLOCK_Q, call.Lq))
            place = {"Lq": rows.stop - start, "offset": call.offset + start}
            mask = tokens.attn_mask
            if mask is not None and mask.shape[2] > 1:
                mask = mask[:, :, rows]
            lists = {
                name: getattr(plan, name)[:, :, i : i + 1]
                for name in ("counts", "indices", "allowed")
            }
            return reference.attend(
                replace(call, **place),
                replace(prepared, queries=prepared.queries.blocks(i, i + 1)),
                replace(plan, **lists, **place, measured=None),
                replace(tokens, **place, attn_mask=mask, kinds=None),
            )

        with ThreadPoolExecutor() as pool:
            done = list(pool.map(attend_block, range(call.n_q)))
        return Attended(*(torch.cat(parts, 2) for parts in zip(*done, strict=True)))


slow = sparge.FixedCost(False, "written to be read; dense attention is faster")
sparge.register_backend(
    sparge.Backend("blockwise", "reference by blocks", Blocks, REFERENCE.refusal, slow)
)
