"""What a site's recipe may depend on: the state of a diffusion run, set around a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Context:
    """noise_level: share of noise in the model's input, 1 is pure noise. step: of the sampler."""

    noise_level: float | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.noise_level is not None and not 0.0 <= self.noise_level <= 1.0:
            raise ValueError(
                f"noise_level must be in [0, 1], got {self.noise_level}; for a timestep divide it "
                "by the number of training timesteps"
            )
        if self.step is not None and self.step < 0:
            raise ValueError(f"step must be at least 0, got {self.step}")


EMPTY = Context()
# One variable for all handles: a ContextVar of each would never be freed.
_contexts: ContextVar[Mapping[int, Context]] = ContextVar(
    "sparge_contexts", default=MappingProxyType({})
)


def context_of(handle: int) -> Context:
    """The context of a handle in this thread or task, by the handle's number."""
    return _contexts.get().get(handle, EMPTY)


@contextmanager
def inside(handle: int, context: Context) -> Iterator[None]:
    token = _contexts.set({**_contexts.get(), handle: context})
    try:
        yield
    finally:
        _contexts.reset(token)
