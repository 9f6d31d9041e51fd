"""A backend: what it refuses, what it costs beside dense attention, and its stages."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..support.cpuinfo import cpu_name
from ..support.turns import Timer
from .call import ROW_GROUP, Call
from .recipe import PRECISIONS
from .stages import KeptLimit, PackedStages, Stages, WholeCalls
from .tokenmask import TokenMask


@dataclass(frozen=True)
class Device:
    """One kind of device.

    type: as torch names it, `"cpu"` or `"cuda"`. capability: what torch's own kernels run with,
    such as `AVX512` or `sm_90`.
    """

    type: str
    name: str = ""
    capability: str = ""


@dataclass(frozen=True)
class Host:
    machine: str = ""
    devices: dict[str, Device] = field(default_factory=dict)
    """By type: the processor, and the accelerator that was asked for."""

    def device(self, kind: str) -> Device:
        return self.devices.get(kind) or Device(kind)


_CPU_ONLY = Host(
    platform.machine(),
    {"cpu": Device("cpu", cpu_name(), torch.backends.cpu.get_cpu_capability())},
)
_hosts: dict[tuple[str, int], Host] = {}
"""By type and index: the cards of a machine may differ."""


def host(kind: str = "cpu", index: int = 0) -> Host:
    """This machine with its processor, and with this accelerator if it is one (`Call.where`)."""
    if kind in ("cpu", "meta"):
        return _CPU_ONLY  # a constant, for graphs being traced
    where = (kind, index)
    if where not in _hosts:
        devices = {**_CPU_ONLY.devices, kind: _accelerator(kind, index)}
        _hosts[where] = Host(_CPU_ONLY.machine, devices)
    return _hosts[where]


def _accelerator(kind: str, index: int) -> Device:
    """Name and architecture of a device; empty where torch does not tell."""
    module = getattr(torch, kind, None)
    try:
        facts = module.get_device_properties(index)  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, AssertionError):
        return Device(kind)
    name = str(getattr(facts, "name", ""))
    architecture = getattr(facts, "gcnArchName", None)  # AMD
    if architecture is None and hasattr(facts, "major"):
        architecture = f"sm_{facts.major}{facts.minor}"
    return Device(kind, name, str(architecture or ""))


AUTO, DENSE, CPU = "auto", "dense", "cpu"
ENV_BACKEND = "SPARGE_BACKEND"
MEASURED, ESTIMATED = "measured", "estimate"

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 128)
DENSE_WAY, DENSE_LSE = "dense", "dense+lse"
WAYS = (DENSE_WAY, DENSE_LSE, *PRECISIONS)
"""Ways of computing that have unit costs: dense attention, with an LSE, and ours by precision."""

Place = tuple[str, int]
"""What the numbers of a process are kept by: the type and index of an accelerator, or the
instruction set and the number of threads of a processor."""


@dataclass(frozen=True)
class UnitCosts:
    """Seconds for a call, for a row of Q, K or V, and for a query-key pair."""

    call: float
    token: float
    element: float


def name_of(dtype: str, D: int, way: str) -> str:
    """The name of unit costs, such as `bf16/128/int8`."""
    return f"{dtype}/{D}/{way}"


def cost_names() -> list[str]:
    """Every name that unit costs have."""
    return [name_of(dtype, D, way) for dtype in DTYPES.values() for D in HEAD_DIMS for way in WAYS]


@dataclass(frozen=True)
class Estimate:
    """Whether a backend is predicted to be faster than dense attention, and why.

    source: `"measured"` on this machine, `"estimate"` by built-in numbers, or `""` where the
    answer needed neither. provisional: a calibration inside the call would improve the numbers.
    kept_limit: what a plan may keep for it to be faster, where that is known before.
    """

    faster: bool
    reason: str
    source: str = ""
    provisional: bool = False
    kept_limit: KeptLimit | None = None


@dataclass(frozen=True)
class FixedCost:
    """The same answer for every call: a backend that is always faster than dense, or never."""

    faster: bool
    reason: str

    def estimate(self, call: Call) -> Estimate:
        return Estimate(self.faster, self.reason)


@dataclass(frozen=True)
class Measuring:
    """How a backend is measured beside dense attention.

    heads: as many as keep the device busy. lengths: of every way but dense attention with an LSE,
    whose scores are held in full and which has `lse_lengths`. seconds, seconds_in_call: of
    measuring everything, and of measuring inside a user's call. limit: seconds after which it gives
    up if `fewest_rounds` are not complete. warms_up: a first round compiles and is not timed.
    timer: runs work and tells its seconds; None waits for the device.
    """

    device: str
    heads: int
    lengths: Sequence[int]
    lse_lengths: Sequence[int]
    seconds: float
    seconds_in_call: float
    fewest_rounds: int
    limit: float | None = None
    warms_up: bool = False
    timer: Timer | None = None


@dataclass(frozen=True)
class Rates:
    """What a backend knows of its own speed. The router predicts, measures and decides by it.

    devices: types of devices that the rates hold for; elsewhere: why it is slower on others.
    place: what numbers are kept by in a process, of a device's type and index; cheap.
    key: what measured numbers hold for; with another key it is another measurement.
    estimate: unit costs by name before anything was measured, or why there are none; estimated_by:
    where they come from, for messages.
    measuring: how it is measured at a place. by_kind: a call measures the costs of its own kind,
    and only if it is long; else the first call measures everything.
    retry_after: after this time, a measurement of a busy machine is repeated; None is never.
    on_host: plans are read as soon as they are made; else what they keep is learnt later.
    unseen_density: what a long row is expected to keep before there is a plan.
    fewest_pairs: calls of fewer query-key pairs are not worth a plan.
    packs_dense: a pack of sequences that keep every block may be faster than dense attention.
    """

    devices: Sequence[str]
    place: Callable[[str, int], Place]
    key: Callable[[Place], dict[str, str]]
    estimate: Callable[[Place], Mapping[str, UnitCosts] | str]
    estimated_by: str
    measuring: Callable[[Place], Measuring]
    unseen_density: float
    elsewhere: str = ""
    by_kind: bool = False
    retry_after: timedelta | None = None
    on_host: bool = False
    fewest_pairs: int = 0
    packs_dense: bool = False


def torch_capability(host: Host, call: Call) -> str:
    """What torch's own kernels run with."""
    return f"torch {host.device(call.device).capability or call.device}"


