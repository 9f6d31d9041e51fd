"""Numbers that numpy lacks, for Triton's interpreter: bf16, fp8 and tf32, rounded as on a GPU."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
"""Types that numpy lacks: the interpreter holds their bits in unsigned integers."""


def is_narrow(x: TensorHandle) -> bool:
    """Whether the data are bits of a narrow type."""
    return x.dtype.scalar in NARROW and x.data.dtype in (np.uint8, np.uint16)


def decode(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The numbers of narrow bits in fp32: exact."""
    signed = np.array(bits).view(np.int8 if bits.itemsize == 1 else np.int16)
    return torch.from_numpy(signed).view(NARROW[dtype]).float().numpy()


def encode(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The bits of the nearest narrow numbers, ties to even. fp8 saturates, infinities too, as
    `cvt.rn.satfinite` does; NaN stays NaN."""
    wide = torch.from_numpy(_fp32_for_rounding(np.asarray(x)))
    if dtype.is_fp8():
        most = torch.finfo(NARROW[dtype]).max
        wide = wide.clamp(-most, most)
    narrow = wide.to(NARROW[dtype])
    if narrow.element_size() == 1:
        return narrow.view(torch.uint8).numpy()
    return narrow.view(torch.int16).numpy().view(np.uint16)


def _fp32_for_rounding(x: np.ndarray) -> np.ndarray:
    """A copy in fp32 that rounds to a narrower type as `x` does: what does not fit is rounded to
    an odd mantissa, which no later tie mistakes for a number halfway between two."""
    if x.dtype in (np.float32, np.float16, np.bool_, np.int8, np.uint8, np.int16, np.uint16):
        return x.astype(np.float32)
    x = x.astype(np.float64)
    near = x.astype(np.float32)
    even = (near.view(np.uint32) & 1) == 0
    inexact = np.isfinite(x) & (near.astype(np.float64) != x)
    toward = np.where(near < x, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact & even, np.nextafter(near, toward), near)


def widen(x: TensorHandle) -> TensorHandle:
    return TensorHandle(decode(x.data, x.dtype.scalar), tl.float32) if is_narrow(x) else x


def rounded_to_tf32(x: np.ndarray) -> np.ndarray:
    """fp32 numbers with 10 mantissa bits: to nearest, ties to even; infinities and NaN stay."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    half = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    near = ((bits + half) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), near, x)


def rounded(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """fp32 numbers rounded to a 16-bit or 8-bit type, still held in fp32."""
    if dtype == tl.float16:
        return x.astype(np.float16).astype(np.float32)
    return decode(encode(x, dtype), dtype)
