"""Density of plans, and what the ranks of a ring need of one another's keys, by length.

density   share of the allowed blocks that the plan keeps
needed    by number of ranks: of the key blocks that a rank would get from the others in a dense
          ring, the share that some query block of it keeps in some head of a key head; the mean
          over ranks
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import BLOCK_Q, DEFAULT, VISION, Recipe, make_plan
from sparge.synthetic import structured_qkv

from ..synthetic_video import video_qkv

MEASURED = Path(__file__).with_name("scale_densities.json")
RANKS = (2, 4, 8, 16, 32)
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of attention layer: how its inputs are made, and the sizes that the model is for."""

    recipe: Recipe
    is_causal: bool
    Hq: int
    Hk: int
    D: int
    inputs: Callable[[int], tuple[Tensor, Tensor, Tensor]]


def _text(L: int) -> tuple[Tensor, Tensor, Tensor]:
    return structured_qkv(Hq=8, Hk=2, L=L, D=64)  # four heads share a key head, as in the model


def _video(L: int) -> tuple[Tensor, Tensor, Tensor]:
    if L % 1024:
        raise ValueError(f"--lengths of video must be multiples of 1024, got {L}")
    return video_qkv((L // 1024, 32, 32), heads=4, order="hilbert")


KINDS = {
    "text": Kind(DEFAULT, True, Hq=32, Hk=8, D=128, inputs=_text),
    "video": Kind(VISION, False, Hq=40, Hk=40, D=128, inputs=_video),
}


def measure(name: str, L: int, ranks: Sequence[int] = RANKS) -> Row:
    """A row of the table of densities, from one synthetic layer."""
    kind = KINDS[name]
    query, key, value = kind.inputs(L)
    groups = query.shape[1] != key.shape[1]
    rest: dict[str, Any] = {"is_causal": kind.is_causal, "enable_gqa": groups, "value": value}
    plan = make_plan(query, key, **rest, recipe=kind.recipe)
    kept = plan.to_mask().unflatten(1, (key.shape[1], -1)).any(2)  # by key head
    needed = {str(world): needed_share(kept, world, kind.is_causal) for world in ranks}
    return {"kind": name, "L": L, "density": plan.density, "needed": needed}


def needed_share(kept: Tensor, world: int, is_causal: bool) -> float:
    """kept: bool `[B, Hk, n_q, n_k]`. Causal queries are dealt in zigzag, as a ring does."""
    n_q, n_k = kept.shape[2:]
    if n_q < 2 * world:
        raise ValueError(
            f"a length must have at least two blocks of {BLOCK_Q} queries for each of {world} "
            f"ranks, got {n_q} blocks"
        )
    shares = []
    for rank in range(world):
        rows = torch.zeros(n_q, dtype=torch.bool)
        parts = [(rank, world)]
        if is_causal:
            parts = [(rank, 2 * world), (2 * world - 1 - rank, 2 * world)]
        for part, of in parts:
            rows[n_q * part // of : n_q * (part + 1) // of] = True
        others = torch.ones(n_k, dtype=torch.bool)
        others[n_k * rank // world : n_k * (rank + 1) // world] = False
        shares.append(kept[:, :, rows][..., others].any(2).float().mean().item())
    return sum(shares) / world


def read(path: Path = MEASURED) -> list[Row]:
    """The rows of a file of densities; anything else in it is refused."""
    try:
        rows = json.loads(path.read_text())["rows"]
        for row in rows:
            shares = [row["density"], *row["needed"].values()]
            if row["kind"] not in KINDS or row["L"] < 1 or not all(0 <= x <= 1 for x in shares):
                raise ValueError(f"row {row}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as mistake:
        raise ValueError(f"--densities must be a file that --measure wrote: {mistake}") from None
    return list(rows)


def at(rows: Sequence[Row], kind: str, L: int, world: int) -> tuple[float, float]:
    """Density and needed share, from the longest length measured that is no longer than L.

    Nothing is extrapolated. What a rank needs grows with its rows, so it is that of a rank measured
    with at least as many; all keys, where none had as many.
    """
    mine = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["L"])
    if not mine:
        raise ValueError(f"--densities must have rows of kind {kind!r}")
    row = next((each for each in reversed(mine) if each["L"] <= L), mine[0])
    by_rows = sorted((row["L"] / int(n), share) for n, share in row["needed"].items())
    needed = next((share for rows_of, share in by_rows if rows_of >= L / world), 1.0)
    return row["density"], max(needed, row["density"])
