"""One record per call: what ran, where the time went, and why."""

from __future__ import annotations

import json
import math
import threading

import pytest
import torch

import sparge
from calls import EXACT, HALF, block_mask, only, tensors
from sparge import KeepAll, KeepFraction, Recipe

# --- the record -------------------------------------------------------------------------------


def call_attention(grad=False, **options):
    q, k, v = tensors()
    q.requires_grad_(grad)
    return sparge.attention(q, k, v, **options)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradient"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="auto"),
        pytest.param({"return_lse": True}, id="auto with lse"),
        pytest.param({"block_mask": block_mask()}, id="auto with a block mask"),
        pytest.param({"backend": "reference"}, id="reference"),
        pytest.param({"backend": "dense"}, id="dense"),
    ],
)
def test_the_record_agrees_with_explain(options, grad):
    q, k, v = tensors()
    q.requires_grad_(grad)
    choice = sparge.explain(q, k, v, recipe=HALF, **options)
    with sparge.record() as runs:
        sparge.attention(q, k, v, recipe=HALF, **options)
    run = only(runs)
    assert (run.what, run.backend, run.reason) == ("attention", choice.backend, choice.reason)
    assert run.rejected == dict(choice.rejected)
    assert run.routed_to_dense == choice.routed_to_dense
    assert run.recipe == HALF
    assert run.call == "[1, 2, 140x200, 16] float32 on cpu"


def test_the_environment_is_the_reason_also_with_a_gradient(monkeypatch):
    monkeypatch.setenv("SPARGE_BACKEND", "reference")
    with sparge.record() as runs:
        call_attention(grad=True, recipe=HALF)
    assert "SPARGE_BACKEND=reference" in only(runs).reason


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_stage_times_and_their_total(precision):
    with sparge.record() as runs:
        call_attention(recipe=Recipe(precision=precision), backend="reference")
        call_attention(recipe=Recipe(precision=precision), backend="dense")
    sparse, dense = runs
    assert {"prepare", "predict", "select", "attend", "total"} == set(sparse.seconds)
    assert {"attend", "total"} <= set(dense.seconds)
    for run in runs:
        stages = [s for name, s in run.seconds.items() if name != "total"]
        assert all(s > 0 for s in stages)
        assert run.seconds["total"] == pytest.approx(sum(stages))


def test_every_function_leaves_one_record():
    q, k, v = tensors()
    with sparge.record() as runs:
        plan = sparge.make_plan(q, k, recipe=EXACT)
        sparge.attend(q, k, v, plan, recipe=EXACT)
        sparge.attend(q, k, v, plan)
        sparge.attention(q, k, v, backend="reference")
    assert [run.what for run in runs] == ["make_plan", "attend", "attend", "attention"]
    made, exact, quantized, _ = runs
    assert made.density == exact.density == quantized.density == plan.density
    assert {"prepare", "predict", "select", "total"} == set(made.seconds)
    assert {"prepare", "attend", "total"} == set(exact.seconds) == set(quantized.seconds)


def skipped_groups(q, k, kept, pv_skip):
    """The second filter written out, one head, fp64: row groups skipped in each query block."""
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    counts = []
    for i_q, row in enumerate(kept):
        count = 0
        for top in range(128 * i_q, min(128 * (i_q + 1), len(q)), 16):
            rows = scores[top : min(top + 16, 128 * (i_q + 1))]
            row_max = torch.full((len(rows),), -math.inf, dtype=torch.float64)
            for i_k in row.nonzero()[:, 0].tolist():
                block_max = rows[:, 64 * i_k : 64 * (i_k + 1)].amax(1)
                count += bool((row_max - block_max >= pv_skip).all())
                row_max = torch.maximum(row_max, block_max)
        counts.append(count)
    return counts


