"""What `sparge bench` counts and judges by: truths, pairs, peaks, targets, and its gate."""

from __future__ import annotations

import pytest
import torch

from sparge import KeepFraction, Recipe, make_plan
from sparge.accuracy import sample_rows
from sparge.backends.cpu import library as native
from sparge.backends.reference import stages as reference_stages
from sparge.blockplan import BlockPlan
from sparge.report import gate, peak
from sparge.report.entries import WANTED
from sparge.report.measure import (
    Truth,
    dense_fp64,
    kept_score_elements,
    relative_l1,
    score_elements,
)
from sparge.report.tables import percent, three_digits
from sparge.report.targets import MET, NO_TARGET, NOT_MEASURED, NOT_MET, TARGETS, judge
from sparge.synthetic import structured_qkv

L = 331


def test_sampled_rows_are_one_of_each_part():
    rows = sample_rows(1024, 64)
    assert torch.equal(rows, sample_rows(1024, 64))
    assert torch.equal(rows // 16, torch.arange(64))
    assert torch.equal(sample_rows(5, 64), torch.arange(5))


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_truth_of_some_rows_and_the_pairs_of_a_plan(is_causal):
    q, k, v = structured_qkv(Hq=2, Hk=2, L=L, D=16)
    rows = sample_rows(L, 20)
    truth = Truth(q, k, v, rows=rows, is_causal=is_causal)
    dense = dense_fp64(q, k, v, is_causal=is_causal)
    assert relative_l1(truth.dense, dense[:, :, rows]) < 1e-12
    recipe = Recipe(keep=KeepFraction(0.4))
    plan = make_plan(q, k, is_causal=is_causal, recipe=recipe, backend="reference")
    keeps = plan.to_mask().repeat_interleave(128, 2).repeat_interleave(64, 3)[:, :, :L, :L]
    keeps = keeps.tril() if is_causal else keeps
    assert kept_score_elements(plan) == int(keeps.sum())
    sparse = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=keeps
    )
    assert relative_l1(truth.of_blocks(plan), sparse[:, :, rows]) < 1e-12
    everything = BlockPlan.from_mask(
        torch.ones_like(plan.to_mask()), Lq=L, Lk=L, is_causal=is_causal
    )
    assert kept_score_elements(everything) == score_elements(1, 2, L, is_causal=is_causal)


def test_the_peak_is_the_faster_product(monkeypatch):
    monkeypatch.setattr(peak, "SECONDS", 0.01)
    found = peak.gemm_peaks([1])[1]
    assert found["peak"] == max(found["gflops"].values()) == found["gflops"][found["of"]] > 0
    one = {"gflops": {"bf16": 5.0, "fp32": 2.0}}
    other = {"gflops": {"bf16": 1.0, "fp32": 3.0}}
    assert peak.larger(one, other) == {
        "gflops": {"bf16": 5.0, "fp32": 3.0},
        "peak": 5.0,
        "of": "bf16",
    }


def test_a_slow_product_is_not_tried_larger(monkeypatch):
    tried = []
    monkeypatch.setattr(peak, "_seconds", lambda x: tried.append(len(x)) or 1.0)
    assert peak.gemm_peak()["peak"] == 2 * 256**3 / 1e9
    assert tried == [256, 256]


def row(recipe_name, length=8192, head_dim=64, **figures):
    case = {"length": length, "head_dim": head_dim, "causal": True, "threads": 2}
    return {**case, "backend": "cpu", "kind": "sparse", "recipe_name": recipe_name, **figures}


def verdicts(rows, isa):
    return {found["target"]: found for found in judge(rows, isa)}


def test_targets_name_contenders_that_there_are():
    names = {wanted.name for wanted in WANTED}
    for target in TARGETS:
        assert {target.recipe, target.beyond or target.recipe, *target.also.values()} <= names


