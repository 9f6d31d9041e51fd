"""What the Triton backend refuses, with reasons; in a process without a GPU, and pretending one."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import sparge
from calls import a_call, tensors
from sparge import Recipe, Unsupported
from sparge.backends.triton import architectures
from sparge.backends.triton.architectures import why_too_large, why_too_many
from sparge.backends.triton.packages import Installation
from sparge.routing import choose
from sparge.values.backend import Device, Host
from static_runs import needs_triton

triton_backend = importlib.import_module("sparge.backends.triton")


@pytest.fixture
def pretend(monkeypatch):
    """A host whose cuda device is of an architecture."""

    def pretend(name):
        made = Host("x", {"cuda": Device("cuda", "a card", name)})
        for module in (importlib.import_module("sparge.routing.router"), architectures):
            monkeypatch.setattr(module, "host", lambda kind="cpu", index=0: made)

    return pretend


def why(**facts):
    with pytest.raises(Unsupported) as caught:
        choose(a_call(**facts), "triton")
    return caught.value.reasons["triton"]


def test_it_runs_on_gpus_and_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        Unsupported, match=r"it runs on GPUs \(cuda, xpu\), and the tensors are on c"
    ):
        sparge.attention(*tensors(), backend="triton")


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_121", "gfx942:sramecc+:xnack-", "gfx1201"])
def test_architectures_that_are_served(pretend, name):
    pretend(name)
    choice = choose(a_call(device="cuda"), "triton")
    assert choice.backend == "triton"


@pytest.mark.parametrize(
    "name, reason",
    [
        (
            "sm_75",
            "sm_75 is too old: it has no int8 and bf16 matrix instructions; served are sm_80",
        ),
        ("gfx906", "the architecture gfx906 is not known; served are sm_80"),
        ("", "the architecture of this device is not known"),
    ],
)
def test_other_architectures_are_refused_with_those_served(pretend, name, reason):
    pretend(name)
    assert why(device="cuda").startswith(reason)


def test_fp8_is_refused_where_there_is_none(pretend):
    fast = Recipe(precision="int8-fast")
    pretend("sm_80")
    assert "sm_80 has no fp8 matrix instructions" in why(device="cuda", recipe=fast)
    assert "use precision 'int8'" in why(device="cuda", recipe=fast)
    pretend("sm_89")
    assert choose(a_call(device="cuda", recipe=fast), "triton").backend == "triton"


def test_float64_is_left_to_the_reference(pretend):
    pretend("sm_90")
    assert "float64" in why(device="cuda", dtype=torch.float64)


def test_a_missing_or_old_triton_is_named(pretend, monkeypatch):
    pretend("sm_90")
    for found, reason in (
        ({}, "triton is not installed; torch requires triton==3.7.1: pip install 'triton==3.7.1'"),
        ({"triton": "3.1.0"}, "triton 3.1.0 is too old; 3.6 or newer is needed"),
        ({"triton-rocm": "3.4.0"}, "triton-rocm 3.4.0 is too old; 3.6 or newer is needed"),
        ({"triton": "3.6.0"}, ""),
        ({"triton-windows": "3.6.0.post25"}, ""),
    ):
        there = Installation(bool(found), found, "Linux", "cuda", "triton==3.7.1")
        monkeypatch.setattr(triton_backend, "installation", lambda there=there: there)
        monkeypatch.setattr(triton_backend, "MISSING", triton_backend.why_missing())
        if reason:
            assert reason in why(device="cuda")
        else:
            assert triton_backend.MISSING is None


@pytest.mark.parametrize(
    "largest, facts, words",
    [
        ({"B": 65_535}, {"B": 65_536}, "at most 65,535 batch entries, and the call has 65,536"),
        ({"Hq": 65_535}, {"Hq": 65_536}, "query heads"),
        ({"Lq": 2**35 - 128}, {"Lq": 2**35}, "programs for the query blocks"),
        ({"Lk": 2**37 - 64}, {"Lk": 2**37}, "key blocks"),
        (
            {"Lq": 65_535 * 128, "has_mask": True},
            {"Lq": 65_535 * 128 + 1, "has_mask": True},
            "at most 65,535 query blocks under a mask, and the call has 65,536; split the queries",
        ),
        (
            {"B": 255, "Hq": 257, "has_mask": True},
            {"B": 256, "Hq": 256, "has_mask": True},
            "heads of a mask in all batch entries",
        ),
    ],
)
def test_grids_beyond_the_limit_are_refused(pretend, largest, facts, words):
    pretend("sm_90")
    call = a_call(device="cuda")
    fits = replace(call, **{"Hq": 1, "Hk": 1, **largest})
    assert choose(fits, "triton").backend == "triton"
    with pytest.raises(Unsupported) as caught:
        choose(replace(call, **{"Hq": 1, "Hk": 1, **facts}), "triton")
    assert words in caught.value.reasons["triton"]


def test_grids_of_amd_cards_count_threads(pretend):
    pretend("gfx942")
    call = replace(a_call(device="cuda"), Lq=2**27)
    assert "programs for the query blocks" in why_too_large(call, "gfx942")
    assert why_too_large(replace(call, Lq=2**27 - 128), "gfx942") is None
    assert why_too_large(call, "sm_90") is None


@needs_triton
def test_packs_beyond_the_limit_are_refused():
    assert why_too_many(65_535) is None
    assert "at most 65,535 packed sequences, got 65,536; split the pack" in why_too_many(65_536)
    stages = triton_backend.TRITON_BACKEND.packed()
    cuts = list(range(65_537))
    with pytest.raises(Unsupported, match="cannot attend this pack"):
        stages.attend_packed(a_call(), None, (cuts, cuts), "top_left", nullcontext)


def test_every_row_of_the_table_has_tiles_for_every_call():
    for name, architecture in architectures.TABLE.items():
        for precision in ("int8", "int8-fast", "half", "exact"):
            for D in (1, 64, 65, 128, 129, 256):
                for filters in (False, True):
                    tiles = architecture.tiles_for(precision, D, filters=filters)
                    assert 128 % tiles.block_m == 0, name
                    assert tiles.block_m >= 16
        assert architecture.source


def test_an_assumed_architecture_ends_with_its_block():
    assert not architectures.assumed()
    with architectures.assume("sm_90") as found:
        assert architectures.architecture_of("cuda") is found
    assert not architectures.assumed()
