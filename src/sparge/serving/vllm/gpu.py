"""vLLM's Triton attention with sparse prefill, as the backend `SPARGE`. Imported by vLLM alone.

Written against vLLM 0.32 and not yet run on a GPU: no machine with one was at hand. What it shares
with the CPU (splitting a step, packing, routing, counting) is tested there; what is its own is the
reading of the cache and of the lengths below. Triton attention is the base because it runs on every
vendor's cards and its cache holds plain rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from .worker import ServingBuilder, ServingImpl, bind_layers


class SpargeImpl(ServingImpl, TritonAttentionImpl):
    """Prefills by sparge's Triton kernels, everything else by vLLM's."""

    def reader(self, layer: Any, kv_cache: Tensor, metadata: Any) -> Callable[..., None] | None:
        # [blocks, Hk, block, 2 D], of which vLLM may store heads or tokens outermost.
        rows = kv_cache.transpose(1, 2)
        table, block, D = metadata.block_table, rows.shape[1], self.head_size
        if rows.shape[-1] != 2 * D:
            return None

        def gather(i: int, key: Tensor, value: Tensor) -> None:
            tokens = key.shape[0]
            taken = rows[table[i, : -(-tokens // block)].long()].flatten(0, 1)[:tokens]
            key.copy_(taken[..., :D])
            value.copy_(taken[..., D:])

        return gather


class SpargeBuilder(ServingBuilder, TritonAttentionMetadataBuilder):
    # A captured graph would repeat the decisions of one step; decode alone decides nothing.
    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def bind(self, layer_names: list[str], config: Any) -> None:
        # vLLM's kernel is not timed here: `auto` compares with torch's attention.
        bind_layers(layer_names, config, measure=None, implementation=SpargeImpl)

    def seq_lens(self, common: Any) -> list[int] | None:
        bound = common.seq_lens_cpu_upper_bound  # exact for prefills, which alone read it
        return None if bound is None else bound.tolist()


class SpargeBackend(TritonAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "SPARGE"

    @staticmethod
    def get_impl_cls() -> type[SpargeImpl]:
        return SpargeImpl

    @staticmethod
    def get_builder_cls() -> type[SpargeBuilder]:
        return SpargeBuilder
