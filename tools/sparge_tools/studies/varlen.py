"""Packed sequences in one call, against one call for each.

    python -m sparge_tools.studies.varlen

64 causal sequences of one attention layer of SmolLM2-135M (9 query and 3 key heads of 64), packed:
short ones and mixed ones. Their tokens are the first ones of a synthetic text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge.cli import BAD_RESULT, OK, Parser
from sparge.cli.arguments import add_json, whole
from sparge.cli.screen import console, deliver
from sparge.support.turns import take_turns, timer
from sparge.synthetic import structured_qkv

from ..machine import machine_text, where_it_runs
from . import study

HEADS: Any = {"Hq": 9, "Hk": 3, "D": 64}
LENGTHS = {"short": (128, 512), "mixed": (128, 4096)}
BACKENDS = ("auto", "cpu")
SHORT_AT_LEAST, NOISE = 1.3, 0.97
"""What is expected of the short ones; no ratio may be below the other."""

Pack = tuple[Tensor, Tensor, Tensor, Tensor]


@study
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.varlen", description=__doc__)
    parser.add_argument("--sequences", type=whole, default=64, help="default: %(default)s")
    parser.add_argument("--rounds", type=whole, default=5, help="default: %(default)s")
    add_json(parser)
    args = parser.parse_args(argv)
    cases = [
        measure(name, backend, args.sequences, args.rounds)
        for name in LENGTHS
        for backend in BACKENDS
    ]
    document = {"format": "sparge.varlen/1", **where_it_runs(), "cases": cases}

    def show() -> None:
        for case in cases:
            console().print(
                f"{case['sequences']} {case['lengths']} sequences, {case['tokens']} tokens, "
                f"backend {case['backend']} (ran {case['ran']}): one call "
                f"{1e3 * case['one_call_seconds']:.1f} ms, one each "
                f"{1e3 * case['one_each_seconds']:.1f} ms, {case['ratio']:.2f} x at density "
                f"{case['density']:.3f}, largest difference {case['difference']:.2g}"
            )
        console().print(f"machine: {machine_text(document)}")

    deliver(document, args, show)
    return OK if all(map(is_good, cases)) else BAD_RESULT


def is_good(case: dict[str, Any]) -> bool:
    """Fast enough, and with a backend that was asked for the same bits."""
    least = SHORT_AT_LEAST if case["lengths"] == "short" else NOISE
    return case["ratio"] >= least and (case["backend"] == "auto" or case["difference"] == 0.0)


def measure(lengths: str, backend: str, sequences: int, rounds: int) -> dict[str, Any]:
    """Fastest of the rounds; both take turns. `auto` may compute in a pack what it leaves to torch
    outside of one, so that their results differ by rounding."""
    timed = timer("cpu")
    pack = make_pack(*LENGTHS[lengths], sequences)
    options: Any = {"is_causal": True, "enable_gqa": True, "backend": backend}
    at_once = partial(in_one_call, pack, **options)
    one_each = partial(in_one_call_each, pack, **options)
    with torch.inference_mode():
        with sparge.record() as runs:
            out = at_once()
        difference = float((out.float() - one_each().float()).abs().max())
        once, each = take_turns(
            [lambda: timed(at_once)[0], lambda: timed(one_each)[0]], rounds=rounds
        )
    return {
        "lengths": lengths,
        "sequences": sequences,
        "tokens": len(pack[0]),
        "backend": backend,
        "ran": runs[0].backend,
        "density": runs[0].density,
        "difference": difference,
        "one_call_seconds": min(once),
        "one_each_seconds": min(each),
        "ratio": min(each) / min(once),
    }


def make_pack(shortest: int, longest: int, sequences: int) -> Pack:
    """Query, key and value `[T, H, D]` in bf16, and the boundaries."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (sequences,), generator=generator)
    text = structured_qkv(L=longest, **HEADS)
    rows = [x[0].transpose(0, 1).bfloat16() for x in text]
    query, key, value = (torch.cat([x[:L] for L in lengths.tolist()]) for x in rows)
    return query, key, value, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def in_one_call(pack: Pack, **options: Any) -> Tensor:
    query, key, value, cuts = pack
    return sparge.attention_varlen(query, key, value, cuts, cuts, **options)


def in_one_call_each(pack: Pack, **options: Any) -> Tensor:
    *tensors, cuts = pack
    outs = []
    for start, stop in pairwise(cuts.tolist()):
        q, k, v = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in tensors)
        outs.append(sparge.attention(q, k, v, **options)[0].transpose(0, 1))
    return torch.cat(outs)


if __name__ == "__main__":
    sys.exit(main())
