"""What `auto` chooses on cards that are not here, before anything was measured on them.

    python -m sparge_tools.studies.auto_on_cards [--triton 3.7.1]

An estimate (src/sparge/backends/triton/rates.py), in Markdown; nothing is run. *Pays below*: the
density below which the backend is predicted to be faster than dense attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparge import DEFAULT, VISION
from sparge.backends.triton.rates import RATES, Card, roofline
from sparge.cli import OK, Parser
from sparge.cli.arguments import add_json
from sparge.cli.screen import deliver
from sparge.routing.crossover import CLEARLY, Crossover, expected_density
from sparge.values.call import Call

from . import study

CARDS = {
    "4090": Card("NVIDIA GeForce RTX 4090", "sm_89", 128, 2.52e9, 1008e9),
    "5090": Card("NVIDIA GeForce RTX 5090", "sm_120", 170, 2.407e9, 1792e9),
    "3090": Card("NVIDIA GeForce RTX 3090", "sm_86", 82, 1.695e9, 936e9),
    "L40S": Card("NVIDIA L40S", "sm_89", 142, 2.52e9, 864e9),
    "A100": Card("NVIDIA A100-SXM4-80GB", "sm_80", 108, 1.41e9, 2039e9),
    "H100": Card("NVIDIA H100 80GB HBM3", "sm_90", 132, 1.98e9, 3352e9),
    "B200": Card("NVIDIA B200", "sm_100", 148, 1.965e9, 8000e9),
    "MI300X": Card("AMD Instinct MI300X", "gfx942", 304, 2.1e9, 5300e9),
}
"""Multiprocessors, highest clock and bandwidth by the vendors' data sheets, as torch tells them."""
LENGTHS = (8192, 32768, 131072)
CALLS: dict[str, dict[str, Any]] = {
    "DEFAULT": {"recipe": DEFAULT, "Hq": 32, "Hk": 8, "is_causal": True},
    "VISION": {"recipe": VISION, "Hq": 24, "Hk": 24},
}


@dataclass(frozen=True)
class Row:
    """sparse, dense: predicted seconds. pays_below: a density; 0 where nothing pays."""

    card: str
    recipe: str
    length: int
    density: float
    sparse: float
    dense: float
    pays_below: float

    @property
    def choice(self) -> str:
        return "sparse" if self.sparse < CLEARLY * self.dense else "dense"


def a_call(recipe: str, length: int) -> Call:
    """bf16, head dim 128: text with 32 query heads on 8, images with 24."""
    sizes: Any = {"B": 1, "Lq": length, "Lk": length, "D": 128, "Dv": 128, "scale": 128**-0.5}
    return Call(**sizes, dtype=torch.bfloat16, device="cuda", **CALLS[recipe])


def rows(triton: str = "") -> Iterator[Row]:
    for name, card in CARDS.items():
        estimate = roofline(card, triton)
        assert not isinstance(estimate, str), estimate
        numbers = Crossover(estimate)
        for recipe in CALLS:
            for length in LENGTHS:
                call = a_call(recipe, length)
                density = expected_density(call, RATES.unseen_density)
                sparse, dense = numbers.predict_sparse(call, density), numbers.predict_dense(call)
                limit = pays_below(numbers, call)
                yield Row(name, recipe, length, density, sparse, dense, limit)


def pays_below(numbers: Crossover, call: Call) -> float:
    """Where the prediction, which is linear in the density, meets dense attention's."""
    low, high = (numbers.predict_sparse(call, density) for density in (0.0, 0.5))
    limit = (CLEARLY * numbers.predict_dense(call) - low) / (high - low) * 0.5
    return min(max(limit, 0.0), 1.0)


@study
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.auto_on_cards", description=__doc__)
    parser.add_argument("--triton", default="", help="version that compiles; the newest by default")
    add_json(parser)
    args = parser.parse_args(argv)
    found = list(rows(args.triton))
    deliver({"rows": [asdict(row) for row in found]}, args, lambda: print(markdown(found)))
    return OK


def markdown(found: list[Row]) -> str:
    lines = [
        "| card | recipe | tokens | `auto`, nothing measured | expected density | pays below |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        times = f"{row.choice}: {row.sparse * 1e3:.2f} ms, dense {row.dense * 1e3:.2f} ms"
        lines.append(
            f"| {row.card} | {row.recipe} | {row.length:,} | {times} | {row.density:.2f} | "
            f"{row.pays_below:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
