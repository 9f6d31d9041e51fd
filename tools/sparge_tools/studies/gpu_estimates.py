"""Every estimate about GPUs that the documentation prints, and how a card replaces it.

`build/gpu-check.json` has one field for each under `replaces`, named `file#heading: name`, with
what the page says, the unit, and what was measured on the card (None in a dry run). `ESTIMATES`
lists them; each function below says what it measures.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge import DEFAULT, KeepFraction, Recipe, attention
from sparge.backends.triton import NAME
from sparge.backends.triton.launch import Launch, watch_launches
from sparge.backends.triton.rates import DENSE_SHARE, Card, Throughput, rates_of
from sparge.cli.doctor_command import crossover_rows
from sparge.engine.check import check_call
from sparge.routing.crossover import Crossover
from sparge.support.turns import timer
from sparge.values.backend import DENSE_WAY, HEAD_DIMS, name_of
from sparge.values.recipe import PRECISIONS

ON_A_GPU = "docs/backends.md#on-a-gpu"
BACKEND = "docs/backends.md#the-triton-backend"
VERIFIED = "docs/backends.md#how-it-is-verified"
LIMITS = "docs/limits.md#sizes-and-devices"
LENGTHS = tuple(2**n for n in range(10, 18))
REPEAT = 10


@dataclass(frozen=True)
class Rig:
    """One card: timed calls, launches one by one. A dry rig runs everything and times nothing: its
    seconds are None, and what is made of them is None.

    device: such as "cuda:0". length, heads: of the calls. measured: the calibrated costs.
    estimated: what would be assumed without them. suite: the result of the conformance suite.
    bench: the rows of `sparge bench`. dry: nothing is timed."""

    device: str
    card: Card
    length: int
    heads: int
    measured: Crossover | None
    estimated: Crossover | None
    suite: dict[str, Any]
    bench: list[dict[str, Any]]
    dry: bool = False

    @property
    def clocks(self) -> float:
        """Of all multiprocessors in a second."""
        return self.card.processors * self.card.clock

    def inputs(self, length: int, D: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        drawn = (torch.randn(1, self.heads, length, D, dtype=dtype) for _ in range(3))
        return [x.to(self.device) for x in drawn]

    def seconds(self, work: Callable[[], Any]) -> float | None:
        """Median of some runs, waiting for the card; after one that may compile."""
        work()
        if self.dry:
            return None
        timed = timer(self.device)
        return statistics.median(timed(work)[0] for _ in range(REPEAT))

    def launches(self, D: int = 128, recipe: Recipe = DEFAULT, **options: Any) -> list[Launch]:
        """Those of one call, which runs."""
        given = {"is_causal": True, "recipe": recipe, "backend": NAME, **options}
        with watch_launches() as launches:
            attention(*self.inputs(self.length, D), **given)
        return launches

    def seconds_of(self, launch: Launch) -> float | None:
        """Of one launch again, on the tensors that it had."""
        run = launch.kernel[launch.grid]
        return self.seconds(lambda: run(**launch.arguments, **launch.options))

    def machine_code(self, launch: Launch) -> dict[str, Any]:
        """What the driver tells of a kernel that it has loaded."""
        kernel = launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)
        kernel.run  # noqa: B018  loads it
        facts = {"registers": kernel.n_regs, "spilled": kernel.n_spills}
        return {**facts, "shared_bytes": kernel.metadata.shared}


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


@dataclass(frozen=True)
class Estimate:
    """where: the page and its heading. says: words of the page. measure: on a card; None where
    nothing is timed."""

    name: str
    where: str
    says: str
    unit: str
    measure: Callable[[Rig], Any]

    @property
    def key(self) -> str:
        return f"{self.where}: {self.name}"


def replacements(rig: Rig) -> dict[str, dict[str, Any]]:
    """By `Estimate.key`. A measurement that raises leaves its message; the others go on."""
    found = {}
    for estimate in ESTIMATES:
        entry: dict[str, Any] = {"says": estimate.says, "unit": estimate.unit, "measured": None}
        try:
            entry["measured"] = estimate.measure(rig)
        except Exception as error:  # nobody has tried this card; what else can be told is told
            entry["failure"] = f"{type(error).__name__}: {error}"
        found[estimate.key] = entry
    return found


# --- from the calibration -----------------------------------------------------------------------


def _share(rig: Rig, dtype: str, D: int, way: str, assumed: float) -> float | None:
    """The share of the peak that explains the measured cost of a pair: the estimate divides by it.
    None if the cost was not estimated or not measured."""
    if rig.measured is None or rig.estimated is None:
        return None
    name = name_of(dtype, D, way)
    estimated, measured = rig.estimated.costs.get(name), rig.measured.costs.get(name)
    return assumed * estimated.element / measured.element if estimated and measured else None


def _rates(rig: Rig) -> Throughput:
    found = rates_of(rig.card.name, rig.card.architecture)
    if found is None:
        raise ValueError(f"nothing was assumed of {rig.card.architecture}")
    return found


def dense_share(rig: Rig) -> Any:
    """Share of the peak, by head dim."""
    assumed = _rates(rig).dense_share
    return {D: _share(rig, "bf16", D, DENSE_WAY, assumed) for D in HEAD_DIMS}


def dense_share_fp32(rig: Rig) -> Any:
    """Share of the rate of three TF32 products, by head dim."""
    return {D: _share(rig, "fp32", D, DENSE_WAY, DENSE_SHARE) for D in HEAD_DIMS}


def our_share(rig: Rig) -> Any:
    """Share of products and instructions one after the other, by precision."""
    assumed = _rates(rig).our_share
    return {way: _share(rig, "bf16", 128, way, assumed) for way in PRECISIONS}


def break_even(rig: Rig) -> Any:
    """The density above which dense attention is faster, by dtype and precision."""
    return None if rig.measured is None else crossover_rows(rig.measured)


def sparse_from(rig: Rig) -> int | None:
    """The fewest tokens at which 20 % of the blocks are faster than dense attention; None also if
    they are at none of `LENGTHS`."""
    if rig.measured is None:
        return None
    density = 0.2
    recipe = replace(DEFAULT, keep=KeepFraction(density))
    element = torch.empty((), dtype=torch.bfloat16, device=rig.device)
    for length in LENGTHS:
        x = element.expand(1, rig.heads, length, 128)
        call = check_call(x, x, x, is_causal=True, recipe=recipe)
        if rig.measured.estimate(call, density).faster:
            return length
    return None


def calibration(rig: Rig) -> float | None:
    return None if rig.measured is None else rig.measured.took


# --- timed here ---------------------------------------------------------------------------------


def launches(rig: Rig) -> Any:
    """Seconds of a call of 128 tokens."""
    q, k, v = rig.inputs(128, 128)
    return {
        "ours": rig.seconds(lambda: attention(q, k, v, backend=NAME)),
        "dense": rig.seconds(lambda: F.scaled_dot_product_attention(q, k, v)),
    }


def first_call(rig: Rig) -> Any:
    """Kernels and seconds to compile them, in a process of its own with an empty cache."""
    options = ["--heads", str(rig.heads), "--head-dim", "128", "--device", rig.device, "--json"]
    found: dict[str, Any] = {}
    for name, more in (("default", ["--causal"]), ("vision", ["--recipe", "vision"])):
        if rig.dry:
            found[name] = None
            continue
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-m", "sparge", "warm", *options, *more],
                env={**os.environ, "TRITON_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                check=True,
            )
        (warmed,) = json.loads(done.stdout)["calls"]
        seconds = sum(kernel["seconds"] for kernel in warmed["kernels"])
        found[name] = {"kernels": len(warmed["kernels"]), "seconds": seconds}
    return found


def gradients(rig: Rig) -> float | None:
    """Seconds of forward and backward, ours / dense attention's."""
    recipe = Recipe(KeepFraction(0.5), precision="half")
    q, k, v = (x.requires_grad_() for x in rig.inputs(rig.length, 64))

    def ours() -> None:
        attention(q, k, v, is_causal=True, recipe=recipe, backend=NAME).sum().backward()

    def dense() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return None if rig.dry else ratio(rig.seconds(ours), rig.seconds(dense))


