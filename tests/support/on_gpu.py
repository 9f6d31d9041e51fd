"""The conformance suite on a GPU: `PYTHONPATH=tests pytest -p on_gpu -k triton-gpu tests`.

The tests make their tensors on the processor. This plugin registers a backend `triton-gpu` that
moves the arguments of each stage to the accelerator, runs the stages of `triton` there, and moves
what they return back. Strides come along: what a test says of them is tested on the GPU, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge.routing import get_backend, register_backend
from sparge.values.backend import Backend, FixedCost, host
from sparge.values.stages import Stages

NAME = "triton-gpu"
Move = Callable[[Tensor], Tensor]


def moved(x: Any, move: Move) -> Any:
    """The same value with every tensor in it moved; a value without tensors is itself."""
    if isinstance(x, Tensor):
        return move(x)
    if is_dataclass(x) and not isinstance(x, type):
        held = {field.name: getattr(x, field.name) for field in fields(x) if field.init}
        new = {name: moved(value, move) for name, value in held.items()}
        return x if all(new[name] is held[name] for name in held) else replace(x, **new)
    if isinstance(x, tuple | list):
        parts = [moved(part, move) for part in x]
        if all(a is b for a, b in zip(parts, x, strict=True)):
            return x
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def as_strided_on(x: Tensor, device: str) -> Tensor:
    """A tensor on another device with the same strides: views with gaps or overlaps stay such."""
    if x.numel() == 0:
        return x.to(device)
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    flat = x.as_strided((span,), (1,)).to(device)
    return flat.as_strided(x.shape, x.stride(), storage_offset=flat.storage_offset())


class StagesOn:
    """Stages on a device, for callers whose tensors are elsewhere.

    A tensor that a stage returns as it came comes back as the caller's own.
    """

    def __init__(self, stages: Stages, device: str):
        self.stages, self.device = stages, device

    def __getattr__(self, stage: str) -> Callable[..., Any]:
        run = getattr(self.stages, stage)

        def run_there(call: Any, *args: Any, **named: Any) -> Any:
            pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by their ids: here, there

            def go(x: Tensor) -> Tensor:
                there = as_strided_on(x, self.device)
                pairs[id(there)] = (x, there)
                return there

            def come_back(x: Tensor) -> Tensor:
                return pairs[id(x)][0] if id(x) in pairs else as_strided_on(x, call.device)

            there = replace(call, device=torch.device(self.device).type)
            by_name = {name: moved(x, go) for name, x in named.items()}
            return moved(run(there, *moved(args, go), **by_name), come_back)

        return run_there


def backend_on(device: str, served: Backend) -> Backend:
    """A backend for tensors on the processor that another one serves on a device."""
    kind = torch.device(device).type
    return replace(
        served,
        name=NAME,
        about=f"{served.name} on {device}, for tensors on the cpu; to test it",
        stages=lambda: StagesOn(served.stages(), device),
        refusal=lambda _, call: served.refusal(host(kind), replace(call, device=kind)),
        cost=FixedCost(False, "every stage moves its tensors to the device and back"),
        isa=lambda _, call: served.isa(host(kind), replace(call, device=kind)),
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Register before conftest.py lists the backends."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        raise pytest.UsageError("-p on_gpu needs an accelerator, and torch finds none here")
    register_backend(backend_on(str(device), get_backend("triton")))
