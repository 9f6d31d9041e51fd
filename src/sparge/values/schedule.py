"""Where in a diffusion run attention is sparse: by noise level or by share of the run.

A schedule has the same meaning for 4 and 50 steps and for every sampler, because it counts in
shares. Position 0 is the noisiest end of a run, 1 its clean end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..support.json_text import parse_json, short
from .recipe import Recipe, check_whole

BY = ("run", "noise")
_CLOSE = 1e-9
"""Shares such as 0.1 + 0.2 are compared up to this."""

Band = tuple[float, float, Recipe | None]
"""Start, stop, and the recipe between them; None is dense attention."""


@dataclass(frozen=True)
class Context:
    """The state of a diffusion run, set around a forward pass; a recipe may depend on it.

    noise_level: share of noise in the model's input, 1 is pure noise. step: of the sampler, from 0.
    progress: share of the run that is done; step 10 of 50 is 0.2.
    """

    noise_level: float | None = None
    step: int | None = None
    progress: float | None = None

    def __post_init__(self) -> None:
        if self.noise_level is not None and not 0.0 <= self.noise_level <= 1.0:
            raise ValueError(
                f"noise_level must be in [0, 1], got {self.noise_level}; for a timestep divide it "
                "by the number of training timesteps"
            )
        if self.step is not None and self.step < 0:
            raise ValueError(f"step must be at least 0, got {self.step}")
        if self.progress is not None and not 0.0 <= self.progress <= 1.0:
            raise ValueError(
                f"progress must be in [0, 1], got {self.progress}; it is step / number of steps"
            )


@dataclass(frozen=True)
class Schedule:
    """Where in a run attention is sparse.

    dense_first, dense_last: shares of the run, from its noisiest and from its clean end, that the
    model computes with its own attention. A step belongs to them by its beginning: with 0.2, ten of
    50 steps and one of 4 are dense.
    dense_first_layers, dense_last_layers: transformer blocks that are dense in every step.
    by: what a share is of: the steps of the `"run"`, or the `"noise"` level (position `1 - level`).
    bands: `(start, stop, recipe)` in order, for other recipes in other parts; they must cover what
    the dense ends leave, without gaps. None as a recipe is dense attention. Without bands the
    recipe (or profile) of the call holds in between.
    """

    dense_first: float = 0.2
    dense_last: float = 0.0
    dense_first_layers: int = 0
    dense_last_layers: int = 0
    by: str = "run"
    bands: tuple[Band, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dense_first", "dense_last"):
            object.__setattr__(self, name, _share(name, getattr(self, name)))
        if self.dense_first + self.dense_last > 1.0 + _CLOSE:
            raise ValueError(
                f"dense_first and dense_last must be at most 1 together, got {self.dense_first:g} "
                f"and {self.dense_last:g}"
            )
        for name in ("dense_first_layers", "dense_last_layers"):
            object.__setattr__(self, name, check_whole(name, getattr(self, name), 0))
        if self.by not in BY:
            raise ValueError(f"by must be 'run' or 'noise', got {self.by!r}")
        object.__setattr__(self, "bands", _bands(self.bands))
        if self.bands:
            self._refuse_gaps()

    def _refuse_gaps(self) -> None:
        """Refuse bands that leave a part of the run open, or that overlap."""
        reached = self.dense_first
        for start, stop, _ in self.bands:
            if abs(start - reached) > _CLOSE:
                kind = "a gap" if start > reached else "an overlap"
                raise ValueError(
                    f"bands must follow one another from dense_first to the end; there is {kind} "
                    f"between {min(start, reached):g} and {max(start, reached):g}"
                )
            reached = stop
        end = 1.0 - self.dense_last
        if abs(reached - end) > _CLOSE:
            raise ValueError(
                f"bands must reach 1 - dense_last, which is {end:g}; the last one ends at "
                f"{reached:g}"
            )

    def position(self, context: Context) -> float | None:
        """Where in the run a context is, from 0 (noisiest) to 1; None where it does not say."""
        if self.by == "run":
            return context.progress
        return None if context.noise_level is None else 1.0 - context.noise_level

    def recipe_at(self, position: float, given: Recipe | None) -> Recipe | None:
        """The recipe at a position: `given` where there are no bands; None is dense attention."""
        # A share of steps is seldom a binary fraction: 3/10 must not lie below 0.3.
        at = position + _CLOSE
        if at < self.dense_first or self.dense_first >= 1.0 - _CLOSE:
            return None
        if self.dense_last and at >= 1.0 - self.dense_last:
            return None
        if not self.bands:
            return given
        return next((recipe for _, stop, recipe in self.bands if at < stop), self.bands[-1][2])

    def is_dense_layer(self, index: int, layers: int) -> bool:
        """Whether transformer block `index` of `layers` is dense in every step."""
        return index < self.dense_first_layers or index >= layers - self.dense_last_layers

    def to_dict(self) -> dict[str, Any]:
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        bands = [[a, b, None if r is None else r.to_dict()] for a, b, r in self.bands]
        return {**data, "bands": bands}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Any) -> Schedule:
        if not isinstance(data, Mapping):
            raise TypeError(f"a schedule is a JSON object, got {type(data).__name__}")
        if gone := sorted({"reuse_steps", "reuse_error"} & set(data)):
            raise ValueError(
                f"schedule fields {gone} are no longer known: plans kept over steps saved no time; "
                "leave them out, and every call selects its blocks anew"
            )
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise ValueError(f"unknown schedule fields {unknown}; known are {', '.join(known)}")
        bands = data.get("bands", ())
        if not isinstance(bands, list | tuple):
            raise TypeError(f"bands must be a list of [start, stop, recipe], got {short(bands)}")
        made = []
        for band in bands:
            if not isinstance(band, list | tuple) or len(band) != 3:
                raise ValueError(f"a band must be [start, stop, recipe or null], got {short(band)}")
            recipe = Recipe.from_dict(band[2]) if isinstance(band[2], dict) else band[2]
            made.append((band[0], band[1], recipe))
        return cls(**{**data, "bands": tuple(made)})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        return cls.from_dict(parse_json(text, "a schedule"))


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number in [0, 1], got {value!r}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value}; it is a share, not a count")
    return float(value)


def _bands(bands: Any) -> tuple[Band, ...]:
    if isinstance(bands, str) or not isinstance(bands, Iterable):
        raise TypeError(f"bands must be (start, stop, recipe) in order, got {short(bands)}")
    made: list[Band] = []
    for band in bands:
        if not isinstance(band, tuple | list) or len(band) != 3:
            raise TypeError(f"a band must be (start, stop, recipe), got {short(band)}")
        start, stop, recipe = band
        start, stop = _share("the start of a band", start), _share("the stop of a band", stop)
        if stop <= start:
            raise ValueError(f"a band must stop after its start, got {start:g} to {stop:g}")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"a band's recipe must be a Recipe or None, got {short(recipe)}")
        made.append((start, stop, recipe))
    return tuple(made)
