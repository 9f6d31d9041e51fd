"""The router: which backends there are, what they cost here, and which of them a call gets.

It alone reads the environment and the machine. What it finds goes, as values, to the pure functions
of choice.py. Numbers come from the cost file, from a measurement inside the first call that needs
them (`SPARGE_CALIBRATE=0` turns that off), or from a backend's own estimate until then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from itertools import count, pairwise
from typing import TypeVar

import torch

from ..backends.cpu import CPU_BACKEND
from ..backends.reference import REFERENCE
from ..backends.triton import TRITON_BACKEND
from ..support.accelerator import capturing
from ..values.backend import AUTO, DENSE, ENV_BACKEND, Backend, Place, Rates, host
from ..values.blockplan import BlockPlan
from ..values.call import Call, diagonal_offset
from ..values.stages import KeptLimit
from . import cost_file
from .calibration import measure, measure_apart
from .choice import (
    ENV_CALIBRATE,
    Choice,
    Chosen,
    Environment,
    Numbers,
    choose_backend,
    choose_by_plan,
    choose_dense_pack,
    dense_refusal,
    density_of,
    is_long,
    keep_everything,
    way_out_of,
    would_measure,
)
from .crossover import CLEARLY, Crossover, costs_of
from .densities import Densities

OURS = (TRITON_BACKEND, CPU_BACKEND, REFERENCE)
MOST_ANSWERS = 1024
LOGGER = logging.getLogger("sparge")
T = TypeVar("T")
Cuts = tuple[list[int], list[int]]
"""Where packed sequences begin and end: of the queries, and of the keys."""


@dataclass
class _Known:
    """The numbers of a backend at a place. tried: costs that a call has begun to measure, by
    process; measuring: the processes in which one does: a fork has no thread to wait for.
    logged: kinds of numbers by which dense attention was logged."""

    estimate: Crossover | str
    measured: Crossover | None
    failure: str = ""
    tried: set[tuple[int, Collection[str] | None]] = field(default_factory=set)
    measuring: dict[int, object] = field(default_factory=dict)
    logged: set[Hashable] = field(default_factory=set)


class Router:
    """backends: fastest first. costs: numbers by name of a backend, used at every place instead of
    those in the cost file. measure: what measures a backend, as `calibration.measure` does."""

    def __init__(
        self,
        backends: Iterable[Backend] = OURS,
        *,
        costs: Mapping[str, Crossover] | None = None,
        measure: Callable[..., Crossover] = measure,
    ) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self._costs = dict(costs or {})
        self._measure = measure
        self._known: dict[tuple[str, Place], _Known] = {}
        self._densities = Densities()
        self._counter = count()
        self.answers: dict[Hashable, object] = {}
        self._changed()

    # --- backends ---------------------------------------------------------------------------------

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends that have stages, fastest first."""
        return tuple(self._backends.values())

    def backend(self, name: str) -> Backend:
        return self._backends[name]

    def register(self, backend: Backend) -> None:
        if not isinstance(backend, Backend):
            raise TypeError(f"backend must be a sparge.Backend, got {type(backend).__name__}")
        if backend.name in (AUTO, DENSE, *self._backends):
            raise ValueError(f"backend name {backend.name!r} is taken; choose another")
        self._backends = {backend.name: backend, **self._backends}
        self._changed()

    def unregister(self, name: str) -> None:
        if name in {backend.name for backend in OURS} or name not in self._backends:
            raise ValueError(f"name must be of a backend that was registered, got {name!r}")
        self._backends = {n: b for n, b in self._backends.items() if n != name}
        self._changed()

    def first_able(self, call: Call) -> Backend:
        """The fastest backend that serves a call, whether dense attention is faster or not."""
        where = host(*call.where)
        return next(b for b in self.backends if b.refusal(where, call) is None)

    # --- choosing ---------------------------------------------------------------------------------

    def environment(self) -> Environment:
        compiling = torch.compiler.is_compiling()
        return Environment(os.environ.get(ENV_BACKEND), os.environ.get(ENV_CALIBRATE), compiling)

    def requested(self, backend: str) -> tuple[str, str]:
        """The name that the caller or the environment asks for, and which of them does."""
        return self.environment().requested(backend)

    def choose(self, call: Call, backend: str = AUTO, *, dense_ok: bool = True) -> Choice:
        """`dense_ok=False` for the single stages, which dense attention does not have."""
        where, environment = host(*call.where), self.environment()
        refusals = {b.name: b.refusal(where, call) for b in self.backends}
        if dense_ok:
            refusals[DENSE] = dense_refusal(where, call)
        asked: dict[str, Numbers] = {}

        def numbers(name: str) -> Numbers:
            self._learn_arrived(call)
            asked[name] = self.numbers(name, call)
            return asked[name]

        choice = choose_backend(
            call,
            backend,
            backends=self.backends,
            refusals=refusals,
            numbers=numbers,
            environment=environment,
        )
        for name, found in asked.items():
            if choice.backend == DENSE and self._rates(name).by_kind:
                self._log_dense(call, choice, name, found)
        return choice

    def answer(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, or what it returned before for this key in the same environment, with the same
        backends and numbers. Nobody changes what is returned."""
        whole = (key, self._changes, torch.get_num_threads(), *_read_environment(self._variables))
        try:
            found: T | None = self.answers.get(whole)  # type: ignore[assignment]
        except TypeError:  # an argument that cannot be hashed; it will be refused
            return make()
        if found is None:
            found = make()
            if len(self.answers) >= MOST_ANSWERS:
                self.answers.clear()
            self.answers[whole] = found
        return found

    def choose_after_plan(self, plan: BlockPlan, call: Call, choice: Choice) -> Choice:
        """The choice again once the plan is known: dense attention if that is faster now.

        The only place on the way of a call that may read numbers of a tensor: of a device that is
        not the host, what the plan keeps is learnt later.
        """
        rates = None if choice.estimate is None else self._backends[choice.backend].cost
        if not isinstance(rates, Rates):
            return choice
        if rates.on_host:
            costs = self._crossover(choice.backend, call)
            return choose_by_plan(choice, costs.estimate_plan(call, plan))
        self._learn_arrived(call)
        self._densities.look_at(choice.backend, call, plan)
        return choice

    def kept_limit(self, call: Call, choice: Choice) -> KeptLimit | None:
        """What `choose_after_plan` will go by, before there is a plan, for a backend that runs all
        stages at once; None if the choice holds whatever the plan."""
        return choice.kept_limit

    def is_faster_than(
        self, seconds: float, call: Call, backend: str, *, density: float | None, more: float
    ) -> bool:
        """Whether a backend, with `more` seconds on top, is clearly faster than another attention
        that takes so many seconds. density: expected if None."""
        if density is None:
            density = density_of(call, self._rates(backend), self.numbers(backend, call))
        ours = self._crossover(backend, call).predict_sparse(call, density)
        return ours + more < CLEARLY * seconds

    def choose_pack(self, call: Call, cuts: Cuts, backend: str, align: str) -> list[Chosen]:
        """What each packed sequence gets, by its own lengths; once for all of the same lengths, and
        once for packs of the same cuts: the layers of a model ask one after another."""
        key = (call, *map(tuple, cuts), backend, align)
        return self.answer(key, lambda: self._choose_pack(call, cuts, backend, align))

    def _choose_pack(self, call: Call, cuts: Cuts, backend: str, align: str) -> list[Chosen]:
        lengths = list(zip(*([b - a for a, b in pairwise(ends)] for ends in cuts), strict=True))
        known: dict[tuple[int, ...], Chosen] = {}
        for Lq, Lk in dict.fromkeys(lengths):
            one = replace(call, Lq=Lq, Lk=Lk, offset=diagonal_offset(Lq, Lk, align))
            known[Lq, Lk] = one, self.choose(one, backend)
        chosen = dict(enumerate(known[pair] for pair in lengths))
        dense = {i: x for i, x in chosen.items() if x[1].routed_to_dense}
        if not dense or call.needs_grad:
            return list(chosen.values())
        first = keep_everything(next(iter(dense.values()))[0])
        found: dict[int, Chosen] = {}
        for b in self.backends:
            packs = isinstance(b.cost, Rates) and b.cost.packs_dense and b.packed is not None
            if packs and not found and b.refusal(host(*first.where), first) is None:
                found = choose_dense_pack(b, self._crossover(b.name, first), dense)
        return list({**chosen, **found}.values())

    # --- numbers ----------------------------------------------------------------------------------

    def crossover(self, name: str, kind: str, index: int = 0) -> Crossover | str:
        """The costs in force on a device: measured or estimated; or why there are none."""
        known = self._known_at(name, kind, index)
        return known.measured or known.estimate

    def failure(self, name: str, kind: str, index: int = 0) -> str:
        """Why the last calibration inside a call failed; "" if none did."""
        return self._known_at(name, kind, index).failure

    def key(self, name: str, kind: str, index: int = 0) -> dict[str, str]:
        """What a measurement on a device depends on."""
        rates = self._rates(name)
        return _whole_key(rates, rates.place(kind, index))

    def measure(self, name: str, kind: str, index: int = 0) -> Crossover:
        """Measure every cost of a backend on a device now; `adopt` uses the result."""
        backend, rates = self._backends[name], self._rates(name)
        place = rates.place(kind, index)
        return replace(self._measure(backend, place), key=_whole_key(rates, place))

    def adopt(self, crossover: Crossover, name: str, kind: str, index: int = 0) -> str:
        """Use costs measured on a device from now on, with those known before that they do not
        replace, and store them; returns why they are not stored, or ""."""
        known = self._known_at(name, kind, index)
        stored, _ = cost_file.read(crossover.key, complete=False)
        for older in (known.measured, stored):  # another process may have stored more
            if older is not None and older.key == crossover.key:
                crossover = replace(crossover, costs={**older.costs, **crossover.costs})
        known.measured, known.failure = crossover, ""
        self._changed()
        return cost_file.write(crossover)

    def calibrate(self, call: Call, choice: Choice) -> Choice:
        """The choice again after measuring what it lacks; the same if nothing was measured."""
        if not choice.provisional or torch.compiler.is_compiling():
            return choice
        where = host(*call.where)
        able = [b for b in self.backends if b.refusal(where, call) is None]
        changed = [self._calibrate(backend, call) for backend in able]
        return self.choose(call) if any(changed) else choice

    def calibrate_pack(self, call: Call, cuts: Cuts, backend: str, align: str) -> list[Chosen]:
        """`choose_pack`, made again if a calibration gives other numbers."""
        chosen = self.choose_pack(call, cuts, backend, align)
        one = next((x for x in chosen if x[1].provisional), None)
        if one is None or self.calibrate(*one) is one[1]:
            return chosen
        return self.choose_pack(call, cuts, backend, align)

    def _calibrate(self, backend: Backend, call: Call) -> bool:
        """Measure what calls of this kind need, once per place and process; True if there is news.
        Nobody waits but the caller, and nothing is measured while its stream is captured."""
        rates = backend.cost
        if not isinstance(rates, Rates) or capturing(torch.device(*call.where)):
            return False
        numbers = self.numbers(backend.name, call)
        if not would_measure(call, rates, numbers, self.environment()):
            return False
        known, process, own = self._known_at(backend.name, *call.where), os.getpid(), object()
        place, wanted = rates.place(*call.where), _wanted(rates, call)
        if known.measuring.setdefault(process, own) is not own:
            return False
        try:
            if (process, wanted) in known.tried:
                return False
            known.tried.add((process, wanted))
            run = partial(self._measure, backend, place, wanted=wanted, in_call=True)
            found = measure_apart(lambda proceed: run(proceed=proceed))
            current = known.measured if numbers.measured else None
            # A measurement that was disturbed more than the current one is not worth keeping.
            if current is None or found.steady or found.disturbance <= current.disturbance:
                found = replace(found, key=_whole_key(rates, place))
                self.adopt(found, backend.name, *call.where)
        except Exception as error:
            known.failure = f"{type(error).__name__}: {error}"
        except BaseException:  # Ctrl-C; the next call tries again
            known.tried.discard((process, wanted))
            raise
        finally:
            del known.measuring[process]
            self._changed()  # also for choices that were made meanwhile
        return True

    def learn(self, backend: str, call: Call, kept: int, allowed: int) -> None:
        """Take in what a call kept, from whoever has read it. Choices are made again only if this
        one would be another."""
        before = self.numbers(backend, call)
        if not self._densities.learn(call, kept, allowed) or isinstance(before.costs, str):
            return
        after, rates = self.numbers(backend, call), self._rates(backend)
        was, now = (
            before.costs.estimate(call, density_of(call, rates, numbers)).faster
            for numbers in (before, after)
        )
        if was != now:
            self._changed()

    def _learn_arrived(self, call: Call) -> None:
        for arrived in self._densities.take_arrived(*call.where):
            self.learn(*arrived)

    def numbers(self, name: str, call: Call) -> Numbers:
        """What is known of the speed of a backend for a call."""
        rates, known = self._rates(name), self._known_at(name, *call.where)
        costs = known.estimate
        if known.measured is not None and known.measured.knows(call):
            costs = known.measured
        return Numbers(
            costs,
            known.estimate,
            density=None if rates.on_host else self._densities.learnt(call),
            failure=known.failure,
            outdated=isinstance(costs, Crossover) and costs.is_outdated(rates.retry_after),
            tried=(os.getpid(), _wanted(rates, call)) in known.tried,
        )

    def _crossover(self, name: str, call: Call) -> Crossover:
        costs = self.numbers(name, call).costs
        assert isinstance(costs, Crossover), costs
        return costs

    def _rates(self, name: str) -> Rates:
        rates = self._backends[name].cost
        assert isinstance(rates, Rates), f"{name} has a fixed cost"
        return rates

    def _known_at(self, name: str, kind: str, index: int) -> _Known:
        rates = self._rates(name)
        place = rates.place(kind, index)
        found = self._known.get((name, place))
        if found is None:
            given = self._costs.get(name)
            made = _read(rates, place) if given is None else _Known(given, given)
            found = self._known.setdefault((name, place), made)
        return found

    def _changed(self) -> None:
        """Backends or numbers are others now: answers that were kept hold no longer."""
        self._changes = next(self._counter)
        variables = [name for backend in self.backends for name in backend.variables]
        names = (ENV_BACKEND, ENV_CALIBRATE, *variables)
        self._variables = {name: os.fsencode(name) for name in names}

    def _log_dense(self, call: Call, choice: Choice, name: str, numbers: Numbers) -> None:
        """Log, once for a device and kind of numbers, that a long call runs dense attention there.
        Where it was measured there is nothing to be done about it; else there is, hence the
        level."""
        known, kind = self._known_at(name, *call.where), (type(numbers.costs), numbers.measured)
        measures = choice.provisional or known.measuring or kind in known.logged
        if measures or not call.predicts or not is_long(call, numbers.costs):
            return
        known.logged.add(kind)
        way_out = way_out_of(name)
        LOGGER.log(
            logging.INFO if numbers.measured else logging.WARNING,
            'backend="auto" runs dense attention on %s (%s), for %s and calls like it: %s; %s',
            host(*call.where).device(call.device).name,
            ":".join(map(str, call.where)),
            call,
            choice.rejected[name].removesuffix(f"; {way_out}"),
            f'backend="{name}" runs the kernels anyway' if numbers.measured else way_out,
        )


def _read_environment(names: Mapping[str, bytes]) -> Iterable[object]:
    """Values of variables, by their names and encoded names. Where `os.environ` has encoded ones,
    they are read as they are: its own `get` takes a microsecond for a name that is not set."""
    encoded = getattr(os.environ, "_data", None)
    if encoded is None or os.name == "nt":
        return map(os.environ.get, names)
    return map(encoded.get, names.values())


def _read(rates: Rates, place: Place) -> _Known:
    """As a process begins that has measured nothing yet."""
    costs = rates.estimate(place)
    stored, _ = cost_file.read(_whole_key(rates, place), complete=not rates.by_kind)
    if isinstance(costs, str):
        return _Known(costs, stored)
    return _Known(Crossover(costs, estimated_by=rates.estimated_by), stored)


def _whole_key(rates: Rates, place: Place) -> dict[str, str]:
    try:
        version = metadata.version("sparge")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {**rates.key(place), "torch": torch.__version__, "sparge": version}


def _wanted(rates: Rates, call: Call) -> tuple[str, ...] | None:
    """Names of the costs that a call measures; None is all of them."""
    return costs_of(call) if rates.by_kind else None


_current = Router()


def current_router() -> Router:
    """The router that every call asks."""
    return _current


@contextmanager
def use_router(router: Router) -> Iterator[Router]:
    """Every call of the process asks another router inside the block."""
    global _current
    before, _current = _current, router
    try:
        yield router
    finally:
        _current = before


def register_backend(backend: Backend) -> None:
    """Add a backend before those registered so far; the conformance suite then runs on it too."""
    _current.register(backend)


def unregister_backend(name: str) -> None:
    _current.unregister(name)


def backends() -> tuple[Backend, ...]:
    """The backends that have stages, fastest first."""
    return _current.backends


def get_backend(name: str) -> Backend:
    return _current.backend(name)


def choose(call: Call, backend: str = AUTO, *, dense_ok: bool = True) -> Choice:
    """`Router.choose` of the current router."""
    return _current.choose(call, backend, dense_ok=dense_ok)
