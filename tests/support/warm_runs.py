"""What a process of its own tells of compiling ahead, on a card that is not here:
`python tests/support/warm_runs.py CACHE`, with Triton's cache in an empty directory."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

os.environ["TRITON_CACHE_DIR"] = sys.argv[1]

import torch

import sparge
from pretended_card import CARDS
from pretended_driver import pretended
from sparge import VISION
from sparge.backends.triton.warm import Warmed
from sparge.cli import main

VISION_CALL = {"recipe": VISION, "backend": "triton"}


def told(found: Warmed) -> dict[str, Any]:
    hows = [kernel.how for kernel in found.kernels]
    names = [kernel.name for kernel in found.kernels]
    return {"launches": found.launches, "names": names, "hows": hows, "text": str(found)}


def inputs(length: int) -> list[torch.Tensor]:
    return [torch.empty(1, 2, length, 64, dtype=torch.bfloat16, device="cuda:0") for _ in range(3)]


def in_a_process() -> dict[str, Any]:
    """Compiled ahead, again, and then called at another length."""
    with pretended(CARDS["sm_89"]) as traffic:
        first = sparge.warm(sparge.attention, *inputs(256), **VISION_CALL)
        launched = len(traffic.launches)
        again = sparge.warm(sparge.attention, *inputs(256), **VISION_CALL)
        before = len(traffic.compiled)
        sparge.attention(*inputs(4096), **VISION_CALL)
        called = {"launches": len(traffic.launches), "compiled": traffic.compiled[before:]}
    files = len(list(Path(sys.argv[1]).rglob("*.cubin")))
    with pretended(CARDS["sm_89"]):  # as another process would: its card has loaded nothing
        stored = sparge.warm(sparge.attention, *inputs(256), **VISION_CALL)
    return {
        "first": told(first),
        "launched": launched,
        "again": told(again),
        "called": called,
        "files": files,
        "stored": told(stored),
    }


def by_command(*arguments: str) -> Any:
    out = io.StringIO()
    with pretended(CARDS["sm_89"]), redirect_stdout(out):
        assert main(["warm", *arguments, "--device", "cuda:0", "--json"]) == 0
    return json.loads(out.getvalue())


if __name__ == "__main__":
    options = ("--heads", "4/2", "--head-dim", "64", "--causal", "--varlen", "--lse")
    print(json.dumps({"process": in_a_process(), "command": by_command(*options)}))
