"""`torch.ops.sparge_cpu.packed_*` with wrong arguments: each raises, none crashes the process."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native_calls import (
    BLEND,
    DV,
    EXACT,
    F64,
    HK,
    HQ,
    I8,
    I32,
    INT8,
    INT8_FAST,
    MASS,
    ROWS,
    D,
    call,
    codes,
    mutated,
    numbers,
)
from native_refusals import refusals_of, tensors_of
from sparge.backends.cpu import library as native

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")

LQ, LK = (130, 20), (70, 200)
TQ, TK = sum(LQ), sum(LK)
N_Q, N_K, PAIRS, GROUP = 2 + 1, 2 + 4, 2 * 2 + 1 * 4, 16
ENTRIES = 5 + 13  # groups of 16 keys
OFFSET = 2**40


def rows(lengths):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor(list(zip(starts, lengths, strict=True)))


def tables():
    offsets = torch.tensor([0, 180])
    return {"q_rows": rows(LQ), "k_rows": rows(LK), "offsets": offsets, "is_causal": True}


def scored(precision):
    if precision in (INT8, INT8_FAST):
        q, k = codes(TQ, HQ, D), codes(TK, HK, D)
        return {"query": q, "key": k, "q_scale": numbers(TQ, HQ).abs(), "k_scale": numbers(TK, HK)}
    q, k = numbers(1, HQ, TQ, D), numbers(1, HK, TK, D)
    return {"query": q, "key": k, "q_scale": None, "k_scale": None}


def statistics():
    return {
        "x": numbers(1, HQ, TQ, D),
        "rows": rows(LQ),
        "block": 128,
        "mean": numbers(2, HQ, D),
        "codes": torch.empty(TQ, HQ, D, dtype=I8),
        "scale": torch.empty(TQ, HQ),
        "pooled": torch.empty(N_Q, HQ, D),
        "similarity": torch.empty(N_Q, HQ),
        "key_mean": numbers(2, HK, D),
        "softmax_scale": 0.2,
        "lse_shift": torch.empty(TQ, HQ),
    }


def channels(value):
    made = {"codes": torch.empty(TK, HK, DV, dtype=I8), "scale": torch.empty(N_K, HK, DV)}
    return {"value": value, "rows": rows(LK), **made}


def predict(predictor, precision):
    return {
        **scored(precision),
        "precision": precision,
        "softmax_scale": 0.2,
        "q_pooled": numbers(N_Q, HQ, D),
        "k_pooled": numbers(N_K, HK, D),
        "k_similarity": numbers(N_K, HK),
        "min_similarity": numbers(HQ),
        **tables(),
        "predictor": predictor,
        "sample_rows": 4,
        "mass": torch.empty(PAIRS, HQ),
    }


def select():
    return {
        "mass": numbers(PAIRS, HQ).abs(),
        "keep": MASS,
        "amount": torch.full((HQ,), 0.5, dtype=F64),
        "q_similarity": numbers(N_Q, HQ),
        "k_similarity": numbers(N_K, HK),
        "min_similarity": numbers(HQ),
        **tables(),
        "sink_blocks": 1,
        "window": 1,
        "protect": torch.tensor([[0, 3], [-5, 2**36]]),
        "counts": torch.empty(N_Q, HQ, dtype=I32),
        "indices": torch.empty(PAIRS, HQ, dtype=I32),
        "allowed": torch.empty(N_Q, HQ, dtype=I32),
    }


def attend(precision):
    fast, quantized = precision == INT8_FAST, precision in (INT8, INT8_FAST)
    plain = tables()
    return {
        **scored(precision),
        "value": codes(TK, HK, DV) if fast else numbers(1, HK, TK, DV),
        "v_scale": numbers(N_K, HK, DV).abs() if fast else None,
        "pooled_key": (codes if quantized else numbers)(ENTRIES, HK, D),
        "pooled_value": (codes if fast else numbers)(ENTRIES, HK, DV),
        "pooled_k_scale": numbers(ENTRIES, HK).abs() if quantized else None,
        "pooled_v_scale": numbers(2, HK, DV).abs() if fast else None,
        "pool_group": GROUP,
        "lse_shift": numbers(TQ, HQ),
        "pv_skip": numbers(HQ).abs(),
        "counts": torch.ones(N_Q, HQ, dtype=I32),
        "indices": torch.zeros(PAIRS, HQ, dtype=I32),
        **plain,
        "attends": torch.tensor([True, False]),
        "precision": precision,
        "softmax_scale": 0.2,
        "out": torch.empty(TQ, HQ, DV),
        "lse": torch.empty(HQ, TQ),
        "pv_skips": torch.empty(N_Q, HQ, dtype=I32),
    }


VALID = {
    "packed_key_mean": lambda: {
        "key": numbers(1, HK, TK, D), "rows": rows(LK), "mean": torch.empty(2, HK, D),
    },
    "packed_statistics": statistics,
    "packed_channels": lambda: channels(numbers(1, HK, TK, DV)),
    "packed_channels in order": lambda: channels(numbers(TK, HK, DV)),
    "packed_predict": lambda: predict(BLEND, INT8),
    "packed_predict rows": lambda: predict(ROWS, EXACT),
    "packed_select": select,
    "packed_attend": lambda: attend(INT8),
    "packed_attend fast": lambda: attend(INT8_FAST),
    "packed_attend exact": lambda: attend(EXACT) | {"attends": None},
}  # fmt: skip
TENSORS, refused = tensors_of(VALID), refusals_of(VALID)
# Tensors of the caller's may have any strides.
STRIDED = {(case, name) for case, name in TENSORS if VALID[case]()[name].dim() == 4}
TABLES = [(case, name) for case, name in TENSORS if name in ("rows", "q_rows", "k_rows")]


@pytest.mark.parametrize("case", VALID)
def test_valid_arguments_are_accepted(case):
    call(case, VALID[case]())


@pytest.mark.parametrize(("case", "name"), TENSORS)
def test_a_tensor_of_another_kind(case, name):
    x = VALID[case]()[name]
    for dtype in {F64, I8, I32, torch.complex64} - {x.dtype}:
        refused(case, "sparge_cpu: .*(must|needed)", **{name: torch.zeros(x.shape, dtype=dtype)})
    refused(case, f"{name} must have", **{name: x[0]})
    for d in range(x.dim()):
        refused(case, f"{name} must have", **{name: x.narrow(d, 0, 0)})
    half_freed = x.clone()
    half_freed.untyped_storage().resize_(x.nbytes // 2)
    refused(case, f"{name} is larger than its storage", **{name: half_freed})
    refused(case, "Meta", **{name: x.to("meta")})
    if (case, name) not in STRIDED:
        refused(case, f"{name} must be contiguous", **{name: torch.stack([x, x], -1)[..., 0]})


@pytest.mark.parametrize("case", VALID)
def test_an_instruction_set_that_is_not_there(case):
    refused(case, "isa must be in 0 … 4, got 5", isa=len(native.ISAS))


@pytest.mark.parametrize(("case", "name"), TABLES)
@pytest.mark.parametrize(
    "row", [(0, 0), (-1, 5), (3, -2), (2**62, 2**62), (0, 2**62), (-(2**63), 1)], ids=str
)
def test_a_sequence_that_cannot_be(case, name, row):
    table = VALID[case]()[name]
    table[1] = torch.tensor(row)
    refused(case, f"{name} must have a first row and at least one row .* 1 has", **{name: table})


@pytest.mark.parametrize("name", ["q_rows", "k_rows"])
def test_a_sequence_beyond_the_end(name):
    table = tables()[name]
    table[1, 0] += 1
    refused("packed_attend exact", f"{name} must end within .* sequence 1 has", **{name: table})
    refused("packed_predict rows", f"{name} must end within the", **{name: table})


def test_another_number_of_rows_than_the_buffers_have():
    table = rows((130, 19))
    for case in ("packed_attend", "packed_predict"):
        refused(case, "query must have shape", q_rows=table)
    refused("packed_statistics", "codes must have shape", rows=table)
    refused("packed_select", "must have shape", q_rows=rows((130, 129)))


def test_outputs_that_two_sequences_would_write():
    table = rows(LQ)
    table[1, 0] = 110
    refused("packed_attend", "q_rows must be ascending and share no row", q_rows=table)
    refused("packed_attend", "q_rows must be ascending", q_rows=torch.tensor([[20, 130], [0, 20]]))


def test_sequences_may_share_keys():
    arguments = attend(EXACT) | {"attends": None}
    arguments["k_rows"] = torch.tensor([[0, 70], [0, 200]])
    call("packed_attend", arguments)


def test_tables_of_another_number_of_sequences():
    for case in ("packed_predict", "packed_select", "packed_attend"):
        refused(case, "offsets must have shape", offsets=torch.tensor([0]))
        refused(case, "k_rows must have the 2 sequences of q_rows", k_rows=rows((70, 100, 100)))
    refused("packed_attend", "attends must have shape", attends=torch.ones(3, dtype=torch.bool))


def test_numbers_out_of_range():
    for case in ("packed_predict", "packed_select", "packed_attend"):
        refused(case, "offset must be in", offsets=torch.tensor([0, OFFSET + 1]))
    refused("packed_select", "protect must be in", protect=torch.tensor([[0, OFFSET + 1]]))
    refused("packed_select", "sink_blocks must be in 0", sink_blocks=-1)
    refused("packed_select", "window must be in 0", window=2**37)
    refused("packed_select", "keep must be in", keep=3)
    refused("packed_predict", "sample_rows must be in 1 … 128", sample_rows=0)
    refused("packed_statistics", "block must be a divisor of 128", block=96)
    refused("packed_attend", "pool_group must divide 64, got 48", pool_group=48)
    refused("packed_attend", "precision must be in", precision=4)
    refused("packed_attend", "softmax_scale must be finite", softmax_scale=float("nan"))


@pytest.mark.parametrize(
    ("case", "broken", "match"),
    [
        ("packed_attend", {"q_scale": None}, "q_scale is needed with int8 codes"),
        ("packed_attend", {"precision": INT8_FAST}, "value must be int8 codes"),
        ("packed_attend", {"pooled_value": None}, "pooled_value is needed with pooled_key"),
        ("packed_attend", {"pooled_key": None}, "pooled_key is needed with pooled_value"),
        ("packed_attend", {"pooled_k_scale": None}, "pooled_k_scale is needed"),
        ("packed_attend fast", {"v_scale": None}, "v_scale is needed"),
        ("packed_attend fast", {"pooled_v_scale": None}, "pooled_v_scale is needed"),
        ("packed_attend exact", {"precision": INT8}, "query and key must be int8 codes"),
        ("packed_attend exact", {"key": numbers(1, 3, TK, D)}, "a multiple of the 3 heads"),
        ("packed_predict", {"q_pooled": None}, "q_pooled and k_pooled are needed"),
        ("packed_predict", {"k_similarity": None}, "k_similarity is needed"),
        ("packed_select", {"mass": None}, "mass is needed"),
        ("packed_select", {"q_similarity": None}, "q_similarity and k_similarity are needed"),
        ("packed_statistics", {"scale": None}, "codes and scale must come together"),
        ("packed_statistics", {"key_mean": None}, "key_mean and lse_shift must come together"),
        ("packed_statistics", {"key_mean": numbers(2, 3, D)}, "key_mean must have a number"),
        ("packed_statistics", {"x": codes(TQ, HQ, D)}, "x must be float32"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x,
)
def test_arguments_that_do_not_fit_each_other(case, broken, match):
    refused(case, match, **broken)


@pytest.mark.parametrize(("count", "block"), [(5, 0), (-1, 0), (1, 2), (1, -1), (2**31 - 1, 0)])
def test_lists_that_are_none(count, block):
    counts, indices = attend(INT8)["counts"], attend(INT8)["indices"]
    counts.view(-1)[3], indices.view(-1)[6] = count, block  # head 1, query block 1 of sequence 0
    refused("packed_attend", "lists of ascending key blocks; sequence 0", counts=counts,
            indices=indices)  # fmt: skip


def test_lists_of_sequences_that_are_left_out_are_not_read():
    arguments = attend(INT8)
    arguments["counts"][2:], arguments["indices"][4:] = 2**30, -(2**30)
    out = torch.full((TQ, HQ, DV), 7.0)
    call("packed_attend", arguments | {"out": out})
    assert bool((out[130:] == 7.0).all())
    assert not bool((out[:130] == 7.0).any())


def test_an_output_that_is_another_argument():
    arguments = attend(INT8)
    with pytest.raises(RuntimeError, match="must share no memory"):
        call("packed_attend", arguments | {"pv_skips": arguments["counts"]})
    arguments = select()
    with pytest.raises(RuntimeError, match="must share no memory"):
        call("packed_select", arguments | {"allowed": arguments["counts"]})


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
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
