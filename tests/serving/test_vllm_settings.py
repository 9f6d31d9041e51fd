"""The settings of vLLM's workers, without vLLM: sources, names of layers, heads of ranks."""

from __future__ import annotations

import json

import pytest

from sparge import KeepFraction, KeepMass, Recipe
from sparge.serving.vllm.settings import ServingSettings, asked_for, profile_name, read_settings
from sparge.values.recipe import DEFAULT
from sparge_tools import zoo

LAYER = "model.layers.3.self_attn.attn"
NAMES = [f"model.layers.{i}.self_attn" for i in range(5)]
WHOLE = {"first": 0, "heads": 4, "all_heads": 4}


@pytest.mark.parametrize("value, wanted", [("", False), ("0", False), ("1", True)])
def test_serving_is_asked_for_by_one(monkeypatch, value, wanted):
    monkeypatch.setenv("SPARGE_VLLM", value)
    assert asked_for() is wanted


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("SPARGE_VLLM", "yes")
    with pytest.raises(ValueError, match=r"SPARGE_VLLM must be 1 .* or 0, got 'yes'"):
        asked_for()


@pytest.mark.parametrize("config", [{}, None, {"other": 1}, {"sparge": {}}])
def test_nothing_given_is_the_default(config):
    settings = read_settings(config, {})
    assert settings == ServingSettings()
    assert settings.recipe_of(LAYER, **WHOLE) is DEFAULT


def test_a_recipe_comes_from_an_object_a_file_or_text(tmp_path):
    recipe = Recipe(KeepMass(0.9), precision="half")
    file = tmp_path / "recipe.json"
    file.write_text(recipe.to_json())
    for value in (recipe.to_dict(), str(file), recipe.to_json()):
        assert read_settings({"sparge": {"recipe": value}}, {}).recipe == recipe
    by_env = read_settings({}, {"SPARGE_VLLM_RECIPE": str(file)})
    assert by_env.recipe == recipe
    assert by_env.origin == "the recipe of SPARGE_VLLM_RECIPE"


def test_the_configuration_comes_before_the_environment(tmp_path):
    environ = {"SPARGE_VLLM_RECIPE": str(tmp_path / "not there")}
    given = {"recipe": {"keep": "all"}, "backend": "cpu", "log_seconds": 5}
    settings = read_settings({"sparge": given}, environ)
    assert settings.recipe == Recipe.from_dict({"keep": "all"})
    assert (settings.backend, settings.log_seconds) == ("cpu", 5.0)


@pytest.mark.parametrize(
    "section, said",
    [
        ("fast", "must be an object with recipe, profile"),
        ({"recipes": {}}, r"unknown fields \['recipes'\]; known are recipe"),
        ({"recipe": {"keep": {"mass": 2}}}, r"\['recipe'\]: mass must be in \(0, 1\], got 2"),
        ({"recipe": 3}, "must be a recipe's object or the path of its file, got 3"),
        ({"recipe": "/not/there.json"}, "No such file"),
        ({"profile": "/not/there.json"}, "No such file"),
        ({"profile": {}}, "must be a path"),
        ({"backend": 3}, "must be the name of a backend"),
        ({"log_seconds": -1}, "must be a number of seconds"),
        ({"log_seconds": True}, "must be a number of seconds"),
        ({"recipe": {}, "profile": "x"}, "must not be given together"),
    ],
)
def test_mistakes_name_their_place(section, said):
    with pytest.raises(ValueError, match=said) as caught:
        read_settings({"sparge": section}, {})
    assert "additional_config['sparge']" in str(caught.value)


def test_two_variables_are_too_many():
    both = {"SPARGE_VLLM_RECIPE": "a", "SPARGE_VLLM_PROFILE": "b"}
    with pytest.raises(ValueError, match="SPARGE_VLLM_RECIPE and SPARGE_VLLM_PROFILE must not"):
        read_settings({}, both)


def test_a_damaged_profile_is_refused(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"SPARGE_VLLM_PROFILE: .* is not a usable profile"):
        read_settings({}, {"SPARGE_VLLM_PROFILE": str(file)})


@pytest.mark.parametrize(
    "layer, name",
    [
        (LAYER, "model.layers.3.self_attn"),
        ("model.layers.3.self_attn", "model.layers.3.self_attn"),
        ("language_model.model.layers.1.self_attn.attn", "model.language_model.layers.1.self_attn"),
    ],
)
def test_names_of_layers(layer, name):
    assert profile_name(layer, [*NAMES, "model.language_model.layers.1.self_attn"]) == name


def test_a_layer_that_a_profile_lacks():
    with pytest.raises(ValueError, match=r"nearest is 'model.layers.3.self_attn'"):
        profile_name("model.layers.33.self_attn.attn", NAMES)


def test_each_rank_takes_its_heads_of_a_recipe():
    numbers = (0.1, 0.2, 0.3, 0.4)
    settings = ServingSettings(recipe=Recipe(KeepFraction(numbers)))
    found = [
        settings.recipe_of(LAYER, first=2 * rank, heads=2, all_heads=4).keep.fraction
        for rank in (0, 1)
    ]
    assert found == [(0.1, 0.2), (0.3, 0.4)]
    with pytest.raises(ValueError, match="numbers for 4 heads, and the model has 8"):
        settings.recipe_of(LAYER, first=0, heads=4, all_heads=8)


def test_each_rank_takes_its_heads_of_a_profile():
    profile = zoo.profile("smollm2-135m-instruct")
    settings = ServingSettings(profile=profile, origin="the profile")
    name = "model.layers.5.self_attn"
    whole = settings.recipe_of(f"{name}.attn", first=0, heads=9, all_heads=9)
    assert whole == profile.recipe_for(name)
    last = settings.recipe_of(f"{name}.attn", first=6, heads=3, all_heads=9)
    assert last.keep.mass == whole.keep.mass[6:]
    with pytest.raises(ValueError, match=r"9 heads for .*, and the model has 12"):
        settings.recipe_of(f"{name}.attn", first=0, heads=6, all_heads=12)


@pytest.mark.parametrize("protect", [[[-100, None]], [[0, 10], [5, -1]]])
def test_ranges_from_the_end_are_refused(protect):
    recipe = Recipe.from_json(json.dumps({"protect": protect}))
    with pytest.raises(ValueError, match="protect must count from the start when serving"):
        ServingSettings(recipe=recipe).recipe_of(LAYER, **WHOLE)


def test_ranges_from_the_start_are_served():
    recipe = Recipe(protect=((0, 100), (200, None)))
    assert ServingSettings(recipe=recipe).recipe_of(LAYER, **WHOLE) == recipe
