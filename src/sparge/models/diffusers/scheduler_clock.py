"""A pipeline's scheduler, watched: which step of a run it is, and at what noise level.

`set_timesteps` begins a run and `step` ends a step, for every scheduler and outside of compiled
graphs. Image-to-image runs begin later: `set_begin_index` says where, or the timestep of the first
`scale_model_input`. Those that a scheduler has are replaced on the instance.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor

from ...values.schedule import Context
from ..clock import Clock

BEGINS, STEPS = "set_timesteps", "step"
SETS_BEGIN, SCALES = "set_begin_index", "scale_model_input"


class SchedulerClock:
    """Turns a clock by a scheduler's steps, until `stop()`."""

    def __init__(self, scheduler: Any, clock: Clock) -> None:
        self.scheduler, self.clock, self.done, self.begin = scheduler, clock, 0, 0
        names = [name for name in (SETS_BEGIN, SCALES) if hasattr(scheduler, name)]
        self.watched = [_Watched(scheduler, name, self) for name in (BEGINS, STEPS, *names)]
        for each in self.watched:
            vars(scheduler)[each.name] = each

    def stop(self) -> None:
        for each in self.watched:
            if vars(self.scheduler).get(each.name) is each:
                if each.before is None:
                    del vars(self.scheduler)[each.name]
                else:
                    vars(self.scheduler)[each.name] = each.before
            each.owner = None
        self.clock.turn_to(Context())

    def note(self, name: str, timestep: Any) -> None:
        if name == BEGINS:
            self.done, self.begin = 0, 0
        elif name == STEPS:
            self.done += 1
        elif self.done:
            return  # a run has begun where it has
        index = getattr(self.scheduler, "begin_index", None)
        if index is not None:
            self.begin = index
        elif name == SCALES and self.done == 0:
            self.begin = _index_of(self.scheduler, timestep)
        self.clock.turn_to(context_of(self.scheduler, self.begin, self.done))


class _Watched:
    """A method of a scheduler that tells its owner after each call."""

    def __init__(self, scheduler: Any, name: str, owner: SchedulerClock | None) -> None:
        self.scheduler, self.name, self.owner = scheduler, name, owner
        self.before = vars(scheduler).get(name)

    @property
    def __signature__(self) -> inspect.Signature:
        # Pipelines look here for the arguments that a scheduler takes.
        return inspect.signature(self._method())

    def _method(self) -> Any:
        if self.before is not None:
            return self.before
        return getattr(type(self.scheduler), self.name).__get__(self.scheduler)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._method()(*args, **kwargs)
        if self.owner is not None:
            self.owner.note(self.name, args[1] if len(args) > 1 else kwargs.get("timestep"))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A pipeline may copy its scheduler for another modality, which must not turn the clock.
        copied = memo.get(id(self.scheduler), self.scheduler)
        if copied is self.scheduler:
            return self
        before = copy.deepcopy(self.before, memo)
        return before or getattr(type(copied), self.name).__get__(copied)


def _index_of(scheduler: Any, timestep: Any) -> int:
    """Where a timestep stands in the run; 0 if it does not."""
    if timestep is None:
        return 0
    at = _number(timestep)
    return next((i for i, each in enumerate(scheduler.timesteps) if _number(each) == at), 0)


def context_of(scheduler: Any, begin: int, done: int) -> Context:
    """The context of the step that follows `done` steps of a run; empty where none follows.

    begin: the index of the first step of the run. Shares are of the steps that it takes.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    steps = 0 if timesteps is None else len(timesteps)
    at = begin + done
    if timesteps is None or at >= steps:
        return Context()
    return Context(
        noise_level=noise_level(scheduler, at), step=done, progress=done / (steps - begin)
    )


def noise_level(scheduler: Any, at: int) -> float | None:
    """Share of noise at a step: timestep / training timesteps, the sigma of flow matching."""
    timestep = _number(scheduler.timesteps[at])
    training = getattr(scheduler.config, "num_train_timesteps", None)
    sigma_data = getattr(scheduler.config, "sigma_data", None)
    if sigma_data is not None and len(sigmas := getattr(scheduler, "sigmas", ())) > at:
        sigma = _number(sigmas[at])  # its timesteps are logarithms of sigma
        return float(min(max(sigma / (sigma + sigma_data), 0.0), 1.0))
    if not training:
        return None
    return float(min(max(timestep / training, 0.0), 1.0))


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)
