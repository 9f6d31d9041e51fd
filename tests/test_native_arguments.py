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
    HK,
    HQ,
    I8,
    I32,
    I64,
    INT8,
    INT8_FAST,
    LK,
    LQ,
    N_K,
    N_Q,
    VALID,
    B,
    D,
    attend,
    call,
    numbers,
    select,
    select_steps,
)
from sparge.backends.cpu import library as native

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")

TENSORS = [
    (case, name)
    for case, make in VALID.items()
    for name, x in make().items()
    if isinstance(x, torch.Tensor)
]
STRIDED = {"query", "key", "value", "x", "mask", "grad_out", "pooled_key", "pooled_value"}
# Sizes that nothing else in the call fixes.
FREE = {
    ("key_mean", "key", 2),
    ("select_steps", "value", 3),
    ("select_steps", "checked", 0),
    ("take_steps", "indices", 3),
}


def refused(case, match, **broken):
    arguments = VALID[case]()
    assert arguments.keys() >= broken.keys() - {"isa"}
    with pytest.raises(RuntimeError, match=match):
        call(case, arguments | broken)


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


@pytest.mark.parametrize(("case", "name"), [t for t in TENSORS if t[1] not in STRIDED])
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


@pytest.mark.parametrize(
    ("case", "name", "low", "high"),
    [
        ("attend", "precision", 0, 3),
        ("predict", "precision", 0, 3),
        ("select_steps", "precision", 0, 3),
        ("predict", "predictor", 0, 2),
        ("select", "keep", 0, 2),
        ("predict", "sample_rows", 1, 128),
        ("block_kinds", "Lq", 1, 2**36),
        ("block_kinds", "Lk", 1, 2**36),
        ("select", "Lq", 1, 2**36),
        ("select", "Lk", 1, 2**36),
        ("attend", "q_rows_per_scale", 1, 2**36),
        ("attend", "k_rows_per_scale", 1, 2**36),
        ("attend", "pool_group", 1, 64),
        ("predict", "k_rows_per_scale", 1, 2**36),
        ("block_kinds", "offset", -(2**40), 2**40),
        ("attend", "offset", -(2**40), 2**40),
        ("backward", "offset", -(2**40), 2**40),
        ("predict", "offset", -(2**40), 2**40),
        ("select", "offset", -(2**40), 2**40),
    ],
)
def test_a_number_out_of_range(case, name, low, high):
    """SIGFPE before, for 0 rows per scale."""
    for wrong in (low - 1, high + 1, -(2**63), 2**63 - 1):
        refused(case, f"{name} must be in {low} … {high}, got {wrong}", **{name: wrong})


@pytest.mark.parametrize("name", ["softmax_scale"])
@pytest.mark.parametrize("case", ["attend", "backward", "predict", "select_steps", "statistics"])
def test_a_scale_that_is_not_finite(case, name):
    for wrong in (float("nan"), float("inf")):
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


def filled(name, make, value):
    x = make()[name].clone()
    x.view(-1)[-1] = value
    return x


@pytest.mark.parametrize("case", ["attend", "attend fast", "attend exact", "backward"])
@pytest.mark.parametrize("count", [-1, N_K + 1, 10**6, -(2**31)])
def test_counts_beyond_the_list(case, count):
    """SIGSEGV before, for counts far beyond the list."""
    broken = filled("counts", VALID[case], count)
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
    arguments = attend(INT8)
    arguments["indices"][..., 2:] = 2**30
    call("attend", arguments)


def test_padding_behind_the_count_is_pooled_like_any_skipped_block():
    """A block was dropped before, if the padding named it."""
    outs = []
    for padding in (-1, 3):
        arguments = attend(INT8) | {"is_causal": False}
        arguments["indices"][:] = torch.tensor([0, 1, padding, padding])
        call("attend", arguments)
        outs.append(arguments["out"])
    assert torch.equal(*outs)


@pytest.mark.parametrize("case", ["predict", "select", "select_steps", "attend", "backward"])
def test_kinds_that_do_not_exist(case):
    for value in (-1, 3, 127):
        broken = filled("kinds", VALID[case], value)
        refused(case, "kinds must be 0, 1 or 2", kinds=broken)


@pytest.mark.parametrize("case", ["predict", "select", "select_steps", "attend", "backward"])
def test_a_mask_comes_with_its_kinds(case):
    refused(case, "mask and kinds must come together", mask=None)
    refused(case, "mask and kinds must come together", kinds=None)


@pytest.mark.parametrize("row", [-1, LQ, 2**62])
def test_checked_rows_beyond_the_queries(row):
    refused("select_steps", "checked must be in", checked=torch.tensor([0, row]))


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1, float("inf")])
def test_amounts_that_are_no_share(value):
    amount = filled("amount", select, value)
    refused("select", "amount must be in 0 … 1", amount=amount)
    masses = filled("masses", select_steps, value)
    refused("select_steps", "masses must be in 0 … 1", masses=masses)


def test_more_steps_than_the_scratch_is_made_for():
    masses = torch.full((HQ, 65), 0.5, dtype=F64)
    wrong = torch.empty(B, HQ, 65, dtype=F64)
    refused("select_steps", "steps of masses must be in 1 … 64", masses=masses, wrong=wrong)


@pytest.mark.parametrize("case", ["attend exact", "predict rows", "backward"])
@pytest.mark.parametrize("heads", [3, 8], ids="{} key heads".format)
def test_heads_that_do_not_share_keys(case, heads):
    """SIGFPE before, for more key heads than query heads."""
    broken = {"key": numbers(B, heads, LK, D)}
    if "value" in VALID[case]():
        broken["value"] = numbers(B, heads, LK, DV)
    refused(case, f"query must have a multiple of the {heads} heads of key, got 4", **broken)


@pytest.mark.parametrize("case", ["attend exact", "predict rows", "backward"])
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


INTEGERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**31, 2**36, 2**40, 2**63 - 1, -(2**31), -(2**63)])
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.half, F64, I8, I32, I64, torch.bool])


@st.composite
def mutated(draw, value):
    """Another tensor or number in the place of `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(INTEGERS)
    if isinstance(value, float):
        return draw(st.floats())
    shape = list((numbers(2, 2) if value is None else value).shape)
    how = draw(st.sampled_from(["none", "size", "rank", "dtype", "strides", "numbers"]))
    if how == "none":
        return None
    if how == "size":
        d = draw(st.integers(0, len(shape) - 1))
        shape[d] = draw(st.sampled_from([0, 1, 2, 3, 63, 65, 320, shape[d] + 1]))
    elif how == "rank":
        shape = draw(st.lists(st.integers(0, 5), max_size=5))
    dtype = draw(DTYPES) if how == "dtype" or value is None else value.dtype
    x = torch.zeros(shape, dtype=dtype)
    if how == "strides" and shape:
        return torch.zeros((), dtype=dtype).expand(shape)
    if how == "numbers" and value is not None:
        x = value.clone()
        wild = [0, 1, 2, -1, 127, 2**30, -(2**31), float("nan"), float("inf"), -1e30]
        fits = [n for n in wild if dtype.is_floating_point or isinstance(n, int)]
        fits = [n for n in fits if dtype not in (I8, torch.bool) or -128 <= n < 128]
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from(fits))
    return x


@given(data=st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
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
