"""The original's helpers for block maps and errors; those for its kernels are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...api.attention import make_plan
from ...values.call import BLOCK_K, BLOCK_Q
from ._recipes import Threshold, numbers_of, recipe_of, refuse


def precision_metric(
    quant_o: Tensor, fa2_o: Tensor, verbose: bool = True, round_num: int = 4
) -> dict[str, float]:
    """How far `quant_o` is from `fa2_o`: cosine, relative L1, root of the mean square error."""
    out, truth = quant_o.float().flatten(), fa2_o.float().flatten()
    difference = out - truth
    found = {
        "Cossim": torch.nn.functional.cosine_similarity(out, truth, dim=0),
        "L1": difference.abs().sum() / truth.abs().sum(),
        "RMSE": difference.square().mean().sqrt(),
    }
    rounded = {name: round(number.item(), round_num) for name, number in found.items()}
    if verbose:
        print(", ".join(f"{name} {number}" for name, number in rounded.items()))
    return rounded


def hyperparameter_check(hyper: Threshold, H: int, device: torch.device | str) -> Tensor:
    """A threshold as a float32 vector of one number per head."""
    numbers = numbers_of("hyper", hyper, H)
    each = numbers if isinstance(numbers, tuple) else (numbers,) * H
    return torch.tensor(each, dtype=torch.float32, device=device)


def get_block_map_meansim(
    q: Tensor,
    k: Tensor,
    is_causal: bool = False,
    BLKQ: int = 128,
    BLKK: int = 64,
    simthreshd1: Threshold = 0.1,
    cdfthreshd: Threshold | None = 0.9,
    topk: Threshold | None = None,
    is_sparse: bool = True,
    return_lut: bool = False,
    attention_sink: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The kept blocks as bool `[B, H, n_q, n_k]`, or as `(lut, counts)`.

    The map that attention itself would use: keys are smoothed first, and the diagonal of a causal
    map is kept. `is_sparse` has no meaning, as in the original.
    """
    if (BLKQ, BLKK) != (BLOCK_Q, BLOCK_K):
        raise refuse(
            f"blocks are {BLOCK_Q} queries x {BLOCK_K} keys on every chip, got BLKQ={BLKQ} and "
            f"BLKK={BLKK}",
            "leave both out",
        )
    recipe = recipe_of(
        q.shape[1],
        simthreshd1=simthreshd1,
        cdfthreshd=cdfthreshd,
        topk=topk,
        pvthreshd=50,
        attention_sink=attention_sink,
    )
    kept = make_plan(q, k, is_causal=is_causal, enable_gqa=True, recipe=recipe).to_mask()
    return block_map_lut(kept) if return_lut else kept


def block_map_lut(block_map: Tensor) -> tuple[Tensor, Tensor]:
    """`(lut, counts)`, int32: kept blocks ascending, each as its distance from the one before."""
    kept = block_map != 0
    n_k = kept.shape[-1]
    counts = kept.sum(-1, dtype=torch.int32)
    where = torch.arange(n_k, device=kept.device).expand(kept.shape)
    ascending = torch.where(kept, where, n_k).sort(dim=-1).values
    steps = ascending.diff(dim=-1, prepend=torch.zeros_like(ascending[..., :1]))
    return steps.masked_fill(ascending == n_k, 0).to(torch.int32), counts


block_map_lut_triton = block_map_lut


def block_map_to_mask(block_map: Tensor, BLKQ: int = 128, BLKK: int = 64) -> Tensor:
    """The map spread over tokens, in whole blocks: the caller cuts it to the lengths."""
    return block_map.bool().repeat_interleave(BLKQ, -2).repeat_interleave(BLKK, -1)


def _refused(name: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise refuse(
            f"{name} feeds the original's CUDA kernels, which are not here",
            "get_block_map_meansim gives the map, sparge.make_plan the plan, and "
            "sparge.attention runs them",
        )

    call.__name__ = call.__qualname__ = name
    call.__doc__ = "Refused when called: it prepares what only the original's kernels read."
    return call


get_block_map_meansim_fuse_quant = _refused("get_block_map_meansim_fuse_quant")
get_vanilla_qk_quant = _refused("get_vanilla_qk_quant")
get_quant = _refused("get_quant")
get_pool_sim_triton_simmean = _refused("get_pool_sim_triton_simmean")
get_pool_sim_triton_simmean_fuse_quant = _refused("get_pool_sim_triton_simmean_fuse_quant")
fill_block_map_triton = _refused("fill_block_map_triton")
fill_causal_mask_triton = _refused("fill_causal_mask_triton")
