"""Inputs that are hard for an error budget: structure that blocks or sampled rows may miss.

A case is a family, a seed and a shape; all of its numbers follow from them. Most families draw
queries and keys around the centres of topics, as language models do, and differ in how the topics
lie on the sequence:

    runs       each topic in runs of 8 to 200 tokens, keys shifted against queries
    shuffled   every token has a topic of its own
    needle     one heavy key, which some rows attend and most do not
    periodic   topics that recur with a period of the sampled rows or of the blocks
    outlier    runs, with one to three channels many times larger than the others
    drift      centres that wander along the sequence
    mixture    runs in one part of the rows, another family in the rest, values of mixed size

`KeepError` runs on them: what it promised, what it reported, and what came out.

    over     heads whose true total error is above OVER x the budget
    misjudged  heads whose true error is above SEEN, and the reported one off by more than FACTOR
    rising   heads that keep more at a larger budget
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge import KeepError, Recipe, attention, record

N_CENTRES = 64
HEADS = 2
LENGTHS = (1024, 1500, 2048, 2500, 3072, 4096)
DIMS = (32, 64, 64, 128)
BUDGETS = (0.01, 0.02, 0.05, 0.1)
OVER, FACTOR, SEEN = 1.25, 1.5, 0.005
"""What must hold: 99 % of heads are not over, 95 % of those with a visible error report it well."""
MOST_OVER, MOST_MISJUDGED = 0.01, 0.05


@dataclass(frozen=True)
class Adversary:
    """One case: what is drawn, and its shape."""

    family: str
    seed: int
    L: int
    D: int
    is_causal: bool

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value `[1, heads, L, D]`, fp32; the same numbers on every machine."""
        rng = Draws(self.seed)
        heads = [FAMILIES[self.family](rng, self.L, self.D) for _ in range(HEADS)]
        query, key, value = (torch.stack(x).unsqueeze(0) for x in zip(*heads, strict=True))
        return query.float(), key.float(), value.float()


def adversaries(per_family: int = 30, *, first_seed: int = 0) -> list[Adversary]:
    """`per_family` seeded cases of each family, causal and not, of mixed lengths and head dims."""
    cases = []
    for number, family in enumerate(FAMILIES):
        for i in range(per_family):
            seed = first_seed + 1000 * number + i
            rng = Draws(seed ^ 0x5EED)
            L, D = rng.pick(LENGTHS), rng.pick(DIMS)
            cases.append(Adversary(family, seed, L, D, is_causal=i % 2 == 0))
    return cases


class Draws:
    """Random numbers of one case, on the CPU in fp64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=self.generator))

    def whole(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def wholes(self, high: int, n: int) -> Tensor:
        return torch.randint(0, high, (n,), generator=self.generator)

    def pick(self, choices: tuple[int, ...]) -> int:
        return choices[self.whole(0, len(choices) - 1)]


Head = tuple[Tensor, Tensor, Tensor]


def around_centres(rng: Draws, topics: Tensor, D: int, *, shift: int = 0) -> Head:
    """Queries and keys around the centres of their topics; the keys' topics are `shift` behind."""
    # Scores between tokens of one topic stay a few nats above the others for every head dim.
    strength = rng.uniform(1.2, 2.2) * (64 / D) ** 0.25
    noise = rng.uniform(0.5, 0.9)
    centres = strength * rng.normal(int(topics.max()) + 1, D)
    L = len(topics)
    query = centres[topics] + noise * rng.normal(L, D)
    key = centres[topics.roll(shift)] + noise * rng.normal(L, D)
    return query, key, rng.normal(L, D)


