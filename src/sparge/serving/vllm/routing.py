"""Which prefills of a layer are served here, and which are left to vLLM's own attention, and why.

Each reason is one short text, counted by the layer. `auto` first asks sparge's own choice, which
knows torch's dense attention. vLLM has a kernel of its own, so its time is measured when a worker
starts and compared with what is predicted of ours, the copy of cached keys included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...models.route import ONE_QUERY
from ...routing import current_router
from ...routing.crossover import allowed_pairs
from ...values.backend import AUTO, CPU, DENSE
from ...values.call import BLOCK_Q, Call
from ...values.recipe import Recipe
from .batch import Request

FEW_QUERIES = "fewer than 128 queries: vLLM's attention is faster"
PREDICTED_DENSE = "predicted to be slower than dense attention"
PREDICTED_OWN = "predicted to be slower than vLLM's attention, as measured at the start"
LEFT_DENSE = "the profile leaves these heads dense"
PAUSED = "serving was turned off"
UNBOUND = "the layer was not there when the worker started"
UNKNOWN_LAYOUT = "the layout of the KV cache is unknown"
OTHER_KEYS = "keys of another layer"
FOREIGN_STEP = "the step was not described by this plugin's metadata"
PLAIN_CACHES = ("auto", "float16", "bfloat16", "half", "float", "float32")
"""Types of a cache that are not quantized."""


def why_layer_not_served(impl: Any) -> str:
    """Why no call of a layer can be served, by what its implementation was made with; "" if they
    can. `impl` is an attention implementation of vLLM's."""
    kind = str(getattr(impl.attn_type, "value", impl.attn_type))
    reasons = {
        f"{kind.replace('_', '-')} attention": kind != "decoder",
        "sliding window": impl.sliding_window not in (None, -1, (-1, -1)),
        "ALiBi slopes": impl.alibi_slopes is not None,
        "soft-capping": bool(impl.logits_soft_cap),
        "attention sinks": impl.sinks is not None,
        f"a KV cache in {impl.kv_cache_dtype}": impl.kv_cache_dtype not in PLAIN_CACHES,
        "chunked local attention": getattr(impl, "chunk_lookback", -1) != -1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def why_step_not_served(metadata: Any, *, fused_output: bool) -> str:
    """Why a step cannot be served, by its metadata; "" if it can."""
    reasons = {
        "output quantization inside attention": fused_output,
        "not causal": metadata.causal is not True,
        "causality given for each request": getattr(metadata, "dynamic_causal", None) is not None,
        "bidirectional image tokens": getattr(metadata, "mm_prefix_range", None) is not None,
        "reference sliding window": getattr(metadata, "rswa_prefix_lens", None) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


ENOUGH_CALLS = 8
"""Calls of a layer after which its own density is used in place of the expected one."""


@dataclass(frozen=True)
class OwnCost:
    """Seconds of vLLM's attention for a query-key pair of one head, measured; and of copying one
    cached key and its value out of their blocks."""

    pair: float
    key: float


@dataclass(frozen=True)
class Shape:
    """What the prefills of a layer have in common: fields of their `Call`."""

    Hq: int
    Hk: int
    D: int
    dtype: torch.dtype
    device: str
    scale: float
    recipe: Recipe
    index: int = 0

    def call(self, request: Request) -> Call:
        Lq = request.Lq + request.lead
        Lk = request.Lk
        return Call(B=1, Lq=Lq, Lk=Lk, Dv=self.D, is_causal=True, offset=Lk - Lq, **vars(self))


def named_backend(backend: str) -> str | None:
    """The backend that settings or `SPARGE_BACKEND` name; None for `auto`."""
    name, _ = current_router().requested(backend)
    return None if name == AUTO else name


def why_not(
    shape: Shape, request: Request, *, backend: str, own: OwnCost | None, density: float | None
) -> str:
    """Why vLLM's attention shall run a request; "" if it is served here.

    density: of this layer's calls so far, None while there are few.
    """
    if request.Lq <= 1:
        return ONE_QUERY
    if named_backend(backend) is not None:
        return ""
    if request.Lq < BLOCK_Q:
        return FEW_QUERIES
    call = shape.call(request)
    chosen = _choose(call)
    if chosen == DENSE:
        return PREDICTED_DENSE
    if own is None or chosen != CPU:
        return ""
    # Query-key pairs that vLLM's attention computes: those of the request's own rows.
    pairs = allowed_pairs(replace(call, Lq=request.Lq, offset=request.Lk - request.Lq))
    theirs = own.pair * call.Hq * pairs
    copying = 0.0 if request.fresh else own.key * request.Lk
    ours_is_faster = current_router().is_faster_than(
        theirs, call, chosen, density=density, more=copying
    )
    return "" if ours_is_faster else PREDICTED_OWN


def chosen_backend(shape: Shape, request: Request, backend: str) -> str:
    """The name to call `attention` with. Named even where `auto` chose it: vLLM's attention takes
    the place of dense attention, so a plan must not be routed to that afterwards."""
    return named_backend(backend) or _choose(shape.call(request))


def _choose(call: Call) -> str:
    router = current_router()
    return router.answer(call, lambda: router.choose(call)).backend
