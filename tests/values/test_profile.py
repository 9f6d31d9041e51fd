"""The profile's file: there and back, damaged and newer ones, models that it is not for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import sparge
from cli_runs import run_json, run_text
from sparge.values.profile import Fingerprint, HeadSettings, LayerSettings, Profile, fingerprint


class Config:
    num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim = 2, 4, 2, 8


class Model(nn.Module):
    """Two attention modules whose names contain each other."""

    def __init__(self, seed=0, config=Config):
        super().__init__()
        torch.manual_seed(seed)
        self.config = config()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.single_blocks = nn.ModuleList([nn.Linear(8, 8)])


HEADS = (
    HeadSettings(mass=0.9, min_similarity=0.25, pv_skip=4.0, density=0.31, error=0.07),
    HeadSettings(error=0.012),
    HeadSettings(mass=0.95, density=0.5, error=0.05),
    HeadSettings(mass=0.8, pv_skip=2.5, density=0.2, pv_skipped=0.4, error=0.08),
)
JUDGED = LayerSettings(heads=HEADS, predictor="mean", sink_blocks=2, protect=((0, 226),), inputs=5)


def profile_of(model, **layers):
    return Profile(
        layers={"blocks.0": JUDGED, "single_blocks.0": LayerSettings(), **layers},
        model=fingerprint(model),
        bounds=(0.08, 0.09),
        name="tiny",
        version="0.1.0",
        date="2026-01-01T00:00:00+00:00",
        machine="a machine",
        calibration={"texts": ["essays"], "length": 4096},
    )


def test_there_and_back(tmp_path):
    profile = profile_of(Model())
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == profile
    assert again.to_json() == profile.to_json() == (tmp_path / "p.json").read_text()
    assert list(tmp_path.iterdir()) == [tmp_path / "p.json"]


def test_a_head_is_one_line_that_a_diff_shows():
    profile = profile_of(Model())
    lines = [line.strip() for line in profile.to_json().splitlines()]
    assert (
        '{"head": 0, "mass": 0.9, "min_similarity": 0.25, "pv_skip": 4.0, "density": 0.31, '
        '"pv_skipped": 0.0, "error": 0.07},'
    ) in lines
    assert '{"head": 1, "dense": true, "error": 0.012},' in lines


def test_a_recipe_has_the_settings_of_every_head():
    recipe = profile_of(Model()).recipe_for("blocks.0")
    assert recipe == sparge.Recipe(
        sparge.KeepMass((0.9, 1.0, 0.95, 0.8)),
        predictor="mean",
        min_similarity=(0.25, None, None, None),
        pv_skip=(4.0, None, None, 2.5),
        sink_blocks=2,
        local_blocks=0,
        protect=((0, 226),),
    )


def test_names_match_exactly():
    profile = profile_of(Model())
    assert profile.recipe_for("single_blocks.0") == sparge.DEFAULT  # not tuned: the default
    assert profile.untuned == ["single_blocks.0"]
    for name in ("blocks.1", "blocks", "locks.0", "model.blocks.0"):
        with pytest.raises(ValueError, match="match exactly"):
            profile.recipe_for(name)


@pytest.mark.parametrize("heads", [slice(2, 4), range(2, 4), [2, 3], slice(-2, None)])
def test_a_rank_asks_for_its_own_heads(heads):
    recipe = profile_of(Model()).recipe_for("blocks.0", heads=heads)
    assert recipe.keep.mass == (0.95, 0.8)
    assert recipe.pv_skip == (None, 2.5)
    assert recipe.min_similarity is None


def test_slices_together_are_the_whole():
    profile = profile_of(Model())
    parts = [profile.recipe_for("blocks.0", heads=range(i, i + 2)) for i in (0, 2)]
    whole = profile.recipe_for("blocks.0")
    assert sum((part.keep.mass for part in parts), ()) == whole.keep.mass
    assert profile.recipe_for("blocks.0", heads=[1]) is None  # dense
    for wrong in ([4], range(3, 5), [], [-1]):
        with pytest.raises(ValueError, match="0 to 3"):
            profile.recipe_for("blocks.0", heads=wrong)


def test_all_heads_dense_is_no_recipe():
    layer = LayerSettings(heads=(HeadSettings(), HeadSettings()))
    assert profile_of(Model(), **{"blocks.1": layer}).recipe_for("blocks.1") is None


def test_the_same_model_passes_and_another_is_refused():
    profile = profile_of(Model())
    profile.check(Model())
    profile.check(Model().bfloat16())  # the same weights in another dtype
    with pytest.raises(ValueError, match=r"weights differ.*force=True"):
        profile.check(Model(seed=1))
    with pytest.warns(UserWarning, match="used anyway"):
        profile.check(Model(seed=1), force=True)

    class Wider(Config):
        num_attention_heads = 8

    with pytest.raises(ValueError, match="heads is 8, not 4"):
        profile.check(Model(config=Wider))

    class Other(Model):
        pass

    with pytest.raises(ValueError, match="it is a Other, not a Model"):
        profile.check(Other())


def test_a_module_that_is_not_there_is_refused_even_by_force():
    profile = profile_of(Model(), **{"blocks.7": JUDGED})
    with pytest.raises(ValueError, match=r"no module blocks\.7"):
        profile.check(Model(), force=True)


def test_one_changed_weight_changes_the_digest():
    model = Model()
    before = fingerprint(model)
    assert before == fingerprint(Model())
    assert before.shapes == {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    with torch.no_grad():
        model.blocks[0].bias[0] += 0.5
    assert fingerprint(model).weights != before.weights
    renamed = nn.Module()
    renamed.linear = model
    assert fingerprint(renamed).weights != fingerprint(model).weights


def test_weights_that_are_not_here_are_not_compared():
    with torch.device("meta"):
        model = Model()
    assert fingerprint(model).weights == ""
    profile_of(Model()).check(model)


def test_a_model_without_a_config_goes_by_its_parameters():
    assert fingerprint(nn.Linear(3, 4)).shapes == {"parameters": 16}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.update(format="sparge.profile/9"), r"sparge.profile/9.*upgrade sparge"),
        (lambda d: d.update(format="sparge.plan/1"), r"sparge.plan/1.*sparge tune writes one"),
        (lambda d: d.pop("format"), "format is None"),
        (lambda d: d.pop("layers"), "has no layers"),
        (lambda d: d.update(more=1), "unknown field 'more'"),
        (lambda d: d.update(bounds={"l1": 0, "l2": None}), r"bounds.l1 must be greater than 0"),
        (lambda d: d.update(bounds={"l1": "a", "l2": None}), "bounds.l1 must be a number, got 'a'"),
        (lambda d: d["default"].update(precision="int3"), "default: precision must be one of"),
        (lambda d: d["layers"]["blocks.0"].pop("heads"), "has no heads"),
        (lambda d: d["layers"]["blocks.0"]["heads"].pop(0), "must be listed as 0, 1, 2"),
        (lambda d: d["layers"]["blocks.0"]["heads"][0].update(mass=1.5), "at most 1, got 1.5"),
        (lambda d: d["layers"]["blocks.0"]["heads"][0].update(mass=True), "mass must be a number"),
        (lambda d: d["layers"]["blocks.0"]["heads"][0].update(dense=1), "dense must be true"),
        (lambda d: d["layers"]["blocks.0"]["heads"][0].update(dense=True), "not both"),
        (lambda d: d["layers"]["blocks.0"]["heads"][0].update(pv_skip=0), "greater than 0"),
        (lambda d: d["layers"]["blocks.0"].update(predictor="blend"), "blocks.0.*no judge"),
        (lambda d: d["layers"]["blocks.0"].update(predictor="best"), "'mean', 'rows', 'blend'"),
        (lambda d: d["layers"]["blocks.0"].update(protect=[[5, 2]]), "blocks.0.*not be empty"),
        (
            lambda d: d["layers"]["blocks.0"].update(protect=[["a", 2]]),
            "whole numbers or None as stop",
        ),
        (lambda d: d["model"].update(shapes={"heads": -1}), "shapes.*at least 0"),
    ],
)
def test_a_file_that_is_not_right_says_where(tmp_path, change, why):
    data = profile_of(Model()).to_dict()
    change(data)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"p.json is not a usable profile: .*{why}"):
        Profile.load(path)


def test_a_damaged_file_says_so(tmp_path):
    path = tmp_path / "p.json"
    text = profile_of(Model()).to_json()
    for damaged in (text[: len(text) // 2], "", "null"):
        path.write_text(damaged)
        with pytest.raises(ValueError, match="not a usable profile"):
            Profile.load(path)
    path.write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(ValueError, match="UTF-8"):
        Profile.load(path)
    with pytest.raises(FileNotFoundError):
        Profile.load(tmp_path / "none.json")


def test_a_file_may_hold_sample_rows_that_mean_never_reads():
    data = profile_of(Model()).to_dict()
    data["layers"]["blocks.0"]["sample_rows"] = 9
    assert Profile.from_dict(data).recipe_for("blocks.0").sample_rows == 4


def test_a_layer_that_pools_comes_back_and_one_that_drops_is_written_as_before():
    heads = (HeadSettings(mass=0.5), HeadSettings(mass=0.7))
    layer = LayerSettings(heads=heads, skipped="pool", pool_group=16)
    profile = profile_of(Model(), **{"blocks.0": layer})
    again = Profile.from_dict(json.loads(profile.to_json()))
    assert again == profile
    recipe = again.recipe_for("blocks.0")
    assert (recipe.skipped, recipe.pool_group) == ("pool", 16)
    dropped = LayerSettings(heads=heads).to_dict()
    assert not {"skipped", "pool_group"} & dropped.keys()
    assert LayerSettings.from_dict(dropped).recipe().skipped == "drop"
    with pytest.raises(ValueError, match="pool_group must be one of"):
        LayerSettings.from_dict({**layer.to_dict(), "pool_group": 24})


def banded(*bands, own=()):
    layers = [
        LayerSettings(heads=(HeadSettings(mass=mass),), noise=noise, protect=((0, 5),))
        for mass, noise in bands
    ]
    return LayerSettings(heads=own, bands=tuple(layers))


@pytest.mark.usefixtures("piped")
def test_noise_bands_are_shown_and_compared(tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, mass in zip(paths, (0.5, 0.6), strict=True):
        layer = banded((mass, (0.0, 0.25)), own=(HeadSettings(mass=0.7),))
        profile_of(Model(), **{"blocks.0": layer}).save(path)
    assert "blocks.0 [noise 0 to 0.25]" in run_text(["profile", "show", paths[0]], capsys)
    found = run_json(["profile", "diff", *paths], capsys, code=1)
    (row,) = found["differences"]
    assert row["where"].startswith("blocks.0 [noise 0 to 0.25]")


def test_a_noise_level_chooses_the_settings_of_its_band(tmp_path):
    layer = banded((0.5, (0.0, 0.25)), (0.9, (0.75, 1.0)), own=(HeadSettings(mass=0.7),))
    only_bands = banded((0.6, (0.5, 1)))
    profile_of(Model(), **{"blocks.0": layer, "blocks.1": only_bands}).save(tmp_path / "p.json")
    profile = Profile.load(tmp_path / "p.json")
    assert profile.layers["blocks.0"] == layer

    def mass(name, noise):
        return profile.recipe_for(name, noise=noise).keep.mass

    at = {0.0: 0.5, 0.2499: 0.5, 0.25: 0.7, 0.5: 0.7, 0.75: 0.9, 1.0: 0.9, None: 0.7}
    assert {noise: mass("blocks.0", noise)[0] for noise in at} == at
    assert mass("blocks.1", 0.5) == (0.6,)
    assert list(profile.named_settings()) == [
        "blocks.0",
        "blocks.0 [noise 0 to 0.25]",
        "blocks.0 [noise 0.75 to 1]",
        "single_blocks.0",
        "blocks.1 [noise 0.5 to 1]",
    ]
    assert profile.recipe_for("blocks.1", noise=0.4) == profile.default  # outside of the bands
    assert profile.untuned == ["single_blocks.0"]
    assert profile.layers["blocks.1"].density == 1.0
    with pytest.raises(ValueError, match=r"noise must be given.*context\(noise_level"):
        profile.recipe_for("blocks.1")


@pytest.mark.parametrize(
    "noise, why",
    [
        ([[0.0, 0.5], [0.4, 1.0]], r"must not overlap, got \[0, 0.5\] and \[0.4, 1\]"),
        ([[0.0, 0.5], [0.0, 0.5]], "must not overlap"),
        ([[0.5, 0.5]], "0 <= low < high <= 1"),
        ([[0.0, 1.1]], "0 <= low < high <= 1"),
        ([[0.0]], "0 <= low < high <= 1"),
        ([["a", 1]], "0 <= low < high <= 1"),
        ([[False, True]], "0 <= low < high <= 1"),
        ([None], "noise"),
    ],
)
def test_bands_that_are_not_right_say_where(noise, why):
    data = profile_of(Model(), **{"blocks.1": banded((0.5, (0.0, 1.0)))}).to_dict()
    (band,) = data["layers"]["blocks.1"]["bands"]
    data["layers"]["blocks.1"]["bands"] = [{**band, "noise": each} for each in noise]
    with pytest.raises(ValueError, match=rf"layers\['blocks.1'\].*{why}"):
        Profile.from_dict(data)


def test_a_band_without_its_levels_is_refused():
    with pytest.raises(ValueError, match="noise of a band must be"):
        LayerSettings(bands=(LayerSettings(),))


@pytest.mark.parametrize("inside", ["default", "calibration", "layers"])
def test_a_file_nested_too_deeply_is_refused(tmp_path, inside):
    text = json.dumps({**profile_of(Model()).to_dict(), inside: "DEEP"})
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / "p.json").write_text(text.replace('"DEEP"', deep))
    with pytest.raises(ValueError, match=r"not a usable profile: .*levels deep"):
        Profile.load(tmp_path / "p.json")


def test_what_is_no_file_of_its_own_is_refused():
    with pytest.raises(OSError, match="not a regular file"):
        Profile.load("/dev/zero")


def test_a_fingerprint_names_every_difference():
    one = Fingerprint("A", {"heads": 4, "layers": 2}, "sha256:1")
    two = Fingerprint("B", {"heads": 8}, "sha256:2")
    assert one.differences(two) == [
        "it is a B, not a A",
        "heads is 8, not 4",
        "layers is None, not 2",
    ]


def test_calibration_may_hold_what_looks_like_a_head():
    calibration = {"a": {"head": "{}\n}"}, '{\n "head": 0\n}': {"head": 1}}
    profile = replace(profile_of(Model()), calibration=calibration)
    assert json.loads(profile.to_json())["calibration"] == calibration