def _attends(found: list[Launch]) -> Launch:
    return next(launch for launch in found if launch.name == "attend_blocks")


def machine_code(rig: Rig) -> Any:
    return {D: rig.machine_code(_attends(rig.launches(D))) for D in HEAD_DIMS}


def clocks(rig: Rig) -> float | None:
    """Of a multiprocessor: all of them work on tiles of 128 queries and 64 keys at once."""
    attends = _attends(rig.launches())
    seconds, tiles = rig.seconds_of(attends), int(attends.arguments["tensors"].counts.sum())
    return None if seconds is None else ratio(seconds * rig.clocks, tiles)


def call(rig: Rig) -> Any:
    found = rig.launches()
    rows = []
    for launch in found:
        seconds = rig.seconds_of(launch)
        rate = None if seconds is None else launch.bytes / seconds
        share = ratio(rate, rig.card.bandwidth)
        rows.append({"kernel": launch.name, "bytes": launch.bytes, "share": share})
    return {"launches": len(found), "kernels": rows}


def spills(rig: Rig) -> Any:
    """What a card refuses is told beside what spills: the rest is looked at in any case."""
    found = []
    for precision, D in product(PRECISIONS, (64, 128, 256)):
        row = {"precision": precision, "head_dim": D}
        try:
            each = rig.launches(D, replace(DEFAULT, precision=precision))
            codes = [(launch.name, rig.machine_code(launch)) for launch in each]
        except Exception as error:
            found.append({**row, "refused": f"{type(error).__name__}: {error}"})
            continue
        spilled = {name: code["spilled"] for name, code in codes if code["spilled"]}
        found += [{**row, "kernel": name, "spilled": n} for name, n in spilled.items()]
    return found


