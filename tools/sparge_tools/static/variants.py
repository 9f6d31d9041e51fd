"""Which launches are compiled: the real stages run on meta tensors, with a forced architecture.

Meta tensors have shapes and no numbers, so a stage that read a number on the host would fail here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from sparge.backends.triton.launch import Launch, watch_launches
from sparge.engine.check import check_call
from sparge.values.call import Call, Inputs
from sparge.values.recipe import DEFAULT, KeepAll, KeepError, KeepMass, Recipe
from sparge.values.tokenmask import TokenMask

from .checks import Intent, LoopIntent
from .targets import TARGETS

STAGES = ("prepare", "predict", "select", "attend")
FP8 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "gfx942")
"""Architectures with 8-bit floating point matrix products."""
PRODUCTS = {"int8": ("int8", "half"), "int8-fast": ("int8", "fp8"), "half": ("half",), "exact": ()}
MOST = {"sm_80": 530, "sm_89": 530, "sm_120": 545, "sm_90": 440}
"""Instructions for one tile of 128 x 64, head dim 128, in the loop without masks, int8. Triton 3.6
needs 541 on sm_120; later ones, 505 to 510."""


SOME = ("sm_80", "sm_90", "gfx942")
KNOWN_SPILLS = {
    ("sm_120", "int8-fast", 128): (160, 40),
    ("gfx1100", "exact", 64): (160, 800),
    ("gfx1100", "half", 128): (40, 0),
    ("gfx1100", "int8", 64): (12, 64),
    ("gfx1100", "int8", 256): (240, 450),
}
"""By target, precision and head dim: bytes on NVIDIA, registers on AMD; then bytes of one iteration
of the first loop. On sm_120 it depends on the version of Triton (0 to 36 bytes); smaller tiles
spill nothing there and need 2.4 times the instructions. On gfx1100 no tile that was tried spills
nothing with every version."""


@dataclass(frozen=True)
class Variant:
    """A call, and the stages of it whose kernels are checked.

    mask: the dtype of a mask, bool or a bias. packed: the call is a pack of two sequences."""

    name: str
    recipe: Recipe
    D: int = 128
    is_causal: bool = True
    stages: tuple[str, ...] = ("attend",)
    Hq: int = 8
    Hk: int = 4
    L: int = 4096
    dtype: torch.dtype = torch.bfloat16
    mask: torch.dtype | None = None
    packed: bool = False
    targets: tuple[str, ...] = tuple(TARGETS)

    def inputs(self) -> Inputs:
        query = torch.empty(1, self.Hq, self.L, self.D, dtype=self.dtype, device="meta")
        key = torch.empty(1, self.Hk, self.L, self.D, dtype=self.dtype, device="meta")
        mask = None
        if self.mask is not None:
            mask = torch.empty(1, 1, self.L, self.L, dtype=self.mask, device="meta")
        return Inputs(query, key, torch.empty_like(key), mask)

    def call(self, inputs: Inputs) -> Call:
        assert inputs.value is not None
        return check_call(
            *inputs[:3],
            attn_mask=inputs.attn_mask,
            is_causal=self.is_causal,
            enable_gqa=self.Hq != self.Hk,
            recipe=self.recipe,
        )


def launches_of(variant: Variant, target: str) -> dict[str, list[Launch]]:
    """The launches of one call by stage; nothing is run."""
    from sparge.backends.triton import TRITON_BACKEND, architectures, stages, varlen
    from sparge.engine.execute import with_kinds
    from sparge.values.stages import Prepared

    inputs = variant.inputs()
    call = variant.call(inputs)
    tokens = TokenMask(call.Lq, call.Lk, call.is_causal, call.offset, inputs.attn_mask)
    made: dict[str, list[Launch]] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        with watch_launches(run=False) as launches:
            yield
        made[name] = list(launches)

    with architectures.assume(target), torch.no_grad():
        if variant.packed:  # two sequences of different lengths
            cuts = [0, call.Lq // 3, call.Lq]
            varlen.attend_packed(call, inputs, (cuts, cuts), "top_left", stage)
            return made
        whole: Any = {"to_plan": True, "to_attend": True}
        with stage("prepare"):
            tokens = with_kinds(TRITON_BACKEND, tokens)
            keys = stages.prepare_keys(call, inputs.key, inputs.value, **whole)
            queries = stages.prepare_queries(call, inputs.query, mean=keys.mean, **whole)
        prepared = Prepared(queries, keys)
        with stage("predict"):
            mass = stages.predict(call, prepared, tokens) if call.predicts else None
        with stage("select"):
            plan = stages.select(call, prepared, mass, tokens)
        with stage("attend"):
            stages.attend(call, prepared, plan, tokens)
    return made


def intent_of(variant: Variant, launch: Launch, stage: str, target: str) -> Intent:
    """What the attention kernel's loops are meant to be; other kernels' loops are not judged."""
    known, in_loop = KNOWN_SPILLS.get((target, variant.recipe.precision, variant.D), (0, 0))
    chained = variant.recipe.precision == "exact"
    if stage != "attend":
        return Intent(spills=known, chained=chained)
    recipe, ahead = variant.recipe, int(launch.options.get("num_stages", 1)) - 1
    products = PRODUCTS[recipe.precision]
    plain = recipe.precision == "int8" and recipe.pv_skip is None
    most = MOST.get(target) if plain and variant.D == 128 else None
    # int8-fast scales each product before it is added; exact multiplies three times.
    waits = recipe.precision in ("int8-fast", "exact")
    loops = [
        LoopIntent("full", products, ahead, waits, most),
        LoopIntent("partial", products, 0, waits),
    ]
    if recipe.pools:  # its V is never in fp8, and tiles without entries are branched around
        pooled = PRODUCTS["int8"] if recipe.quantized else products
        loops.append(LoopIntent("pooled", pooled))
    return Intent(tuple(loops), known, in_loop, chained)


def _attend(
    precision: str, D: int, *, causal: bool = True, pool: bool = True, skip: bool = False
) -> Variant:
    words = ["attend", precision, f"d{D}", "causal" if causal else "full"]
    words += ["pool"] if pool else []
    words += ["pv_skip"] if skip else []
    recipe = Recipe(
        KeepMass(0.97),
        precision=precision,
        skipped="pool" if pool else "drop",
        pv_skip=8.0 if skip else None,
    )
    targets = FP8 if precision == "int8-fast" else tuple(TARGETS)
    return Variant(" ".join(words), recipe, D, causal, targets=targets)


def default_variants() -> list[Variant]:
    exact, budget = Recipe(precision="exact"), Recipe(KeepError(0.05), skipped="pool")
    own = ("sm_89", "sm_90", "sm_100", "gfx942")
    return [
        Variant("default recipe", DEFAULT, stages=("prepare", "predict", "select")),
        _attend("int8", 128),
        _attend("int8", 64),
        _attend("int8", 128, causal=False, pool=False),
        _attend("int8", 64, causal=False, pool=False, skip=True),
        _attend("int8-fast", 128, pool=False),
        _attend("int8-fast", 64, pool=False),
        _attend("half", 128, pool=False),
        _attend("int8", 256, pool=False),
        replace(_attend("exact", 64, pool=False), dtype=torch.float32),
        Variant("exact", exact, stages=("predict",), dtype=torch.float32, targets=own),
        # Kernels that the default recipe does not launch: one target of each kind.
        Variant("error budget", budget, 64, stages=("select",), targets=SOME),
        Variant("head dim 80", DEFAULT, 80, stages=("prepare",), targets=SOME),
        Variant("mask", Recipe(), 64, stages=("predict",), mask=torch.bool, targets=SOME),
    ]


def full_variants() -> list[Variant]:
    """Every precision, head dim, diagonal, treatment of skipped blocks and second filter."""
    more = [
        _attend(precision, D, causal=causal, pool=pool, skip=skip)
        for precision, D, causal, pool, skip in product(
            ("int8", "int8-fast", "half"), (64, 128), (True, False), (True, False), (False, True)
        )
    ]
    more += [
        replace(
            _attend(precision, 128, pool=False),
            name=f"attend {precision} d128 mask",
            mask=torch.bool,
        )
        for precision in ("int8", "half")
    ]
    by_mean = Recipe(KeepMass(0.97), predictor="mean", min_similarity=0.5)
    everything, fast = Recipe(KeepAll()), replace(DEFAULT, precision="int8-fast")
    return [
        *{variant.name: variant for variant in (*default_variants(), *more)}.values(),
        Variant("predictor mean", by_mean, stages=("prepare", "predict", "select")),
        Variant("predictor rows", Recipe(predictor="rows"), stages=("predict",)),
        Variant("keep all", everything, stages=("prepare", "select")),
        Variant("int8-fast", fast, 64, stages=("prepare",), targets=FP8),
    ]
