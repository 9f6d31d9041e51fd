"""vLLM's CPU attention with sparse prefill. Imported by vLLM alone, when it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from ...support.turns import timed
from .batch import Request
from .cache_layout import CacheLayout, find_cache_layout
from .routing import OwnCost, Shape
from .worker import ServingBuilder, ServingImpl, bind_layers

TRIAL, TURNS = 1024, 3
"""Tokens of the prompt that vLLM's attention is measured with, and how often; the least counts."""


class SpargeCPUImpl(ServingImpl, CPUAttentionBackendImpl):
    """Prefills by sparge, everything else by vLLM's CPU attention."""

    def reader(self, layer: Any, kv_cache: Tensor, metadata: Any) -> Callable[..., None] | None:
        block, D = kv_cache.shape[2], kv_cache.shape[3] // 2
        layout = layout_of(layer.isa, kv_cache.dtype, block, D)
        if layout is None:
            return None
        table = metadata.block_table

        def gather(i: int, key: Tensor, value: Tensor) -> None:
            layout.read(kv_cache, table[i], key, value)

        return gather

    def metadata_of(self, layer: Any, metadata: Any, chosen: Sequence[Request], at: Any) -> Any:
        made = super().metadata_of(layer, metadata, chosen, at)
        schedule = _schedule(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            dtype=layer.dtype,
            isa=layer.isa,
            seq_lens=made.seq_lens,
            query_start_loc=made.query_start_loc,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return replace(made, scheduler_metadata=schedule)


class SpargeCPUBuilder(ServingBuilder, CPUAttentionMetadataBuilder):
    def bind(self, layer_names: list[str], config: Any) -> None:
        def measure(shape: Shape) -> OwnCost | None:
            sizes, threads = (shape.Hq, shape.Hk, shape.D, shape.dtype), torch.get_num_threads()
            return own_cost(self.block_size, self.isa, *sizes, threads)

        bind_layers(layer_names, config, measure=measure, implementation=SpargeCPUImpl)

    def seq_lens(self, common: Any) -> list[int] | None:
        lengths: list[int] = common.seq_lens.tolist()
        return lengths


class SpargeCPUBackend(CPUAttentionBackend):
    """Keeps the name of the backend that it stands in for: vLLM's CPU platform knows no other."""

    @staticmethod
    def get_impl_cls() -> type[SpargeCPUImpl]:
        return SpargeCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SpargeCPUBuilder]:
        return SpargeCPUBuilder


@lru_cache(maxsize=64)
def layout_of(isa: str, dtype: torch.dtype, block: int, D: int) -> CacheLayout | None:
    """How vLLM packs a block, found by letting it write one; None if that is not understood."""

    def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        halves = cache.view(cache.shape[0], 1, 2 * block, D).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)

    try:
        return find_cache_layout(write, dtype=dtype, block=block, D=D)
    except RuntimeError:  # vLLM itself does not serve this
        return None


@lru_cache(maxsize=64)
def own_cost(
    block: int, isa: str, Hq: int, Hk: int, D: int, dtype: torch.dtype, threads: int
) -> OwnCost | None:
    """vLLM's kernel and the copy out of its cache, timed on this machine; None if the cache cannot
    be read."""
    layout = layout_of(isa, dtype, block, D)
    if layout is None:
        return None
    n = -(-TRIAL // block)
    cache = torch.zeros(n, Hk, block, 2 * D, dtype=dtype)
    query = torch.zeros(TRIAL, Hq, D, dtype=dtype)
    key, value = (torch.zeros(TRIAL, Hk, D, dtype=dtype) for _ in range(2))
    table = torch.arange(n, dtype=torch.int32)
    attend = own_attention(query, cache, [TRIAL], [TRIAL], table[None], isa)
    pairs = Hq * TRIAL * (TRIAL + 1) / 2
    read = partial(layout.read, cache, table, key, value)
    attending, reading = (min(timed(work)[0] for _ in range(TURNS)) for work in (attend, read))
    return OwnCost(attending / pairs, reading / TRIAL)


def own_attention(
    query: Tensor, cache: Tensor, Lq: Sequence[int], Lk: Sequence[int], table: Tensor, isa: str
) -> Callable[[], Tensor]:
    """vLLM's kernel alone, over packed queries `[T, Hq, D]` and a cache; returns its output."""
    blocks, Hk, block, width = cache.shape
    D = width // 2
    key_cache, value_cache = cache.view(blocks, Hk, 2 * block, D).chunk(2, dim=2)
    seq_lens = torch.tensor(Lk, dtype=torch.int32)
    starts = torch.tensor(list(accumulate(Lq, initial=0)), dtype=torch.int32)
    plan = _schedule(
        num_heads=query.shape[1],
        num_kv_heads=Hk,
        head_dim=D,
        dtype=query.dtype,
        isa=isa,
        seq_lens=seq_lens,
        query_start_loc=starts,
        kv_cache_dtype="auto",
    )
    output = torch.empty_like(query)

    def attend() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=D**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return output

    return attend


def _schedule(*, seq_lens: Tensor, **facts: Any) -> Tensor:
    """vLLM's own division of the work among threads."""
    made: Tensor = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        seq_lens=seq_lens,
        causal=True,
        sliding_window_size=-1,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        **facts,
    )
    return made
