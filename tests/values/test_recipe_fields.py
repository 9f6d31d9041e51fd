"""Which fields of a recipe are read together, slices by heads, and recipes in files."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sparge
from sparge import KeepAll, KeepError, KeepFraction, KeepMass, Recipe

# Every combination of how much is kept and how it is predicted, and the fields it reads.
READS = {
    ("mass", "mean"): {"min_similarity"},
    ("mass", "rows"): {"sample_rows"},
    ("mass", "blend"): {"sample_rows"},
    ("fraction", "mean"): {"min_similarity"},
    ("fraction", "rows"): {"sample_rows"},
    ("fraction", "blend"): {"sample_rows"},
    ("error", "mean"): None,  # refused as such
    ("error", "rows"): None,
    ("error", "blend"): {"sample_rows"},
    ("all", "mean"): None,
    ("all", "rows"): None,
    ("all", "blend"): set(),
}
KEPT = {"mass": KeepMass(), "fraction": KeepFraction(), "error": KeepError(), "all": KeepAll()}
ALWAYS_READ = {
    "pv_skip": 3.0,
    "precision": "half",
    "sink_blocks": 2,
    "local_blocks": 2,
    "protect": ((0, 5),),
    "skipped": "pool",
}


@pytest.mark.parametrize("keep, predictor", READS)
@pytest.mark.parametrize("name, value", [("min_similarity", 0.5), ("sample_rows", 8)])
def test_a_field_that_nothing_reads_is_refused(keep, predictor, name, value):
    reads = READS[keep, predictor]
    make = lambda **more: Recipe(KEPT[keep], predictor=predictor, **more)  # noqa: E731
    if reads is None:
        with pytest.raises(ValueError, match=r"^predictor must be"):
            make()
        return
    assert make(**ALWAYS_READ).sink_blocks == 2
    assert make(min_similarity=None, sample_rows=4) == make()
    if name in reads:
        assert getattr(make(**{name: value}), name) == value
    else:
        with pytest.raises(ValueError, match=f"^{name} (must be left out|judges)"):
            make(**{name: value})


@pytest.mark.parametrize("keep", KEPT)
def test_only_pooling_reads_the_group(keep):
    """A plan or block mask of the caller's may skip blocks with every `keep`, KeepAll included."""
    assert Recipe(KEPT[keep], skipped="pool", pool_group=16).pool_group == 16
    assert Recipe(KEPT[keep], pool_group=64) == Recipe(KEPT[keep])
    with pytest.raises(ValueError, match=r"^pool_group must be left out with skipped 'drop'"):
        Recipe(KEPT[keep], pool_group=16)


def test_json_from_before_there_was_pooling():
    data = Recipe(KeepMass(0.9)).to_dict()
    del data["skipped"], data["pool_group"]
    assert Recipe.from_dict(data) == Recipe(KeepMass(0.9), skipped="drop")


def test_heads_are_sliced_and_one_number_for_all_stays():
    recipe = Recipe(
        KeepMass((0.5, 0.6, 0.7, 0.8)),
        predictor="mean",
        min_similarity=0.25,
        pv_skip=(None, 1.0, 2.0, 3.0),
    )
    part = recipe.heads(1, 3)
    assert part == dataclasses.replace(recipe, keep=KeepMass((0.6, 0.7)), pv_skip=(1.0, 2.0))
    assert recipe.heads(0, 4) == recipe
    assert Recipe(KeepAll()).heads(5, 7) == Recipe(KeepAll())
    assert Recipe(KeepError((0.1, 0.2))).heads(1, 2) == Recipe(KeepError((0.2,)))
    pooled = Recipe(KeepMass((0.1, 0.2)), skipped="pool", pool_group=8)
    assert pooled.heads(0, 1) == Recipe(KeepMass((0.1,)), skipped="pool", pool_group=8)


def test_sliced_heads_attend_as_in_the_whole():
    q, k, v = torch.randn(3, 1, 4, 500, 16, generator=torch.Generator().manual_seed(0)).unbind()
    recipe = Recipe(KeepFraction((0.2, 0.4, 0.6, 0.8)), pv_skip=(None, 3.0, 2.0, None))
    whole = sparge.attention(q, k, v, recipe=recipe, backend="cpu")
    for own in (slice(0, 2), slice(2, 4)):
        rank = [x[:, own] for x in (q, k, v)]
        out = sparge.attention(*rank, recipe=recipe.heads(own.start, own.stop), backend="cpu")
        assert torch.equal(out, whole[:, own])


@pytest.mark.parametrize(
    "start, stop, says",
    [
        (0, 5, "stop must be at most 4.*got 5"),
        (2, 2, "stop must be greater than start"),
        (-1, 2, "start must be a whole number of at least 0"),
    ],
)
def test_heads_out_of_range(start, stop, says):
    with pytest.raises(ValueError, match=says):
        Recipe(KeepMass((0.5, 0.6, 0.7, 0.8))).heads(start, stop)


def test_a_recipe_from_a_file(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(Recipe(KeepFraction(0.25)).to_json())
    assert Recipe.from_file(path) == Recipe(KeepFraction(0.25))
    with pytest.raises(FileNotFoundError):
        Recipe.from_file(tmp_path / "none.json")
    with pytest.raises(OSError, match="not a regular file"):
        Recipe.from_file("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        Recipe.from_file(tmp_path)
