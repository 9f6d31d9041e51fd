"""Synthetic query, key and value of a video's tokens, with text before them.

    q_i · k_j / sqrt(D)  ≈  near_h · K(place of i - place of j)         near in space and time
                          + follow_h · K(matter of i - matter of j)     the same matter, any frame
                          + like_h · <look of i, look of j>             alike, near or far
                          + read_h · [j is text]                        visual tokens read the text
                          + q_i · offset (the same for every j)         removed by smoothing
                          + noise

A token has a place (t, y, x), and shows the matter at (y, x) - t · velocity: the picture moves by
`motion` tokens in every frame. Its look is a random smooth function of its matter. K falls to 0.6
at `locality` tokens. Heads are local, temporal and global in turn. Text tokens are clusters, each
with a look of its own. Numbers are drawn on the CPU in fp64 without BLAS, so a seed gives the same
numbers with any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.reorder import check_grid, check_order, reorder_tokens
from sparge.support.ordered_sums import fold_sum
from sparge.synthetic import _along, _axes, _normal, _unit

Sizes = tuple[int, int, int]

MIN_HEAD_DIM = 16
CHUNK = 4096
"""Tokens made at once: fp64 copies of a long video would take gigabytes."""
FRAMES_PER_LOCALITY = 0.5
"""Reach in frames of what is near, per token of `locality`."""
LOOK_WAVES = 48
TEXT_CLUSTER = 8  # text tokens of one look
OFFSET = 3.0
TOKENS, FEWEST = 6144, 64
"""Tokens for which the strengths hold. They grow with the logarithm of the length, as attention of
models that were trained on longer videos is sharper: the tokens that matter do not become more."""


@dataclass(frozen=True)
class Strengths:
    """Logits of one head: for near tokens, the same matter, the same look, and text."""

    near: float
    follow: float
    like: float
    read: float


HEADS = {
    "local": Strengths(near=9.0, follow=2.0, like=2.0, read=1.0),
    "temporal": Strengths(near=2.0, follow=8.0, like=3.0, read=1.0),
    "global": Strengths(near=1.0, follow=2.0, like=7.0, read=3.0),
}


def video_qkv(
    grid: Sequence[int],
    *,
    text: int = 0,
    heads: int = 4,
    D: int = 64,
    locality: float = 4.0,
    motion: float = 1.0,
    noise: float = 0.3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    order: str = "row",
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value `[1, heads, text + T·H·W, D]`; deterministic for a seed.

    grid: (T, H, W) or (H, W). text: text tokens, which come first. locality: tokens over which the
    picture changes. motion: tokens that it moves per frame. noise: from 0, structure alone, to 1,
    none. order: of the visual tokens, see `sparge.reorder`; it changes their places only.
    """
    sizes = check_grid(grid)
    check_order(order)
    _check(text=text, heads=heads, D=D, locality=locality, motion=motion, noise=noise, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    sharpness = math.log(max(text + math.prod(sizes), FEWEST)) / math.log(TOKENS)
    held = _features(sizes, text, D, locality, motion, generator)
    query, key, value = (torch.empty(1, heads, len(held), D, dtype=dtype) for _ in range(3))
    for h in range(heads):
        head = list(HEADS.values())[h % len(HEADS)]
        axes = _axes(D, generator)[: held.shape[1]]
        offset = OFFSET * _unit(_normal((D,), generator))
        for part in torch.arange(len(held)).split(CHUNK):
            white = [_normal((len(part), D), generator) for _ in range(3)]
            made = _mixed(held[part], head, axes, white, noise=noise, sharpness=sharpness)
            made[1].add_(offset)
            for out, rows in zip((query, key, value), made, strict=True):
                out[0, h, part] = rows.to(dtype)
    return (
        reorder_tokens(query, sizes, order, start=text),
        reorder_tokens(key, sizes, order, start=text),
        reorder_tokens(value, sizes, order, start=text),
    )


def _mixed(
    held: Tensor,
    head: Strengths,
    axes: Tensor,
    white: Sequence[Tensor],
    *,
    noise: float,
    sharpness: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value `[tokens, D]` of some tokens of one head, fp64."""
    D = axes.shape[1]
    n_waves, n_looks = _counts(D)
    of_column = [0.0] + [head.near] * 2 * n_waves + [head.follow] * 2 * n_waves
    wanted = held * torch.tensor(of_column + [head.like] * n_looks, dtype=torch.float64)
    wanted[:, 0] = head.read
    wanted *= sharpness
    looks = torch.zeros_like(held)
    looks[:, -n_looks:] = held[:, -n_looks:]
    structure, disorder = math.sqrt(1 - noise), math.sqrt(noise)
    strongest = sharpness * max(head.near, head.follow, head.like)
    # Keys hold unit vectors: the query carries the logit and cancels the 1/sqrt(D).
    query = structure * math.sqrt(D) * _along(wanted, axes) + disorder * strongest * white[0]
    key = structure * _along(held, axes) + disorder / math.sqrt(D) * white[1]
    value = structure * math.sqrt(D) * _along(looks, axes) + white[2]
    return query, key, value


def _features(
    grid: Sizes, text: int, D: int, locality: float, motion: float, generator: torch.Generator
) -> Tensor:
    """What keys hold, `[text + T·H·W, columns]`: whether it is text, then unit vectors of place,
    matter and look."""
    T, H, W = grid
    n_waves, n_looks = _counts(D)
    place = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in (T, H, W)))
    place = place.view(-1, 3)
    angle = 2 * math.pi * float(torch.rand(1, generator=generator, dtype=torch.float64))
    velocity = motion * torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64)
    matter = place[:, 1:] - place[:, :1] * velocity
    reach = torch.tensor([FRAMES_PER_LOCALITY, 1.0, 1.0], dtype=torch.float64) * locality
    near = _waves(place / reach, n_waves, generator) / math.sqrt(n_waves)
    follow = _waves(matter / locality, n_waves, generator) / math.sqrt(n_waves)
    looks = _waves(matter / locality, LOOK_WAVES, generator)
    looks = _along(looks, _normal((2 * LOOK_WAVES, n_looks), generator))
    looks = _unit(looks - fold_sum(looks, dim=0) / len(looks)) if len(looks) > 1 else _unit(looks)
    clusters = _unit(_normal((-(-text // TEXT_CLUSTER), n_looks), generator))
    held = torch.zeros(text + len(place), 1 + 4 * n_waves + n_looks, dtype=torch.float64)
    held[:text, 0] = 1.0
    held[:text, -n_looks:] = clusters.repeat_interleave(TEXT_CLUSTER, 0)[:text]
    held[text:, 1:] = torch.cat([near, follow, looks], 1)
    return held


def _counts(D: int) -> tuple[int, int]:
    """Waves of places and of matter, and dimensions of looks, so that all fit into D."""
    return D // 8, D // 4


def _waves(points: Tensor, n_waves: int, generator: torch.Generator) -> Tensor:
    """cos and sin of random waves, `[points, 2 · n_waves]`: their products between two points at
    distance d average to exp(-d² / 2).

    Directions and lengths of the waves in the picture are one from each of n equal parts: a few
    waves that happen to lie alike would make stripes.
    """
    parts = torch.arange(n_waves, dtype=torch.float64)
    turns = (parts + torch.rand(1, generator=generator, dtype=torch.float64)) / n_waves
    ranks = (torch.randperm(n_waves, generator=generator) + 0.5) / n_waves
    length = (-2 * torch.log1p(-ranks.double())).sqrt()
    directions = _normal((n_waves, points.shape[1]), generator)
    directions[:, -2] = length * (math.pi * turns).sin()
    directions[:, -1] = length * (math.pi * turns).cos()
    angles = torch.zeros(len(points), n_waves, dtype=torch.float64)
    for i, direction in enumerate(directions.T):
        angles += points[:, i, None] * direction
    return torch.cat([angles.cos(), angles.sin()], 1)


def _check(
    *, text: int, heads: int, D: int, locality: float, motion: float, noise: float, seed: int
) -> None:
    for name, size, least in (("text", text, 0), ("heads", heads, 1), ("D", D, MIN_HEAD_DIM)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be a whole number, got {size!r}")
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
    if not 0 < locality < math.inf:
        raise ValueError(f"locality must be greater than 0 tokens, got {locality}")
    if not 0 <= motion < math.inf:
        raise ValueError(f"motion must be at least 0 tokens per frame, got {motion}")
    if not 0 <= noise <= 1:
        raise ValueError(f"noise must be from 0 to 1, got {noise}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2**63 - 1, got {seed}")
