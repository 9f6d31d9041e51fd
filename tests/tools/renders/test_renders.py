"""Renders of tiny pipelines and results of a tiny module, dense and sparse."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("skimage")
pytest.importorskip("flip_evaluator")

import tiny_pipelines
from sparge import VISION, KeepAll, KeepMass, Recipe, Schedule, accelerate
from sparge.backends.cpu import library as native
from sparge.cli.screen import to_json
from sparge_tools.renders import compare_renders, compare_results, open_pipeline
from sparge_tools.renders.compare import NO_CALLBACK, _callback
from sparge_tools.zoo import ZooModule
from sparge_tools.zoo.kinds import square_grid
from sparge_tools.zoo.vision.task import TerrainTask
from sparge_tools.zoo.vision.terrain import Terrain, TerrainConfig

OURS = "cpu" if native.why_missing() is None else "reference"
HALF = Recipe(KeepMass(0.5))
STEPS = {"num_inference_steps": 5}


def split(tiny):
    """The pipeline, its prompt and the other arguments of a call."""
    arguments = {**tiny.arguments, **STEPS}
    return tiny.pipe, [arguments.pop("prompt")], arguments


@pytest.fixture(scope="module")
def flux():
    return split(tiny_pipelines.flux())


@pytest.fixture(scope="module")
def renders(flux):
    pipe, prompts, call = flux
    return compare_renders(pipe, prompts, seeds=[3, 4], call=call, recipe=HALF, backend=OURS)


def test_each_pair_has_figures_times_and_pictures(renders):
    assert [(pair.caption, pair.seed) for pair in renders.pairs] == [("a cat", 3), ("a cat", 4)]
    for pair in renders.pairs:
        assert 20 < pair.figures["psnr"] < 90
        assert 0.5 < pair.figures["ssim"] < 1
        assert 0 < pair.figures["flip"] < 0.5
        assert pair.dense_seconds > 0
        assert pair.dense.shape == pair.sparse.shape == (1, 28, 36, 3)
        assert not pair.is_identical
        assert not pair.missing
    assert (renders.pairs[0].dense != renders.pairs[1].dense).any()
    assert renders.worst("psnr") <= renders.mean("psnr")
    assert renders.worst("flip") >= renders.mean("flip")


def test_the_error_of_the_latents_begins_where_the_schedule_does(renders):
    for pair in renders.pairs:
        assert len(pair.latent_errors) == 5
        assert pair.latent_errors[0] == 0.0  # one step of five is dense
        assert all(error > 0 for error in pair.latent_errors[1:])
        assert pair.figures["latent_error"] == pair.latent_errors[-1]


def test_density_by_layer_step_and_head(renders):
    found = json.loads(to_json(renders.to_dict()))
    assert found["format"] == "sparge.renders/1"
    for pair in found["pairs"]:
        steps = pair["steps"]
        assert steps["steps"] == [0, 1, 2, 3, 4]
        assert steps["noise_levels"][0] == 1.0
        assert len(steps["layers"]) == len(steps["density"]) == len(steps["density_by_head"])
        for layer, heads in zip(steps["density"], steps["density_by_head"], strict=True):
            assert layer[0] == 1.0
            assert heads[0] is None
            assert all(0 < share < 1 for share in layer[1:])
            assert all(len(each) == 2 for each in heads[1:])
        assert pair["density"] == pytest.approx(sum(steps["density_by_step"]) / 5, abs=1e-6)
        assert pair["sparse_density"] < pair["density"] < 1


def test_a_schedule_that_is_dense_everywhere_is_identical(flux):
    pipe, prompts, call = flux
    dense = compare_renders(
        pipe, prompts, call=call, schedule=Schedule(dense_first=1.0), warm_up=False
    )
    (pair,) = dense.pairs
    assert pair.is_identical
    assert set(pair.latent_errors) == {0.0}
    assert pair.figures["psnr"] == math.inf
    found = json.loads(to_json(dense.to_dict()))
    assert found["pairs"][0]["figures"]["psnr"] is None  # JSON has no infinity
    assert found["pairs"][0]["is_identical"] is True
    assert dense.density == 1.0


def test_all_kept_and_exact_is_equal_to_rounding(flux):
    pipe, prompts, call = flux
    everything = Recipe(KeepAll(), precision="exact")
    exact = compare_renders(
        pipe, prompts, call=call, recipe=everything, backend=OURS, warm_up=False
    )
    assert 0 < exact.pairs[0].latent_errors[-1] < 1e-5


def test_the_pipeline_is_as_before_afterwards(flux, renders):
    pipe, prompts, call = flux
    again = compare_renders(
        pipe, prompts, seeds=[3], call=call, schedule=Schedule(1.0), warm_up=False
    )
    assert (again.pairs[0].dense == renders.pairs[0].dense).all()
    assert not hasattr(pipe.transformer, "_sparge_handle")


def test_dense_and_sparse_take_turns(flux):
    pipe, prompts, call = flux
    told = []
    compare_renders(pipe, prompts, seeds=[0, 1], call=call, recipe=HALF, done=told.append)
    assert told[0] == "warming up"
    assert [each.split(",")[0] for each in told[1:]] == ["dense", "sparse", "sparse", "dense"]


def test_a_video_with_two_denoisers():
    pipe, prompts, call = split(tiny_pipelines.wan22())
    video = compare_renders(
        pipe, prompts, call=call, recipe=HALF, backend=OURS, warm_up=False, order="row"
    )
    (pair,) = video.pairs
    assert pair.dense.shape == (9, 160, 192, 3)
    assert pair.figures["psnr_worst"] <= pair.figures["psnr"]
    names = pair.to_dict()["steps"]["layers"]
    assert {name.split(".")[0] for name in names} == {"transformer", "transformer_2"}
    assert "'row'" in " ".join(pair.report.notes)


def test_a_pipeline_with_the_older_callback():
    pipe, prompts, call = split(tiny_pipelines.pixart())
    found = compare_renders(pipe, prompts, call=call, recipe=HALF, backend=OURS, warm_up=False)
    assert len(found.pairs[0].latent_errors) == 5


def test_a_pipeline_without_a_callback():
    class Pipeline:
        def __call__(self, prompt, generator=None): ...

    assert _callback(Pipeline(), []) == ({}, NO_CALLBACK)


def test_latents_alone_have_no_pictures(flux):
    pipe, prompts, call = flux
    call = {**call, "output_type": "latent"}
    found = compare_renders(pipe, prompts, call=call, recipe=HALF, backend=OURS, warm_up=False)
    (pair,) = found.pairs
    assert pair.dense is None
    assert pair.is_identical is None
    assert set(pair.figures) == {"latent_error"}
    assert "latents" in pair.missing["psnr, ssim, flip"]
    assert found.mean("psnr") is None


def test_embeddings_in_the_place_of_a_prompt():
    tiny = tiny_pipelines.flux2()
    arguments = dict(tiny.arguments)
    prompt = {"prompt_embeds": arguments.pop("prompt_embeds")}
    found = compare_renders(tiny.pipe, [prompt], call={**arguments, **STEPS}, warm_up=False)
    assert found.pairs[0].caption == "prompt_embeds Tensor [1, 12, 32]"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": "a cat"}, "must be a list"),
        ({"seeds": []}, "at least one seed"),
        ({"call": {"num_frames": 9}}, "FluxPipeline takes no num_frames; it takes prompt, "),
        ({"call": {"generator": None}}, "generator must be left out"),
        ({"prompts": [{"class_labels": [1]}]}, "takes no class_labels"),
    ],
)
def test_mistakes_are_found_before_any_run(changes, message, flux):
    pipe, prompts, call = flux
    given = {"prompts": prompts, "call": call, **changes}
    with pytest.raises(ValueError, match=message):
        compare_renders(pipe, **given, done=pytest.fail)


def test_an_accelerated_pipeline_is_refused(flux):
    pipe, prompts, call = flux
    with accelerate(pipe), pytest.raises(ValueError, match=r"remove\(\) it first"):
        compare_renders(pipe, prompts, call=call, done=pytest.fail)


def test_a_saved_pipeline_is_opened(flux, tmp_path, capfd):
    flux[0].save_pretrained(tmp_path / "flux")
    capfd.readouterr()
    pipe = open_pipeline(tmp_path / "flux", dtype=torch.bfloat16)
    assert type(pipe) is type(flux[0])
    assert pipe.transformer.dtype == torch.bfloat16
    assert "it/s" not in capfd.readouterr().err  # no bars
    (tmp_path / "flux" / "vae" / "config.json").unlink()
    with pytest.raises(ValueError, match="cannot be loaded as a FluxPipeline"):
        open_pipeline(tmp_path / "flux", dtype=torch.float32)


def test_a_video_that_is_decoded_in_tiles(tmp_path, flux):
    tiny_pipelines.allegro().pipe.save_pretrained(tmp_path / "allegro")
    pipe = open_pipeline(tmp_path / "allegro", dtype=torch.float32, tiling=True)
    assert pipe.vae.use_tiling
    flux[0].save_pretrained(tmp_path / "flux")
    pipe = open_pipeline(tmp_path / "flux", dtype=torch.float32, tiling=True)
    assert pipe.vae.use_tiling


def test_offloading_needs_a_gpu(flux, tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="no GPU here"):
        open_pipeline(tmp_path, dtype=torch.float32, offload=True)


def test_results_of_a_module():
    net = TerrainConfig(
        channels=8, multipliers=(1, 2), blocks=1, attention_levels=(1,), head_dim=4, groups=4
    )
    torch.manual_seed(0)
    task = replace(TerrainTask(), size=64)
    loaded = ZooModule("tiny", Terrain(net).eval(), square_grid, task)
    found = compare_results(loaded, inputs=2, recipe=HALF, backend=OURS)
    assert found.metric == "relative_l2"
    assert [pair.caption for pair in found.pairs] == [
        "seed 0, difficulty 0.5",
        "seed 1, difficulty 0.8",
    ]
    for pair in found.pairs:
        assert set(pair.figures) == {"relative_l2", "largest_error"}
        assert pair.dense.shape == (1, 64, 64, 3)
        assert pair.report.density < 1
    assert compare_results(loaded, inputs=1).settings["recipe"] == VISION.to_dict()
    with accelerate(loaded.model), pytest.raises(ValueError, match="dense runs must be dense"):
        compare_results(loaded, inputs=1)
