"""What this machine has, which backends there are, and which of them a call gets.

`choose()` is a pure function of the host, the call and the name asked for. It returns a `Choice`
that says why this backend and why none of the others, or raises `Unsupported` with every reason.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .call import Call
from .errors import Unsupported

ENV = "SPARGE_BACKEND"
AUTO = "auto"
DENSE = "dense"
STAGES = ("plan", "quantize", "attend")


@dataclass(frozen=True)
class Host:
    """The machine as far as choosing needs it."""

    machine: str
    cpu_capability: str


def _torch_isa(host: Host, call: Call) -> str:
    """What torch's own kernels run with."""
    return f"torch {host.cpu_capability}" if call.device == "cpu" else f"torch {call.device}"


@dataclass(frozen=True)
class Backend:
    """One way to run the stages.

    refusal: why it cannot run a call on a host, or None.
    slower: why dense attention would be faster, or None where this backend wins.
    modules: the module of each stage in STAGES; imported when first used.
    isa: the instruction set it runs with, for the record.
    q_rows_per_scale, k_rows_per_scale: rows that share an int8 scale; 1 is one per token.
    """

    name: str
    about: str
    refusal: Callable[[Host, Call], str | None]
    slower: Callable[[Host, Call], str | None]
    modules: Mapping[str, str]
    isa: Callable[[Host, Call], str] = _torch_isa
    q_rows_per_scale: int = 1
    k_rows_per_scale: int = 1

    def stage(self, name: str) -> Any:
        module: ModuleType = importlib.import_module(self.modules[name])
        return module


@dataclass(frozen=True)
class Choice:
    """Which backend a call gets, why, and why every other one does not."""

    backend: str
    reason: str
    rejected: Mapping[str, str]
    routed_to_dense: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "reason": self.reason,
            "rejected": dict(self.rejected),
            "routed_to_dense": self.routed_to_dense,
        }

    def __str__(self) -> str:
        others = [f"  not {name}: {why}" for name, why in self.rejected.items()]
        return "\n".join([f"{self.backend}: {self.reason}", *others])


def _reference_refusal(host: Host, call: Call) -> str | None:
    if call.device == "mps":
        return "it counts mass in float64, which mps does not have; move the tensors to the cpu"
    return None


def _reference_slower(host: Host, call: Call) -> str | None:
    return "it is written to be read, not to be fast; dense attention is faster at every shape"


def _dense_refusal(host: Host, call: Call) -> str | None:
    if call.has_block_mask:
        return "a block mask asks for exactly its blocks, and dense attention computes them all"
    return None


DENSE_BACKEND = Backend(
    DENSE, "torch's own scaled_dot_product_attention", _dense_refusal, lambda h, c: None, {}
)
_REFERENCE = Backend(
    "reference",
    "plain PyTorch, any device; the meaning that the others are measured against",
    _reference_refusal,
    _reference_slower,
    {stage: f"sparge.{stage}.reference" for stage in STAGES},
)
# Fastest first; the reference last. Dense is apart: it has no stages.
_BACKENDS: dict[str, Backend] = {_REFERENCE.name: _REFERENCE}
_changes = 0


def register_backend(backend: Backend) -> None:
    """Add a backend before those registered so far; it is then also in the conformance suite."""
    if not isinstance(backend, Backend):
        raise TypeError(f"a Backend is registered, got {type(backend).__name__}")
    if backend.name in (AUTO, DENSE, *_BACKENDS):
        raise ValueError(f"there is a backend named {backend.name!r} already")
    if missing := set(STAGES) - set(backend.modules):
        raise ValueError(f"backend {backend.name!r} has no module for stages {sorted(missing)}")
    _replace_registry({backend.name: backend, **_BACKENDS})


def unregister_backend(name: str) -> None:
    if name == _REFERENCE.name or name not in _BACKENDS:
        raise ValueError(f"{name!r} is not a backend that was registered")
    _replace_registry({n: b for n, b in _BACKENDS.items() if n != name})


def _replace_registry(registry: dict[str, Backend]) -> None:
    global _BACKENDS, _changes
    _BACKENDS, _changes = registry, _changes + 1


def registry_age() -> int:
    """Counts changes of the registry; what was chosen before one may no longer hold."""
    return _changes


def backends() -> tuple[Backend, ...]:
    """The backends that have stages, fastest first."""
    return tuple(_BACKENDS.values())


def get_backend(name: str) -> Backend:
    return _BACKENDS[name]


# Read once: a compiled graph then sees a constant, and nothing here changes while we run.
_HOST = Host(platform.machine(), torch.backends.cpu.get_cpu_capability())


def host() -> Host:
    return _HOST


def choose(host: Host, call: Call, backend: str = AUTO, *, dense_ok: bool = True) -> Choice:
    """`dense_ok=False` for the single stages, which dense attention does not have."""
    candidates = dict(_BACKENDS)
    if dense_ok:
        candidates[DENSE] = DENSE_BACKEND
    asked_by = f"backend={backend!r}"
    if backend == AUTO:
        forced = os.environ.get(ENV) or AUTO
        if forced != AUTO:
            backend, asked_by = forced, f"{ENV}={forced}"
    refusals = {name: b.refusal(host, call) for name, b in candidates.items()}
    if backend != AUTO:
        return _obey(backend, asked_by, refusals, candidates)
    rejected = {name: why for name, why in refusals.items() if why is not None}
    able = [b for name, b in candidates.items() if name not in rejected and name != DENSE]
    dense = dense_ok and DENSE not in rejected
    for b in able:
        slower = b.slower(host, call) if dense else None
        if slower is None:
            why = "the fastest that can serve this call"
            others = {name: f"slower than {b.name}" for name in candidates if name != b.name}
            return Choice(b.name, why, {**others, **rejected})
        rejected[b.name] = slower
    if dense:
        return Choice(DENSE, "no sparse backend is faster for this call", rejected, True)
    raise Unsupported(f"no backend can serve {call}:", rejected, _WAY_OUT)


_WAY_OUT = "sparge.explain(...) says what each backend needs"


def _obey(
    backend: str,
    asked_by: str,
    refusals: Mapping[str, str | None],
    candidates: Mapping[str, Backend],
) -> Choice:
    """The backend that was asked for, or an error; never another one."""
    if backend == DENSE and DENSE not in candidates:
        refusals = {**refusals, DENSE: "dense attention has no plan and no stages"}
    elif backend not in candidates:
        raise ValueError(
            f"unknown backend in {asked_by}; there are {', '.join([AUTO, *candidates])}"
        )
    if refusals[backend] is not None:
        reasons = {name: why or "can serve it, but was not asked" for name, why in refusals.items()}
        way_out = _WAY_OUT if backend in candidates else "sparge.attention runs dense attention"
        raise Unsupported(f"{asked_by} cannot serve this call:", reasons, way_out)
    others = {name: why or f"{asked_by} asks for another" for name, why in refusals.items()}
    del others[backend]
    return Choice(backend, f"asked for by {asked_by}", others)
