"""Random calls, compiled for GPUs that are not here: what is drawn, and that all of it fits."""

from __future__ import annotations

import pytest
import torch

from sparge import KeepError
from sparge.values.recipe import POOL_GROUPS, PRECISIONS
from sparge_tools.static import fuzz
from sparge_tools.static.targets import TARGETS
from static_runs import needs_triton, run_alone


@pytest.fixture(scope="module")
def found():
    return run_alone("static_draws.py", "40")


@needs_triton
def test_forty_calls_compile_and_fit(found):
    assert found["faults"] == []
    assert found["unlisted"] == []
    assert found["kernels"] > 150
    assert found["targets"] == sorted(TARGETS)


@needs_triton
def test_a_kernel_beyond_shared_memory_is_a_fault(found):
    faults = found["small"]["faults"]
    assert faults
    assert all("of 4096 bytes of shared memory" in fault["what"] for fault in faults)


def test_draws_are_the_same_for_a_seed_and_reach_everything():
    many = fuzz.draws(200, seed=0)
    assert many[:40] == fuzz.draws(40, seed=0)
    assert len({variant.name for variant in many}) == 200
    assert fuzz.draws(5, seed=1) != many[:5]
    for reached, everything in (
        ({x.dtype for x in many}, set(fuzz.DTYPES)),
        ({x.D for x in many}, set(fuzz.HEAD_DIMS)),
        ({x.recipe.precision for x in many}, set(PRECISIONS)),
        ({x.recipe.keep for x in many}, set(fuzz.KEEPS)),
        ({x.recipe.pool_group for x in many if x.recipe.pools}, set(POOL_GROUPS)),
        ({x.mask for x in many}, {None, torch.bool, *fuzz.DTYPES}),
        ({x.packed for x in many}, {True, False}),
        ({x.recipe.pv_skip for x in many}, {None, 8.0}),
    ):
        assert reached == everything
    # An error budget raises heads: both launches of attend are compiled.
    assert any(isinstance(x.recipe.keep, KeepError) and x.recipe.quantized for x in many)


def test_spills_are_known_by_kernel_target_precision_and_head_dim():
    spill = fuzz.Spill("a draw", "attend_blocks", "sm_89", "exact", 256, 500, 8)
    assert fuzz.KnownSpill("attend_blocks", ("sm_",), 600).covers(spill)
    assert fuzz.KnownSpill("attend_blocks", ("sm_",), 500, ("exact",), (160, 256)).covers(spill)
    for other in (
        fuzz.KnownSpill("predict_rows", ("sm_",), 600),
        fuzz.KnownSpill("attend_blocks", ("gfx",), 600),
        fuzz.KnownSpill("attend_blocks", ("sm_",), 499),
        fuzz.KnownSpill("attend_blocks", ("sm_",), 600, ("half",)),
        fuzz.KnownSpill("attend_blocks", ("sm_",), 600, ("exact",), (160, 192)),
    ):
        assert not other.covers(spill)


def test_head_dims_64_and_128_spill_nothing_in_8_bits_but_where_it_is_said():
    """The shapes that most models have."""
    for D, precision in ((64, "int8"), (128, "int8"), (64, "int8-fast")):
        spill = fuzz.Spill("a draw", "attend_blocks", "sm_89", precision, D, 4, 4)
        assert not any(x.covers(spill) for x in fuzz.KNOWN)