def topics_in_runs(rng: Draws, L: int, run: int) -> Tensor:
    return rng.wholes(N_CENTRES, -(-L // run)).repeat_interleave(run)[:L]


def runs(rng: Draws, L: int, D: int) -> Head:
    run = round(8 * 25 ** rng.uniform(0, 1))
    return around_centres(rng, topics_in_runs(rng, L, run), D, shift=rng.whole(0, 127))


def shuffled(rng: Draws, L: int, D: int) -> Head:
    return around_centres(rng, rng.wholes(rng.whole(8, 256), L), D)


def needle(rng: Draws, L: int, D: int) -> Head:
    """Some of the rows, in one place of each block or anywhere, attend one key."""
    query, key, value = around_centres(rng, topics_in_runs(rng, L, rng.whole(16, 128)), D)
    direction = rng.normal(D)
    direction = direction / direction.norm()
    at = rng.whole(0, max(0, L // 4 - 1))
    key[at] = direction * math.sqrt(D) * rng.uniform(2, 4)
    share = rng.uniform(0.01, 0.3)
    places = torch.arange(L) % 128 if rng.whole(0, 1) else rng.wholes(128, L)
    looks = (places - rng.whole(0, 127)) % 128 < 128 * share
    query[looks] = query[looks] + direction * math.sqrt(D) * rng.uniform(2, 4)
    return query, key, value


def periodic(rng: Draws, L: int, D: int) -> Head:
    """Within each period a few rows have topics of their own, at places that a lattice may miss or
    meet alone."""
    period = rng.pick((16, 31, 32, 33, 64, 79, 96, 128, 160, 256))
    topics = topics_in_runs(rng, L, period)
    places = (torch.arange(L) + rng.whole(0, period - 1)) % period
    others = places < max(1, round(period * rng.uniform(0.03, 0.5)))
    own = N_CENTRES + rng.wholes(N_CENTRES, -(-L // period)).repeat_interleave(period)[:L]
    return around_centres(rng, torch.where(others, own, topics), D, shift=rng.whole(0, 64))


def outlier(rng: Draws, L: int, D: int) -> Head:
    query, key, value = runs(rng, L, D)
    for _ in range(rng.whole(1, 3)):
        channel = rng.whole(0, D - 1)
        large = rng.uniform(5, 50)
        if rng.whole(0, 1):
            # As in trained models: keys with one large, nearly constant channel.
            key[:, channel] = large * (1 + 0.05 * rng.normal(L))
        else:
            key[:, channel] = key[:, channel] * large
            query[:, channel] = query[:, channel] / large * rng.uniform(0.2, 1)
    return query, key, value


def drift(rng: Draws, L: int, D: int) -> Head:
    """Centres turn along the sequence: near tokens are alike, far ones are not."""
    angle = torch.arange(L, dtype=torch.float64)[:, None] / rng.uniform(30, 2000)
    angle = angle * (1 + rng.normal(1, D // 2).abs())
    phase = rng.uniform(0, 2 * math.pi) * rng.normal(1, D // 2)
    wave = torch.cat([(angle + phase).cos(), (angle + phase).sin()], 1)
    strength, noise = rng.uniform(1.5, 3.0), rng.uniform(0.2, 0.8)
    query = strength * wave + noise * rng.normal(L, D)
    key = strength * wave.roll(rng.whole(0, 200), 0) + noise * rng.normal(L, D)
    values = rng.normal(L, D) + wave * rng.uniform(0, 2)
    return query, key, values


def mixture(rng: Draws, L: int, D: int) -> Head:
    """One family in some stretches of rows, another in the rest; some values are far larger."""
    names = [name for name in FAMILIES if name != "mixture"]
    one, other = (FAMILIES[names[rng.whole(0, len(names) - 1)]](rng, L, D) for _ in range(2))
    stretch = rng.whole(16, 1024)
    of_one = rng.wholes(2, -(-L // stretch)).repeat_interleave(stretch)[:L, None].bool()
    query, key, value = (torch.where(of_one, a, b) for a, b in zip(one, other, strict=True))
    large = rng.wholes(100, L) < 2
    value[large] = value[large] * rng.uniform(1, 20)
    return query, key, value


FAMILIES: dict[str, Callable[[Draws, int, int], Head]] = {
    family.__name__: family
    for family in (runs, shuffled, needle, periodic, outlier, drift, mixture)
}


@dataclass(frozen=True)
class Outcome:
    """One head of one case at one budget."""

    family: str
    budget: float
    density: float
    reported: float
    bound: float
    true: float
    raised: bool
    rising: bool

    @property
    def is_over(self) -> bool:
        return not self.true <= OVER * self.budget

    @property
    def is_visible(self) -> bool:
        return self.true > SEEN

    @property
    def is_misjudged(self) -> bool:
        return self.is_visible and not self.true / FACTOR <= self.reported <= self.true * FACTOR


def run_case(
    case: Adversary, budgets: Sequence[float], recipe: Recipe, *, backend: str
) -> list[Outcome]:
    """Every head of a case at every budget, against dense attention in fp32."""
    query, key, value = case.qkv()
    truth = F.scaled_dot_product_attention(query, key, value, is_causal=case.is_causal).double()
    outcomes: list[Outcome] = []
    before: Sequence[int] | None = None
    for budget in sorted(budgets):
        its = replace(recipe, keep=KeepError(budget))
        with record() as runs:
            out = attention(
                query, key, value, is_causal=case.is_causal, recipe=its, backend=backend
            )
        run = runs[0]
        assert run.error_by_head is not None
        assert run.bound_by_head is not None
        true = _relative_l1(out, truth)
        given = run.precision_by_head or (recipe.precision,) * len(true)
        for h, error in enumerate(true):
            rising = before is not None and run.kept_by_head[h] > before[h]
            found = (run.density_by_head[h], run.error_by_head[h], run.bound_by_head[h], error)
            raised = given[h] != recipe.precision
            outcomes.append(Outcome(case.family, budget, *found, raised, rising))
        before = run.kept_by_head
    return outcomes


def run_suite(
    cases: Iterable[Adversary],
    budgets: Sequence[float],
    recipe: Recipe,
    *,
    backend: str,
    step: Callable[[str], Any] = lambda what: None,
) -> list[Outcome]:
    outcomes = []
    for case in cases:
        outcomes += run_case(case, budgets, recipe, backend=backend)
        step(f"{case.family} {case.seed}")
    return outcomes


def summarize(outcomes: Sequence[Outcome], by: str) -> list[dict[str, Any]]:
    """One row for each value of a field, and one for all."""
    groups: dict[Any, Sequence[Outcome]] = {
        value: [one for one in outcomes if getattr(one, by) == value]
        for value in dict.fromkeys(getattr(one, by) for one in outcomes)
    }
    return [_row(value, some) for value, some in {**groups, "all": outcomes}.items()]


def _row(of: Any, some: Sequence[Outcome]) -> dict[str, Any]:
    visible = [one for one in some if one.is_visible]
    return {
        "of": of if isinstance(of, str) else f"{of:g}",
        "heads": len(some),
        "density": sum(one.density for one in some) / len(some),
        "error": sum(one.true for one in some) / len(some),
        "worst": max(one.true / one.budget for one in some),
        "over": sum(one.is_over for one in some) / len(some),
        "visible": len(visible),
        "misjudged": sum(one.is_misjudged for one in visible) / max(len(visible), 1),
        "raised": sum(one.raised for one in some) / len(some),
        "rising": sum(one.rising for one in some),
    }


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the last row, of all heads, misses."""
    every, missed = rows[-1], []
    if every["over"] > MOST_OVER:
        missed.append(f"{every['over']:.1%} of heads exceed {OVER} x their budget")
    if every["misjudged"] > MOST_MISJUDGED:
        missed.append(f"{every['misjudged']:.1%} of heads report an error off by > {FACTOR}x")
    if every["rising"]:
        missed.append(f"{every['rising']} heads keep more at a larger budget")
    return missed


def _relative_l1(out: Tensor, truth: Tensor) -> list[float]:
    """Of each head of the one sequence."""
    wrong = (out.double() - truth).abs().sum((0, 2, 3)) / truth.abs().sum((0, 2, 3))
    return torch.where(torch.isfinite(wrong), wrong, torch.inf).tolist()
