"""What this machine has, which backends there are, and which of them a call gets.

`choose()` is a pure function of the host, the call and the name asked for. It returns a `Choice`
that says why this backend and why none of the others, or raises `Unsupported` with every reason.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ..backends.cpu import cost_file as cache
from ..backends.cpu import library as native
from ..backends.cpu.crossover import BUILT_IN, Crossover, Estimate
from ..call import Call
from ..errors import Unsupported
from ..geometry import BLOCK_Q

ENV = "SPARGE_BACKEND"
AUTO = "auto"
DENSE = "dense"
CPU = "cpu"
STAGES = ("plan", "quantize", "attend")
FEWEST_PAIRS = 1 << 19
"""Calls of fewer query-key pairs take a millisecond or two; planning alone takes half of that."""


@dataclass(frozen=True)
class Host:
    """The machine as far as choosing needs it."""

    machine: str
    cpu_capability: str
    isas: tuple[str, ...] = ()
    """Instruction sets of the native core that run here, best first."""
    native_missing: str | None = None
    """Why there is no native core, if there is none."""
    crossover: Crossover = BUILT_IN
    """What the native core and dense attention cost here."""


def _no_estimate(host: Host, call: Call) -> Estimate | None:
    return None


def _torch_isa(host: Host, call: Call) -> str:
    """What torch's own kernels run with."""
    return f"torch {host.cpu_capability}" if call.device == "cpu" else f"torch {call.device}"


def modules_of(name: str) -> dict[str, str]:
    """The modules of a backend of ours."""
    files = {"plan": "plan", "quantize": "prepare", "attend": "attend"}
    return {stage: f"sparge.backends.{name}.{file}" for stage, file in files.items()}


@dataclass(frozen=True)
class Backend:
    """One way to run the stages.

    refusal: why it cannot run a call on a host, or None.
    slower: why dense attention is faster, known without numbers; or None.
    estimate: what both are predicted to take, or None for a backend that always wins.
    modules: the module of each stage in STAGES; imported when first used.
    isa: the instruction set it runs with, for the record.
    q_rows_per_scale, k_rows_per_scale: rows that share an int8 scale; 1 is one per token.
    shares_statistics: quantize has `prepare` and plan has `plan_from`: one pass serves both.
    """

    name: str
    about: str
    refusal: Callable[[Host, Call], str | None]
    slower: Callable[[Host, Call], str | None]
    modules: Mapping[str, str]
    isa: Callable[[Host, Call], str] = _torch_isa
    q_rows_per_scale: int = 1
    k_rows_per_scale: int = 1
    shares_statistics: bool = False
    estimate: Callable[[Host, Call], Estimate | None] = _no_estimate

    def stage(self, name: str) -> Any:
        module: ModuleType = importlib.import_module(self.modules[name])
        return module


@dataclass(frozen=True)
class Choice:
    """Which backend a call gets, why, and why every other one does not.

    estimate: the prediction that `auto` went by; None where it needed none.
    """

    backend: str
    reason: str
    rejected: Mapping[str, str]
    routed_to_dense: bool = False
    estimate: Estimate | None = None

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
    modules_of("reference"),
)


def _cpu_refusal(host: Host, call: Call) -> str | None:
    if call.device != "cpu":
        return f"it runs on the cpu, and the tensors are on {call.device}"
    if call.dtype == torch.float64:
        return "it computes in fp32; the reference serves float64"
    if host.native_missing is None:
        native.chosen_isa(host.isas)  # a forced name that is not there is an error, never ignored
    return host.native_missing


def _cpu_slower(host: Host, call: Call) -> str | None:
    if call.needs_grad:
        return "torch's own gradient of dense attention is faster"
    if torch.compiler.is_compiling():
        return (
            None  # lengths may be symbols here; the op chooses again by its numbers, when it runs
        )
    if call.Lq < BLOCK_Q:
        return f"{call.Lq} queries do not fill a block of {BLOCK_Q}; dense attention is faster"
    pairs = call.B * call.Hq * call.Lq * call.Lk
    if pairs < FEWEST_PAIRS:
        return (
            f"{pairs} query-key pairs are fewer than {FEWEST_PAIRS}; dense attention is done "
            "before a plan is made"
        )
    return None


def _cpu_estimate(host: Host, call: Call) -> Estimate | None:
    return None if torch.compiler.is_compiling() else host.crossover.estimate(call)


_CPU = Backend(
    CPU,
    "the native core for the processor, with the best instruction set it has",
    _cpu_refusal,
    _cpu_slower,
    modules_of("cpu"),
    isa=lambda host, call: native.chosen_isa(host.isas),
    shares_statistics=True,
    estimate=_cpu_estimate,
)
# Fastest first; the reference last. Dense is apart: it has no stages.
_BACKENDS: dict[str, Backend] = {_CPU.name: _CPU, _REFERENCE.name: _REFERENCE}
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
    if name in (_REFERENCE.name, _CPU.name) or name not in _BACKENDS:
        raise ValueError(f"{name!r} is not a backend that was registered")
    _replace_registry({n: b for n, b in _BACKENDS.items() if n != name})


def _replace_registry(registry: dict[str, Backend]) -> None:
    global _BACKENDS, _changes
    _BACKENDS, _changes = registry, _changes + 1


def registry_age() -> int:
    """Counts changes of the registry and of what was measured; older choices may not hold."""
    return _changes


def backends() -> tuple[Backend, ...]:
    """The backends that have stages, fastest first."""
    return tuple(_BACKENDS.values())


def get_backend(name: str) -> Backend:
    return _BACKENDS[name]


# Read once: a compiled graph then sees a constant, and nothing here changes while we run.
_HOST = Host(
    platform.machine(),
    torch.backends.cpu.get_cpu_capability(),
    native.available(),
    native.why_missing(),
)
# The same machine with what was measured on it, by instruction set and number of threads.
_hosts: dict[tuple[str, int], Host] = {}


def host() -> Host:
    if torch.compiler.is_compiling() or not _HOST.isas:
        return _HOST
    where = (os.environ.get(native.ENV_ISA) or _HOST.isas[0], torch.get_num_threads())
    found = _hosts.get(where)
    if found is None:
        found = _hosts[where] = replace(_HOST, crossover=_crossover_of(*where))
    return found


def _crossover_of(isa: str, threads: int) -> Crossover:
    measured, _ = cache.read(cache.key_of(isa, threads))
    return measured or BUILT_IN


def set_crossover(crossover: Crossover) -> None:
    """What was measured holds from now on; choices made before are forgotten."""
    global _changes
    where = (crossover.key["isa"], int(crossover.key["threads"]))
    _hosts[where] = replace(_HOST, crossover=crossover)
    _changes += 1


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
    estimate = None
    for b in able:
        slower = b.slower(host, call) if dense else None
        estimate = b.estimate(host, call) if dense and slower is None else estimate
        if slower is None and (estimate is None or estimate.faster):
            why = "the fastest that can serve this call"
            others = {name: f"slower than {b.name}" for name in candidates if name != b.name}
            if estimate is not None:
                why = f"{why}: {estimate}"
            return Choice(b.name, why, {**others, **rejected}, estimate=estimate)
        rejected[b.name] = slower or str(estimate)
    if dense:
        why = "no sparse backend is faster for this call"
        return Choice(DENSE, why, rejected, True, estimate)
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
