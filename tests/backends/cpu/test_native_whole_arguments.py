"""`torch.ops.sparge_cpu.attention` and `attention_varlen` with wrong arguments: each raises, none
crashes the process."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native_calls import (
    ALL,
    BLEND,
    DV,
    EXACT,
    F64,
    FRACTION,
    HALF,
    HK,
    HQ,
    I8,
    I32,
    INT8,
    INT8_FAST,
    MASS,
    MEAN,
    D,
    call,
    codes,
    mutated,
    numbers,
)
from native_refusals import refusals_of, tensors_of
from sparge.backends.cpu import library as native

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")

B, LQ, LK = 2, (130, 20), (70, 200)
TQ, TK = sum(LQ), sum(LK)
OFFSET, LENGTH = 2**40, 2**36


def rows(lengths):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor(list(zip(starts, lengths, strict=True)))


def recipe(precision, keep, *, predictor=MEAN, pool_group=16):
    return {
        "softmax_scale": 0.2,
        "precision": precision,
        "keep": keep,
        "amount": torch.full((HQ,), 0.5, dtype=F64),
        "predictor": predictor,
        "sample_rows": 4,
        "min_similarity": numbers(HQ),
        "sink_blocks": 1,
        "window": 1,
        "protect": torch.tensor([[0, 3], [-5, 2**36]]),
        "pv_skip": numbers(HQ).abs(),
        "pool_group": pool_group,
        "pooled_cost": 0.1,
        "seconds": torch.zeros(4, dtype=F64),
        "threads": 0,
    }


def outputs(blocks, pairs, out, lse):
    return {
        **{name: torch.empty(blocks, dtype=I32) for name in ("counts", "allowed", "pv_skips")},
        "indices": torch.empty(pairs, dtype=I32),
        "out": torch.empty(out),
        "lse": torch.empty(lse),
    }


def attention(precision, keep=MASS, *, mask=None, **numbers_of_recipe):
    n_q, n_k = -(-TQ // 128), -(-TK // 64)
    return {
        "query": numbers(B, HQ, TQ, D),
        "key": numbers(B, HK, TK, D),
        "value": numbers(B, HK, TK, DV),
        "mask": mask,
        "is_causal": True,
        "offset": TK - TQ,
        **recipe(precision, keep, **numbers_of_recipe),
        "most_kept": -1.0,
        **outputs((B, HQ, n_q), (B, HQ, n_q, n_k), (B, HQ, TQ, DV), (B, HQ, TQ)),
    }


def varlen(precision, keep=MASS, **numbers_of_recipe):
    return {
        "query": numbers(1, HQ, TQ, D),
        "key": numbers(1, HK, TK, D),
        "value": numbers(1, HK, TK, DV),
        "q_rows": rows(LQ),
        "k_rows": rows(LK),
        "offsets": torch.tensor([0, 180]),
        "is_causal": True,
        **recipe(precision, keep, **numbers_of_recipe),
        "most_kept": torch.tensor([-1.0, 3.0], dtype=F64),
        **outputs((2 + 1, HQ), (2 * 2 + 1 * 4, HQ), (TQ, HQ, DV), (HQ, TQ)),
        "attended": torch.empty(2, dtype=torch.bool),
    }


VALID = {
    "attention": lambda: attention(INT8, mask=numbers(B, 1, TQ, TK) > -1),
    "attention fast": lambda: attention(INT8_FAST, FRACTION, predictor=BLEND),
    "attention half": lambda: attention(HALF, ALL, pool_group=0, mask=numbers(1, HQ, 1, TK)),
    "attention_varlen": lambda: varlen(INT8),
    "attention_varlen exact": lambda: varlen(EXACT, FRACTION) | {"most_kept": None},
}
TENSORS, refused = tensors_of(VALID), refusals_of(VALID)
STRIDED = ("query", "key", "value", "mask")
RANGES = [
    ("offset", -OFFSET, OFFSET),
    ("precision", 0, 3),
    ("keep", 0, 2),
    ("predictor", 0, 2),
    ("sample_rows", 1, 128),
    ("sink_blocks", 0, LENGTH),
    ("window", 0, LENGTH),
    ("pool_group", 0, 64),
    ("threads", 0, LENGTH),
]


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
    if name not in STRIDED:
        refused(case, f"{name} must be contiguous", **{name: torch.stack([x, x], -1)[..., 0]})


@pytest.mark.parametrize("case", VALID)
def test_an_instruction_set_that_is_not_there(case):
    refused(case, "isa must be in 0 … 4, got 5", isa=len(native.ISAS))


@pytest.mark.parametrize(("name", "low", "high"), RANGES)
@pytest.mark.parametrize("case", ["attention", "attention_varlen"])
def test_a_number_out_of_range(case, name, low, high):
    if name not in VALID[case]():  # a pack has an offset for each sequence
        name, wrongs = "offsets", ([0, OFFSET + 1], [-OFFSET - 1, 0])
        for wrong in wrongs:
            refused(case, "offset must be in", offsets=torch.tensor(wrong))
        return
    for wrong in (low - 1, high + 1, -(2**63), 2**63 - 1):
        refused(case, f"{name} must be in {low} … {high}, got {wrong}", **{name: wrong})


@pytest.mark.parametrize("case", ["attention", "attention_varlen"])
def test_numbers_that_cannot_be(case):
    for wrong in (float("nan"), float("inf")):
        refused(case, "softmax_scale must be finite", softmax_scale=wrong)
        refused(case, "pooled_cost must be finite", pooled_cost=wrong)
        most = torch.tensor([0.0, wrong], dtype=F64) if "varlen" in case else wrong
        refused(case, "most_kept must be finite", most_kept=most)
    for wrong in (float("nan"), -0.1, 1.1):
        amount = torch.full((HQ,), wrong, dtype=F64)
        refused(case, "amount must be in 0 … 1", amount=amount)
    refused(case, "protect must be in", protect=torch.tensor([[0, OFFSET + 1]]))
    refused(case, "pool_group must divide 64 or be 0, got 48", pool_group=48)


@pytest.mark.parametrize("case", ["attention", "attention_varlen"])
def test_tensors_that_do_not_fit_each_other(case):
    batch = 1 if "varlen" in case else B
    refused(case, "must have one dtype", key=numbers(batch, HK, TK, D).half())
    refused(case, "must have one dtype", value=numbers(batch, HK, TK, DV).half())
    for heads in (3, 8):
        key, value = numbers(batch, heads, TK, D), numbers(batch, heads, TK, DV)
        refused(case, f"a multiple of the {heads} heads", key=key, value=value)
    wide = {"query": numbers(batch, HQ, TQ, 320), "key": numbers(batch, HK, TK, 320)}
    refused(case, "query must have a head dim of at most 256, got 320", **wide)
    refused(case, "query must be float32", query=codes(batch, HQ, TQ, D))


@pytest.mark.parametrize("name", ["q_rows", "k_rows"])
@pytest.mark.parametrize(
    "row", [(0, 0), (-1, 5), (3, -2), (2**62, 2**62), (0, 2**62), (-(2**63), 1)], ids=str
)
def test_a_sequence_that_cannot_be(name, row):
    table = VALID["attention_varlen"]()[name]
    table[1] = torch.tensor(row)
    match = f"{name} must have a first row and at least one row .* 1 has"
    refused("attention_varlen", match, **{name: table})


@pytest.mark.parametrize("name", ["q_rows", "k_rows"])
def test_a_sequence_beyond_the_end(name):
    table = VALID["attention_varlen"]()[name]
    table[1, 0] += 1
    refused("attention_varlen", f"{name} must end within .* sequence 1 has", **{name: table})


def test_tables_and_lists_of_other_sequences():
    case = "attention_varlen"
    refused(case, "counts must have shape", q_rows=rows((149, 1)), counts=torch.empty(9, HQ).int())
    refused(case, "offsets must have shape", offsets=torch.tensor([0]))
    refused(case, "k_rows must have the 2 sequences of q_rows", k_rows=rows((70, 100, 100)))
    refused(case, "a batch of 1, got 2", query=numbers(2, HQ, TQ, D), key=numbers(2, HK, TK, D),
            value=numbers(2, HK, TK, DV))  # fmt: skip


def test_outputs_that_two_sequences_would_write():
    table = rows(LQ)
    table[1, 0] = 110
    refused("attention_varlen", "q_rows must be ascending and share no row", q_rows=table)
    table = torch.tensor([[20, 130], [0, 20]])
    refused("attention_varlen", "q_rows must be ascending", q_rows=table)


def test_sequences_may_share_keys():
    call("attention_varlen", varlen(EXACT) | {"k_rows": torch.tensor([[0, 70], [0, 200]])})


def test_rows_of_sequences_that_are_left_are_not_written():
    out, attended = torch.full((TQ, HQ, DV), 7.0), torch.empty(2, dtype=torch.bool)
    most = torch.tensor([-1.0, 0.0], dtype=F64)
    call("attention_varlen", varlen(INT8) | {"out": out, "most_kept": most, "attended": attended})
    assert attended.tolist() == [True, False]
    assert bool((out[130:] == 7.0).all())
    assert not bool((out[:130] == 7.0).any())


@pytest.mark.parametrize("case", ["attention", "attention_varlen"])
def test_an_output_that_is_another_argument(case):
    arguments = VALID[case]()
    for name, other in (("pv_skips", "counts"), ("allowed", "counts")):
        with pytest.raises(RuntimeError, match="must share no memory"):
            call(case, arguments | {name: arguments[other]})


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
