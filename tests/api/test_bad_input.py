"""Mistakes in tensors and masks, refused before any work with what came and what is needed."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from refusals import (
    EVERY,
    EXACT,
    OPEN,
    SAYS_CAUSAL,
    WITH_VALUE,
    B,
    D,
    Dv,
    Hk,
    Hq,
    Lk,
    Lq,
    attend,
    attention,
    blocks,
    each,
    explain,
    k,
    make_plan,
    n_k,
    n_q,
    q,
    reference,
    refused,
    v,
)

pytestmark = pytest.mark.usefixtures("no_work")


def test_the_call_the_mistakes_are_made_in_is_itself_right():
    choice = explain(q(), k(), v(), enable_gqa=True, block_mask=blocks(), attn_mask=OPEN)
    assert choice.backend == "cpu"
    with pytest.raises(AssertionError, match="work was begun"):
        attention(q(), k(), v(), enable_gqa=True)
    for function in (reference, make_plan, attend):
        with pytest.raises(AssertionError, match="work was begun"):
            function(q(), k(), v(), enable_gqa=True)


# --- query, key and value ---------------------------------------------------------------------


@each(*EVERY)
@pytest.mark.parametrize(
    "query, key, error, says",
    [
        pytest.param(None, k(), TypeError, ("query must be a tensor", "NoneType"), id="no query"),
        pytest.param([[1.0]], k(), TypeError, ("query must be a tensor", "list"), id="list"),
        pytest.param(q(), 3.5, TypeError, ("key must be a tensor", "float"), id="number as key"),
        pytest.param(
            q(Hq, Lq, D), k(), ValueError, ("query must be [B, H, L, D]", "[4, 130, 16]"), id="3-D"
        ),
        pytest.param(
            q(), k(1, B, Hk, Lk, D), ValueError, ("key must be", "[1, 2, 2, 100, 16]"), id="5-D key"
        ),
        pytest.param(
            q(dtype=torch.int32), k(dtype=torch.int32), TypeError, ("bfloat16", "int32"), id="ints"
        ),
        pytest.param(
            q(dtype=torch.int8), k(dtype=torch.int8), TypeError, ("bfloat16", "int8"), id="int8"
        ),
        pytest.param(
            q(dtype=torch.bool), k(dtype=torch.bool), TypeError, ("float16", "bool"), id="bools"
        ),
        pytest.param(
            q(dtype=torch.complex64), k(), TypeError, ("float32", "complex64"), id="complex"
        ),
        pytest.param(
            q(dtype=torch.float8_e4m3fn),
            k(dtype=torch.float8_e4m3fn),
            TypeError,
            ("query must be bfloat16, float16, float32 or float64", "float8_e4m3fn"),
            id="fp8",
        ),
        pytest.param(
            q(),
            k(dtype=torch.bfloat16),
            TypeError,
            ("one dtype", "float32", "key torch.bfloat16", ".to("),
            id="dtype mix",
        ),
        pytest.param(
            q(),
            k(device="meta"),
            ValueError,
            ("one device", "cpu", "key on meta", ".to("),
            id="device mix",
        ),
        pytest.param(
            q(3, Hq, Lq, D), k(), ValueError, ("batch", "[3, 4,", "[2, 2,", "expand"), id="batches"
        ),
        pytest.param(
            q(), k(B, Hk, Lk, 32), ValueError, ("same head dim", "130, 16]", "100, 32]"), id="dims"
        ),
        pytest.param(
            q(B, 5, Lq, D), k(), ValueError, ("multiple of key heads", "5 and 2"), id="5 heads of 2"
        ),
        pytest.param(
            q(B, 1, Lq, D), k(), ValueError, ("multiple of key heads", "1 and 2"), id="1 head of 2"
        ),
        pytest.param(
            q(B, Hq, Lq, 257), k(B, Hk, Lk, 257), ValueError, ("at most 256", "257"), id="head_dim"
        ),
        pytest.param(
            q(B, Hq, 0, D), k(), ValueError, ("query is empty", "0, 16]", "at least one"), id="Lq 0"
        ),
        pytest.param(
            q(), k(B, Hk, 0, D), ValueError, ("key is empty", "0, 16]", "at least one"), id="Lk 0"
        ),
        pytest.param(q(0, Hq, Lq, D), k(), ValueError, ("query is empty", "[0, 4"), id="B 0"),
        pytest.param(q(), k(B, 0, Lk, D), ValueError, ("key is empty", "[2, 0"), id="Hk 0"),
        pytest.param(q(B, Hq, Lq, 0), k(), ValueError, ("query is empty", "130, 0]"), id="D 0"),
    ],
)
def test_query_and_key(function, query, key, error, says):
    value = v()
    if isinstance(key, torch.Tensor):  # the value is right beside the key, whatever that is
        value = v(dtype=key.dtype, device=key.device)
    refused(lambda: function(query, key, value, enable_gqa=True), error, *says)


@each(*WITH_VALUE)
@pytest.mark.parametrize(
    "value, error, says",
    [
        pytest.param(None, TypeError, ("value must be a tensor", "NoneType"), id="no value"),
        pytest.param("v", TypeError, ("value must be a tensor", "str"), id="string"),
        pytest.param(v(Hk, Lk, Dv), ValueError, ("value must be", "[2, 100, 24]"), id="3-D"),
        pytest.param(
            v(B, Hk, 99, Dv), ValueError, ("same heads and length", "99, 24"), id="length"
        ),
        pytest.param(v(B, 4, Lk, Dv), ValueError, ("same heads and length", "[2, 4"), id="heads"),
        pytest.param(v(1, Hk, Lk, Dv), ValueError, ("batch", "value [1, 2", "expand"), id="batch"),
        pytest.param(v(B, Hk, Lk, 257), ValueError, ("value", "at most 256", "257"), id="dim 257"),
        pytest.param(v(B, Hk, Lk, 0), ValueError, ("value is empty", "100, 0]"), id="dim 0"),
        pytest.param(
            v(dtype=torch.float16), TypeError, ("float32", "value torch.float16"), id="fp16"
        ),
        pytest.param(v(dtype=torch.int64), TypeError, ("value must be", "int64"), id="ints"),
        pytest.param(v(device="meta"), ValueError, ("one device", "value on meta"), id="device"),
    ],
)
def test_value(function, value, error, says):
    refused(lambda: function(q(), k(), value, enable_gqa=True), error, *says)


@each(*EVERY)
def test_shared_key_heads_must_be_asked_for(function):
    says = ("4 heads", "key 2", "enable_gqa=True", "2 query heads")
    refused(lambda: function(q(), k(), v()), ValueError, *says)


@each(*EVERY)
@pytest.mark.parametrize(
    "scale, error, says",
    [
        pytest.param(math.nan, ValueError, ("scale must be finite", "nan"), id="nan"),
        pytest.param(math.inf, ValueError, ("scale must be finite", "inf"), id="inf"),
        pytest.param(-math.inf, ValueError, ("scale must be finite", "-inf"), id="-inf"),
        pytest.param("0.1", TypeError, ("scale must be a number", "'0.1'"), id="string"),
        pytest.param(True, TypeError, ("scale must be a number", "True"), id="bool"),
        pytest.param(torch.tensor(0.1), TypeError, ("scale must be a number", "0.1"), id="tensor"),
    ],
)
def test_scale(function, scale, error, says):
    refused(lambda: function(q(), k(), v(), enable_gqa=True, scale=scale), error, *says)


@each(*SAYS_CAUSAL)
@pytest.mark.parametrize(
    "options, error, says",
    [
        pytest.param(
            {"is_causal": True, "causal_align": "center"},
            ValueError,
            ("top_left", "bottom_right", "'center'"),
            id="unknown diagonal",
        ),
        pytest.param(
            {"causal_align": "Bottom_Right"}, ValueError, ("bottom_right", "Bottom_R"), id="case"
        ),
        pytest.param({"causal_align": None}, ValueError, ("causal_align", "None"), id="None"),
        pytest.param({"is_causal": 1}, TypeError, ("is_causal", "True or False", "1"), id="1"),
        pytest.param({"is_causal": None}, TypeError, ("is_causal", "None"), id="causal None"),
        pytest.param(
            {"is_causal": torch.tensor(True)}, TypeError, ("is_causal", "tensor"), id="tensor"
        ),
        pytest.param({"enable_gqa": 1}, TypeError, ("enable_gqa", "True or False"), id="gqa 1"),
    ],
)
def test_flags(function, options, error, says):
    refused(lambda: function(q(), k(), v(), **{"enable_gqa": True, **options}), error, *says)


@each(attention, reference, explain)
def test_return_lse_must_be_a_bool(function):
    options = {"enable_gqa": True, "return_lse": "yes"}
    refused(lambda: function(q(), k(), v(), **options), TypeError, "return_lse", "'yes'")


def test_unknown_arguments_are_refused_not_ignored():
    with pytest.raises(TypeError, match="dropout_p"):
        sparge.attention(q(), k(), v(), enable_gqa=True, dropout_p=0.1)


# --- masks ------------------------------------------------------------------------------------


def mask(*shape, dtype=torch.bool, **options):
    return torch.ones(shape, dtype=dtype, **options)


@each(*EVERY)
@pytest.mark.parametrize(
    "attn_mask, error, says",
    [
        pytest.param([[True]], TypeError, ("attn_mask must be a tensor", "list"), id="list"),
        pytest.param(
            mask(Lq, Lk + 1), ValueError, ("[2, 4, 130, 100]", "[130, 101]"), id="one key more"
        ),
        pytest.param(
            mask(B, Lk),
            ValueError,
            ("[2, 4, 130, 100]", "[2, 100]", "[:, None, None, :]"),
            id="pad",
        ),
        pytest.param(
            mask(3, 1, Lq, Lk), ValueError, ("[2, 4, 130, 100]", "[3, 1, 130, 100]"), id="batch"
        ),
        pytest.param(
            mask(B, Hk, Lq, Lk), ValueError, ("[2, 4, 130, 100]", "[2, 2, 130, 100]"), id="Hk heads"
        ),
        pytest.param(
            mask(1, 1, 1, Lq, Lk), ValueError, ("[2, 4, 130, 100]", "[1, 1, 1, 130"), id="5-D"
        ),
        pytest.param(
            mask(Lq, Lk, dtype=torch.int64), TypeError, ("bool", "int64", ".bool()"), id="0/1 ints"
        ),
        pytest.param(
            mask(Lq, Lk, dtype=torch.float16),
            TypeError,
            ("float32", "torch.float16"),
            id="another float",
        ),
        pytest.param(
            mask(Lq, Lk, device="meta"), ValueError, ("attn_mask is on meta", "cpu"), id="device"
        ),
    ],
)
def test_attn_mask(function, attn_mask, error, says):
    refused(lambda: function(q(), k(), v(), enable_gqa=True, attn_mask=attn_mask), error, *says)


@each(attention, reference, explain, attend)
def test_a_bias_that_requires_grad(function):
    bias = torch.zeros(Lq, Lk, requires_grad=True)
    options = {"enable_gqa": True, "attn_mask": bias, "recipe": EXACT}
    says = ("attn_mask requires grad", "detach()")
    refused(lambda: function(q(), k(), v(), **options), ValueError, *says)


@each(*SAYS_CAUSAL)
@pytest.mark.parametrize(
    "block_mask, error, says",
    [
        pytest.param([True], TypeError, ("block_mask must be a bool tensor", "list"), id="list"),
        pytest.param(
            blocks().int(), TypeError, ("block_mask must be a bool tensor", "int32"), id="ints"
        ),
        pytest.param(
            blocks().float(),
            TypeError,
            ("block_mask must be a bool tensor", "float32"),
            id="floats",
        ),
        pytest.param(
            blocks(B, Hq, n_q, n_k + 1),
            ValueError,
            ("[2, 4, 2, 2]", "128", "64", "[2, 4, 2, 3]"),
            id="one block more",
        ),
        pytest.param(blocks(Lq, Lk), ValueError, ("[2, 4, 2, 2]", "[130, 100]"), id="a token mask"),
        pytest.param(
            blocks(B, Hk, n_q, n_k), ValueError, ("[2, 4, 2, 2]", "[2, 2, 2, 2]"), id="Hk heads"
        ),
        pytest.param(
            blocks(1, B, Hq, n_q, n_k), ValueError, ("[2, 4, 2, 2]", "[1, 2, 4, 2, 2]"), id="5-D"
        ),
        pytest.param(
            blocks().to("meta"), ValueError, ("block_mask is on meta", "cpu"), id="device"
        ),
    ],
)
def test_block_mask(function, block_mask, error, says):
    refused(lambda: function(q(), k(), v(), enable_gqa=True, block_mask=block_mask), error, *says)
