"""What permuting tokens once costs a video transformer.

    python -m sparge_tools.studies.reorder_cost

The transformer is diffusers' Wan with random weights, at the sizes of its 1.3B model and two of its
30 blocks, so the share of the whole model is fifteen times smaller than the one printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge.cli import BAD_RESULT, OK, Parser
from sparge.cli.arguments import add_json, whole
from sparge.cli.screen import console, deliver
from sparge.models.tokens import Placed
from sparge.support.turns import take_turns, timer

from ..machine import machine_text, where_it_runs
from ..zoo import best_dtype
from . import study

WAN = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960}
LAYERS, TEXT = 2, 512
MOST = 0.005
ROUNDS = 5


@study
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.reorder_cost", description=__doc__)
    parser.add_argument("--tokens", type=whole, default=16384, help="default: %(default)s")
    add_json(parser)
    args = parser.parse_args(argv)
    side = round((args.tokens / 16) ** 0.5)
    document = measure((16, side, side))

    def show() -> None:
        console().print(
            f"{document['tokens']} tokens, {document['dtype']}: two blocks "
            f"{document['transformer_seconds']:.2f} s, permuting and restoring "
            f"{1e3 * document['reorder_seconds']:.1f} ms, {100 * document['share']:.3f} % "
            f"(limit {100 * MOST:g} %)\nmachine: {machine_text(document)}"
        )

    deliver(document, args, show)
    return OK if document["share"] < MOST else BAD_RESULT


def measure(grid: tuple[int, int, int]) -> dict[str, Any]:
    """Seconds of the transformer's forward, and of all permutations of one forward."""
    from diffusers import WanTransformer3DModel

    T, H, W = grid
    dtype = best_dtype()
    torch.manual_seed(0)
    sizes: Any = {"patch_size": (1, 2, 2), "num_layers": LAYERS, **WAN}
    model: Any = WanTransformer3DModel(**sizes)
    model.eval().to(dtype)
    latents = torch.randn(1, 16, T, 2 * H, 2 * W, dtype=dtype)
    text, timestep = torch.randn(1, TEXT, 4096, dtype=dtype), torch.tensor([500])
    placed = Placed(grid, 0, "hilbert")
    n, width = T * H * W, WAN["num_attention_heads"] * WAN["attention_head_dim"]
    hidden = torch.randn(1, n, width, dtype=dtype)
    tables = [torch.randn(1, n, 1, WAN["attention_head_dim"]) for _ in range(2)]

    def permute() -> Tensor:
        for table in tables:
            placed.reorder(table, dim=1)
        return placed.restore(placed.reorder(hidden, dim=1), dim=1)

    with torch.inference_mode(), sparge.accelerate(model):
        transformer = fastest(lambda: model(latents, timestep, text), 2)
        reorder = fastest(permute, ROUNDS)
    return {
        "format": "sparge.reorder_cost/1",
        **where_it_runs(),
        "tokens": n,
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_seconds": transformer,
        "reorder_seconds": reorder,
        "share": reorder / transformer,
    }


def fastest(work: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest round; one before them warms up."""
    timed = timer("cpu")
    return min(take_turns([lambda: timed(work)[0]], rounds=rounds, warm_up=float("inf"))[0])


if __name__ == "__main__":
    sys.exit(main())
