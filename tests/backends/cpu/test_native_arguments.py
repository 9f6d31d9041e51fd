"""`torch.ops.sparge_cpu.*` with wrong arguments: each raises, none crashes the process.

A test whose docstring names a signal died of it before the ops checked their arguments.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native_calls import CASES, DV, F64, HK, HQ, I8, I32, LK, LQ, N_K, B, D, mutated, numbers, valid
from native_calls import call as call_op
from sparge.backends.cpu import library as native

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")

LENGTH, OFFSET = 2**36, 2**40
STRIDED = ("query", "key", "value", "mask", "grad_out")
RUNS = [case for case in CASES if case != "backward"]
# Sizes that nothing else in the call fixes.
FREE = {
    ("queries", 6),
    ("predict", 6),
    ("predict rows", 6),
    ("select", 6),
    ("kinds", 1),
    ("kinds", 5),
    ("kinds", 6),
}
WHOLE = ["whole", "whole budget", "pack"]


def refused(case, match, **broken):
    arguments = valid(case)
    with pytest.raises(RuntimeError, match=match):
        call_op(arguments | broken)


def tensors_of(case):
    return {name: x for name, x in valid(case).items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("case", CASES)
def test_valid_arguments_are_accepted(case):
    call_op(valid(case))


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_of_another_dtype(case):
    for name, x in tensors_of(case).items():
        for dtype in (torch.float32, F64, I8, I32, torch.uint8, torch.bool, torch.complex64):
            same_mask = name == "mask" and dtype in (torch.float32, torch.bool)
            if dtype == x.dtype or same_mask:
                continue
            other = torch.zeros(x.shape, dtype=dtype)
            refused(case, "sparge_cpu: .*(must|needed)", **{name: other})


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_of_another_shape(case):
    """SIGSEGV before, for keys without rows among others."""
    for name, x in tensors_of(case).items():
        refused(case, f"{name} must have", **{name: x[0]})
        refused(case, f"{name} must have", **{name: x[None]})
        for d in range(x.dim()):
            refused(case, f"{name} must have", **{name: x.narrow(d, 0, 0)})
            if name == "protect" and d == 0:  # any number of ranges
                continue
            wider = x.repeat(*(3 if i == d else 1 for i in range(x.dim())))
            refused(case, "sparge_cpu: .* must ", **{name: wider})


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_that_is_not_contiguous(case):
    for name, x in tensors_of(case).items():
        if name not in STRIDED:
            apart = torch.stack([x, x], -1)[..., 0]
            refused(case, f"{name} must be contiguous", **{name: apart})


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_whose_storage_was_freed_or_is_elsewhere(case):
    """SIGSEGV before."""
    for name, x in tensors_of(case).items():
        freed = x.clone()
        freed.untyped_storage().resize_(x.nbytes // 2)
        refused(case, f"{name} is larger than its storage", **{name: freed})
        refused(case, "Meta", **{name: x.to("meta")})


@pytest.mark.parametrize("case", CASES)
def test_an_argument_that_is_left_out(case):
    """SIGSEGV before, for codes or scales that the precision needs and that do not come."""
    for name in tensors_of(case):
        with contextlib.suppress(RuntimeError):
            call_op(valid(case) | {name: None})
        if case != "backward":
            with contextlib.suppress(RuntimeError):
                call_op({key: x for key, x in valid(case).items() if key != name})


@pytest.mark.parametrize(
    ("case", "name", "match"),
    [
        ("attend", "q_codes", "q_codes and k_codes is needed"),
        ("attend", "q_scale", "q_scale is needed"),
        ("attend", "k_scale", "k_scale is needed"),
        ("attend fast", "v_codes", "v_codes is needed"),
        ("attend fast", "v_scale", "v_scale is needed"),
        ("attend", "entry_key", "entry_key and entry_value is needed"),
        ("attend", "entry_k_scale", "entry_k_scale is needed"),
        ("attend fast", "entry_v_scale", "entry_v_scale is needed"),
        ("attend exact", "query", "query and key is needed"),
        ("attend", "value", "value is needed"),
        ("attend", "out", "out, lse and pv_skips is needed"),
        ("predict", "q_pooled", "q_pooled and k_pooled is needed"),
        ("predict", "k_similarity", "k_similarity is needed"),
        ("predict", "mass", "mass is needed"),
        ("select", "mass", "mass is needed"),
        ("select", "amount", "amount is needed"),
        ("select", "q_similarity", "q_similarity is needed"),
        ("select", "counts", "counts, indices and allowed is needed"),
        ("select budget", "query", "query, key and value is needed"),
        ("select budget", "measured", "measured is needed"),
        ("select budget", "budget", "budget, six tables, is needed"),
        ("queries", "key_mean", "key_mean is needed"),
        ("queries", "query", "query is needed"),
        ("keys", "key", "key is needed"),
        ("keys", "value", "value is needed"),
        ("kinds", "kinds", "kinds is needed"),
        ("kinds", "mask", "kinds must be None without a mask"),
        ("pack", "k_rows", "a pack needs"),
        ("planned, raised", "value", "value is needed"),
    ],
)
def test_what_a_stage_cannot_do_without(case, name, match):
    assert name in valid(case)
    refused(case, match, **{name: None})


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("first", 0, 4),
        ("precision", 0, 3),
        ("keep", 0, 3),
        ("predictor", 0, 2),
        ("sample_rows", 1, 128),
        ("sink_blocks", 0, LENGTH),
        ("window", 0, LENGTH),
        ("pool_group", 0, 64),
        ("threads", 0, LENGTH),
        ("offset", -OFFSET, OFFSET),
    ],
)
@pytest.mark.parametrize("case", WHOLE)
def test_a_number_out_of_range(case, name, low, high):
    for wrong in (low - 1, high + 1, -(2**63), 2**63 - 1):
        refused(case, f"{name} must be in {low} … {high}, got {wrong}", **{name: wrong})


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("case", RUNS)
def test_a_shape_that_is_not_that_of_the_tensors(case, at):
    """SIGFPE before, for more key heads than query heads."""
    shape = valid(case)["shape"]
    for wrong in (-1, 2**40, 2**62, shape[at] + (0 if (case, at) in FREE else 1)):
        if wrong == shape[at]:
            continue
        refused(case, "sparge_cpu: ", shape=[*shape[:at], wrong, *shape[at + 1 :]])
    refused(case, "shape must be B, Hq", shape=shape[:at])


@pytest.mark.parametrize("case", CASES)
def test_an_instruction_set_that_is_not_there(case):
    n = len(native.isas())
    refused(case, f"isa must be in 0 … {n - 1}, got -1", isa=-1)
    refused(case, f"isa must be in 0 … {n - 1}, got {n}", isa=n)
    for name, isa in native.isas().items():
        if not isa.available:
            refused(case, f"isa {isa.number} is {name}, which this machine", isa=isa.number)


@pytest.mark.parametrize("case", WHOLE)
def test_numbers_that_cannot_be(case):
    for wrong in (float("nan"), float("inf"), -float("inf")):
        for name in ("softmax_scale", "pooled_cost", "raised_cost", "most_kept"):
            refused(case, f"{name} must be finite", **{name: wrong})
    for wrong in (float("nan"), -0.1):
        amount = torch.full((HQ,), wrong, dtype=F64)
        refused(case, "amount must be in 0 … ", amount=amount)
    refused(case, "protect must be in", protect=torch.tensor([[0, OFFSET + 1]]))
    refused(case, "pool_group must divide 64 or be 0, got 48", pool_group=48)


@pytest.mark.parametrize("case", WHOLE)
def test_tensors_that_do_not_fit_each_other(case):
    given = valid(case)
    for name in ("key", "value"):
        refused(case, "must have one dtype", **{name: given[name].half()})
    refused(case, "query must be float32", query=given["query"].to(I8))


@pytest.mark.parametrize(
    ("table", "at", "wrong", "match"),
    [
        (1, 0, 1.5, "masses must be in 0 … 1"),
        (1, 0, float("nan"), "masses must be in 0 … 1"),
        (1, 1, 0.0, "masses must not fall"),
        (2, 0, -1, "measured_steps must be in"),
        (2, 3, 10**6, "measured_steps must be in"),
        (3, 0, 1000, "next_measured must be in"),
        (4, 0, -1, "sparser must be in"),
        (5, 1, 0, "rows_by_blocks must be in"),
        (5, 2, 3, "rows_by_blocks must be in"),
        (0, 0, float("inf"), "rules must be finite"),
        (0, 14, 1e9, "sparse_steps of rules"),
        (0, 15, 0.0, "strata of rules"),
        (0, 16, 0.0, "measured_rows of rules"),
        (0, 17, 0.0, "many_blocks of rules"),
        (0, 18, 0.0, "far_share of rules"),
    ],
)
def test_tables_of_a_budget_that_lead_nowhere(table, at, wrong, match):
    for case in ("whole budget", "select budget", "pack budget"):
        budget = valid(case)["budget"]
        budget[table].view(-1)[at] = wrong
        refused(case, match, budget=budget)


def test_tables_and_places_of_a_budget_of_another_number():
    refused("whole budget", "six tables", budget=valid("whole budget")["budget"][:5])
    steps = torch.linspace(0, 1, 65, dtype=F64)
    budget = valid("whole budget")["budget"]
    refused(
        "whole budget", "number of masses must be in 1 … 64", budget=[budget[0], steps, *budget[2:]]
    )
    refused("whole budget", "deviation must have shape", budget_places=[torch.empty(3)])
    refused("whole budget", "budget_places must be 13 tensors", budget_places=[])


LISTS = ["planned", "planned, raised", "attend", "attend fast", "attend exact", "backward"]


@pytest.mark.parametrize("case", LISTS)
@pytest.mark.parametrize("count", [-1, N_K + 1, 10**6, -(2**31)])
def test_counts_beyond_the_list(case, count):
    """SIGSEGV before, for counts far beyond the list."""
    counts = valid(case)["counts"]
    counts.view(-1)[-1] = count
    refused(case, "counts and indices must be lists of ascending key blocks", counts=counts)


@pytest.mark.parametrize("case", LISTS)
@pytest.mark.parametrize(
    "kept", [[1, 2**30], [-1, 2], [-(2**31), 0], [1, N_K], [3, 1], [1, 1], [0, -1]], ids=str
)
def test_indices_that_are_no_ascending_key_blocks(case, kept):
    """SIGSEGV before, where they lie beyond the keys."""
    given = valid(case)
    given["indices"][1, 2, 1, :2] = torch.tensor(kept)
    given["counts"][1, 2, 1] = 2
    broken = {name: given[name] for name in ("counts", "indices")}
    refused(case, "must be lists of ascending key blocks", **broken)


@pytest.mark.parametrize("case", ["planned", "attend"])
@pytest.mark.parametrize("padding", [2**30, 3])
def test_padding_behind_the_count_is_not_read(case, padding):
    """A block was dropped before, if the padding named it."""
    found = []
    for number in (-1, padding):
        given = valid(case)
        behind = torch.arange(N_K) >= given["counts"][..., None]
        given["indices"].masked_fill_(behind, number)
        call_op(given)
        found.append([given[name] for name in ("out", "lse", "pv_skips")])
    assert found[0][0].isfinite().any()
    for expected, ours in zip(*found, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_kinds_come_with_a_mask_and_may_be_any_numbers():
    refused(
        "predict",
        "kinds must be None without a mask",
        mask=None,
        kinds=torch.zeros(1, 1, 3, 4, dtype=I8),
    )
    given = valid("predict")
    given["kinds"] = torch.full((B, 1, 3, N_K), 77, dtype=I8)
    call_op(given)


@pytest.mark.parametrize("name", ["q_rows", "k_rows"])
@pytest.mark.parametrize(
    "row", [(0, 0), (-1, 5), (3, -2), (2**62, 2**62), (0, 2**62), (-(2**63), 1)], ids=str
)
def test_a_sequence_that_cannot_be(name, row):
    table = valid("pack")[name]
    table[1] = torch.tensor(row)
    match = f"{name} must have a first row and at least one row .* 1 has"
    refused("pack", match, **{name: table})


@pytest.mark.parametrize("name", ["q_rows", "k_rows"])
def test_a_sequence_beyond_the_end(name):
    table = valid("pack")[name]
    table[1, 0] += 1
    refused("pack", f"{name} must end within .* sequence 1 has", **{name: table})


def test_tables_and_lists_of_other_sequences():
    refused("pack", "offsets must have shape", offsets=torch.tensor([0]))
    refused("pack", "offset must be in", offsets=torch.tensor([0, OFFSET + 1]))
    three = torch.tensor([[0, 50], [50, 50], [100, 50]])
    refused("pack", "k_rows must have the 2 sequences of q_rows", k_rows=three)
    limits = torch.tensor([0.0, float("nan")], dtype=F64)
    refused("pack", "limits must be finite", limits=limits)
    refused("pack", "mask must be None in a pack", mask=numbers(1, 1, LK, LK) > 0)
    refused("pack", "a pack must run all stages", first=1)


def test_outputs_that_two_sequences_would_write():
    table = valid("pack")["q_rows"]
    table[1] = torch.tensor([110, 70])
    refused("pack", "q_rows must be ascending and share no row", q_rows=table)
    table = torch.tensor([[20, 130], [0, 20]])
    refused("pack", "q_rows must be ascending", q_rows=table)


def test_rows_of_sequences_that_are_left_are_not_written():
    given = valid("pack") | {"limits": torch.tensor([0.0, 1e-9], dtype=F64)}
    given["out"].fill_(7.0)
    assert call_op(given) is False
    assert given["attended"].tolist() == [True, False]
    assert bool((given["out"][130:] == 7.0).all())
    assert not bool((given["out"][:130] == 7.0).any())


@pytest.mark.parametrize(
    ("case", "output", "other"),
    [
        ("whole", "pv_skips", "counts"),
        ("whole", "allowed", "counts"),
        ("pack", "allowed", "counts"),
        ("attend", "pv_skips", "counts"),
        ("attend", "lse", "lse_shift"),
        ("select", "allowed", "counts"),
        ("keys", "k_scale", "value"),
        ("backward", "grad_query", "query"),
    ],
)
def test_an_output_that_is_another_argument(case, output, other):
    given = valid(case)
    x, y = given[other].contiguous(), given[output]
    shared = x.view(y.dtype).view(-1)[: y.numel()].view(y.shape)
    with pytest.raises(RuntimeError, match="must share no memory"):
        call_op(given | {other: x, output: shared})


def test_a_head_dim_that_is_too_large():
    """SIGSEGV before: kernels keep rows on the stack."""
    wide = {"query": numbers(B, HQ, LQ, 320), "key": numbers(B, HK, LK, 320)}
    refused("whole", "D must be in 1 … 256, got 320", shape=[B, HQ, HK, LQ, LK, 320, DV], **wide)
    broken = {name: wide[name] for name in ("query", "key")}
    refused("backward", "query must have a head dim of at most 256, got 320", **broken)


def test_lengths_that_only_a_stride_of_zero_can_have():
    key = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**37, 1)
    refused("keys", "Lk must be in", shape=[1, 1, 1, 0, 2**37, 1, 1], key=key)
    refused("keys", "shape is too large", shape=[2**20, 2**20, 2**20, 0, 2**20, D, DV])


# ---- whatever comes


@given(data=st.data())
@settings(max_examples=900, deadline=None, suppress_health_check=list(HealthCheck))
def test_mutated_arguments_raise_or_run(data):
    arguments = valid(data.draw(st.sampled_from(CASES)))
    names = [name for name in arguments if name != "op"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        arguments[name] = data.draw(mutated(arguments[name]), label=name)
    with contextlib.suppress(RuntimeError):
        call_op(arguments)
