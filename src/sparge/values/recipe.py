"""What the user wants: how much to keep, how to predict it, the precision, what is protected.

A recipe is frozen, compares by value, prints itself, and goes to JSON and back without loss.
`mass`, `fraction`, `max_error`, `min_similarity` and `pv_skip` are one number for all heads or one
per head. A field that would do nothing in its combination is refused.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, cast

from ..support.json_text import parse_json, read_json_text, short

PREDICTORS = ("mean", "rows", "blend")
PRECISIONS = ("int8", "int8-fast", "half", "exact")
QUANTIZED = ("int8", "int8-fast")
SKIPPED = ("drop", "pool")
POOL_GROUPS = (4, 8, 16, 32, 64)
"""Keys of a pooled entry: whole groups make up a key block. Fewer keys would cost as much as half
of the block and more."""
SAMPLE_ROWS = 4

PerHead = float | tuple[float, ...]
PerHeadOrOff = float | tuple[float | None, ...] | None


def _numbers(value: Any, name: str) -> Any:
    """A float, or a tuple of floats for one per head; None stays None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Iterable) and not isinstance(value, str | set | frozenset | Mapping):
        items = tuple(x.tolist() if hasattr(x, "tolist") else x for x in value)
        if not items or any(isinstance(x, Iterable) and not isinstance(x, str) for x in items):
            needed = "must be a number or a flat list, one per head"
            raise ValueError(f"{name} {needed}; got {short(items)}")
        return tuple(_numbers(item, name) for item in items)
    if value is None or type(value) is float:
        return value
    try:
        if not isinstance(value, bool | str):
            return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        pass
    came = f"{type(value).__name__} {short(value)}"
    raise TypeError(f"{name} must be a number or one number per head in order, got {came}")


def _check_numbers(
    owner: Any, name: str, needed: str, fits: Callable[[float], bool], *, none_is: str = ""
) -> None:
    """Make a field of a frozen value a float, or a tuple of one per head, each of them checked."""
    value = _numbers(getattr(owner, name), name)
    for number in value if isinstance(value, tuple) else (value,):
        allowed = bool(none_is) if number is None else fits(number)
        if not allowed:
            way_out = f"; None means {none_is}" if none_is else ""
            raise ValueError(f"{name} must be {needed}, got {number}{way_out}")
    object.__setattr__(owner, name, value)


@dataclass(frozen=True)
class KeepMass:
    """Keep the fewest key blocks whose predicted mass reaches `mass`."""

    mass: PerHead = 0.98

    def __post_init__(self) -> None:
        _check_numbers(self, "mass", "in (0, 1]", lambda mass: 0.0 < mass <= 1.0)


@dataclass(frozen=True)
class KeepFraction:
    """Keep the given fraction, rounded up, of the key blocks a query block may attend."""

    fraction: PerHead = 0.5

    def __post_init__(self) -> None:
        _check_numbers(self, "fraction", "in (0, 1]", lambda fraction: 0.0 < fraction <= 1.0)


@dataclass(frozen=True)
class KeepError:
    """Keep as few key blocks as a relative L1 error of `max_error` allows, measured in every call.

    Predictor `"blend"` only. No tuning is needed: each head starts at mass `1 - max_error`, and
    keeps more or fewer by the error measured on rows that the prediction has not seen.
    """

    max_error: PerHead = 0.05

    def __post_init__(self) -> None:
        needed = "greater than 0 and less than 1 (for no error at all there is KeepAll())"
        _check_numbers(self, "max_error", needed, lambda error: 0.0 < error < 1.0)


@dataclass(frozen=True)
class KeepAll:
    """Keep every key block that may be attended."""


Keep = KeepMass | KeepFraction | KeepError | KeepAll
_KEEPS: dict[str, Any] = {"mass": KeepMass, "fraction": KeepFraction, "error": KeepError}


