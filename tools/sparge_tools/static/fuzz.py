"""Random calls, compiled: every valid call must compile, fit shared memory, and spill only where it
is listed.

    sparge bench --static --draws 200 --targets sm_89,gfx942

Each draw is a call: dtype, head dim, precision, mask, rule of keeping, pooled group, pack, second
filter. All of its kernels are compiled for each target; one that a draw before had is not compiled
again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparge.backends.triton.launch import Launch
from sparge.values.recipe import (
    POOL_GROUPS,
    PRECISIONS,
    PREDICTORS,
    Keep,
    KeepAll,
    KeepError,
    KeepFraction,
    KeepMass,
    Recipe,
)

from .checks import Intent, fits_shared
from .compile import Compiled, build, read
from .resources import nvidia_usage
from .suite import Made, Task, compile_all, compile_task
from .targets import TARGETS, Target
from .variants import FP8, STAGES, Variant

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
KEEPS: tuple[Keep, ...] = (KeepMass(0.97), KeepFraction(0.3), KeepAll(), KeepError(0.05))
MASKS = ("none", "none", "bool", "bias", "fp32 bias")
"""Without a mask twice as often."""


@dataclass(frozen=True)
class Fault:
    """What went wrong with one kernel of a draw."""

    draw: str
    kernel: str
    target: str
    what: str


@dataclass(frozen=True)
class Spill:
    """A kernel that keeps registers in memory. amount: bytes (NVIDIA) or registers (AMD)."""

    draw: str
    kernel: str
    target: str
    precision: str
    D: int
    amount: int
    in_main_loop: int


@dataclass(frozen=True)
class Found:
    kernels: int
    faults: tuple[Fault, ...]
    spills: tuple[Spill, ...]

    @property
    def unlisted(self) -> list[Spill]:
        """Spills that are not known and told in docs/limits.md."""
        return [x for x in self.spills if not any(known.covers(x) for known in KNOWN)]


@dataclass(frozen=True)
class KnownSpill:
    """targets: how their names begin. precisions, D: of the calls, all of them if empty. most:
    bytes on NVIDIA, registers on AMD."""

    kernel: str
    targets: tuple[str, ...]
    most: int
    precisions: tuple[str, ...] = ()
    D: tuple[int, ...] = ()

    def covers(self, spill: Spill) -> bool:
        return (
            spill.kernel == self.kernel
            and spill.target.startswith(self.targets)
            and (not self.precisions or spill.precision in self.precisions)
            and (not self.D or spill.D in self.D)
            and spill.amount <= self.most
        )


UNEVEN, LARGE = (40, 72, 80, 96), (160, 192, 256)
NVIDIA, CDNA, RDNA = ("sm_",), ("gfx9",), ("gfx1",)
KNOWN = (
    KnownSpill("attend_blocks", NVIDIA, 2200, ("exact",)),
    KnownSpill("attend_blocks", NVIDIA, 2000, D=(*UNEVEN, *LARGE)),
    KnownSpill("attend_blocks", NVIDIA, 160, ("half", "int8-fast"), (128,)),
    KnownSpill("attend_blocks", ("sm_80", "sm_90", "sm_10", "sm_110"), 64, ("int8",), (128,)),
    KnownSpill("prepare_keys", NVIDIA, 4600, D=LARGE),
    KnownSpill("prepare_keys", NVIDIA, 128, D=UNEVEN),
    KnownSpill("prepare_queries", NVIDIA, 1700, D=LARGE),
    KnownSpill("measure_rows", NVIDIA, 2800),
    KnownSpill("predict_rows", NVIDIA, 300),
    KnownSpill("predict_means", NVIDIA, 80),
    KnownSpill("survey_rows", NVIDIA, 200),
    KnownSpill("select_blocks", NVIDIA, 32),
    KnownSpill("attend_blocks", CDNA, 340, ("exact",)),
    KnownSpill("attend_blocks", CDNA, 300, D=(*UNEVEN, *LARGE)),
    KnownSpill("prepare_keys", CDNA, 32, D=LARGE),
    KnownSpill("survey_rows", CDNA, 16),
    KnownSpill("prepare_queries", RDNA, 40, D=LARGE),
    KnownSpill("prepare_keys", RDNA, 4, D=LARGE),
    *(
        KnownSpill(kernel, RDNA, 1200)
        for kernel in (
            "attend_blocks",
            "predict_means",
            "predict_rows",
            "survey_rows",
            "measure_rows",
        )
    ),
)
"""Told in docs/limits.md. Of the loops that most time goes into, attend_blocks at head dims 64 and
128 in 8 bits, few are here, with a few bytes: sm_120, and with a mask sm_80, sm_90 and sm_100."""


def draw(random: random.Random) -> Variant:
    """One valid call. Its name says everything that was drawn."""
    keep, precision = random.choice(KEEPS), random.choice(PRECISIONS)
    dtype, D, mask = random.choice(DTYPES), random.choice(HEAD_DIMS), random.choice(MASKS)
    budget = isinstance(keep, KeepError)
    # Packs have no mask; with an error budget they are attended one after another.
    packed = mask == "none" and not budget and random.random() < 0.3
    group = random.choice((0, *POOL_GROUPS))
    pools: dict[str, Any] = {"skipped": "pool", "pool_group": group} if group else {}
    if not isinstance(keep, KeepAll):
        predictor = "blend" if budget else random.choice(PREDICTORS)
        pools["predictor"] = predictor
        if predictor == "mean":
            pools["min_similarity"] = random.choice((None, 0.5))
        else:
            pools["sample_rows"] = random.choice((4, 8))
    pv_skip = random.choice((None, None, 8.0))
    causal, grouped = random.random() < 0.5, random.random() < 0.5
    masks = {"bool": torch.bool, "bias": dtype, "fp32 bias": torch.float32}
    recipe = Recipe(keep, precision=precision, pv_skip=pv_skip, **pools)
    words = [
        str(dtype).removeprefix("torch."), f"d{D}", precision, type(keep).__name__, f"mask {mask}",
        "causal" if causal else "full", f"pool {group}" if group else "drop",
        str(pools.get("predictor", "")), "pack" if packed else "", "filter" if pv_skip else "",
    ]  # fmt: skip
    targets = FP8 if precision == "int8-fast" else tuple(TARGETS)
    return Variant(
        " ".join(filter(None, words)), recipe, D, causal, stages=STAGES, Hq=8,
        Hk=4 if grouped else 8, L=2048, dtype=dtype, mask=masks.get(mask), packed=packed,
        targets=targets,
    )  # fmt: skip


def draws(n: int, seed: int) -> list[Variant]:
    """Distinct calls; the same for the same seed, whatever the number."""
    generator = random.Random(seed)
    made: dict[str, Variant] = {}
    while len(made) < n:
        variant = draw(generator)
        made.setdefault(variant.name, variant)
    return list(made.values())


def compile_and_weigh(launch: Launch, target: Target) -> Compiled:
    """As `compile_launch`; machine code is read only where registers may be spilled, which takes as
    long as compiling."""
    made = build(launch, target)
    if not target.is_nvidia or nvidia_usage(made.asm["cubin"])[1]:
        return read(made, launch.name, target)
    warps, stages, shared = (
        getattr(made.metadata, name) for name in ("num_warps", "num_stages", "shared")
    )
    return Compiled(
        target=target.name, kernel=launch.name, num_warps=warps, num_stages=stages, shared=shared,
        registers=0, spills=0, scalar_spills=0, stack=0, instructions=0, matrix={}, loops=(),
    )  # fmt: skip


_seen: dict[str, set[str]] = {}
"""Kernels that this worker has compiled, by target."""


def compile_draw(task: Task) -> list[Made]:
    """The kernels of one draw for one target that this worker has not compiled yet; never raises,
    but a compiler may take the process along."""
    return compile_task(task, seen=_seen.setdefault(task[1], set()), compile=compile_and_weigh)


def compile_draws(tasks: Sequence[Task], *, step: Callable[[str], None] = lambda _: None) -> Found:
    """All of them, each for its target. A draw whose compiler crashed is a fault."""
    return judge_draws(tasks, compile_all(tasks, step=step, work=compile_draw))


def judge_draws(tasks: Iterable[Task], made: Iterable[Made]) -> Found:
    """What is wrong with the kernels of some draws."""
    variants = {variant.name: variant for variant, _ in tasks}
    faults: list[Fault] = []
    spills: list[Spill] = []
    kernels = 0
    for each in made:
        draw, target, compiled = each.variant, each.target, each.compiled
        kernels += each.kernel not in ("launching", "compiler")
        if compiled is None:
            faults.append(Fault(draw, each.kernel, target, each.error))
            continue
        shared = fits_shared(compiled, Intent())
        if not shared.ok:
            faults.append(Fault(draw, compiled.kernel, target, shared.reason))
        if compiled.spills:
            of = variants[draw].recipe.precision, variants[draw].D
            in_loop = compiled.loops[0].spills if compiled.loops else 0
            spills.append(Spill(draw, compiled.kernel, target, *of, compiled.spills, in_loop))
    return Found(kernels, tuple(faults), tuple(spills))
