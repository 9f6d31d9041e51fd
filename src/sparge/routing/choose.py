"""Which backend a call gets: chosen from shapes, settled by calibration, routed by the plan.

`choose()` returns a `Choice` that says why this backend and why none of the others, or raises
`Unsupported` with every reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backends.dense import dense_refusal
from ..support.errors import Unsupported
from ..values.backend import AUTO, DENSE, ENV_BACKEND, Estimate
from ..values.blockplan import BlockPlan
from ..values.call import Call
from ..values.host import host
from .registry import backends, get_backend

_WAY_OUT = "sparge.explain(...) says what each backend needs"


@dataclass(frozen=True)
class Choice:
    """Which backend a call gets, why, and why every other one does not.

    routed_to_dense: `auto` sent the call to dense attention.
    estimate: the prediction that `auto` used; None where it needed none.
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


def choose(call: Call, backend: str = AUTO, *, dense_ok: bool = True) -> Choice:
    """`dense_ok=False` for the single stages, which dense attention does not have."""
    where = host(*call.where)
    refusals = {b.name: b.refusal(where, call) for b in backends()}
    if dense_ok:
        refusals[DENSE] = dense_refusal(where, call)
    backend, asked_by = asked_backend(backend)
    if backend != AUTO:
        return _obey(backend, asked_by, refusals)
    rejected = {name: why for name, why in refusals.items() if why is not None}
    dense = dense_ok and DENSE not in rejected
    by_numbers = None
    for b in (b for b in backends() if b.name not in rejected):
        estimate = b.cost.before(call) if dense else None
        if estimate is None or estimate.faster:
            why = "the fastest that can serve this call"
            others = {name: f"slower than {b.name}" for name in refusals if name != b.name}
            if estimate is not None and estimate.source:
                why = f"{why}: {estimate.reason}"
            return Choice(b.name, why, {**others, **rejected}, estimate=estimate)
        rejected[b.name] = estimate.reason
        by_numbers = estimate if estimate.source or not estimate.settled else by_numbers
    if dense:
        why = "no sparse backend is faster for this call"
        return Choice(DENSE, why, rejected, True, by_numbers)
    raise Unsupported(f"no backend can serve {call}:", rejected, _WAY_OUT)


def asked_backend(backend: str) -> tuple[str, str]:
    """The name asked for by the caller or the environment, and who asked."""
    forced = os.environ.get(ENV_BACKEND) or AUTO
    if backend == AUTO and forced != AUTO:
        return forced, f"{ENV_BACKEND}={forced}"
    return backend, f"backend={backend!r}"


def settle(call: Call, choice: Choice) -> Choice:
    """A choice of `auto` that rests on built-in numbers, made again after a calibration."""
    estimate = choice.estimate
    if estimate is None or estimate.settled or torch.compiler.is_compiling():
        return choice
    where = host(*call.where)
    able = [b for b in backends() if b.refusal(where, call) is None]
    changed = [b.cost.calibrate(call) for b in able]  # each of them, hence no any()
    return choose(call, AUTO) if any(changed) else choice


def route_by_plan(plan: BlockPlan, call: Call, choice: Choice) -> Choice:
    """The choice again once the plan is known: dense attention if that is faster now."""
    if choice.estimate is None:
        return choice
    estimate = get_backend(choice.backend).cost.after(call, plan)
    if estimate is None or estimate.faster:
        return choice
    others = {name: reason for name, reason in choice.rejected.items() if name != DENSE}
    return replace(
        choice,
        backend=DENSE,
        reason=estimate.reason,
        rejected={choice.backend: estimate.reason, **others},
        routed_to_dense=True,
        estimate=estimate,
    )


def _obey(backend: str, asked_by: str, refusals: Mapping[str, str | None]) -> Choice:
    """The backend that was asked for, or an error; never another one."""
    known = list(refusals)
    if backend == DENSE and DENSE not in refusals:
        refusals = {**refusals, DENSE: "dense attention has no plan and no stages"}
    elif backend not in refusals:
        raise ValueError(f"unknown backend in {asked_by}; there are {', '.join([AUTO, *known])}")
    if refusals[backend] is not None:
        reasons = {name: why or "can serve it, but was not asked" for name, why in refusals.items()}
        way_out = _WAY_OUT if backend in known else "sparge.attention runs dense attention"
        raise Unsupported(f"{asked_by} cannot serve this call:", reasons, way_out)
    others = {name: why or f"{asked_by} asks for another" for name, why in refusals.items()}
    del others[backend]
    return Choice(backend, f"asked for by {asked_by}", others)
