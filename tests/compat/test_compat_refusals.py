"""Every argument of `spas_sage_attn` works or is refused, before any work, with a way out."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from oracle import make_qkv
from refusals import refused
from sparge.compat.spas_sage_attn import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
)

Q, K, V = make_qkv(B=2, Lq=300, Lk=330)
MASK = torch.ones(2, 2, 3, 6, dtype=torch.bool)
cdf, topk, block = (
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
    lambda *tensors, **options: block_sparse_sage2_attn_cuda(
        *tensors, **{"mask_id": MASK, **options}
    ),
)
NEVER = sparge.Unsupported
EVERY = [
    ({"dropout_p": 0.1}, NEVER, "dropout_p must be 0.0", "0.1", "scaled_dot_product_attention"),
    ({"dropout_p": True}, NEVER, "dropout_p must be 0.0"),
    ({"scale": "1"}, TypeError, "scale must be a number"),
    ({"scale": math.nan}, ValueError, "scale must be finite"),
    ({"smooth_k": None}, TypeError, "smooth_k must be True or False, got None"),
    ({"smooth_k": 0}, TypeError, "smooth_k must be True or False, got 0"),
    ({"attention_sink": 1}, TypeError, "attention_sink must be True or False"),
    ({"return_sparsity": 1}, TypeError, "return_sparsity must be True or False"),
    ({"tensor_layout": "BHLD"}, ValueError, "'HND'", "'NHD'", "got 'BHLD'"),
    ({"output_dtype": torch.int8}, TypeError, "output_dtype must be a floating", "int8", "None"),
    ({"output_dtype": "float16"}, TypeError, "output_dtype must be a floating"),
    ({"pvthreshd": 0}, ValueError, "pvthreshd must be greater than 0, got 0", "float('inf')"),
    ({"pvthreshd": torch.tensor([1.0, -1.0])}, ValueError, "pvthreshd", "got -1.0"),
    ({"pvthreshd": torch.ones(3)}, ValueError, "pvthreshd has 3 numbers for 2 query heads"),
    ({"pvthreshd": torch.ones(2, 2)}, ValueError, "1-D", "[2, 2]"),
    ({"pvthreshd": None}, TypeError, "pvthreshd must be a number", "None"),
    ({"pvthreshd": math.nan}, ValueError, "pvthreshd must be a number, got nan"),
]
PREDICTED = [
    (
        {"attn_mask": torch.ones(300, 330, dtype=torch.bool)},
        NEVER,
        "attn_mask must be None",
        "spar",
    ),
    ({"is_causal": 1}, TypeError, "is_causal must be True or False"),
    ({"simthreshd1": "0.6"}, TypeError, "simthreshd1 must be a number", "'0.6'"),
    ({"simthreshd1": torch.ones(2, 1)}, ValueError, "simthreshd1", "1-D"),
    ({"cdfthreshd": 0.0}, ValueError, "must be in (0, 1], got 0.0"),
    ({"cdfthreshd": 1.5}, ValueError, "must be in (0, 1], got 1.5"),
]
TOPK = [
    ({"topk": 0}, ValueError, "topk must be in (0, 1], got 0"),
    ({"topk": 32}, ValueError, "topk must be in (0, 1], got 32"),
    ({"topk": None}, ValueError, "exactly one of cdfthreshd and topk", "topk=None"),
    ({"cdfthreshd": 0.9}, ValueError, "exactly one of cdfthreshd and topk", "cdfthreshd=0.9"),
]
BLOCK = [
    ({"mask_id": None}, TypeError, "mask_id must be a tensor", "[2, 2, 3, 6]", "got None", "topk"),
    ({"mask_id": MASK[0]}, ValueError, "[2, 2, 3, 6]", "got [2, 3, 6]", ".expand"),
    ({"mask_id": torch.ones(2, 2, 5, 3)}, ValueError, "64 x 128", "sm90", "128 x 64 on every chip"),
    ({"mask_id": MASK.to("meta")}, ValueError, "mask_id is on meta", "mask_id.to(q.device)"),
]


def rows(table):
    return [(options, error, says) for options, error, *says in table]


@pytest.mark.parametrize("function", [cdf, topk, block], ids=["cdf", "topk", "block"])
@pytest.mark.parametrize("options, error, says", rows(EVERY))
def test_by_every_function(function, options, error, says, no_work):
    refused(lambda: function(Q, K, V, **options), error, *says)


@pytest.mark.parametrize("function", [cdf, topk], ids=["cdf", "topk"])
@pytest.mark.parametrize("options, error, says", rows(PREDICTED))
def test_by_those_that_predict(function, options, error, says, no_work):
    if function is topk and "cdfthreshd" in options:
        options = {**options, "topk": None}
    refused(lambda: function(Q, K, V, **options), error, *says)


@pytest.mark.parametrize("options, error, says", rows(TOPK))
def test_by_topk(options, error, says, no_work):
    refused(lambda: topk(Q, K, V, **options), error, *says)


def test_by_cdf(no_work):
    refused(lambda: cdf(Q, K, V, cdfthreshd=None), ValueError, "exactly one of cdfthreshd")


@pytest.mark.parametrize("options, error, says", rows(BLOCK))
def test_by_the_block_mask(options, error, says, no_work):
    refused(lambda: block(Q, K, V, **options), error, *says)


@pytest.mark.parametrize("function", [cdf, topk, block], ids=["cdf", "topk", "block"])
def test_tensors(function, no_work):
    refused(lambda: function(Q[0], K, V), ValueError, "q must have 4 dimensions", "unsqueeze(0)")
    refused(lambda: function(Q, [1], V), TypeError, "k must be a tensor, got list")
    refused(lambda: function(Q, K, V.half()), TypeError, "one dtype", ".to(query.dtype)")
    refused(lambda: function(Q, K[..., :16], V), ValueError, "head dim")
    with_grad = Q.clone().requires_grad_()
    refused(lambda: function(with_grad, K, V), ValueError, "no gradient", "torch.no_grad()")
