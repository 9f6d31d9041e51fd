"""The drawn calls: plain values, so that a call prints, shrinks and can be run again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparge import KeepAll, KeepError, KeepFraction, KeepMass, Recipe

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = (
    "plain", "heads", "sliced", "stepped", "turned", "offset",
    "same_batch", "same_heads", "same_rows", "same_channels",
)  # fmt: skip
NUMBERS = (
    "normal", "sharp", "large", "huge", "largest", "small", "subnormal", "zeros", "constant",
    "shifted", "uneven",
)  # fmt: skip
BAD = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Drawn:
    """One call; `tensors` makes its tensors, the same every time."""

    B: int = 1
    Hk: int = 1
    group: int = 1
    Lq: int = 1
    Lk: int = 1
    D: int = 1
    Dv: int = 1
    dtype: str = "float32"
    layouts: tuple[str, str, str] = ("plain", "plain", "plain")
    numbers: tuple[str, str, str] = ("normal", "normal", "normal")
    bad: tuple[tuple[int, int], ...] = ()
    """`(which of q, k, v, which of BAD)`; the places follow from the seed."""
    mask: tuple[str, tuple[bool, ...], float, str, bool] | None = None
    """`(bool or a dtype, dimensions written out, share that attends, layout, NaN inside)`."""
    blocks: float | None = None
    """Share of True in the caller's block mask."""
    is_causal: bool = False
    causal_align: str = "top_left"
    scale: float | None = None
    recipe: Recipe = field(default_factory=lambda: Recipe(KeepAll(), precision="exact"))
    threads: int = 1
    seed: int = 0

    @property
    def Hq(self) -> int:
        return self.Hk * self.group

    @property
    def plain(self) -> bool:
        """Numbers of ordinary size, so that gradients can be compared."""
        return not self.bad and set(self.numbers) <= {"normal", "zeros", "constant", "shifted"}


edges = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
lengths = st.one_of(
    st.integers(1, 80), st.sampled_from(edges[:11]), st.sampled_from(edges), st.integers(1, 400)
)
dims = st.one_of(
    st.integers(1, 40), st.sampled_from(edges[:8]), st.sampled_from([e for e in edges if e < 257])
)


@st.composite
def recipes(draw: st.DrawFn, Hq: int) -> Recipe:
    def each(value: st.SearchStrategy) -> st.SearchStrategy:
        return st.one_of(value, st.tuples(*[value] * Hq))

    amount = st.one_of(st.floats(0.01, 1.0), st.sampled_from([0.5, 1.0]))
    keep = draw(st.one_of(
        st.just(KeepAll()), each(amount).map(KeepMass), each(amount).map(KeepFraction),
        each(st.floats(0.01, 0.9)).map(KeepError),
    ))  # fmt: skip
    only_blend = isinstance(keep, KeepError | KeepAll)
    predictors = ["blend"] if only_blend else ["mean", "rows", "blend"]
    predictor = draw(st.sampled_from(predictors))
    judge = st.one_of(st.none(), each(st.floats(-1.0, 1.0)))
    off_or = st.one_of(st.none(), st.floats(0.05, 12.0))
    ends = st.tuples(st.integers(-300, 300), st.none())
    samples = predictor != "mean" and not isinstance(keep, KeepAll)
    return Recipe(
        keep,
        predictor=predictor,
        precision=draw(st.sampled_from(["int8", "int8-fast", "half", "exact"])),
        min_similarity=draw(judge) if predictor == "mean" else None,
        pv_skip=draw(st.one_of(st.none(), off_or, st.tuples(*[off_or] * Hq))),
        sink_blocks=draw(st.integers(0, 2)),
        local_blocks=draw(st.sampled_from([0, 0, 1, 2, 10**12])),
        protect=draw(st.lists(ends, max_size=1).map(tuple)),
        sample_rows=draw(st.sampled_from([4, 1, 16, 128])) if samples else 4,
        **draw(st.sampled_from([{}, {"skipped": "pool"}, {"skipped": "pool", "pool_group": 8}])),
    )


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    Hk, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 3]))
    dtype = draw(st.sampled_from(DTYPES))
    three = range(3)
    mask = st.tuples(
        st.sampled_from(["bool", "float32", dtype]),
        st.tuples(*[st.booleans()] * 4),
        st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]),
        st.sampled_from(["plain", "turned", "stepped", "expanded"]),
        st.sampled_from([False, False, False, True]),
    )
    bad = st.lists(
        st.tuples(st.sampled_from(three), st.sampled_from(three)), min_size=1, max_size=3
    )
    usual = st.sampled_from(["normal", "normal", "sharp", "shifted"])
    return Drawn(
        B=draw(st.sampled_from([1, 1, 2, 3])),
        Hk=Hk,
        group=group,
        Lq=draw(lengths),
        Lk=draw(lengths),
        D=draw(dims),
        Dv=draw(dims),
        dtype=dtype,
        layouts=tuple(draw(st.sampled_from(LAYOUTS)) for _ in three),
        numbers=tuple(draw(st.one_of(usual, st.sampled_from(NUMBERS))) for _ in three),
        bad=tuple(draw(st.one_of(st.just([]), st.just([]), bad))),
        mask=draw(st.one_of(st.none(), mask)),
        blocks=draw(st.sampled_from([None, None, None, None, 0.3])),
        is_causal=draw(st.booleans()),
        causal_align=draw(st.sampled_from(["top_left", "bottom_right"])),
        scale=draw(st.sampled_from([None, None, 1.0, 0.01, -0.3, 0.0])),
        recipe=draw(recipes(Hk * group)),
        threads=draw(st.sampled_from([1, 1, 2])),
        seed=draw(st.integers(0, 2**16)),
    )


