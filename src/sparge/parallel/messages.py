"""Tensors as bytes on the wire, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_ALIGN = 16
"""Tensors begin at multiples of this, so that every dtype can be viewed in place."""


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of a tensor that comes from another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def spec_of(x: Tensor) -> Spec:
    return Spec(tuple(x.shape), x.dtype)


def size_of(specs: Iterable[Spec]) -> int:
    """Bytes of the message that holds these tensors."""
    return sum(-(-spec.n_bytes // _ALIGN) * _ALIGN for spec in specs)


def to_bytes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One message, uint8."""
    buffer = torch.empty(size_of(map(spec_of, tensors)), dtype=torch.uint8, device=device)
    at = 0
    for x in tensors:
        spec = spec_of(x)
        if spec.n_bytes:
            buffer[at : at + spec.n_bytes].view(x.dtype).view(x.shape).copy_(x)
        at += size_of([spec])
    return buffer


def from_bytes(buffer: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    """The tensors of a message, as views of it."""
    found, at = [], 0
    for spec in specs:
        found.append(buffer[at : at + spec.n_bytes].view(spec.dtype).view(spec.shape))
        at += size_of([spec])
    return found


_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor with its last dimension in bits, uint8."""
    n = mask.shape[-1]
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -n % 8))
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    return (padded.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """`n` bools in place of the last dimension."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) & weights).bool().flatten(-2)[..., :n]
