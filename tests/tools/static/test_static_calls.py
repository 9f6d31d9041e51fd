"""Whole calls on meta tensors, in a process of its own: launches, compilations, no host reads."""

from __future__ import annotations

import pytest

from static_runs import needs_triton, run_alone


@pytest.fixture(scope="module")
def calls():
    return run_alone("static_calls.py")


@needs_triton
def test_no_stage_reads_a_number_on_the_host(calls):
    """Every variant runs on meta tensors, which have none: reading one raises."""
    assert calls["refused"] == ["item", "tolist", "bool", "int"]
    assert len(calls["launches"]) > 100
    for name, stages in calls["launches"].items():
        assert stages["attend"], name
        assert stages["select"], name
        if "keep all" not in name:
            assert stages["predict"], name


@needs_triton
def test_a_new_length_compiles_nothing(calls):
    again = {
        name: {kernel: n for kernel, n in kernels.items() if n != 1}
        for name, kernels in calls["compilations"].items()
        if any(n != 1 for n in kernels.values())
    }
    # An error budget measures in the caller's own precision too, and may raise heads to it.
    twice = {"attend_blocks": 2, "measure_rows": 2, "prepare_keys": 2}
    assert {name for name in again if again[name] != twice or "error budget" not in name} == set()


@needs_triton
def test_a_call_makes_few_launches(calls):
    for n, moved, least, _ in calls["chains"]:
        assert 0 < n <= 8
        assert moved > least
