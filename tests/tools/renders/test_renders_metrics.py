"""Metrics of pictures and videos, and pictures out of what pipelines return."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("skimage")
pytest.importorskip("flip_evaluator")
pytest.importorskip("PIL")

from PIL import Image

from sparge import Unsupported
from sparge_tools import optional_libraries
from sparge_tools.renders import compare_pictures, difference_map, flip, frames_of, psnr, ssim
from sparge_tools.renders.pictures import shown_frames

RANDOM = np.random.default_rng(0)
PICTURE = RANDOM.integers(20, 200, (24, 32, 3), dtype=np.uint8)
VIDEO = RANDOM.integers(20, 200, (3, 24, 32, 3), dtype=np.uint8)


def test_psnr_of_a_known_difference():
    assert psnr(PICTURE, PICTURE + 10) == pytest.approx(20 * math.log10(255 / 10), abs=1e-4)


def test_bytes_and_floats_are_measured_alike():
    floats, worse = PICTURE / 255, PICTURE + 10
    assert psnr(floats, worse / 255) == pytest.approx(psnr(PICTURE, worse), abs=1e-4)
    assert flip(floats, worse / 255) == pytest.approx(flip(PICTURE, worse), abs=1e-6)


def test_equal_pictures():
    found = compare_pictures(PICTURE, PICTURE.copy())
    assert found == {"psnr": math.inf, "ssim": 1.0, "flip": 0.0}
    assert difference_map(PICTURE, PICTURE).max() < 10  # the dark end of its colours


def test_a_worse_picture_is_worse_in_every_metric():
    little, much = PICTURE + 4, np.roll(PICTURE, 5, axis=1)
    for metric, sign in ((psnr, 1), (ssim, 1), (flip, -1)):
        assert sign * metric(PICTURE, little) > sign * metric(PICTURE, much)
    assert difference_map(PICTURE, much).mean() > difference_map(PICTURE, little).mean()


def test_a_video_is_compared_frame_by_frame():
    other = VIDEO.copy()
    other[1] += 10
    other[2] += 40
    found = compare_pictures(VIDEO, other)
    each = [psnr(a, b) for a, b in zip(VIDEO, other, strict=True)]
    assert each[0] == math.inf
    assert found["psnr"] == pytest.approx((100 + each[1] + each[2]) / 3)  # equal counts as 100
    assert found["psnr_worst"] == each[2]
    assert found["flip_worst"] == pytest.approx(flip(VIDEO[2], other[2]))
    assert found["ssim_worst"] < found["ssim"] < 1


def test_a_picture_smaller_than_the_window_of_ssim():
    assert ssim(PICTURE[:4, :6], PICTURE[:4, :6]) == 1.0
    with pytest.raises(ValueError, match="at least 3×3"):
        ssim(PICTURE[:2, :6], PICTURE[:2, :6])


@pytest.mark.parametrize(
    "one, other, message",
    [
        (PICTURE, PICTURE[:20], "the shape of dense"),
        (PICTURE[..., 0], PICTURE[..., 0], r"a picture \[H, W, 3\]"),
        (PICTURE.astype(np.int32), PICTURE, "got int32"),
        (PICTURE / 100, PICTURE, r"floats in \[0, 1\]"),
        (np.full((8, 8, 3), np.nan), np.zeros((8, 8, 3)), r"floats in \[0, 1\]"),
    ],
)
def test_what_is_no_picture_is_refused(one, other, message):
    with pytest.raises(ValueError, match=message):
        compare_pictures(one, other)


@pytest.mark.parametrize("missing, metric", [("skimage", ssim), ("flip_evaluator", flip)])
def test_without_a_library_the_extra_is_named(missing, metric, monkeypatch):
    monkeypatch.setattr(optional_libraries, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=rf"{missing}[\s\S]*sparge-tools\[vision\]"):
        metric(PICTURE, PICTURE)


def test_pictures_of_every_kind_of_output():
    floats = PICTURE.astype(np.float32) / 255
    for given, kind in (
        (SimpleNamespace(images=floats[None]), "np"),
        (SimpleNamespace(images=[Image.fromarray(PICTURE)]), "pil"),
        (SimpleNamespace(images=torch.from_numpy(floats).permute(2, 0, 1)[None]), "pt"),
        ((floats[None],), "np"),
    ):
        frames, why = frames_of(given, kind)
        assert why == ""
        assert (frames == PICTURE[None]).all()


def test_videos_of_every_kind_of_output():
    floats = VIDEO.astype(np.float32) / 255
    for given, kind in (
        (SimpleNamespace(frames=floats[None]), "np"),
        (SimpleNamespace(frames=[[Image.fromarray(frame) for frame in VIDEO]]), "pil"),
        (SimpleNamespace(frames=torch.from_numpy(floats).permute(0, 3, 1, 2)[None]), "pt"),
    ):
        frames, why = frames_of(given, kind)
        assert why == ""
        assert (frames == VIDEO).all()


def test_a_grey_picture_has_three_channels():
    frames, _ = frames_of(SimpleNamespace(images=PICTURE[None, ..., :1] / 255))
    assert (frames[0] == PICTURE[..., :1]).all()


@pytest.mark.parametrize(
    "given, kind, why",
    [
        (SimpleNamespace(images=torch.zeros(1, 16, 4)), "latent", "latents"),
        (SimpleNamespace(audios=[0]), "np", "no images and no frames"),
        (SimpleNamespace(images=[]), "np", "no picture"),
        (SimpleNamespace(images=np.full((1, 8, 8, 3), np.nan)), "np", "not finite"),
        (SimpleNamespace(images=np.zeros((1, 2, 8, 8, 8))), "np", "is no picture"),
    ],
)
def test_why_there_is_no_picture(given, kind, why):
    frames, told = frames_of(given, kind)
    assert frames is None
    assert why in told


def test_which_frames_are_shown():
    assert shown_frames(1) == [0]
    assert shown_frames(2) == [0, 1]
    assert shown_frames(49) == [0, 24, 48]
