"""What is left to vLLM's own attention, and why: one short reason each, counted by the layer."""

from __future__ import annotations

from typing import Any

DECODE = "decode"
FEW_QUERIES = "fewer than 128 queries: vLLM's attention is faster"
PREDICTED_DENSE = "predicted to be slower than dense attention"
PREDICTED_OWN = "predicted to be slower than vLLM's attention, as measured at the start"
LEFT_DENSE = "the profile leaves these heads dense"
PAUSED = "serving was turned off"
UNBOUND = "the layer was not there when the worker started"
UNKNOWN_LAYOUT = "the layout of the KV cache is unknown"
OTHER_KEYS = "keys of another layer"
FOREIGN_STEP = "the step was not described by this plugin's metadata"


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
        f"a KV cache in {impl.kv_cache_dtype}": _is_quantized(impl.kv_cache_dtype),
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


def _is_quantized(kv_cache_dtype: str) -> bool:
    return kv_cache_dtype not in ("auto", "float16", "bfloat16", "half", "float", "float32")
