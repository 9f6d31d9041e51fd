"""The parts of a vLLM attention backend that CPU and GPU share: one step, split and counted.

Both are mixed in before vLLM's own classes, whose attention runs everything that is not served.
vLLM is not imported here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .batch import Request, Rows, Step, make_pack
from .refusals import (
    DECODE,
    OTHER_KEYS,
    PAUSED,
    UNBOUND,
    UNKNOWN_LAYOUT,
    why_step_not_served,
)
from .worker import WORKER, ServedLayer

STEP, PARTS = "sparge_step", "sparge_parts"
"""Attributes of a step's metadata: its requests, and the metadata of some of them."""


class ServingImpl:
    """Mixed in before an `AttentionImpl`. Subclasses say how the cache is read and how the metadata
    of some requests is made."""

    served: ServedLayer | None = None

    def reader(self, layer: Any, kv_cache: Tensor, metadata: Any) -> Callable[..., None] | None:
        """`gather(i, key, value)` for request i; None if the cache cannot be read."""
        raise NotImplementedError

    def metadata_of(self, layer: Any, metadata: Any, chosen: Sequence[Request], at: Any) -> Any:
        """The metadata of some requests of a step; `at` are their numbers, as a tensor."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """vLLM's contract: the rows of `output` are written, and it is returned."""

        def own() -> Tensor:
            rest = (attn_metadata, output, output_scale, output_block_scale)
            written: Tensor = super(ServingImpl, self).forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, *rest
            )
            return written

        if attn_metadata is None:  # vLLM measures its memory
            return own()
        served = self.served or _unbound(layer)
        step: Step | None = getattr(attn_metadata, STEP, None)
        start = time.perf_counter()
        if step is None or step.decode_only:
            own()
            seconds = time.perf_counter() - start
            if step is None:
                served.note_foreign_step(attn_metadata.num_actual_tokens, seconds)
            else:
                served.note_decode(len(step.requests), seconds)
            return output
        fused = output_scale is not None or output_block_scale is not None
        why = PAUSED if WORKER.paused else served.why
        why = why or why_step_not_served(attn_metadata, fused_output=fused)
        why = why or (OTHER_KEYS if key is None else "")
        gather = None if why else self.reader(layer, kv_cache, attn_metadata)
        why = why or (UNKNOWN_LAYOUT if gather is None else "")
        reasons = [DECODE if r.Lq <= 1 else why or served.why_not(r) for r in step.requests]
        mine = [i for i, reason in enumerate(reasons) if not reason]
        rest = [i for i, reason in enumerate(reasons) if reason and step.requests[i].Lq]
        if not mine:
            own()
        elif rest:
            self._attend_rest(layer, query, kv_cache, attn_metadata, output, step, rest)
        others = [(step.requests[i], reasons[i]) for i in rest]
        served.note_own(others, query.shape[1], time.perf_counter() - start)
        if mine:
            assert gather is not None
            pack = make_pack(step, mine, query, key, value, gather)
            served.attend(pack, output.view(query.shape))
        WORKER.log_if_due()
        return output

    def _attend_rest(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
        step: Step,
        rest: Sequence[int],
    ) -> None:
        """Some requests of a step by vLLM's attention, with metadata made once for all layers."""
        parts = vars(metadata).setdefault(PARTS, {})
        if tuple(rest) not in parts:
            chosen = [step.requests[i] for i in rest]
            at = metadata.seq_lens.new_tensor(rest).long()
            made = self.metadata_of(layer, metadata, chosen, at)
            parts[tuple(rest)] = (made, Rows.of(chosen, query.device).where)
        made, rows = parts[tuple(rest)]
        together = isinstance(rows, slice)
        out = (
            output[rows]
            if together
            else output.new_empty(made.num_actual_tokens, *output.shape[1:])
        )
        arguments = (layer, query[rows], None, None, kv_cache, made, out)
        super().forward(*arguments)  # type: ignore[misc]
        if not together:
            output[rows] = out


class ServingBuilder:
    """Mixed in before a metadata builder: describes each step, and binds the layers at the start.

    A subclass's `bind` raises for settings that do not fit; that ends the start of the worker.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, config, device)  # type: ignore[call-arg]
        self.bind(layer_names, config)

    def bind(self, layer_names: list[str], config: Any) -> None:
        raise NotImplementedError

    def seq_lens(self, common: Any) -> list[int] | None:
        """Tokens of each request, without waiting for a device; None if they are not known."""
        raise NotImplementedError

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        n = common_attn_metadata.num_reqs
        starts = common_attn_metadata.query_start_loc_cpu[: n + 1].tolist()
        lengths = self.seq_lens(common_attn_metadata)
        if lengths is not None:
            setattr(made, STEP, Step.of(starts, lengths[:n]))
        return made


def _unbound(layer: Any) -> ServedLayer:
    """A layer that no builder bound is counted, and left to vLLM."""
    name = str(getattr(layer, "layer_name", "?"))
    return WORKER.layers.setdefault(name, ServedLayer(name, None, "auto", UNBOUND))