def when_called(module: str) -> Callable[[], Any]:
    """A backend's stages, imported at first use."""
    return cache(partial(import_module, module))


def without_float64(host: Host, call: Call) -> str | None:
    """Refuses devices that have no float64, in which the reference sums mass."""
    if call.device == "mps":
        return "it sums mass in float64, which mps does not have; move the tensors to the cpu"
    return None


def serves_all(host: Host, call: Call) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One implementation of the stages.

    stages: returns the implementation; imported when it is first called.
    refusal: why it cannot run a call on a host, or None.
    cost: whether it is faster than dense attention: always or never, or by its rates.
    isa: the instruction set or architecture it runs with, for the record.
    row_group: consecutive query rows that its second filter judges together.
    raises_heads: its attend stage runs the heads that an error budget raised in the caller's own
    precision; if not, they are run as calls of their own.
    packed: stages that attend packed sequences at once; without them, one after another.
    whole: runs all stages of a call at once; without it, one after another.
    plain_operands: what it prepares are plain tensors of rows, which may come from elsewhere.
    block_kinds: computes `TokenMask.block_kinds` under a caller's mask, once for all stages of a
    call; without it, every stage does.
    sums_keys: its stages make the mean key of sums over blocks (`KeySums`), which may come from
    elsewhere.
    variables: names of environment variables that its refusals and its speed depend on.
    """

    name: str
    about: str
    stages: Callable[[], Stages]
    refusal: Callable[[Host, Call], str | None] = serves_all
    cost: FixedCost | Rates = field(
        default=FixedCost(True, "assumed to be faster than dense attention")
    )
    isa: Callable[[Host, Call], str] = torch_capability
    row_group: int = ROW_GROUP
    raises_heads: bool = False
    packed: Callable[[], PackedStages] | None = None
    whole: Callable[[], WholeCalls] | None = None
    plain_operands: bool = False
    block_kinds: Callable[[TokenMask], Tensor] | None = None
    sums_keys: bool = False
    variables: Sequence[str] = ()
