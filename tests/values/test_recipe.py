"""Recipes as values: frozen, printed, to JSON and back, and their ranges."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparge
from recipes import quick, recipes
from sparge import DEFAULT, KeepAll, KeepFraction, KeepMass, Recipe

# --- a value ----------------------------------------------------------------------------------


def test_defaults():
    assert Recipe() == Recipe(
        keep=KeepMass(0.98),
        predictor="blend",
        min_similarity=None,
        pv_skip=None,
        precision="int8",
        sink_blocks=1,
        local_blocks=None,
        protect=(),
        sample_rows=4,
        skipped="drop",
        pool_group=64,
    )
    assert KeepMass() == KeepMass(0.98)
    assert KeepFraction() == KeepFraction(0.5)


def test_no_recipe_is_the_default_recipe():
    x = torch.randn(1, 1, 70, 16, generator=torch.Generator().manual_seed(0))
    with sparge.record() as runs:
        sparge.attention(x, x, x)
        sparge.make_plan(x, x)
    assert [run.recipe for run in runs] == [DEFAULT, DEFAULT]


@pytest.mark.parametrize(
    "value, name",
    [
        (Recipe(), "keep"),
        (Recipe(), "precision"),
        (KeepMass(), "mass"),
        (KeepFraction(), "fraction"),
    ],
)
def test_frozen(value, name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, getattr(value, name))


@quick
@given(recipes(), recipes())
def test_equal_recipes_hash_alike_and_others_differ(one, other):
    assert copy.deepcopy(one) == one
    assert hash(copy.deepcopy(one)) == hash(one)
    assert pickle.loads(pickle.dumps(one)).to_json() == one.to_json()
    assert (one == other) == (one.to_dict() == other.to_dict())


def test_equality_looks_at_every_field():
    others = {
        "keep": KeepAll(),
        "predictor": "rows",
        "pv_skip": 5.0,
        "precision": "half",
        "sink_blocks": 0,
        "local_blocks": 1,
        "protect": ((0, 5),),
        "sample_rows": 8,
        "skipped": "pool",
    }
    for name, value in others.items():
        assert Recipe(**{name: value}) != Recipe()
    judged = Recipe(predictor="mean", min_similarity=0.5)
    assert judged != dataclasses.replace(judged, min_similarity=None)
    pooled = Recipe(skipped="pool", pool_group=16)
    assert pooled != dataclasses.replace(pooled, pool_group=64)
    alone = {"min_similarity", "pool_group"}
    assert {*others, *alone} == {field.name for field in dataclasses.fields(Recipe)}
    assert KeepMass(0.5) != KeepFraction(0.5)


def test_ints_and_floats_of_one_value_are_one_recipe():
    assert KeepMass(1) == KeepMass(1.0)
    assert repr(KeepMass(1)) == "KeepMass(mass=1.0)"
    assert Recipe(pv_skip=(5, None)).to_json() == Recipe(pv_skip=(5.0, None)).to_json()


@quick
@given(recipes())
def test_prints_every_field_and_evaluates_back(recipe):
    text = str(recipe)
    for field in dataclasses.fields(Recipe):
        assert f"{field.name}={getattr(recipe, field.name)!r}" in text
    assert eval(repr(recipe)) == recipe


def test_replace_keeps_the_rest_and_checks_again():
    recipe = Recipe(keep=KeepFraction(0.3), pv_skip=4.0)
    changed = dataclasses.replace(recipe, precision="half")
    assert changed == Recipe(keep=KeepFraction(0.3), pv_skip=4.0, precision="half")
    assert '"half"' in changed.to_json()
    with pytest.raises(ValueError, match="'fp4'"):
        dataclasses.replace(recipe, precision="fp4")


@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_quantized_says_whether_codes_are_made(precision):
    assert Recipe(precision=precision).quantized == precision.startswith("int8")


# --- one per head -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "each",
    [
        [0.25, 0.5, 1.0],
        torch.tensor([0.25, 0.5, 1.0]),
        torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64),
        (number for number in (0.25, 0.5, 1.0)),
    ],
    ids=["list", "tensor", "fp64 tensor", "generator"],
)
def test_lists_and_tensors_are_one_per_head(each):
    assert KeepMass(each) == KeepMass((0.25, 0.5, 1.0))


def test_every_threshold_takes_one_per_head():
    assert KeepFraction(torch.tensor([0.5, 0.25])).fraction == (0.5, 0.25)
    assert Recipe(pv_skip=[1, None]).pv_skip == (1.0, None)
    assert Recipe(predictor="mean", min_similarity=[0.5, None]).min_similarity == (0.5, None)


def test_a_tensor_of_no_dimension_is_one_number():
    assert KeepMass(torch.tensor(0.5)) == KeepMass(0.5)


def test_a_recipe_made_of_a_tensor_does_not_follow_it():
    masses = torch.tensor([0.5, 0.25])
    recipe = Recipe(keep=KeepMass(masses))
    masses.fill_(1.0)
    assert recipe.keep.mass == (0.5, 0.25)


def test_protect_as_lists_is_protect_as_tuples():
    assert Recipe(protect=[[0, 5], [7, None]]) == Recipe(protect=((0, 5), (7, None)))
    assert hash(Recipe(protect=[[0, 5]])) == hash(Recipe(protect=((0, 5),)))


# --- JSON -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(recipes())
def test_json_round_trip_loses_nothing(recipe):
    back = Recipe.from_json(recipe.to_json())
    assert back == recipe
    assert repr(back) == repr(recipe)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert set(recipe.to_dict()) == {field.name for field in dataclasses.fields(Recipe)}


def test_json_is_strict_and_reads_plainly():
    recipe = Recipe(keep=KeepMass([0.9, 0.8]), pv_skip=(5.0, None), protect=((0, None),))
    data = json.loads(recipe.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert data["keep"] == {"mass": [0.9, 0.8]}
    assert data["pv_skip"] == [5.0, None]
    assert data["protect"] == [[0, None]]
    assert json.loads(Recipe(keep=KeepAll()).to_json())["keep"] == "all"
    assert json.loads(Recipe(keep=KeepFraction(0.5)).to_json())["keep"] == {"fraction": 0.5}


def test_missing_fields_take_their_defaults():
    assert Recipe.from_json("{}") == Recipe()
    assert Recipe.from_json('{"keep": {"fraction": 0.25}}') == Recipe(keep=KeepFraction(0.25))


@pytest.mark.parametrize(
    "text, says",
    [
        pytest.param("", "valid JSON", id="nothing"),
        pytest.param("{", "valid JSON", id="cut off"),
        pytest.param("keep all", "valid JSON", id="prose"),
        pytest.param(
            '{"kep": "all"}', r"unknown recipe fields \['kep'\]; known are keep", id="typo"
        ),
        pytest.param('{"mass": 0.9}', r"\['mass'\]", id="mass outside keep"),
        pytest.param('{"_json": "{}"}', "_json", id="an attribute that is no field"),
        pytest.param('{"keep": "most"}', 'keep must be "all".*most', id="unknown keep"),
        pytest.param('{"keep": 0.9}', "keep must be.*0.9", id="bare number"),
        pytest.param('{"keep": null}', "keep must be.*None", id="null"),
        pytest.param('{"keep": {}}', "keep must be", id="empty keep"),
        pytest.param('{"keep": {"mass": 0.9, "fraction": 0.5}}', "keep must be", id="two keeps"),
        pytest.param('{"keep": {"mass": 2}}', r"mass must be in \(0, 1\], got 2.0", id="range"),
        pytest.param('{"keep": {"mass": NaN}}', "mass must be.*nan", id="NaN"),
        pytest.param('{"pv_skip": Infinity}', "pv_skip must be.*inf", id="Infinity"),
        pytest.param('{"precision": "fp64"}', "precision must be.*'fp64'", id="precision"),
        pytest.param('{"keep": ' * 99999 + "1" + "}" * 99999, "64 levels deep", id="deep objects"),
        pytest.param(
            '{"pv_skip": ' + "[" * 99999 + "]" * 99999 + "}", "64 levels deep", id="deep lists"
        ),
        pytest.param('{"pv_skip": [[[[[1]]]]]}', "pv_skip must be.*flat list", id="nested"),
        pytest.param(
            '{"precision": "half", "precision": "int8"}', "key 'precision' stands twice", id="twice"
        ),
        pytest.param(
            '{"keep": {"mass": 0.5, "mass": 0.6}}', "key 'mass' stands twice", id="twice inside"
        ),
    ],
)
def test_json_that_is_no_recipe(text, says):
    with pytest.raises(ValueError, match=says):
        Recipe.from_json(text)


@pytest.mark.parametrize("text", ["[]", "3", '"all"', "null", "true"])
def test_json_that_is_no_object(text):
    with pytest.raises(TypeError, match="a recipe is a JSON object, got"):
        Recipe.from_json(text)


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"sink_blocks": 1.0}', "sink_blocks.*whole number.*1.0"),
        ('{"local_blocks": "2"}', "local_blocks.*whole number.*'2'"),
        ('{"protect": [[0, "5"]]}', "protect.*'5'"),
        ('{"protect": [3]}', "protect.*3"),
        ('{"pv_skip": "off"}', "pv_skip must be a number.*'off'"),
    ],
)
def test_json_of_the_wrong_types(text, says):
    with pytest.raises(TypeError, match=says):
        Recipe.from_json(text)


# --- ranges -----------------------------------------------------------------------------------

tiny, below_one, above_one = 5e-324, math.nextafter(1.0, 0.0), math.nextafter(1.0, 2.0)


@pytest.mark.parametrize("keep", [KeepMass, KeepFraction])
def test_boundaries_of_keep(keep):
    for good in (tiny, below_one, 1.0, (tiny, 1.0)):
        assert keep(good) == keep(good)
    for bad in (0.0, -0.0, -tiny, above_one, math.inf, -math.inf, (1.0, 0.0)):
        with pytest.raises(ValueError, match=r"must be in \(0, 1\], got"):
            keep(bad)


@quick
@given(st.floats())
def test_a_share_is_accepted_where_it_lies_in_the_range(number):
    for keep in (KeepMass, KeepFraction):
        if 0.0 < number <= 1.0:
            assert keep([1.0, number]) == keep((1.0, number))
        else:
            with pytest.raises(ValueError, match=r"in \(0, 1\]"):
                keep([1.0, number])


@quick
@given(st.floats())
def test_similarity_is_accepted_where_it_lies_in_the_range(number):
    if -1.0 <= number <= 1.0:
        assert Recipe(predictor="mean", min_similarity=number).min_similarity == number
    else:
        with pytest.raises(ValueError, match=r"min_similarity must be in \[-1, 1\]"):
            Recipe(predictor="mean", min_similarity=number)


def test_boundaries_of_similarity():
    for good in (-1.0, 0.0, 1.0, None, (None, -1.0)):
        Recipe(predictor="mean", min_similarity=good)
    for bad in (above_one, -above_one):
        with pytest.raises(ValueError, match="min_similarity"):
            Recipe(predictor="mean", min_similarity=bad)


@pytest.mark.parametrize("predictor", ["rows", "blend"])
def test_only_the_mean_predictor_has_a_judge(predictor):
    with pytest.raises(ValueError, match=f"{predictor}.*no judge"):
        Recipe(predictor=predictor, min_similarity=-1.0)


@quick
@given(st.floats())
def test_pv_skip_is_accepted_where_it_lies_in_the_range(number):
    if 0.0 < number < math.inf:
        assert Recipe(pv_skip=number).pv_skip == number
    else:
        with pytest.raises(ValueError, match="pv_skip must be a finite number greater than 0"):
            Recipe(pv_skip=number)


@pytest.mark.parametrize(
    "name, low, high",
    [("sink_blocks", 0, None), ("local_blocks", 0, None), ("sample_rows", 1, 128)],
)
def test_boundaries_of_whole_numbers(name, low, high):
    top = 10**12 if high is None else high
    for good in (low, low + 1, top):
        assert getattr(Recipe(**{name: good}), name) == good
    for bad in (low - 1, *(() if high is None else (high + 1,))):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least {low}"):
            Recipe(**{name: bad})
    # Of the window None means something.
    for bad in (True, 1.0, "1", *(() if name == "local_blocks" else (None,))):
        with pytest.raises(TypeError, match=f"{name} must be a whole number.*{bad}"):
            Recipe(**{name: bad})


def test_the_window_of_a_causal_call_is_one_block_unless_it_is_named():
    assert [Recipe().window(causal) for causal in (True, False)] == [1, 0]
    for named in (0, 3):
        assert [Recipe(local_blocks=named).window(c) for c in (True, False)] == [named] * 2


@quick
@given(st.integers(-50, 50), st.integers(-50, 50))
def test_a_protected_range_that_is_empty_in_every_sequence_is_refused(start, stop):
    # Python's own slices say whether any length has a token in it.
    if any(range(L)[start:stop] for L in range(1, 200)):
        assert Recipe(protect=((start, stop),)).protect == ((start, stop),)
    else:
        with pytest.raises(ValueError, match="must not be empty"):
            Recipe(protect=((start, stop),))