def tensors(drawn: Drawn) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
    """`(query, key, value, masks)` of a call."""
    g = torch.Generator().manual_seed(drawn.seed)
    d = drawn
    shapes = [(d.B, d.Hq, d.Lq, d.D), (d.B, d.Hk, d.Lk, d.D), (d.B, d.Hk, d.Lk, d.Dv)]
    dtype = getattr(torch, d.dtype)
    made = [
        laid(numbers(shape, kind, dtype, g), layout, bad_values(d, i), g)
        for i, (shape, kind, layout) in enumerate(zip(shapes, d.numbers, d.layouts, strict=True))
    ]
    masks = {"attn_mask": token_mask(d, g), "block_mask": None}
    if d.blocks is not None:
        n = (-(-d.Lq // 128), -(-d.Lk // 64))
        masks["block_mask"] = torch.rand(n, generator=g) < d.blocks
    return made[0], made[1], made[2], masks


def bad_values(drawn: Drawn, which: int) -> list[float]:
    return [BAD[value] for tensor, value in drawn.bad if tensor == which]


def numbers(shape: tuple[int, ...], kind: str, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    narrow, facts = dtype == torch.float16, torch.finfo(dtype)
    if kind == "uneven":
        x = x * 10 ** (torch.rand(shape[:3], generator=g)[..., None] * 6 - 3)
    elif kind == "shifted":
        x = x + 10 * torch.randn(shape[-1], generator=g)
    elif kind == "constant":
        x = torch.ones_like(x) * x.flatten()[0]
    elif kind == "largest":
        x = x.sign() * facts.max
    else:
        x = x * {
            "normal": 1.0, "sharp": 4.0, "large": 100.0, "huge": 1e4 if narrow else 1e30,
            "small": 1e-4 if narrow else 1e-20, "subnormal": facts.tiny / 8, "zeros": 0.0,
        }[kind]  # fmt: skip
    return x.clamp(-facts.max, facts.max).to(dtype)


def laid(x: Tensor, layout: str, bad: list[float], g: torch.Generator) -> Tensor:
    """The same numbers in another memory layout (the first ones where it shares memory)."""
    shared = {"same_batch": 0, "same_heads": 1, "same_rows": 2, "same_channels": 3}.get(layout)
    shape = x.shape
    if shared is not None:
        x = x.narrow(shared, 0, 1).contiguous()
    for value in bad:
        x.view(-1)[int(torch.randint(x.numel(), (), generator=g))] = value
    return in_memory(x, layout).expand(shape)


def in_memory(x: Tensor, layout: str) -> Tensor:
    if layout == "heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "turned":
        return x.mT.contiguous().mT
    if layout == "sliced":
        room = x.new_full((*x.shape[:3], x.shape[3] + 3), math.nan)
        room[..., 2:-1] = x
        return room[..., 2:-1]
    if layout == "stepped":
        room = x.new_full((*x.shape[:3], 2 * x.shape[3]), math.nan)
        room[..., 1::2] = x
        return room[..., 1::2]
    if layout == "offset":  # at the end of its memory, at an odd address
        room = x.new_full((x.numel() + 1,), math.nan)
        room[1:] = x.flatten()
        return room[1:].view(x.shape)
    return x


def token_mask(drawn: Drawn, g: torch.Generator) -> Tensor | None:
    if drawn.mask is None:
        return None
    kind, written, share, layout, bad = drawn.mask
    full = (drawn.B, drawn.Hq, drawn.Lq, drawn.Lk)
    shape = [n if w else 1 for n, w in zip(full, written, strict=True)]
    mask = torch.rand(shape, generator=g) < share
    if kind != "bool":
        bias = torch.randn(shape, generator=g).to(getattr(torch, kind))
        mask = bias.masked_fill(~mask, -math.inf)
        if bad:
            at = int(torch.randint(mask.numel(), (), generator=g))
            mask.view(-1)[at] = BAD[int(torch.randint(2, (), generator=g))]
    if layout == "turned":
        return mask.mT.contiguous().mT
    if layout == "stepped":
        room = mask.new_zeros((*shape[:3], 2 * shape[3]))
        room[..., ::2] = mask
        return room[..., ::2]
    return mask.expand(full) if layout == "expanded" else mask