# --- from what ran before -----------------------------------------------------------------------


def kept(rig: Rig) -> Any:
    return [
        {"contender": row["contender"], "length": row["length"], "density": row["density"]}
        for row in rig.bench
        if row["recipe"] is not None and row["why_not"] is None
    ]


def not_run_yet(rig: Rig) -> Any:
    told = {name: rig.suite[name] for name in ("tests", "failures", "errors", "skipped", "passed")}
    return {"card": rig.card.name, "architecture": rig.card.architecture, **told}


ESTIMATES = (
    Estimate("dense, 16 bits", ON_A_GPU, "70 % of the peak; 92 %", "share", dense_share),
    Estimate("dense, fp32", ON_A_GPU, "three TF32 products", "share", dense_share_fp32),
    Estimate("ours", ON_A_GPU, "one after the other, at 60 %", "share", our_share),
    Estimate("launches", ON_A_GPU, "0.3 ms per call of this backend", "seconds", launches),
    Estimate("kept", ON_A_GPU, "40 % of a long row", "density", kept),
    Estimate("sparse from", ON_A_GPU, "before anything is measured", "tokens", sparse_from),
    Estimate("break-even", ON_A_GPU, "the density below which", "density", break_even),
    Estimate("calibration", ON_A_GPU, "a minute or more, mostly compilation", "s", calibration),
    Estimate("first call", ON_A_GPU, "seconds, mostly compilation", "seconds", first_call),
    Estimate("gradients", BACKEND, "cost as much as dense attention", "ratio", gradients),
    Estimate("machine code", VERIFIED, "registers | spilled | shared", "by head dim", machine_code),
    Estimate("clocks", VERIFIED, "prints an estimate by roofline", "clocks per tile", clocks),
    Estimate("call", VERIFIED, "takes 7 launches", "share of the peak", call),
    Estimate("spills", LIMITS, "Some kernels spill registers", "registers", spills),
    Estimate("not run yet", LIMITS, "has not run on a GPU yet", "tests", not_run_yet),
)
