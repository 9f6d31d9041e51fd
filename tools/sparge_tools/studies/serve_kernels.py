"""vLLM's attention, torch's and ours alone, over the same paged keys, for the study `serve`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import DEFAULT, Recipe
from sparge.synthetic import structured_qkv

BLOCK, TURNS = 128, 3


def kernel_times(
    lengths: Sequence[int],
    *,
    chunk: int,
    threads: int,
    recipe: Recipe | None,
    Hq: int,
    Hk: int,
    D: int,
) -> list[dict[str, Any]]:
    """Milliseconds of one layer: of whole prompts, and of their last chunk where that is shorter.

    torch's is of the whole prompt, causal; of a chunk it has a mask.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shapes = [(n, n) for n in lengths] + [(chunk, n) for n in lengths if chunk < n]
        return [_times(*shape, recipe or DEFAULT, Hq, Hk, D) for shape in shapes]
    finally:
        torch.set_num_threads(before)


def _times(Lq: int, Lk: int, recipe: Recipe, Hq: int, Hk: int, D: int) -> dict[str, Any]:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from sparge.serving.vllm import cpu

    current_platform.import_kernels()
    dtype = torch.bfloat16
    query, key, value = (x.to(dtype) for x in structured_qkv(Hq=Hq, Hk=Hk, L=Lk, D=D))
    query = query[:, :, Lk - Lq :]
    packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    isa = _get_attn_isa(dtype, BLOCK, D)
    blocks = -(-Lk // BLOCK)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    cache = torch.zeros(blocks, Hk, BLOCK, 2 * D, dtype=dtype)
    slots = (table[:, None].long() * BLOCK + torch.arange(BLOCK)).flatten()[:Lk]
    halves = cache.view(blocks, Hk, 2 * BLOCK, D).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(packed[1], packed[2], *halves, slots, isa)
    own = cpu.own_attention(packed[0], cache, [Lq], [Lk], table[None], isa)
    layout = cpu.layout_of(isa, dtype, BLOCK, D)
    assert layout is not None
    read = [torch.empty_like(x) for x in packed[1:]]

    def gather() -> None:
        layout.read(cache, table, *read)

    def ours() -> Tensor:
        if Lq < Lk:  # a whole prompt has its keys at hand
            gather()
        keys, values = (x.transpose(0, 1)[None] for x in (read if Lq < Lk else packed[1:]))
        return sparge.attention(
            query,
            keys,
            values,
            is_causal=True,
            enable_gqa=True,
            causal_align="bottom_right",
            recipe=recipe,
            backend="cpu",
        )

    mask = None if Lq == Lk else torch.ones(Lq, Lk, dtype=torch.bool).tril(Lk - Lq)

    def dense() -> Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    with sparge.record() as runs:
        ours()
    ways = {"vllm_ms": own, "torch_ms": dense, "sparge_ms": ours, "gather_ms": gather}
    times = fastest_in_turns(ways)
    if Lq == Lk:
        times["gather_ms"] = 0.0
    return {"Lq": Lq, "Lk": Lk, "isa": isa, "density": runs[0].density, **times}


def fastest_in_turns(ways: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each, the least of several turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(TURNS):
        for name, work in ways.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best
