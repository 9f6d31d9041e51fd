"""`torch.ops.sparge_cpu.*` with wrong arguments: each raises, none crashes the process.

A test whose docstring names a signal died of it before the ops checked their arguments.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native_calls import (
    DV,
    ERROR,
    EXACT,
    F64,
    FINITE,
    HK,
    HQ,
    I8,
    I32,
    INT8,
    INT8_FAST,
    LK,
    LQ,
    MASKED,
    N_K,
    N_Q,
    RANGES,
    STEPS,
    VALID,
    B,
    D,
    attend,
    call,
    first,
    mutated,
    numbers,
    step_errors,
)
from native_refusals import refusals_of, tensors_of
from sparge.backends.cpu import library as native

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")

TENSORS, refused = tensors_of(VALID), refusals_of(VALID)
STRIDED = {
    "query", "key", "value", "x", "mask", "grad_out", "pooled_key", "pooled_value", "exact_query",
    "exact_key", ("step_errors fast", "codes"),
}  # fmt: skip
FLOATS = ["attend exact", "predict rows", "backward", "survey half", "step_errors own"]
# Sizes that nothing else in the call fixes.
FREE = {
    ("key_mean", "key", 2),
    ("deviations", "query", 3),
    ("choose_rows", "far_ranks", 1),
    ("step_errors own", "value", 3),
    ("take_steps", "indices", 3),
}


@pytest.mark.parametrize("case", VALID)
def test_valid_arguments_are_accepted(case):
    call(case, VALID[case]())


@pytest.mark.parametrize(("case", "name"), TENSORS)
def test_a_tensor_of_another_dtype(case, name):
    x = VALID[case]()[name]
    for dtype in (torch.float32, F64, I8, I32, torch.uint8, torch.bool, torch.complex64):
        same_mask = name == "mask" and dtype in (torch.float32, torch.bool)
        if dtype == x.dtype or same_mask:
            continue
        refused(case, "sparge_cpu: .*(must|needed)", **{name: torch.zeros(x.shape, dtype=dtype)})


@pytest.mark.parametrize(("case", "name"), TENSORS)
def test_a_tensor_of_another_shape(case, name):
    """SIGSEGV before, for keys without rows among others."""
    x = VALID[case]()[name]
    refused(case, f"{name} must have", **{name: x[0]})
    refused(case, f"{name} must have", **{name: x[None]})
    for d in range(x.dim()):
        refused(case, f"{name} must have", **{name: x.narrow(d, 0, 0)})
        if (case, name, d) not in FREE:
            wider = x.repeat(*(3 if i == d else 1 for i in range(x.dim())))
            refused(case, "sparge_cpu: .* must ", **{name: wider})


@pytest.mark.parametrize(("case", "name"), [t for t in TENSORS if not {t, t[1]} & STRIDED])
def test_a_tensor_that_is_not_contiguous(case, name):
    x = VALID[case]()[name]
    apart = torch.stack([x, x], -1)[..., 0]
    refused(case, f"{name} must be contiguous", **{name: apart})


@pytest.mark.parametrize(("case", "name"), TENSORS)
def test_a_tensor_whose_storage_was_freed(case, name):
    """SIGSEGV before."""
    x = VALID[case]()[name].clone()
    x.untyped_storage().resize_(x.nbytes // 2)
    refused(case, f"{name} is larger than its storage", **{name: x})


@pytest.mark.parametrize(("case", "name"), TENSORS)
def test_a_tensor_of_another_device(case, name):
    refused(case, "Meta", **{name: VALID[case]()[name].to("meta")})


@pytest.mark.parametrize("case", VALID)
def test_an_instruction_set_that_is_not_there(case):
    refused(case, "isa must be in 0 … 4, got -1", isa=-1)
    refused(case, "isa must be in 0 … 4, got 5", isa=len(native.ISAS))
    for number, name in enumerate(native.ISAS):
        if name not in native.available():
            refused(case, f"isa {number} is {name}, which this machine", isa=number)


@pytest.mark.parametrize(("case", "name", "low", "high"), RANGES)
def test_a_number_out_of_range(case, name, low, high):
    """SIGFPE before, for 0 rows per scale."""
    for wrong in (low - 1, high + 1, -(2**63), 2**63 - 1):
        refused(case, f"{name} must be in {low} … {high}, got {wrong}", **{name: wrong})


@pytest.mark.parametrize(("case", "name"), FINITE)
def test_a_number_that_is_not_finite(case, name):
    for wrong in (float("nan"), float("inf"), -float("inf")):
        refused(case, f"{name} must be finite", **{name: wrong})


def test_a_block_of_another_size():
    """SIGFPE before, for 0."""
    for block in (0, -1, 3, 96, 256, 2**40):
        refused("statistics", "block must be a divisor of 128", block=block)


def test_pooled_entries_of_another_kind():
    refused("attend", "pool_group must divide 64, got 48", pool_group=48)
    refused("attend", "pooled_key must have shape", pool_group=32)
    refused("attend", "pooled_value is needed with pooled_key", pooled_value=None)
    refused("attend", "pooled_key is needed with pooled_value", pooled_key=None)
    refused("attend", "pooled_k_scale is needed with int8 codes", pooled_k_scale=None)
    refused("attend fast", "pooled_v_scale is needed with int8 values", pooled_v_scale=None)
    scale = torch.zeros(B, HK, 1, DV)
    refused("attend", "pooled_v_scale must be None without int8 values", pooled_v_scale=scale)
    half = attend(EXACT)["pooled_key"].bfloat16()
    refused("attend exact", "pooled_key must have the dtype of key, or float32", pooled_key=half)


def filled(name, case, value):
    x = VALID[case]()[name].clone()
    x.view(-1)[-1] = value
    return x


@pytest.mark.parametrize("case", ["attend", "attend fast", "attend exact", "backward"])
@pytest.mark.parametrize("count", [-1, N_K + 1, 10**6, -(2**31)])
def test_counts_beyond_the_list(case, count):
    """SIGSEGV before, for counts far beyond the list."""
    broken = filled("counts", case, count)
    refused(case, f"counts must be in 0 … {N_K}, got {count}", counts=broken)


@pytest.mark.parametrize("case", ["attend", "attend fast", "attend exact", "backward"])
@pytest.mark.parametrize(
    "kept",
    [[1, 2**30], [-1, 2], [-(2**31), 0], [1, N_K], [3, 1], [1, 1], [0, -1]],
    ids=str,
)
def test_indices_that_are_no_ascending_key_blocks(case, kept):
    """SIGSEGV before, where they lie beyond the keys."""
    indices = VALID[case]()["indices"]
    indices[1, 2, 1, :2] = torch.tensor(kept)
    refused(case, "indices must be ascending key blocks", indices=indices)


def test_padding_behind_the_count_is_not_read():
    found = []
    for padding in (-1, 2**30):
        arguments = attend(INT8)
        arguments["indices"][..., 2:] = padding
        call("attend", arguments)
        found.append([arguments[name] for name in ("out", "lse", "pv_skips")])
    assert found[0][0].isfinite().any()
    for expected, ours in zip(*found, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_padding_behind_the_count_is_pooled_like_any_skipped_block():
    """A block was dropped before, if the padding named it."""
    outs = []
    for padding in (-1, 3):
        arguments = attend(INT8) | {"is_causal": False}
        arguments["indices"][:] = torch.tensor([0, 1, padding, padding])
        call("attend", arguments)
        outs.append(arguments["out"])
    assert torch.equal(*outs)


@pytest.mark.parametrize("case", MASKED)
def test_kinds_that_do_not_exist(case):
    for value in (-1, 3, 127):
        broken = filled("kinds", case, value)
        refused(case, "kinds must be 0, 1 or 2", kinds=broken)


@pytest.mark.parametrize("case", MASKED)
def test_a_mask_comes_with_its_kinds(case):
    refused(case, "mask and kinds must come together", mask=None)
    refused(case, "mask and kinds must come together", kinds=None)


@pytest.mark.parametrize(
    ("case", "name", "low", "high"),
    [
        ("survey", "rows", -1, LQ - 1),
        ("survey", "first_steps", -1, STEPS),
        ("draw_measured", "rows", -1, 2**36 - 1),
        ("draw_measured", "steps", 0, STEPS - 1),
        ("step_errors", "rows", -1, LQ - 1),
        ("step_errors", "first_steps", -1, STEPS),
        ("step_errors", "steps", 1, STEPS - 1),  # behind the one before
        ("choose_rows", "starts", 0, LQ - 1),
        ("choose_rows", "n_far", 1, 40),  # open rows of the last block
        ("choose_rows", "n_near", 0, 38),
        ("choose_rows", "far_ranks", 0, 1),
        ("choose_rows", "near_places", 0, 127),
        ("decide", "next_measured", 0, 1),
        ("decide", "sparser", 0, STEPS - 1),
    ],
)
def test_entries_out_of_range(case, name, low, high):
    for wrong in {low - 1, high + 1, -(2**31), 2**62 if name == "rows" else 2**31 - 1}:
        refused(case, f"{name} must be in {low} … {high}", **{name: filled(name, case, wrong)})


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1, float("inf")])
def test_amounts_that_are_no_share(value):
    refused("select", "amount must be in 0 … 1", amount=filled("amount", "select", value))
    masses = filled("masses", "first_steps", value)
    refused("first_steps", "masses must be in 0 … 1", masses=masses)
    if value != 1.1:
        for case in ("choose_rows", "decide"):
            refused(case, "budget must be finite", budget=filled("budget", case, value))


def test_more_steps_than_the_scratch_is_made_for():
    masses = torch.linspace(0, 1, 65, dtype=F64)
    refused("first_steps", "number of masses must be in 1 … 64", masses=masses)
    refused("survey", "steps of dropped must be in 1 … 64", dropped=torch.empty(B, HQ, 5, 65))
    refused("step_errors", "number of steps must be in 1 … 64", steps=torch.arange(65, dtype=I32))


def test_pooled_blocks_that_no_step_keeps():
    """Read out of bounds before: their step was looked up in front of the table."""
    found = []
    for entries in (1.0, 1e6):
        arguments = step_errors(INT8) | {"first_steps": torch.full_like(first(), -1)}
        arguments |= {"is_causal": False, "pooled_value": arguments["pooled_value"] * entries}
        call("step_errors", arguments)
        found.append(arguments["total"])
    assert torch.equal(*found)


def test_bools_that_are_neither():
    may = VALID["choose_rows"]()["may"].view(torch.uint8) * 200
    refused("choose_rows", "bytes of may must be in 0 … 1", may=may.view(torch.bool))


def test_no_rows_to_look_at():
    for case, output in (("survey", "dropped"), ("step_errors", "total")):
        arguments = VALID[case]()
        arguments["rows"][:] = -1
        call(case, arguments)
        assert not arguments[output].any()


@pytest.mark.parametrize("case", FLOATS)
@pytest.mark.parametrize("heads", [3, 8], ids="{} key heads".format)
def test_heads_that_do_not_share_keys(case, heads):
    """SIGFPE before, for more key heads than query heads."""
    broken = {"key": numbers(B, heads, LK, D)}
    if "value" in VALID[case]():
        broken["value"] = numbers(B, heads, LK, DV)
    refused(case, f"query must have a multiple of the {heads} heads of key, got 4", **broken)


@pytest.mark.parametrize("case", FLOATS)
def test_a_head_dim_that_is_too_large(case):
    """SIGSEGV before: kernels keep rows on the stack."""
    broken = {"query": numbers(B, HQ, LQ, 320), "key": numbers(B, HK, LK, 320)}
    refused(case, "query must have a head dim of at most 256, got 320", **broken)
    if "value" in VALID[case]():
        refused(case, "value must have a head dim of at most 256", value=numbers(B, HK, LK, 320))


def test_lengths_that_only_a_stride_of_zero_can_have():
    key = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**40, 1)
    refused("key_mean", "key has more than", key=key, mean=torch.empty(1, 1, 1))
    key = torch.zeros(1, 1, 1, 1).expand(2**20, 2**20, 2**20, 1)
    refused("key_mean", "key is too large", key=key)


@pytest.mark.parametrize(
    ("case", "broken", "match"),
    [
        ("attend", {"q_scale": None}, "q_scale is needed with int8 codes"),
        ("attend", {"k_scale": None}, "k_scale is needed with int8 codes"),
        ("attend", {"precision": EXACT}, "query and key must be float32"),
        ("attend exact", {"precision": INT8}, "query and key must be int8 codes"),
        ("attend", {"precision": INT8_FAST}, "value must be int8 codes"),
        ("attend fast", {"precision": INT8}, "value must be float32"),
        ("attend fast", {"v_scale": None}, "v_scale is needed"),
        ("attend exact", {"v_scale": numbers(B, HK, N_K, DV)}, "v_scale must be None"),
        ("attend exact", {"q_scale": numbers(B, HQ, LQ)}, "q_scale must be None"),
        ("attend exact", {"key": numbers(B, HK, LK, D).half()}, "key must have the dtype of query"),
        ("attend exact", {"value": numbers(B, HK, LK, DV).half()}, "value must have the dtype"),
        ("attend", {"out": torch.empty(B, HQ, LQ, DV, dtype=I8)}, "out must be float32"),
        ("predict rows", {"precision": INT8}, "query and key must be int8 codes"),
        ("predict", {"q_pooled": None}, "q_pooled and k_pooled are needed"),
        ("predict", {"k_similarity": None}, "k_similarity is needed"),
        ("select", {"mass": None}, "mass is needed"),
        ("select", {"keep": ERROR}, "keep must be in"),
        ("select", {"q_similarity": None}, "q_similarity and k_similarity are needed"),
        ("first_steps", {"masses": torch.tensor([0.5, 0.4], dtype=F64)}, "masses must not fall"),
        ("choose_rows", {"starts": torch.tensor([0, 127, 256])}, "first rows of query blocks"),
        ("decide", {"Hk": 3}, "Hk must divide the 4 heads, got 3"),
        ("step_errors", {"exact_key": None}, "exact_query and exact_key must come together"),
        ("step_errors", {"exact_key": numbers(B, HK, LK, D).half()}, "the dtype of exact_query"),
        ("step_errors", {"pooled_value": None}, "pooled_key and pooled_value must come together"),
        ("step_errors", {"pooled_k_scale": None}, "pooled_k_scale is needed with int8 codes"),
        ("step_errors", {"pool_group": 48}, "pool_group must divide 64, got 48"),
        ("step_errors fast", {"codes": None}, "codes and v_scale must come together"),
        ("statistics", {"scale": None}, "codes and scale must come together"),
        ("statistics", {"key_mean": None}, "key_mean and lse_shift must come together"),
        ("statistics", {"key_mean": numbers(B, 3, D)}, "key_mean must have a number of heads"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x,
)
def test_arguments_that_do_not_fit_each_other(case, broken, match):
    """SIGSEGV before, for codes or scales that the precision needs and that do not come."""
    refused(case, match, **broken)


@pytest.mark.parametrize(
    ("case", "output", "other"),
    [
        ("attend", "pv_skips", "counts"),
        ("backward", "grad_query", "query"),
        ("select", "allowed", "counts"),
        ("take_steps", "counts", "indices"),
        ("first_steps", "allowed", "indices"),
        ("draw_measured", "to_rows", "rows"),
        ("step_errors", "whole", "skipping"),
        ("decide", "measured", "mean"),
    ],
)
def test_an_output_that_is_another_argument(case, output, other):
    arguments = VALID[case]()
    x = arguments[other]
    shared = x.view(-1)[: arguments[output].numel()].view(arguments[output].shape)
    with pytest.raises(RuntimeError, match="must share no memory"):
        call(case, arguments | {output: shared})


def test_a_lse_over_the_indices_that_attend_reads():
    """Written while other threads read it, it would be indices again that nobody checked."""
    arguments = attend(EXACT)
    room = torch.zeros(B * HQ * LQ, dtype=torch.float32)
    arguments["lse"] = room.view(B, HQ, LQ)
    indices = room.view(I32)[: B * HQ * N_Q * N_K].view(B, HQ, N_Q, N_K)
    arguments["indices"] = indices.copy_(arguments["indices"])
    with pytest.raises(RuntimeError, match="lse is an output and must share no memory with"):
        call("attend", arguments)


# ---- whatever comes


@given(data=st.data())
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
def test_mutated_arguments_raise_or_run(data):
    case = data.draw(st.sampled_from(list(VALID)))
    arguments = {"isa": native.isa_number()} | VALID[case]()
    names = data.draw(
        st.lists(st.sampled_from(list(arguments)), min_size=1, max_size=3, unique=True)
    )
    for name in names:
        arguments[name] = data.draw(mutated(arguments[name]), label=name)
    with contextlib.suppress(RuntimeError):
        call(case, arguments)
