"""Loads the native library and selects its instruction set.

`SPARGE_ISA` forces an instruction set by name; the library lists them (csrc/isa.h). Those for tests
are never selected by default. `SPARGE_LIBRARY` is the path of another build of the library, such as
the one of `make sanitize`.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...values.backend import Host
from ...values.call import Call

ENV_ISA = "SPARGE_ISA"
ENV_LIBRARY = "SPARGE_LIBRARY"


def library() -> str | None:
    """Path of the native library; None if there is none."""
    spec = importlib.util.find_spec("sparge._cpu")
    return os.environ.get(ENV_LIBRARY) or (spec.origin if spec else None)


@lru_cache(maxsize=1)
def _found() -> tuple[Any, str | None]:
    """`(ops, None)`, or `(None, reason)`."""
    path = library()
    if not path:
        return None, "the native library was not built for this platform"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return None, f"the native library does not load: {error}"
    if not all(hasattr(torch.ops.sparge_cpu, name) for name in ("run", "backward", "isas")):
        return None, f"the native library {path} is of another version; install sparge again"
    return torch.ops.sparge_cpu, None


def why_missing() -> str | None:
    """The reason why the native core cannot be used; None if it can."""
    return _found()[1]


def ops() -> Any:
    """`torch.ops.sparge_cpu`; valid only if `why_missing()` is None."""
    return _found()[0]


class Isa(NamedTuple):
    """An instruction set that the native library knows; `number` is what its ops take."""

    number: int
    description: str
    available: bool
    for_tests: bool


@lru_cache(maxsize=1)
def isas() -> dict[str, Isa]:
    """All instruction sets by name, best first, those for tests last; none without a library."""
    if why_missing() is not None:
        return {}
    listed = enumerate(zip(*ops().isas(), strict=True))
    return {
        name: Isa(number, description, bool(available), bool(for_tests))
        for number, (name, description, available, for_tests) in listed
    }


@lru_cache(maxsize=1)
def available() -> tuple[str, ...]:
    """Names of this machine's instruction sets, in the order of `isas()`."""
    return tuple(name for name, isa in isas().items() if isa.available)


def chosen_isa(there: tuple[str, ...]) -> str:
    """The instruction set to run: the one named by `SPARGE_ISA`, or the best of `there`."""
    asked = os.environ.get(ENV_ISA)
    if not asked:
        return there[0]
    if asked in there:
        return asked
    names = ", ".join(name for name in there if not isas()[name].for_tests)
    why = "this machine does not have it" if asked in isas() else "no instruction set has that name"
    raise ValueError(f"{ENV_ISA}={asked}: {why}; here are {names}")


def isa_number() -> int:
    return isas()[chosen_isa(available())].number


@lru_cache(maxsize=1)
def _arguments() -> tuple[Any, dict[str, int], list[Any]]:
    """The op `run`, the place of each argument, and their defaults."""
    op = ops().run.default
    arguments = op._schema.arguments
    return op, {x.name: i for i, x in enumerate(arguments)}, [x.default_value for x in arguments]


def run(fields: dict[str, Any]) -> bool:
    """One native call (csrc/read_work.h lists the fields); whether attention ran. By position,
    which saves torch 5 µs of looking up names."""
    op, places, defaults = _arguments()
    arguments = defaults.copy()
    for name, x in fields.items():
        arguments[places[name]] = x
    arguments[-1] = isa_number()
    ran: bool = op(*arguments)
    return ran


# Read once: a graph being traced then sees constants.
MISSING, ISAS_HERE = why_missing(), available()


def refusal(host: Host, call: Call) -> str | None:
    if call.device != "cpu":
        return f"it runs on the cpu, and the tensors are on {call.device}"
    if call.dtype == torch.float64:
        return "it computes in fp32; the reference serves float64"
    if MISSING is None:
        chosen_isa(ISAS_HERE)  # raises if a forced name is not there
    return MISSING
