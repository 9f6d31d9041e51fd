"""What `sparge bench` counts with: truths, pairs, peaks, and its self-check."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparge import KeepFraction, Recipe, make_plan
from sparge.api.accuracy import spread_rows
from sparge.backends.cpu import library as native
from sparge.backends.reference import stages as reference_stages
from sparge.cli.self_check import relative_l1
from sparge.synthetic import structured_qkv
from sparge.values.blockplan import BlockPlan
from sparge_tools.bench import gemm_peak
from sparge_tools.bench import truth as bench_truth
from sparge_tools.bench.cases import dense_pairs, kept_pairs
from sparge_tools.bench.truth import Truth
from sparge_tools.screen import percent, three_digits

L = 331


def test_sampled_rows_are_one_of_each_part():
    rows = spread_rows(1024, 64)
    assert torch.equal(rows, spread_rows(1024, 64))
    assert torch.equal(rows // 16, torch.arange(64))
    assert torch.equal(spread_rows(5, 64), torch.arange(5))


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_truth_of_some_rows_and_the_pairs_of_a_plan(is_causal):
    q, k, v = structured_qkv(Hq=4, Hk=2, L=L, D=16)
    rows = spread_rows(L, 20)
    truth = Truth(q, k, v, rows=rows, is_causal=is_causal)
    doubles = [x.double() for x in (q, k, v)]
    dense = F.scaled_dot_product_attention(*doubles, is_causal=is_causal, enable_gqa=True)
    assert relative_l1(truth.dense, dense[:, :, rows]) < 1e-12
    recipe = Recipe(keep=KeepFraction(0.4))
    plan = make_plan(q, k, is_causal=is_causal, enable_gqa=True, recipe=recipe, backend="reference")
    keeps = plan.to_mask().repeat_interleave(128, 2).repeat_interleave(64, 3)[:, :, :L, :L]
    keeps = keeps.tril() if is_causal else keeps
    assert kept_pairs(plan) == int(keeps.sum())
    sparse = F.scaled_dot_product_attention(*doubles, attn_mask=keeps, enable_gqa=True)
    assert relative_l1(truth.of_blocks(plan), sparse[:, :, rows]) < 1e-12
    everything = BlockPlan.from_mask(
        torch.ones_like(plan.to_mask()), Lq=L, Lk=L, is_causal=is_causal
    )
    assert kept_pairs(everything) == dense_pairs(1, 4, L, is_causal=is_causal)


def test_the_peak_is_the_faster_product(monkeypatch):
    monkeypatch.setattr(gemm_peak, "SECONDS", 0.01)
    found = gemm_peak.gemm_peaks(gemm_peak.gemm_rates([1]))[1]
    assert found["peak"] == max(found["gflops"].values()) == found["gflops"][found["of"]] > 0
    one, other = {2: {"bf16": 5.0, "fp32": 2.0}}, {2: {"bf16": 1.0, "fp32": 3.0}}
    both = {"gflops": {"bf16": 5.0, "fp32": 3.0}, "peak": 5.0, "of": "bf16"}
    assert gemm_peak.gemm_peaks(one, other) == {2: both}


def test_a_slow_product_is_not_tried_larger(monkeypatch):
    tried = []
    monkeypatch.setattr(gemm_peak, "_seconds", lambda x: tried.append(len(x)) or 1.0)
    assert set(gemm_peak.gemm_rates([1])[1].values()) == {2 * 256**3 / 1e9}
    assert tried == [256, 256]


def test_the_self_check_runs_what_will_be_measured():
    checks = bench_truth.check_sparse(["cpu" if native.why_missing() is None else "reference"])
    assert [check.recipe for check in checks] == list(bench_truth.SPARSE)
    assert {check.verdict for check in checks} == {"passed"}
    if native.why_missing() is None:
        assert {check.isa for check in checks} == {native.chosen_isa(native.available())}


def test_the_self_check_finds_blocks_that_are_not_the_references(monkeypatch, add_backend):
    def first_blocks(call, prepared, mass, tokens):
        plan = reference_stages.select(call, prepared, mass, tokens)
        n_k = plan.indices.shape[-1]
        facts = {"Lq": plan.Lq, "Lk": plan.Lk, "is_causal": plan.is_causal}
        return BlockPlan.from_mask(torch.arange(n_k) < plan.counts[..., None], **facts)

    monkeypatch.setattr(bench_truth, "SPARSE_LENGTH", 500)
    add_backend("lazy", select=first_blocks)
    checks = bench_truth.check_sparse(["lazy"])
    assert {check.verdict for check in checks} == {"failed"}
    assert all("of its blocks are not the reference's" in check.why for check in checks)


@pytest.mark.parametrize(
    "value, text", [(0.0, "0"), (0.04567, "0.046"), (0.643, "0.643"), (12.34, "12.3"), (345, "345")]
)
def test_three_digits(value, text):
    assert three_digits(value) == text


def test_percent():
    assert [percent(x) for x in (0.004, 0.035, 0.25, -0.01)] == ["0.4%", "3.5%", "25%", "-1.0%"]
