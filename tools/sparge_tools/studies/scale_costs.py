"""Bytes and seconds of one attention layer over several devices, by formulas.

The formulas follow `sparge.parallel`; tests compare the bytes with those that a ring counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sparge import BLOCK_K, BLOCK_Q, KeepAll, KeepError, Recipe

SCALE, PER_HALF, FLOAT = 4, 2, 4
"""Bytes of a scale, of a value in 16 bits, of a pooled number."""


@dataclass(frozen=True)
class Machine:
    """flops: of dense attention, as achieved by a device. link: bytes per second that a device
    receives. latency: seconds per message. block_cost: time of a kept block against a dense one."""

    flops: float = 4e14
    link: float = 5e10
    latency: float = 1e-5
    block_cost: float = 1.0


@dataclass(frozen=True)
class Layer:
    """One attention layer over `world` ranks; `needed`: see `scale_densities`."""

    L: int
    world: int
    Hq: int
    Hk: int
    D: int
    recipe: Recipe
    is_causal: bool = False
    dtype_bytes: int = 2
    density: float = 1.0
    needed: float = 1.0

    @property
    def budget(self) -> bool:
        """Whether the recipe measures errors, for which whole heads travel as they are."""
        return isinstance(self.recipe.keep, KeepError)

    @property
    def plans_per_head(self) -> int:
        """Ranks that plan one key head: several, where there are more ranks than heads and the
        busiest then has less to do. A budget is one number for a head, and planned at once."""
        most = 1 if self.budget else -(-self.world // self.Hk)
        choices = range(1, most + 1)
        return min(choices, key=lambda n: (Fraction(-(-self.Hk * n // self.world), n), n))

    @property
    def busiest(self) -> float:
        """What the rank that plans the most plans, against the mean."""
        plans = self.Hk * self.plans_per_head
        return -(-plans // self.world) * self.world / plans

    @property
    def _received(self) -> float:
        """Share of the sequence that a rank does not hold."""
        return (self.world - 1) / self.world


def dense_ring_bytes(layer: Layer) -> float:
    """That a rank receives: keys and values of all others."""
    return layer._received * layer.L * layer.Hk * 2 * layer.D * layer.dtype_bytes


def ulysses_bytes(layer: Layer) -> float | None:
    """That a rank receives: q, k, v of its heads, and outputs of its rows. None: some rank would
    have no head."""
    if (layer.world - 1) * -(-layer.Hq // layer.world) >= layer.Hq:
        return None
    copies = max(1, layer.world // layer.Hk)  # key heads are repeated until each rank has one
    heads = 2 * layer.Hq + 2 * layer.Hk * copies
    return layer._received * layer.L / layer.world * heads * layer.D * layer.dtype_bytes


def plan_bytes(layer: Layer) -> float:
    """That a rank receives before it can plan, and as the plan of its rows."""
    recipe, D, group = layer.recipe, layer.D, layer.Hq / layer.Hk
    n_q, n_k = layer.L / BLOCK_Q, layer.L / BLOCK_K
    coded = recipe.quantized and not layer.budget
    key = D + SCALE if coded else D * layer.dtype_bytes
    per_head = float(layer.L * key)
    if layer.budget:  # values and queries, too
        per_head += layer.L * D * layer.dtype_bytes * (1 + group)
    else:
        per_head += n_k * (D + 1) * FLOAT * coded
        per_head += group * n_q * (recipe.sample_rows * layer.dtype_bytes * D + (D + 1) * FLOAT)
    heads = layer.Hk * layer.plans_per_head / layer.world
    bits = layer.Hq * n_q / layer.world * n_k / 8
    return layer._received * (heads * per_head + bits)


def block_bytes(layer: Layer) -> float:
    """That a rank receives in the rounds: the blocks that it needs, and what pools the others."""
    recipe, D = layer.recipe, layer.D
    # A rank has the keys of the heads that it planned; there is no plan to keep all.
    known = layer.plans_per_head / layer.world if recipe.keep != KeepAll() else 0.0
    key = value = D * layer.dtype_bytes
    if layer.budget:
        known = 0.0
    elif recipe.quantized:
        key, value = D + SCALE, D * (1 if recipe.precision == "int8-fast" else PER_HALF)
    rows = layer._received * layer.L * layer.Hk
    pooled = (key + value) / recipe.pool_group if recipe.pools else 0.0
    return rows * (layer.needed * ((1 - known) * key + value) + pooled)


def move_bytes(layer: Layer) -> float:
    """That a rank receives where causal rows are dealt so that all have as much: q, and outputs."""
    rows = layer._received * layer.L / layer.world
    return rows * layer.Hq * 2 * layer.D * layer.dtype_bytes if layer.is_causal else 0.0


def compute_seconds(layer: Layer, machine: Machine, *, sparse: bool) -> float:
    """Of one rank, if all have as much to do; without planning."""
    dense = 4.0 * layer.L**2 * layer.Hq * layer.D / layer.world / machine.flops
    dense *= 0.5 if layer.is_causal else 1.0
    return dense * layer.density * machine.block_cost if sparse else dense


def plan_seconds(layer: Layer, machine: Machine) -> float:
    """Scores of the sampled rows, which are half of attention over them; budgets double it."""
    sampled = 0.5 * layer.recipe.sample_rows / BLOCK_Q * (2 if layer.budget else 1)
    return layer.busiest * sampled * compute_seconds(layer, machine, sparse=False)


def ring_seconds(layer: Layer, machine: Machine, n_bytes: float, compute: float) -> float:
    """Rounds, each of which receives while the one before is computed."""
    rounds = layer.world - 1
    receive = n_bytes / rounds / machine.link + machine.latency
    each = compute / layer.world
    return each + rounds * max(each, receive)


def estimate(layer: Layer, machine: Machine) -> dict[str, Any]:
    """Bytes that a rank receives, and seconds of one layer; None for Ulysses with too few heads."""
    dense = compute_seconds(layer, machine, sparse=False)
    sparse = compute_seconds(layer, machine, sparse=True)
    plan = plan_seconds(layer, machine)
    once = 2 * (layer.world - 1) * machine.latency  # an exchange there and back
    through = ulysses_bytes(layer)
    all_to_all = None if through is None else through / machine.link + once
    before = plan_bytes(layer) + move_bytes(layer)
    first = (layer.busiest * plan_bytes(layer) + move_bytes(layer)) / machine.link
    ours = plan + first + once
    # Ulysses plans the heads that it has; some ranks have one more than others.
    uneven = -(-layer.Hq // layer.world) * layer.world / layer.Hq
    through_heads = plan / layer.busiest + sparse
    return {
        "L": layer.L,
        "world": layer.world,
        "density": layer.density,
        "needed": layer.needed,
        "dense_ring_bytes": dense_ring_bytes(layer),
        "ulysses_bytes": through,
        "ring_bytes": before + block_bytes(layer),
        "ring_bytes_ratio": (before + block_bytes(layer)) / dense_ring_bytes(layer),
        "dense_ring_seconds": ring_seconds(layer, machine, dense_ring_bytes(layer), dense),
        "dense_ulysses_seconds": None if all_to_all is None else all_to_all + uneven * dense,
        "ulysses_seconds": None if all_to_all is None else all_to_all + uneven * through_heads,
        "ring_seconds": ours + ring_seconds(layer, machine, block_bytes(layer), sparse),
        "ring_waits_for": _bound(layer, machine, sparse),
    }


def _bound(layer: Layer, machine: Machine, sparse: float) -> str:
    receive = block_bytes(layer) / (layer.world - 1) / machine.link + machine.latency
    return "links" if receive > sparse / layer.world else "computing"
