"""Mistakes in recipes and backends, refused before any work."""

from __future__ import annotations

import math

import pytest
import torch

import sparge
from refusals import (
    EVERY,
    D,
    Lq,
    attend,
    attention,
    each,
    explain,
    k,
    make_plan,
    q,
    reference,
    refused,
    v,
)
from sparge import KeepFraction, KeepMass, Recipe
from sparge.backends.reference import REFERENCE

# --- recipes ----------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("no_work")


@each(*EVERY)
@pytest.mark.parametrize(
    "recipe, error, says",
    [
        pytest.param(0.9, TypeError, ("sparge.Recipe", "float"), id="number"),
        pytest.param({"keep": "all"}, TypeError, ("sparge.Recipe", "dict"), id="dict"),
        pytest.param(KeepMass(0.9), TypeError, ("sparge.Recipe", "KeepMass"), id="a keep alone"),
        pytest.param(Recipe, TypeError, ("sparge.Recipe", "type"), id="the class"),
        pytest.param(
            Recipe(keep=KeepMass([0.9, 0.8])), ValueError, ("keep", "2 numbers", "4"), id="masses"
        ),
        pytest.param(
            Recipe(keep=KeepFraction((0.5,) * 5)), ValueError, ("keep", "5", "4"), id="fractions"
        ),
        pytest.param(
            Recipe(predictor="mean", min_similarity=(0.1, None)),
            ValueError,
            ("min_similarity", "2 numbers", "4 query heads"),
            id="similarities for the key heads",
        ),
        pytest.param(
            Recipe(pv_skip=[5.0]), ValueError, ("pv_skip", "1 numbers", "4 query heads"), id="skips"
        ),
    ],
)
def test_recipe_of_a_call(function, recipe, error, says):
    refused(lambda: function(q(), k(), v(), enable_gqa=True, recipe=recipe), error, *says)


@pytest.mark.parametrize("bad", [math.nan, (0.5, math.nan), torch.tensor([math.nan, 0.5])])
@pytest.mark.parametrize(
    "make, name",
    [
        pytest.param(KeepMass, "mass", id="mass"),
        pytest.param(KeepFraction, "fraction", id="fraction"),
        pytest.param(
            lambda x: Recipe(predictor="mean", min_similarity=x), "min_similarity", id="similarity"
        ),
        pytest.param(lambda x: Recipe(pv_skip=x), "pv_skip", id="pv_skip"),
    ],
)
def test_nan_in_a_threshold(make, name, bad):
    refused(lambda: make(bad), ValueError, name, "got nan")


@pytest.mark.parametrize(
    "make, error, says",
    [
        pytest.param(lambda: KeepMass(0.0), ValueError, ("(0, 1]", "0.0"), id="mass 0"),
        pytest.param(lambda: KeepMass(1.01), ValueError, ("(0, 1]", "1.01"), id="mass 1.01"),
        pytest.param(lambda: KeepMass((0.5, -1)), ValueError, ("(0, 1]", "-1.0"), id="one of two"),
        pytest.param(lambda: KeepMass(None), ValueError, ("(0, 1]", "None"), id="mass None"),
        pytest.param(lambda: KeepMass(()), ValueError, ("one per head", "()"), id="no masses"),
        pytest.param(lambda: KeepMass("0.9"), TypeError, ("number", "'0.9'"), id="text"),
        pytest.param(lambda: KeepMass(True), TypeError, ("number", "True"), id="mass True"),
        pytest.param(lambda: KeepMass(object()), TypeError, ("number", "object"), id="an object"),
        pytest.param(lambda: KeepMass(10**400), ValueError, ("(0, 1]",), id="no float is so large"),
        pytest.param(
            lambda: KeepMass({0.8, 0.9}), TypeError, ("mass", "set"), id="a set has no order"
        ),
        pytest.param(
            lambda: KeepMass({0: 0.8, 1: 0.9}), TypeError, ("mass", "dict"), id="masses by name"
        ),
        pytest.param(
            lambda: KeepFraction(torch.full((2, 2), 0.5)), ValueError, ("flat",), id="2-D tensor"
        ),
        pytest.param(
            lambda: KeepFraction(1.5), ValueError, ("fraction", "(0, 1]", "1.5"), id="fraction"
        ),
        pytest.param(
            lambda: Recipe(predictor="mean", min_similarity=1.1),
            ValueError,
            ("[-1, 1]", "1.1", "None means no judge"),
            id="similarity 1.1",
        ),
        pytest.param(
            lambda: Recipe(min_similarity=0.5),
            ValueError,
            ("'blend'", "predictor='mean'", "min_similarity=None"),
            id="similarity without a judge",
        ),
        pytest.param(
            lambda: Recipe(pv_skip=0), ValueError, ("greater than 0", "0.0", "None"), id="pv_skip 0"
        ),
        pytest.param(
            lambda: Recipe(pv_skip=math.inf),
            ValueError,
            ("finite", "inf", "None"),
            id="pv_skip inf",
        ),
        pytest.param(
            lambda: Recipe(precision="fp8"), ValueError, ("'int8-fast'", "'fp8'"), id="precision"
        ),
        pytest.param(
            lambda: Recipe(predictor="max"), ValueError, ("'rows'", "'max'"), id="predictor"
        ),
        pytest.param(
            lambda: Recipe(keep=0.9), TypeError, ("KeepMass(number)", "0.9"), id="bare number"
        ),
        pytest.param(
            lambda: Recipe(sink_blocks=-1), ValueError, ("sink_blocks", "at least 0", "-1"), id="-1"
        ),
        pytest.param(
            lambda: Recipe(local_blocks=1.5), TypeError, ("local_blocks", "whole", "1.5"), id="1.5"
        ),
        pytest.param(
            lambda: Recipe(sink_blocks=True), TypeError, ("sink_blocks", "whole", "True"), id="True"
        ),
        pytest.param(
            lambda: Recipe(sample_rows=0), ValueError, ("sample_rows", "at least 1", "0"), id="none"
        ),
        pytest.param(
            lambda: Recipe(sample_rows=129), ValueError, ("sample_rows", "128", "129"), id="129"
        ),
        pytest.param(
            lambda: Recipe(skipped="keep"), ValueError, ("'pool'", "'keep'"), id="skipped"
        ),
        pytest.param(
            lambda: Recipe(pool_group=16), ValueError, ("'drop'", "16", "'pool'"), id="no pool"
        ),
        pytest.param(
            lambda: Recipe(skipped="pool", pool_group=2),
            ValueError,
            ("pool_group", "at least 4", "2"),
            id="pool_group 2",
        ),
        pytest.param(
            lambda: Recipe(skipped="pool", pool_group=48),
            ValueError,
            ("pool_group", "(4, 8, 16, 32, 64)", "48"),
            id="pool_group 48",
        ),
        pytest.param(
            lambda: Recipe(skipped="pool", pool_group=16.0),
            TypeError,
            ("pool_group", "whole", "16.0"),
            id="pool_group 16.0",
        ),
        pytest.param(
            lambda: Recipe(protect=(0, 5)), TypeError, ("(start, stop)", "got 0"), id="bare range"
        ),
        pytest.param(
            lambda: Recipe(protect=7), TypeError, ("(start, stop)", "got 7"), id="a number"
        ),
        pytest.param(
            lambda: Recipe(protect=((5, 5),)), ValueError, ("not be empty", "(5, 5)"), id="5 to 5"
        ),
        pytest.param(
            lambda: Recipe(protect=((-1, -3),)), ValueError, ("not be empty", "(-1, -3)"), id="down"
        ),
        pytest.param(
            lambda: Recipe(protect=((None, 3),)), TypeError, ("whole", "(None, 3)"), id="no start"
        ),
        pytest.param(
            lambda: Recipe(protect=((0, 2.0),)), TypeError, ("whole", "(0, 2.0)"), id="float stop"
        ),
        pytest.param(
            lambda: Recipe(protect=((0, 2, 4),)), TypeError, ("(start, stop)", "4)"), id="a step"
        ),
    ],
)
def test_recipe_values(make, error, says):
    refused(make, error, *says)


