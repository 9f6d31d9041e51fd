"""Which addresses a kernel may touch in Triton's interpreter: elements of its tensor arguments.

Used by `interpreter.py`. A pointer remembers the argument that it was made of, so an address in the
memory of another argument, or in a gap between the elements of a strided one, is found, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_names: dict[int, str] = {}
_regions: list[Region] = []
"""Of the launch that is running."""


@dataclass(frozen=True, eq=False)
class Region:
    """The memory of one tensor argument. steps: size and stride of its dimensions, from the
    largest stride to the smallest, where elements leave gaps between them; else empty."""

    name: str
    start: int
    extent: int
    itemsize: int
    shape: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, x: torch.Tensor, name: str) -> Region:
        # Dimensions that do not move an address say nothing about it.
        pairs = [p for p in zip(x.shape, x.stride(), strict=True) if p[0] > 1 and p[1] > 0]
        steps = sorted(pairs, key=lambda p: -p[1])
        span = 1 + sum((size - 1) * stride for size, stride in steps) if x.numel() else 0
        held = int(np.prod([size for size, _ in steps]))
        # Where rows overlap (a sliding window), indices do not follow from an address.
        nested = all(
            stride > sum((n - 1) * s for n, s in steps[i + 1 :])
            for i, (_, stride) in enumerate(steps)
        )
        walked = tuple(steps) if nested and span != held else ()
        bytes_each = x.element_size()
        return cls(name, x.data_ptr(), span * bytes_each, bytes_each, tuple(x.shape), walked)

    def misses(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of `size` bytes are not to elements of the tensor."""
        offset = addresses.astype(np.int64) - self.start
        outside = (offset < 0) | (offset + size > self.extent)
        if self.steps:
            rest = offset // self.itemsize
            for n, stride in self.steps:
                index, rest = np.divmod(rest, stride)
                outside |= index >= n
            outside |= rest != 0
        return outside


class ArgumentPointer(tl.pointer_type):
    """A pointer that remembers its argument: the interpreter hands the type of a pointer on through
    all arithmetic, so an address in the memory of another argument is found, too."""

    def __init__(self, plain: tl.pointer_type, region: Region):
        super().__init__(plain.element_ty, plain.address_space, plain.const)
        self.region = region


def begin_launch(arguments: dict[str, Any]) -> None:
    """Forget the last launch; note the names of the tensors of this one."""
    _names.clear()
    _regions.clear()
    for name, x in arguments.items():
        for part in x if isinstance(x, tuple) else (x,):
            base = getattr(part, "base", part)  # of a descriptor
            _names.update({id(part): name, id(base): name})


def remember_argument(pointer: TensorHandle, x: torch.Tensor, held: Any) -> None:
    """Let a pointer know its tensor; `held`: the argument, which may be a wrapper of it."""
    region = Region.of(x, _names.get(id(held), "an argument"))
    _regions.append(region)
    pointer.dtype = ArgumentPointer(pointer.dtype, region)


def forget_argument(pointer: TensorHandle) -> None:
    """A pointer that may be of several arguments is checked against all of them."""
    own = pointer.dtype
    pointer.dtype = tl.pointer_type(own.element_ty, own.address_space, own.const)


def check_addresses(what: str, pointers: TensorHandle, mask: TensorHandle | None = None) -> None:
    """Raise IndexError if an address that is not masked lies outside of its argument."""
    every = pointers.data
    if mask is not None:
        every = every[np.broadcast_to(mask.data, every.shape)]
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    own = getattr(pointers.dtype, "region", None)
    missed = np.ones(every.shape, dtype=bool)
    for region in [own] if own is not None else _regions:
        missed &= region.misses(every, size)
    if not missed.any():
        return
    first = int(every[missed][0])
    if own is None:
        raise IndexError(f"{what} at {first:#x}, which is in no argument of the kernel")
    raise IndexError(
        f"{what} outside of {own.name}, shape {list(own.shape)}: {int(missed.sum())} of "
        f"{every.size} addresses, the first {(first - own.start) // own.itemsize} elements from "
        "its start"
    )