@dataclass(frozen=True)
class Recipe:
    """How one attention call is made sparse and in what precision it runs.

    keep: `KeepMass`, `KeepFraction`, `KeepError` or `KeepAll`.
    predictor: `"mean"` (pooled tokens), `"rows"` (a few exact rows) or `"blend"` (both). `KeepAll`
    predicts nothing, so it takes neither another predictor than the default nor the settings of
    one; blocks that are always kept may be named with it, since it keeps them.
    min_similarity: `"mean"` only; blocks less self-similar than this are always computed.
    pv_skip: second filter; a row group skips a block this far (natural log) below its maximum.
    precision: `"int8"`, `"int8-fast"`, `"half"` or `"exact"`.
    sink_blocks: this many first key blocks are always kept.
    local_blocks: this many key blocks to each side of the query block's own are always kept; None
    is 1 in a causal call, whose sampled rows cannot see what the first rows have just before them,
    and 0 in others.
    protect: token ranges `(start, stop)`, sliced like Python, kept as keys and as queries.
    sample_rows: `"rows"` and `"blend"` only; rows of each query block that they score exactly.
    skipped: what a skipped block contributes: nothing (`"drop"`), or one entry for each
    `pool_group` of its keys, with their mean key, mean value and number (`"pool"`). Read by every
    `keep`, because a caller's plan or block mask may skip blocks too.
    pool_group: `"pool"` only; 4, 8, 16, 32 or 64 keys.
    """

    keep: Keep = KeepMass()
    predictor: str = "blend"
    min_similarity: PerHeadOrOff = None
    pv_skip: PerHeadOrOff = None
    precision: str = "int8"
    sink_blocks: int = 1
    local_blocks: int | None = None
    protect: tuple[tuple[int, int | None], ...] = ()
    sample_rows: int = SAMPLE_ROWS
    skipped: str = "drop"
    pool_group: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.keep, KeepMass | KeepFraction | KeepError | KeepAll):
            raise TypeError(
                f"keep must be KeepMass, KeepFraction, KeepError or KeepAll, got {self.keep!r}; "
                "for a number write KeepMass(number)"
            )
        names = {"predictor": PREDICTORS, "precision": PRECISIONS, "skipped": SKIPPED}
        for name, known in names.items():
            if (value := getattr(self, name)) not in known:
                listed = ", ".join(map(repr, known))
                raise ValueError(f"{name} must be one of {listed}; got {value!r}")
        _check_numbers(
            self, "min_similarity", "in [-1, 1]", lambda s: -1.0 <= s <= 1.0, none_is="no judge"
        )
        finite = "a finite number greater than 0"
        _check_numbers(self, "pv_skip", finite, lambda x: 0.0 < x < math.inf, none_is="off")
        limits = {"sink_blocks": (0, None), "local_blocks": (0, None), "sample_rows": (1, 128)}
        limits["pool_group"] = POOL_GROUPS[0], POOL_GROUPS[-1]
        for name, (low, high) in limits.items():
            if name != "local_blocks" or self.local_blocks is not None:
                object.__setattr__(self, name, check_whole(name, getattr(self, name), low, high))
        if self.pool_group not in POOL_GROUPS:
            raise ValueError(f"pool_group must be one of {POOL_GROUPS}, got {self.pool_group}")
        object.__setattr__(self, "protect", _ranges(self.protect))
        self._refuse_unused_fields()
        # Kept ready, because a compiled graph can read a string but not make JSON.
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        text = json.dumps({**data, "keep": _keep_to_dict(self.keep)})
        object.__setattr__(self, "_json", text)

    def _refuse_unused_fields(self) -> None:
        """Refuse a field that nothing in this recipe reads."""
        if isinstance(self.keep, KeepError) and self.predictor != "blend":
            raise ValueError(
                f"predictor must be 'blend' with KeepError, got {self.predictor!r}; leave "
                "predictor out, or use KeepMass"
            )
        unused, why = ["min_similarity"], f"predictor {self.predictor!r}, which has no judge"
        way_out = "; use predictor='mean' or leave min_similarity=None"
        if isinstance(self.keep, KeepAll):
            unused = ["predictor", "min_similarity", "sample_rows"]
            why, way_out = "KeepAll, which predicts nothing", ""
        elif self.predictor == "mean":
            unused, why = ["sample_rows"], "predictor 'mean', which samples no rows"
            way_out = "; use predictor='blend' or 'rows'"
        for name in unused:
            if (value := getattr(self, name)) != getattr(Recipe, name):
                raise ValueError(f"{name} must be left out with {why}; got {value!r}{way_out}")
        if self.skipped != "pool" and self.pool_group != Recipe.pool_group:
            raise ValueError(
                "pool_group must be left out with skipped 'drop', which pools nothing; got "
                f"{self.pool_group}; use skipped='pool'"
            )

    def window(self, is_causal: bool) -> int:
        """`local_blocks` as a number."""
        return int(is_causal) if self.local_blocks is None else self.local_blocks

    def heads(self, start: int, stop: int) -> Recipe:
        """The recipe of query heads `start` to `stop - 1`, for one tensor-parallel rank.

        Numbers given per head are sliced; one number for all heads stays.
        """
        start, stop = check_whole("start", start, 0), check_whole("stop", stop, 1)
        if start >= stop:
            raise ValueError(f"stop must be greater than start, got heads {start} to {stop}")

        def cut(value: Any) -> Any:
            if isinstance(value, tuple) and stop > len(value):
                most = f"{len(value)}, the number of heads in this recipe"
                raise ValueError(f"stop must be at most {most}; got {stop}")
            return value[start:stop] if isinstance(value, tuple) else value

        keep = replace(self.keep, **{name: cut(value) for name, value in vars(self.keep).items()})
        similarity, pv_skip = cut(self.min_similarity), cut(self.pv_skip)
        return replace(self, keep=keep, min_similarity=similarity, pv_skip=pv_skip)

    @property
    def quantized(self) -> bool:
        return self.precision in QUANTIZED

    @property
    def pools(self) -> bool:
        """Whether skipped blocks contribute pooled entries."""
        return self.skipped == "pool"

    def to_dict(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.to_json()))

    def to_json(self) -> str:
        return cast(str, self._json)  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        if not isinstance(data, dict):
            raise TypeError(f"a recipe is a JSON object, got {type(data).__name__}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(data) - set(known)):
            raise ValueError(f"unknown recipe fields {unknown}; known are {', '.join(known)}")
        keep = {"keep": _keep_from_dict(data["keep"])} if "keep" in data else {}
        return cls(**{**data, **keep})

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        return cls.from_dict(parse_json(text, "a recipe"))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe's JSON file; refuses what is not a regular file, or is too large."""
        return cls.from_json(read_json_text(path))


@lru_cache(maxsize=256)
def recipe_from_json(text: str) -> Recipe:
    """`Recipe.from_json`, remembered: ops receive their recipe as a string on every call."""
    return Recipe.from_json(text)


@lru_cache(maxsize=256)
def recipe_with_protected(recipe: Recipe, ranges: tuple[tuple[int, int], ...]) -> Recipe:
    """A recipe with these protected ranges in place of its own, remembered for the next call."""
    return replace(recipe, protect=ranges)


def heads_of(value: PerHeadOrOff, Hq: int, *, none: float = 1.0) -> list[float]:
    """One number for each query head; `none` stands in for None."""
    each = value if isinstance(value, tuple) else (value,) * Hq
    return [none if number is None else number for number in each]


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """The number as an int. Raises TypeError for no whole number, ValueError out of its range."""
    needed = f"a whole number of at least {low}" + ("" if high is None else f", at most {high}")
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {needed}; got {value!r}")
    number = operator.index(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {needed}; got {number}")
    return number


def _ranges(protect: Any) -> tuple[tuple[int, int | None], ...]:
    needed = "protect must be (start, stop) token ranges such as ((0, 226),)"
    if isinstance(protect, str) or not isinstance(protect, Iterable):
        raise TypeError(f"{needed}; got {protect!r}")
    ranges = []
    for item in protect:
        start, stop = item if isinstance(item, Sequence) and len(item) == 2 else ("", "")
        if type(start) is not int or (stop is not None and type(stop) is not int):
            raise TypeError(f"{needed}, whole numbers or None as stop; got {item!r}")
        if stop is not None and (stop == 0 or ((start < 0) == (stop < 0) and stop <= start)):
            raise ValueError(
                f"a protected range must not be empty, got {item!r}; {needed}, "
                "and None as stop reaches to the end"
            )
        ranges.append((start, stop))
    return tuple(ranges)


def _keep_to_dict(keep: Keep) -> Any:
    for name, kind in _KEEPS.items():
        if isinstance(keep, kind):
            (value,) = vars(keep).values()
            return {name: value}
    return "all"


def _keep_from_dict(data: Any) -> Keep:
    if data == "all":
        return KeepAll()
    if isinstance(data, dict) and len(data) == 1:
        ((name, value),) = data.items()
        if name in _KEEPS:
            return _KEEPS[name](value)
    names = " or ".join(f'{{"{name}": ...}}' for name in _KEEPS)
    raise ValueError(f'keep must be "all" or {names}; got {short(data)}')


DEFAULT = Recipe(KeepMass(0.97), skipped="pool")
"""Where no recipe is given. Chosen on a real model by perplexity, needles, error and time (LAB.md);
`Recipe()` itself drops what it skips, as the paper does."""
VISION = Recipe(KeepError(0.05), skipped="pool", pool_group=8, sample_rows=8)
"""Where no recipe is given for an image or video model. Chosen on SAM 2, a terrain model and
synthetic video (LAB.md). How much must be kept differs tenfold between layers and noise levels, so
the error is the knob. Query blocks along a Hilbert curve are patches, whose rows differ more than
those of a line: eight rows predict better than four. Groups of eight keys are small patches, too,
and their means say much of them."""
EXACTLY = replace(DEFAULT, skipped="drop")
"""Where no recipe is given for blocks that the caller chose: no others may contribute."""