def test_a_scale_that_no_float_holds():
    call = {"enable_gqa": True, "scale": 10**400}
    refused(lambda: attention(q(), k(), v(), **call), ValueError, "scale", "finite")


@each(attention, reference, explain, attend)
@pytest.mark.parametrize("precision", ["int8", "int8-fast"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_quantized_precision_has_no_gradient(function, precision, which):
    tensors = [q(), k(), v()]
    tensors[which].requires_grad_()
    options = {"enable_gqa": True, "recipe": Recipe(precision=precision)}
    says = (repr(precision), "requires grad", "'half'", "'exact'", "no_grad")
    refused(lambda: function(*tensors, **options), ValueError, *says)


def test_varlen_quantized_precision_has_no_gradient():
    x = torch.zeros(Lq, 2, D, requires_grad=True)
    says = ("'int8'", "'half'", "'exact'")
    cuts = torch.tensor([0, Lq])
    refused(lambda: sparge.attention_varlen(x, x, x, cuts, cuts), ValueError, *says)


# --- backends ---------------------------------------------------------------------------------


@each(attention, explain, make_plan, attend)
@pytest.mark.parametrize("name", ["cuda", "no", "Reference", None, 3, ["reference"]], ids=str)
def test_backend_names(function, name):
    with sparge.record() as runs, pytest.raises((ValueError, TypeError)) as caught:
        function(q(), k(), v(), enable_gqa=True, backend=name)
    assert repr(name) in str(caught.value)
    assert "reference" in str(caught.value)
    assert "auto" in str(caught.value)
    assert runs == []


@pytest.mark.parametrize("function", [make_plan, attend], ids=lambda f: f.__name__)
def test_dense_attention_has_no_stages(function):
    says = ("backend='dense'", "no plan", "reference", "was not asked")
    call = {"enable_gqa": True, "backend": "dense"}
    refused(lambda: function(q(), k(), v(), **call), sparge.Unsupported, *says)


def backend_named(name):
    return sparge.Backend(name, "for a test", REFERENCE.stages)


@pytest.mark.parametrize(
    "made, error, says",
    [
        pytest.param(backend_named("reference"), ValueError, ("'reference'", "taken"), id="twice"),
        pytest.param(backend_named("dense"), ValueError, ("'dense'", "taken"), id="dense"),
        pytest.param(backend_named("auto"), ValueError, ("'auto'", "taken"), id="auto"),
        pytest.param("triton", TypeError, ("Backend", "str"), id="a name only"),
    ],
)
def test_register_backend(made, error, says):
    from sparge.routing import backends

    before = backends()
    refused(lambda: sparge.register_backend(made), error, *says)
    assert backends() == before