def test_a_target_is_met_if_every_long_case_meets_it():
    rows = [row("all", ratio=1.6), row("all", head_dim=128, ratio=1.5)]
    found = verdicts(rows, "avx2")["all kept, times SDPA bf16"]
    assert (found["verdict"], found["worst"], found["best"]) == (MET, 1.5, 1.6)
    assert found["worst_case"]["head_dim"] == 128
    short = row("all", length=4096, ratio=0.5)
    assert verdicts([*rows, short], "avx2")["all kept, times SDPA bf16"]["cases"] == 2
    slow = row("all", length=16384, ratio=1.4)
    found = verdicts([*rows, slow], "avx2")["all kept, times SDPA bf16"]
    assert (found["verdict"], found["cases_met"], found["cases"]) == (NOT_MET, 2, 3)
    other = {**slow, "backend": "reference"}
    assert verdicts([other], "avx2")["all kept, times SDPA bf16"]["verdict"] == NOT_MEASURED


def test_targets_depend_on_the_instruction_set():
    rows = [row("40%", ratio=2.0), row("fast 40%", ratio=2.7), row("20%", ratio=3.0)]
    name = "40 % kept, times SDPA bf16"
    assert verdicts(rows, "avx512")[name]["verdict"] == MET  # int8-fast counts there
    assert verdicts(rows, "amx")[name]["worst"] == 2.0
    assert verdicts(rows, "avx2")[name]["verdict"] == NOT_MET
    name = "20 % kept, times SDPA bf16"
    assert verdicts(rows, "avx2")[name]["verdict"] == NO_TARGET
    assert verdicts(rows, "amx")[name]["verdict"] == NOT_MET
    assert verdicts([], None)[name]["verdict"] == NOT_MEASURED


def test_shares_of_dense_time_must_stay_below():
    rows = [row("40%", overhead=0.03), row("40% blend", overhead=0.06)]
    found = verdicts(rows, "avx2")
    at_8k = found["statistics + selection (mean), share of SDPA bf16 at 8k"]
    at_32k = found["statistics + selection (mean), share of SDPA bf16 at 32k"]
    assert (at_8k["verdict"], at_32k["verdict"]) == (MET, NOT_MEASURED)
    on_top = found["the exact rows of blend on top, share of SDPA bf16"]
    assert on_top["worst"] == pytest.approx(0.03)
    assert on_top["verdict"] == MET


def test_the_gate_runs_what_will_be_measured():
    checks = gate.check_sparse(["cpu" if native.why_missing() is None else "reference"])
    assert [check.recipe for check in checks] == list(gate.SPARSE)
    assert {check.verdict for check in checks} == {"passed"}
    if native.why_missing() is None:
        assert {check.isa for check in checks} == {native.chosen_isa(native.available())}


def test_the_gate_finds_blocks_that_are_not_the_references(monkeypatch, add_backend):
    def first_blocks(call, prepared, mass, tokens):
        plan = reference_stages.select(call, prepared, mass, tokens)
        n_k = plan.indices.shape[-1]
        facts = {"Lq": plan.Lq, "Lk": plan.Lk, "is_causal": plan.is_causal}
        return BlockPlan.from_mask(torch.arange(n_k) < plan.counts[..., None], **facts)

    monkeypatch.setattr(gate, "SPARSE_LENGTH", 500)
    add_backend("lazy", select=first_blocks)
    checks = gate.check_sparse(["lazy"])
    assert {check.verdict for check in checks} == {"failed"}
    assert all("of its blocks are not those of the reference" in check.why for check in checks)


@pytest.mark.parametrize(
    "value, text", [(0.0, "0"), (0.04567, "0.046"), (0.643, "0.643"), (12.34, "12.3"), (345, "345")]
)
def test_three_digits(value, text):
    assert three_digits(value) == text


def test_percent():
    assert [percent(x) for x in (0.004, 0.035, 0.25, -0.01)] == ["0.4%", "3.5%", "25%", "-1.0%"]
