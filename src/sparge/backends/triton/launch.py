"""The one place where kernels are launched. What is launched can be watched, with or without a run.

Kernels get run-time lengths, and run on the current stream of the device that holds their tensors.
Watching serves three purposes: counting launches and bytes, compiling for an architecture that is
not here, and showing that nothing of a call is decided by numbers of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

from ...support.errors import Unsupported
from . import first_launch


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    arguments: by the names of the kernel's parameters, constants included. options: what the
    compiler is told, such as `num_warps` and `num_stages`. touched: elements read or written of a
    tensor, where these are fewer than it has, by its name; `q.scale` is a field of a tuple.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    touched: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def bytes(self) -> int:
        """Bytes that go through memory if each tensor argument is read or written once."""
        return sum(
            self.touched.get(name, _elements(x)) * x.element_size()
            for name, x in tensors_of(self.arguments)
        )


@dataclass(frozen=True)
class Watch:
    launches: list[Launch]
    run: bool


COMMON = {"enable_fp_fusion": True}
"""Options of every launch. Said, because Triton's default changes with 3.10: unfused multiply-adds
would be other numbers and more instructions."""
SET_UP = ("C compiler", "active drivers", "libcuda")
"""In the messages of Triton's errors where a machine lacks what a first launch needs."""
_watches: ContextVar[tuple[Watch, ...]] = ContextVar("sparge_launches", default=())


@contextmanager
def watch_launches(*, run: bool = True) -> Iterator[list[Launch]]:
    """Collect the launches of this thread or task; without `run`, nothing is launched, and the
    tensors that kernels would have written hold whatever they held."""
    watch = Watch([], run)
    token = _watches.set((*_watches.get(), watch))
    try:
        yield watch.launches
    finally:
        _watches.reset(token)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    options: Mapping[str, Any],
    *,
    touched: Any = None,
    **arguments: Any,
) -> None:
    """Launch `kernel[grid](**arguments)` on the device of its tensors. touched: as `Launch` has it,
    a mapping or None.

    Raises `DoesNotFit` if the kernel needs more of a resource than the device has: Triton compares
    the two when it loads a kernel, before it runs."""
    options = {**COMMON, **options}
    watches = _watches.get()
    if watches:
        made = Launch(kernel, grid, arguments, options, touched or {})
        for watch in watches:
            watch.launches.append(made)
        if not all(watch.run for watch in watches):
            return
    with on_device_of(arguments):
        try:
            kernel[grid](**arguments, **options)
        except Exception as error:
            if (why := _why_not_launched(kernel.fn.__name__, error)) is not None:
                raise why from error
            raise


class DoesNotFit(Unsupported):
    """A kernel needs more of a resource than the card has. Nothing was launched."""


def _why_not_launched(name: str, error: Exception) -> Unsupported | None:
    """What a first launch lacked; None for every other error."""
    from triton.runtime.errors import OutOfResources

    if isinstance(error, OutOfResources):
        needs = f"its kernel {name} needs {error.required} of {error.name}"
        why = f"{needs}, and the card has {error.limit}"
        way_out = "use backend='dense' or another precision, and please report the card"
        return DoesNotFit("a kernel does not fit this card:", {"triton": why}, way_out)
    # The launcher of a kernel is a C program that is compiled on the user's machine.
    said = str(error)
    if isinstance(error, OSError | CalledProcessError) or any(x in said for x in SET_UP):
        return first_launch.explained(error, first_launch.this_machine())
    return None


def on_device_of(arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Triton compiles for, and launches on, the current device, wherever the tensors are."""
    device = next(x.device for _, x in tensors_of(arguments))
    if device.type in ("cpu", "meta"):
        return nullcontext()
    return torch.get_device_module(device.type).device(device)


def tensors_of(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among arguments, and those in tuples by the name of their field."""
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            yield name, x
        elif isinstance(x, tuple) and hasattr(x, "_asdict"):
            yield from ((f"{name}.{field}", part) for field, part in tensors_of(x._asdict()))


def _elements(x: Tensor) -> int:
    """Distinct elements of a tensor; expanded dimensions count once."""
    n = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        n *= size if stride else 1
    return n
