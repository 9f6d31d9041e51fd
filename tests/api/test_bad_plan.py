"""Mistakes in plans, quantized tensors and partial results, refused before any work."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sparge
from refusals import (
    CAUSAL_PLAN,
    MASKED_PLAN,
    PLAN,
    B,
    Hq,
    Lk,
    Lq,
    attend,
    blocks,
    each,
    k,
    n_k,
    n_q,
    q,
    refused,
    v,
)
from sparge import BlockPlan, QTensor

# --- plans ------------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("no_work")


def plan_like(plan=PLAN, **changes):
    return dataclasses.replace(plan, **changes)


OTHER_LENGTHS = BlockPlan.from_mask(blocks(), Lq=129, Lk=Lk)
OTHER_KEYS = BlockPlan.from_mask(blocks(), Lq=Lq, Lk=101)
ONE_HEAD = BlockPlan.from_mask(blocks(B, 1, n_q, n_k), Lq=Lq, Lk=Lk)
ONE_BATCH = BlockPlan.from_mask(blocks(1, Hq, n_q, n_k), Lq=Lq, Lk=Lk)


@each(attend)
@pytest.mark.parametrize(
    "plan, error, says",
    [
        pytest.param(None, TypeError, ("BlockPlan", "NoneType", "from_mask"), id="no plan"),
        pytest.param(blocks(), TypeError, ("BlockPlan", "Tensor", "from_mask"), id="a mask"),
        pytest.param(
            OTHER_LENGTHS, ValueError, ("(2, 4, 129, 100)", "(2, 4, 130, 100)"), id="queries"
        ),
        pytest.param(OTHER_KEYS, ValueError, ("(2, 4, 130, 101)", "(2, 4, 130, 100)"), id="keys"),
        pytest.param(ONE_HEAD, ValueError, ("(2, 1, 130, 100)", "(2, 4, 130, 100)"), id="heads"),
        pytest.param(ONE_BATCH, ValueError, ("(1, 4, 130, 100)", "(2, 4, 130, 100)"), id="batch"),
        pytest.param(
            MASKED_PLAN, ValueError, ("made with an attn_mask", "same attn_mask"), id="its mask"
        ),
        pytest.param(
            plan_like(
                counts=PLAN.counts.to("meta"),
                indices=PLAN.indices.to("meta"),
                allowed=PLAN.allowed.to("meta"),
            ),
            ValueError,
            ("plan", "meta", "cpu"),
            id="device",
        ),
        pytest.param(
            plan_like(indices=PLAN.indices[..., :1]),
            ValueError,
            ("indices", "(2, 4, 2, 2)", "(2, 4, 2, 1)"),
            id="lists cut short",
        ),
        pytest.param(
            plan_like(indices=PLAN.indices + 50), ValueError, ("below 2",), id="blocks out of range"
        ),
    ],
)
def test_a_plan_for_something_else(function, plan, error, says):
    refused(lambda: function(q(), k(), v(), enable_gqa=True, plan=plan), error, *says)


@pytest.mark.parametrize(
    "options, error, says",
    [
        pytest.param(
            {"is_causal": True}, ValueError, ("is_causal=False", "is_causal=True"), id="causal"
        ),
        pytest.param(
            {"is_causal": False, "plan": CAUSAL_PLAN},
            ValueError,
            ("is_causal=True", "is_causal=False", "leave it out"),
            id="not causal",
        ),
        pytest.param(
            {"causal_align": "bottom_right", "plan": CAUSAL_PLAN},
            ValueError,
            ("offset of 0", "'bottom_right'", "leave causal_align out"),
            id="other diagonal",
        ),
        pytest.param(
            {"causal_align": "sideways", "plan": CAUSAL_PLAN},
            ValueError,
            ("'top_left'", "'sideways'"),
            id="no diagonal at all",
        ),
        pytest.param(
            {"causal_align": "sideways"},
            ValueError,
            ("top_left", "'sideways'"),
            id="no diagonal, plan without one",
        ),
    ],
)
def test_attend_against_its_plan(options, error, says):
    refused(lambda: attend(q(), k(), v(), enable_gqa=True, **options), error, *says)


SIZES = {"Lq": Lq, "Lk": Lk}


@pytest.mark.parametrize(
    "mask, options, error, says",
    [
        pytest.param([[True]], SIZES, TypeError, ("block mask", "list"), id="list"),
        pytest.param(
            blocks().int(), SIZES, TypeError, ("must be bool", "int32", ".bool()"), id="ints"
        ),
        pytest.param(
            blocks(n_q, n_k), SIZES, ValueError, ("[B, Hq, 2, 2]", "(2, 2)"), id="2-D mask"
        ),
        pytest.param(
            blocks(B, Hq, n_q, 3),
            SIZES,
            ValueError,
            ("130 and 100", "[B, Hq, 2, 2]", "128", "64", "(2, 4, 2, 3)"),
            id="one block more",
        ),
        pytest.param(
            blocks(B, Hq, 0, n_k), {"Lq": 0, "Lk": Lk}, ValueError, ("Lq", "0"), id="no queries"
        ),
        pytest.param(
            blocks(B, Hq, n_q, 0), {"Lq": Lq, "Lk": -3}, ValueError, ("Lk", "-3"), id="keys below 0"
        ),
        pytest.param(
            blocks(), {"Lq": 130.0, "Lk": Lk}, TypeError, ("Lq", "130.0"), id="length a float"
        ),
        pytest.param(
            blocks(),
            {**SIZES, "is_causal": True, "causal_align": "center"},
            ValueError,
            ("top_left", "bottom_right", "'center'"),
            id="unknown diagonal",
        ),
        pytest.param(
            blocks(), {**SIZES, "is_causal": "yes"}, TypeError, ("is_causal", "'yes'"), id="'yes'"
        ),
        pytest.param(
            blocks(),
            {**SIZES, "attn_mask": torch.ones(1, 1, Lq, 99, dtype=torch.bool)},
            ValueError,
            ("[2, 4, 130, 100]", "[1, 1, 130, 99]"),
            id="token mask of another shape",
        ),
        pytest.param(
            blocks(),
            {**SIZES, "attn_mask": torch.ones(1, 3, Lq, Lk, dtype=torch.bool)},
            ValueError,
            ("[2, 4, 130, 100]", "[1, 3, 130, 100]"),
            id="token mask for other heads",
        ),
        pytest.param(
            blocks(),
            {**SIZES, "attn_mask": torch.ones(1, 1, Lq, Lk, dtype=torch.int32)},
            TypeError,
            ("bool", "int32"),
            id="token mask of ints",
        ),
    ],
)
def test_plan_from_mask(mask, options, error, says):
    refused(lambda: BlockPlan.from_mask(mask, **options), error, *says)


@pytest.mark.parametrize(
    "changes, says",
    [
        pytest.param({"offset": 1 << 50}, ("offset", str(1 << 50)), id="diagonal"),
        pytest.param({"Lq": 500}, ("(2, 4, 4)", "500", "(2, 4, 2)"), id="other length"),
        pytest.param({"Lk": 500}, ("indices", "(2, 4, 2, 8)", "500"), id="other keys"),
        pytest.param(
            {"counts": PLAN.counts.long()}, ("counts", "int32", "torch.int64"), id="counts int64"
        ),
        pytest.param(
            {"counts": PLAN.counts.flatten()}, ("counts", "[B, Hq, n_q]", "(16,)"), id="counts flat"
        ),
        pytest.param(
            {"allowed": PLAN.allowed[:1]}, ("allowed", "(2, 4, 2)", "(1, 4, 2)"), id="batch of 1"
        ),
        pytest.param({"counts": PLAN.counts + 1}, ("`count` ascending",), id="count too large"),
        pytest.param({"counts": PLAN.counts - 3}, ("`count` ascending",), id="count below 0"),
        pytest.param({"allowed": PLAN.allowed - 1}, ("at most `allowed`",), id="kept > allowed"),
        pytest.param({"allowed": PLAN.allowed + 1}, ("below 2",), id="allowed > blocks"),
        pytest.param({"indices": PLAN.indices.flip(-1)}, ("ascending",), id="descending"),
        pytest.param({"indices": PLAN.indices * 0}, ("ascending",), id="twice the same"),
        pytest.param({"indices": PLAN.indices + 1}, ("below 2",), id="out of range"),
        pytest.param({"indices": PLAN.indices - 2}, ("below 2",), id="negative"),
        pytest.param({"counts": PLAN.counts - 1}, ("then -1",), id="entries behind the count"),
    ],
)
def test_validate(changes, says):
    refused(plan_like(**changes).validate, ValueError, *says)
    refused(lambda: plan_like(**changes).validate("here: "), ValueError, "here: ", *says)


def test_validate_accepts_what_is_right():
    for plan in (PLAN, CAUSAL_PLAN, MASKED_PLAN):
        copy = plan_like(plan)
        assert not copy.is_valid
        copy.validate()
        assert copy.is_valid


def test_load_what_is_no_plan(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a plan")
    refused(lambda: BlockPlan.load(path), ValueError, "notes.txt", "not a block plan")
    with pytest.raises(FileNotFoundError, match="missing"):
        BlockPlan.load(tmp_path / "missing.safetensors")


# --- QTensor ----------------------------------------------------------------------------------

CODES = torch.zeros(1, 2, 5, 8, dtype=torch.int8)
SCALE = torch.ones(1, 2, 5)


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        pytest.param((None, SCALE), TypeError, ("codes", "NoneType"), id="no codes"),
        pytest.param((CODES, 0.5), TypeError, ("scale", "float"), id="one number as scale"),
        pytest.param(
            (CODES.float(), SCALE), TypeError, ("codes must be int8", "float32"), id="float codes"
        ),
        pytest.param((CODES.to(torch.uint8), SCALE), TypeError, ("int8", "uint8"), id="uint8"),
        pytest.param((CODES[0], SCALE[0]), ValueError, ("codes", "2, 5, 8"), id="3-D codes"),
        pytest.param(
            (CODES, SCALE[..., :4]), ValueError, ("(1, 2, 5)", "(1, 2, 4)"), id="scales missing"
        ),
        pytest.param(
            (CODES, SCALE, 2),
            ValueError,
            ("(1, 2, 3)", "rows_per_scale 2", "(1, 2, 5)"),
            id="groups",
        ),
        pytest.param(
            (CODES, SCALE, 1, True), ValueError, ("(1, 2, 5, 8)", "(1, 2, 5)"), id="per channel"
        ),
        pytest.param((CODES, SCALE, 0), ValueError, ("rows_per_scale", "0"), id="groups of 0"),
        pytest.param((CODES, SCALE, -1), ValueError, ("rows_per_scale", "-1"), id="groups of -1"),
        pytest.param(
            (CODES, SCALE[..., :3], 2.0), TypeError, ("rows_per_scale", "2.0"), id="groups of 2.0"
        ),
        pytest.param(
            (CODES, SCALE.int()), TypeError, ("scale", "float32", "int32"), id="int scale"
        ),
        pytest.param(
            (CODES, SCALE.half()), TypeError, ("scale", "float32", "float16"), id="half scale"
        ),
        pytest.param(
            (CODES, SCALE.to("meta")),
            ValueError,
            ("codes", "cpu", "scale", "meta"),
            id="device mix",
        ),
    ],
)
def test_qtensor(arguments, error, says):
    refused(lambda: QTensor(*arguments), error, *says)


# --- merge ------------------------------------------------------------------------------------

OUT, LSE = torch.zeros(2, 3, 4), torch.zeros(2, 3)


@pytest.mark.parametrize(
    "parts, error, says",
    [
        pytest.param((None, LSE, OUT, LSE), TypeError, ("out_a", "NoneType"), id="no out_a"),
        pytest.param((OUT, LSE, OUT, [0.0]), TypeError, ("lse_b", "list"), id="lse_b a list"),
        pytest.param(
            (OUT, LSE[:, :2], OUT, LSE), ValueError, ("lse_a", "[2, 2]", "[2, 3, 4]"), id="lse_a"
        ),
        pytest.param(
            (OUT, LSE, OUT, LSE[..., None]),
            ValueError,
            ("lse_b", "without its last", "[2, 3, 1]", "[2, 3, 4]"),
            id="lse_b with a dimension more",
        ),
        pytest.param(
            (OUT, LSE, OUT[:1], LSE[:1]), ValueError, ("[2, 3, 4]", "[1, 3, 4]"), id="other batch"
        ),
        pytest.param(
            (OUT, LSE, OUT[..., :2], LSE), ValueError, ("[2, 3, 4]", "[2, 3, 2]"), id="other Dv"
        ),
        pytest.param(
            (OUT, LSE, OUT.half(), LSE), ValueError, ("float32", "float16"), id="dtype mix"
        ),
        pytest.param(
            (OUT, LSE, OUT, LSE.double()), ValueError, ("float32", "float64"), id="lse dtype mix"
        ),
        pytest.param(
            (OUT.int(), LSE, OUT.int(), LSE), TypeError, ("out", "int32"), id="integer results"
        ),
        pytest.param(
            (OUT, LSE.int(), OUT, LSE.int()), TypeError, ("lse", "int32"), id="integer lse"
        ),
        pytest.param(
            (OUT, LSE, OUT.to("meta"), LSE.to("meta")),
            ValueError,
            ("one device", "cpu", "meta"),
            id="device mix",
        ),
        pytest.param(
            (OUT, LSE, OUT, LSE.to("meta")), ValueError, ("cpu", "meta"), id="lse on another device"
        ),
    ],
)
def test_merge(parts, error, says):
    refused(lambda: sparge.merge(*parts), error, *says)
