"""Which backend a call gets: pure functions of the call, the backends, their numbers and the
environment. The router gathers these facts; nothing here reads the machine.

`choose_backend` returns a `Choice` that says why this backend and why none of the others, or raises
`Unsupported` with every reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..support.errors import Unsupported
from ..values.backend import AUTO, DENSE, ENV_BACKEND, Backend, Estimate, FixedCost, Host, Rates
from ..values.call import BLOCK_Q, Call
from ..values.recipe import KeepAll, Recipe
from ..values.stages import KeptLimit
from .crossover import CLEARLY, Crossover, expected_density

ENV_CALIBRATE = "SPARGE_CALIBRATE"
LONG_CALL = 1e-3
"""Seconds of dense attention, as estimated, from which a call is worth compiling and measuring for.
Launches of ours take a third of it."""
LONG_PAIRS = 1 << 30
"""The same where nothing is estimated: 8192 tokens of 16 heads."""
IN_REACH = 2.0
"""An estimate may be off by this much. Beyond, measuring would not change the choice."""

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

    @property
    def kept_limit(self) -> KeptLimit | None:
        """What a plan may keep for the choice to hold; None if it holds with any plan."""
        return None if self.estimate is None or self.routed_to_dense else self.estimate.kept_limit

    @property
    def provisional(self) -> bool:
        """Whether a calibration inside the call may change it."""
        return self.estimate is not None and self.estimate.provisional

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


Chosen = tuple[Call, Choice]


@dataclass(frozen=True)
class Environment:
    """What surrounds a call. backend, calibrate: values of `SPARGE_BACKEND` and `SPARGE_CALIBRATE`;
    compiling: a graph is being traced."""

    backend: str | None = None
    calibrate: str | None = None
    compiling: bool = False

    def requested(self, backend: str) -> tuple[str, str]:
        """The name that the caller or the environment asks for, and which of them does."""
        forced = self.backend or AUTO
        if backend == AUTO and forced != AUTO:
            return forced, f"{ENV_BACKEND}={forced}"
        return backend, f"backend={backend!r}"

    def may_calibrate(self) -> bool:
        """Whether a call may measure. Raises ValueError for another value of the variable."""
        asked = self.calibrate or "1"
        if asked not in ("0", "1"):
            raise ValueError(
                f"{ENV_CALIBRATE} must be 0 (never measure inside a call) or 1, got {asked}"
            )
        return asked == "1"


@dataclass(frozen=True)
class Numbers:
    """What is known of the speed of a backend, for one call.

    costs: measured ones, else estimated ones, or why there are none. estimate: the estimated ones.
    density: what the call's layer kept before; None if that is not known. failure: why the last
    calibration failed. outdated: measured on a busy machine, long ago. tried: this process has
    begun to measure the costs of such calls.
    """

    costs: Crossover | str
    estimate: Crossover | str
    density: float | None = None
    failure: str = ""
    outdated: bool = False
    tried: bool = False

    @property
    def measured(self) -> bool:
        return isinstance(self.costs, Crossover) and self.costs.measured


def choose_backend(
    call: Call,
    backend: str,
    *,
    backends: Sequence[Backend],
    refusals: Mapping[str, str | None],
    numbers: Callable[[str], Numbers],
    environment: Environment,
) -> Choice:
    """backends: fastest first. refusals: by name, with that of dense attention if it may be chosen.
    numbers: returns those of a backend that has rates; asked only if they decide."""
    backend, asked_by = environment.requested(backend)
    if backend != AUTO:
        return _obey(backend, asked_by, refusals)
    rejected = {name: why for name, why in refusals.items() if why is not None}
    dense = DENSE in refusals and DENSE not in rejected
    by_numbers = None
    for b in (b for b in backends if b.name not in rejected):
        estimate = compare_with_dense(call, b, numbers, environment) if dense else None
        if estimate is None or estimate.faster:
            why = "the fastest that can serve this call"
            others = {name: f"slower than {b.name}" for name in refusals if name != b.name}
            if estimate is not None and estimate.source:
                why = f"{why}: {estimate.reason}"
            return Choice(b.name, why, {**others, **rejected}, estimate=estimate)
        rejected[b.name] = estimate.reason
        by_numbers = estimate if estimate.source or estimate.provisional else by_numbers
    if dense:
        why = "no sparse backend is faster for this call"
        return Choice(DENSE, why, rejected, True, by_numbers)
    raise Unsupported(f"no backend can serve {call}:", rejected, _WAY_OUT)


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


def compare_with_dense(
    call: Call, backend: Backend, numbers: Callable[[str], Numbers], environment: Environment
) -> Estimate:
    """Whether a backend is faster than dense attention, before there is a plan."""
    rates = backend.cost
    if isinstance(rates, FixedCost):
        return rates.estimate(call)
    if call.needs_grad:
        return Estimate(False, "torch's own gradient of dense attention is faster")
    if call.device not in rates.devices:
        return Estimate(False, rates.elsewhere)
    if environment.compiling:
        # Lengths may be symbols here. The op chooses again by its numbers when it runs.
        return Estimate(True, "decided by its lengths when it runs")
    if call.Lq < BLOCK_Q:
        why = f"{call.Lq} queries do not fill a block of {BLOCK_Q}; dense attention is faster"
        return Estimate(False, why)
    pairs = call.B * call.Hq * call.Lq * call.Lk
    if pairs < rates.fewest_pairs:
        return Estimate(
            False,
            f"{pairs} query-key pairs are fewer than {rates.fewest_pairs}; dense attention is done "
            "before a plan is made",
        )
    known = numbers(backend.name)
    if isinstance(known.costs, str):
        estimate = Estimate(False, f"{known.costs}; {way_out_of(backend.name)}")
    else:
        why = "" if known.density is None else "as this layer kept before"
        estimate = known.costs.estimate(call, density_of(call, rates, known), why=why)
        if rates.on_host:  # else what a plan keeps is learnt later
            estimate = replace(estimate, kept_limit=known.costs.kept_limit(call))
    if known.failure and (not known.measured or known.outdated):
        reason = f"{estimate.reason}; calibration failed: {known.failure}"
        estimate = replace(estimate, reason=reason)
    return replace(estimate, provisional=would_measure(call, rates, known, environment))


def would_measure(call: Call, rates: Rates, numbers: Numbers, environment: Environment) -> bool:
    """Whether numbers are missing that a call should measure."""
    if numbers.tried or (numbers.measured and not numbers.outdated):
        return False
    if not environment.may_calibrate():
        return False
    if not rates.by_kind:
        return True
    estimate = numbers.estimate
    if not is_long(call, estimate):
        return False
    if isinstance(estimate, str):
        return True
    ours = estimate.predict_sparse(call, density_of(call, rates, numbers))
    return ours < IN_REACH * estimate.predict_dense(call)


def density_of(call: Call, rates: Rates, numbers: Numbers) -> float:
    """What a call is expected to keep of its blocks: what its layer kept before, if known."""
    if numbers.density is not None:
        return numbers.density
    return expected_density(call, rates.unseen_density)


def is_long(call: Call, costs: Crossover | str) -> bool:
    if isinstance(costs, str):
        return call.B * call.Hq * call.Lq * call.Lk >= LONG_PAIRS
    return costs.predict_dense(call) >= LONG_CALL


def way_out_of(name: str) -> str:
    """What to do about a backend that has no measured numbers."""
    return f'`sparge doctor --calibrate` measures it; backend="{name}" runs the kernels anyway'


def choose_by_plan(choice: Choice, estimate: Estimate) -> Choice:
    """The choice again once the plan is known: dense attention if that is faster now."""
    if estimate.faster:
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


def choose_dense_pack(
    backend: Backend, costs: Crossover, dense: Mapping[int, Chosen]
) -> dict[int, Chosen]:
    """Of packed sequences that `auto` gives to dense attention, those that are faster in one pack
    of a backend, every block kept in the caller's own precision. By measured numbers only. What a
    call costs besides its rows and pairs is paid once for the pack, so what the sequences save
    together must be more than that."""
    if not costs.measured:
        return {}
    found, saved = {}, 0.0
    for i, (call, choice) in dense.items():
        one = keep_everything(call)
        ours, theirs = costs.predict_in_pack(one), costs.predict_dense(one)
        if ours >= CLEARLY * theirs:
            continue
        saved += theirs - ours
        reason = (
            "dense attention in a pack, every block kept: predicted "
            f"{ours * 1e3:.2f} ms, torch's {theirs * 1e3:.2f} ms ({costs.words})"
        )
        others = {name: why for name, why in choice.rejected.items() if name != backend.name}
        rejected = {**others, DENSE: reason}
        found[i] = one, replace(choice, backend=backend.name, reason=reason, rejected=rejected)
    return found if found and saved > costs.cost_of_call(one) else {}


def keep_everything(call: Call) -> Call:
    """The call as dense attention computes it: every block, in the caller's own precision."""
    return replace(call, recipe=Recipe(KeepAll(), precision=call.own_precision))


def dense_refusal(host: Host, call: Call) -> str | None:
    if call.has_block_mask:
        return "a block mask asks for exactly its blocks, and dense attention computes them all"
    return None
