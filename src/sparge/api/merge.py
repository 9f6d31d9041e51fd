"""Merge partial attention results over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of two partial results `[..., L, Dv]` and `[..., L]`, natural-log LSE.

    A part that attended nothing (`lse = -inf`) changes nothing; two such parts give zeros.
    """
    _check(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    work = torch.promote_types(torch.float32, torch.promote_types(out_a.dtype, lse_a.dtype))
    a, b = lse_a.to(work), lse_b.to(work)
    nothing = (a == float("-inf")) & (b == float("-inf"))
    a, b = a.masked_fill(nothing, 0.0), b.masked_fill(nothing, 0.0)
    # Weights from the difference of the LSEs: they sum to one however large the LSEs are.
    share_a, share_b = torch.sigmoid(a - b).unsqueeze(-1), torch.sigmoid(b - a).unsqueeze(-1)
    # A part that attended nothing is ignored, whatever its output holds.
    part_a = out_a.to(work).masked_fill((lse_a == float("-inf")).unsqueeze(-1), 0.0)
    part_b = out_b.to(work).masked_fill((lse_b == float("-inf")).unsqueeze(-1), 0.0)
    out = part_a * share_a + part_b * share_b
    lse = torch.logaddexp(a, b).masked_fill(nothing, float("-inf"))
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def _check(**parts: Tensor) -> None:
    for name, x in parts.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
    out_a, lse_a, out_b, lse_b = parts.values()
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if out.shape[:-1] != lse.shape:
            raise ValueError(
                f"lse_{name} must have the shape of out_{name} without its last dimension, got "
                f"{list(lse.shape)} for {list(out.shape)}"
            )
    for first, second in ((out_a, out_b), (lse_a, lse_b)):
        if first.shape != second.shape or first.dtype != second.dtype:
            raise ValueError(
                "both parts must have one shape and dtype, got "
                f"{list(first.shape)} {first.dtype} and {list(second.shape)} {second.dtype}"
            )
    devices = {str(x.device) for x in parts.values()}
    if len(devices) > 1:
        raise ValueError(f"all parts must be on one device, got {', '.join(sorted(devices))}")