@pytest.mark.parametrize("options", [{}, {"block_mask": block_mask()}], ids=["predicted", "mask"])
def test_density_and_skips_of_the_record_are_the_plan_s(options):
    q, k, v = tensors(Hq=1, Hk=1)
    # Keys of the first block shine in the first coordinate, and so do most queries.
    k[:, :, :64, 0] += 12
    q[:, :, :100, 0] = 3
    recipe = Recipe(keep=KeepFraction(0.75), precision="exact", pv_skip=5.0)
    plan = sparge.make_plan(q, k, recipe=recipe, backend="reference", **options)
    with sparge.record() as runs:
        sparge.attention(q, k, v, recipe=recipe, backend="reference", **options)
    run = only(runs)
    pv_skips = torch.tensor([[skipped_groups(q[0, 0], k[0, 0], plan.to_mask()[0, 0], 5.0)]])
    assert int(pv_skips.sum()) > 0
    assert run.density == plan.density
    assert (run.kept, run.allowed) == (int(plan.counts.sum()), int(plan.allowed.sum()))
    assert run.pv_skipped == plan.pv_skipped(pv_skips)
    assert 0 < run.pv_skipped < 1
    assert run.sparsity == pytest.approx(plan.sparsity(pv_skips))


@pytest.mark.parametrize("name", ["reference", "dense"])
def test_density_of_a_causal_call_counts_only_allowed_blocks(name):
    with sparge.record() as runs:
        call_attention(is_causal=True, recipe=Recipe(keep=KeepAll()), backend=name)
    # Rows 0–127 see key blocks 0 and 1, rows 128–139 see 0, 1 and 2; two heads.
    assert (only(runs).kept, only(runs).allowed, only(runs).density) == (10, 10, 1.0)


def test_to_dict_goes_to_json():
    with sparge.record() as runs:
        call_attention(backend="reference", recipe=Recipe(pv_skip=(3.0, None)))
        call_attention()
        x = torch.randn(30, 1, 16)
        cuts = torch.tensor([0, 10, 30])
        sparge.attention_varlen(x, x, x, cuts, cuts)
    for run in runs:
        data = json.loads(json.dumps(run.to_dict(), allow_nan=False))
        assert data["backend"] == run.backend
        assert data["seconds"] == run.seconds
        assert Recipe.from_dict(data["recipe"]) == run.recipe
        assert len(data["parts"]) == len(run.parts)
    assert runs[2].to_dict()["parts"][0]["call"] == "[1, 1, 10, 16] float32 on cpu"


def test_a_record_prints_on_one_line():
    with sparge.record() as runs:
        call_attention()
    text = str(only(runs))
    for words in ("attention", "dense", "routed to dense", "density 1.000", "pv_skipped", "attend"):
        assert words in text
    assert "\n" not in text


def test_nested_records_each_collect():
    with sparge.record() as outer:
        call_attention()
        with sparge.record() as inner:
            call_attention(backend="reference")
        call_attention(backend="dense")
    call_attention()
    assert [run.backend for run in inner] == ["reference"]
    assert [run.backend for run in outer] == ["dense", "reference", "dense"]
    assert inner[0] is outer[1]


def test_an_error_ends_the_record_and_keeps_what_ran():
    seen = []

    def fail():
        with sparge.record() as runs:
            seen.append(runs)
            call_attention()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    call_attention()
    assert len(only(seen)) == 1


def test_a_call_that_fails_leaves_no_record():
    with sparge.record() as runs, pytest.raises(ValueError, match="scale"):
        call_attention(scale=math.nan)
    assert runs == []


def test_other_threads_are_not_collected():
    theirs = []

    def work():
        call_attention(backend="reference")
        with sparge.record() as runs:
            call_attention(backend="reference")
        theirs.extend(runs)

    with sparge.record() as mine:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert mine == []
        call_attention()
    assert [run.backend for run in mine] == ["dense"]
    assert [run.backend for run in theirs] == ["reference"]


def test_recording_changes_no_result():
    plain = call_attention(backend="reference")
    with sparge.record():
        recorded = call_attention(backend="reference")
    assert torch.equal(plain, recorded)
