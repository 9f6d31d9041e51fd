"""`sparge bench --suite vision`: attention at the shapes of picture and video models.

Inputs are synthetic video tokens in Hilbert order, text before them and protected. The dtype is the
one in which torch's SDPA is faster on this machine, for everybody. Heads are reduced: every head
costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from sparge import VISION, KeepFraction, Recipe
from sparge.reorder import reorder_tokens, restore_tokens
from sparge.support.turns import take_turns, timer

from ..measuring import threads
from ..synthetic_video import video_qkv
from .cases import Case, Row, case_rows, make_contenders, measure_contenders
from .contender import DTYPES, SDPA, SPARSE, Entry, Inputs

HALF, FAST_HALF = "50%", "fast 50%"
RECIPES = {
    HALF: Recipe(KeepFraction(0.5)),
    FAST_HALF: Recipe(KeepFraction(0.5), precision="int8-fast"),
    "default": VISION,
}
PROBE_ROWS = 2048
"""Query rows of the calls that decide the dtype: SDPA's time is proportional to them."""
PROBE_ROUNDS = REORDER_ROUNDS = 3


@dataclass(frozen=True)
class VisionShape:
    """The tokens of one attention call of a model.

    source: what the model makes with so many tokens. heads: measured here, of `model_heads`.
    """

    name: str
    source: str
    grid: tuple[int, int, int]
    text: int
    head_dim: int
    heads: int
    model_heads: int

    @property
    def tokens(self) -> int:
        T, H, W = self.grid
        return self.text + T * H * W

    @property
    def layout(self) -> str:
        """Such as 226 + 13×30×45."""
        box = "×".join(str(n) for n in self.grid[self.grid[0] == 1 :])
        return f"{self.text} + {box}" if self.text else box

    def recipe(self, name: str) -> Recipe:
        """A recipe of the suite, with the text protected."""
        return replace(RECIPES[name], protect=((0, self.text),) if self.text else ())


SHAPES = (
    VisionShape("flux", "1024×1024 pixels", (1, 64, 64), 512, 128, 4, 24),
    VisionShape("cogvideox", "49 frames of 720×480", (13, 30, 45), 226, 64, 2, 30),
    VisionShape("mochi", "79 frames of 848×480", (14, 30, 53), 256, 128, 2, 24),
    VisionShape("wan", "81 frames of 1280×720", (21, 45, 80), 0, 128, 1, 40),
)


@dataclass(frozen=True)
class Setting:
    """What is the same for all shapes. heads: None for each shape's own. repeat: rounds, or None
    for as many as the time allows."""

    backends: Sequence[str]
    order: str = "hilbert"
    heads: int | None = None
    repeat: int | None = None
    device: str = "cpu"


def named_shapes(words: Sequence[str]) -> list[VisionShape]:
    """Shapes by name, all without words. Raises ValueError for a name that is not known."""
    known = {shape.name: shape for shape in SHAPES}
    for word in words:
        if word not in known:
            raise ValueError(f"--shapes: unknown shape {word!r}; known: {', '.join(known)}")
    return [shape for shape in SHAPES if not words or shape.name in words]


def measure_shape(shape: VisionShape, setting: Setting, n_threads: int) -> list[Row]:
    """A row for SDPA and for each backend and recipe."""
    shape = replace(shape, heads=setting.heads or shape.heads)
    with threads(n_threads):
        inputs = make_inputs(shape, setting)
        dense = dense_seconds(inputs, setting.device)
        dtype = min(dense, key=dense.__getitem__)
        chosen = inputs.pop(dtype)
        inputs.clear()  # the other dtype's are of no more use, and large
        case = Case(shape.tokens, shape.head_dim, causal=False, threads=n_threads)
        entries = entries_of(shape, setting.backends, dtype)
        contenders = make_contenders(case, entries, {dtype: chosen})
        measure_contenders(contenders, repeat=setting.repeat)
        reorder = reorder_seconds(shape, setting.order, chosen)
        found = case_rows(case, contenders)
    facts = {
        "shape": shape.name,
        "source": shape.source,
        "grid": list(shape.grid),
        "text": shape.text,
        "layout": shape.layout,
        "heads": shape.heads,
        "model_heads": shape.model_heads,
        "order": setting.order,
        "probe_seconds": dense,
    }
    return [{**facts, **row, **_with_reorder(row, reorder)} for row in found]


def make_inputs(shape: VisionShape, setting: Setting) -> dict[str, Inputs]:
    """Query, key and value by name of the dtype."""
    made = video_qkv(
        shape.grid, text=shape.text, heads=shape.heads, D=shape.head_dim, order=setting.order
    )
    q, k, v = (x.to(setting.device) for x in made)
    return {name: (q.to(dtype), k.to(dtype), v.to(dtype)) for name, dtype in DTYPES.items()}


def dense_seconds(inputs: dict[str, Inputs], device: str) -> dict[str, float]:
    """Seconds of SDPA by dtype, for some of the query rows."""
    timed = timer(device)

    def run(name: str) -> float:
        query, key, value = inputs[name]
        some = query[:, :, :PROBE_ROWS].contiguous()
        return timed(partial(F.scaled_dot_product_attention, some, key, value))[0]

    times = take_turns([partial(run, name) for name in inputs], rounds=PROBE_ROUNDS, warm_up=1e9)
    return {name: min(seconds) for name, seconds in zip(inputs, times, strict=True)}


def reorder_seconds(shape: VisionShape, order: str, inputs: Inputs) -> float:
    """Seconds to put query, key and value into an order, and an output back."""
    timed = timer(inputs[0].device.type)

    def run() -> torch.Tensor:
        for x in inputs:
            reorder_tokens(x, shape.grid, order, start=shape.text)
        return restore_tokens(inputs[0], shape.grid, order, start=shape.text)

    return median(take_turns([lambda: timed(run)[0]], rounds=REORDER_ROUNDS, warm_up=1e9)[0])


def entries_of(shape: VisionShape, backends: Sequence[str], dtype: str) -> list[Entry]:
    return [Entry(f"SDPA {dtype}", SDPA, dtype)] + [
        Entry(f"{backend} {name}", SPARSE, dtype, backend, name, shape.recipe(name))
        for backend, name in product(backends, RECIPES)
    ]


def _with_reorder(row: Row, seconds: float) -> dict[str, Any]:
    """ratio_reordered: times SDPA if every call reordered its own inputs and output."""
    if row["kind"] != SPARSE or row["why_not"] is not None:
        return {}
    share = row["seconds"] / (row["seconds"] + seconds)
    return {"reorder_seconds": seconds, "ratio_reordered": row["ratio"] * share}
