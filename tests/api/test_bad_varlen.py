"""Mistakes in packed sequences, refused before any work."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from refusals import EXACT, D, Dv, Hk, Hq, explain, k, q, refused, v
from sparge import KeepAll, Recipe

# --- varlen -----------------------------------------------------------------------------------

Tq, Tk = 12, 20
CU_Q, CU_K = torch.tensor([0, 4, 12]), torch.tensor([0, 9, 20], dtype=torch.int32)

pytestmark = pytest.mark.usefixtures("no_work")


def varlen(query=None, key=None, value=None, cu_q=CU_Q, cu_k=CU_K, **options):
    query = torch.zeros(Tq, Hq, D) if query is None else query
    key = torch.zeros(Tk, Hk, D) if key is None else key
    value = torch.zeros(Tk, Hk, Dv) if value is None else value
    options = {"enable_gqa": True, **options}
    return sparge.attention_varlen(query, key, value, cu_q, cu_k, **options)


def test_the_right_varlen_call_begins_to_work():
    with pytest.raises(AssertionError, match="work was begun"):
        varlen()


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        pytest.param({"query": 3}, TypeError, ("query must be a tensor", "int"), id="number"),
        pytest.param({"value": "v"}, TypeError, ("value must be a tensor", "str"), id="text"),
        pytest.param(
            {"query": q()}, ValueError, ("[T, H, D]", "[2, 4, 130, 16]"), id="4-D as in attention"
        ),
        pytest.param(
            {"key": torch.zeros(Tk, D)}, ValueError, ("key must be [T, H, D]", "[20, 16]"), id="2-D"
        ),
        pytest.param(
            {"key": torch.zeros(Tk, Hk, D, device="meta")},
            ValueError,
            ("one device", "key on meta"),
            id="device mix",
        ),
        pytest.param(
            {"value": torch.zeros(Tk, Hk, Dv, dtype=torch.float64)},
            TypeError,
            ("float32", "float64"),
            id="dtype mix",
        ),
        pytest.param(
            {"value": torch.zeros(Tk - 1, Hk, Dv)}, ValueError, ("same heads and length",), id="V"
        ),
        pytest.param(
            {"query": torch.zeros(Tq, 3, D)}, ValueError, ("multiple", "3 and 2"), id="heads"
        ),
        pytest.param({"enable_gqa": False}, ValueError, ("enable_gqa=True",), id="gqa not asked"),
        pytest.param(
            {"query": torch.zeros(0, Hq, D), "cu_q": torch.tensor([0, 0])},
            ValueError,
            ("query is empty",),
            id="no tokens",
        ),
        pytest.param({"scale": math.nan}, ValueError, ("scale", "nan"), id="scale nan"),
        pytest.param({"is_causal": 1}, TypeError, ("is_causal", "1"), id="is_causal 1"),
        pytest.param({"causal_align": "x"}, ValueError, ("bottom_right", "'x'"), id="diagonal"),
        pytest.param({"recipe": "all"}, TypeError, ("sparge.Recipe", "str"), id="recipe"),
        pytest.param(
            {"recipe": Recipe(pv_skip=(1.0, 2.0))}, ValueError, ("pv_skip", "2", "4"), id="per head"
        ),
        pytest.param({"return_lse": 0}, TypeError, ("return_lse", "0"), id="return_lse 0"),
        pytest.param({"backend": "cuda"}, ValueError, ("'cuda'", "reference"), id="backend"),
    ],
)
def test_varlen(arguments, error, says):
    refused(lambda: varlen(**arguments), error, *says)


@pytest.mark.parametrize("name", [None, 3], ids=str)
def test_varlen_backend_names(name):
    with pytest.raises((ValueError, TypeError), match=f"{name}.*reference"):
        varlen(backend=name)


CUTS = [
    pytest.param([0, 4, 12], TypeError, ("tensor", "list"), id="list"),
    pytest.param(None, TypeError, ("tensor", "NoneType"), id="nothing"),
    pytest.param(torch.tensor([0.0, 4, 12]), TypeError, ("int32 or int64", "float32"), id="floats"),
    pytest.param(
        torch.tensor([0, 4, 12], dtype=torch.int16), TypeError, ("int32", "int16"), id="int16"
    ),
    pytest.param(torch.tensor([[0, 4, 12]]), ValueError, ("1-D", "[[0, 4, 12]]"), id="2-D"),
    pytest.param(torch.tensor(12), ValueError, ("1-D", "got 12"), id="0-D"),
    pytest.param(torch.tensor([0]), ValueError, ("begin with 0", "12", "[0]"), id="no sequence"),
    pytest.param(
        torch.tensor([1, 4, 12]), ValueError, ("begin with 0", "[1, 4, 12]"), id="starts at 1"
    ),
    pytest.param(torch.tensor([4, 12]), ValueError, ("begin with 0", "[4, 12]"), id="no zero"),
    pytest.param(
        torch.tensor([0, 4, 11]), ValueError, ("end with", "12", "[0, 4, 11]"), id="ends early"
    ),
    pytest.param(
        torch.tensor([0, 4, 13]), ValueError, ("end with", "12", "[0, 4, 13]"), id="ends late"
    ),
    pytest.param(
        torch.tensor([0, 8, 4, 12]), ValueError, ("must rise", "sequence 1", "8 to 4"), id="falls"
    ),
    pytest.param(
        torch.tensor([0, 4, 4, 12]),
        ValueError,
        ("must rise", "sequence 1", "4 to 4", "at least one token"),
        id="empty sequence",
    ),
    pytest.param(
        torch.tensor([0, 4, 12], device="meta"), ValueError, ("cu_seqlens", "meta"), id="device"
    ),
]


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradient"])
@pytest.mark.parametrize("cuts, error, says", CUTS)
def test_varlen_boundaries(cuts, error, says, grad, side):
    x = torch.zeros(Tq, 2, D, requires_grad=grad)
    right = torch.tensor([0, 4, 12])
    arguments = {"cu_q": right, "cu_k": right, f"cu_{side}": cuts}
    options = {"query": x, "key": x, "value": x, "recipe": EXACT, **arguments}
    refused(lambda: varlen(**options), error, f"cu_seqlens_{side}", *says)


def test_varlen_other_count_of_sequences():
    says = ("same number of sequences", "2 and 3")
    refused(lambda: varlen(cu_k=torch.tensor([0, 9, 15, 20])), ValueError, *says)


def test_keep_all_is_no_mistake():
    assert explain(q(), k(), v(), enable_gqa=True, recipe=Recipe(keep=KeepAll())).backend
