"""SAM 2: its sizes, its windows, that all attention is SDPA's, the conversion, and the task.

Here the model is tiny and random; sam2.py says how the published weights compare with onnxruntime.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from sam2_export import export_decoder, export_encoder, onnx_file, ort_file
from sparge_tools.zoo.vision.sam2 import (
    HieraBlock,
    Sam2,
    Sam2Config,
    join_windows,
    prepare_image,
    split_windows,
)
from sparge_tools.zoo.vision.task import PROMPTS, Photo, PointToMask
from sparge_tools.zoo.vision.weights import convert_sam2, read_ort_weights

TINY = Sam2Config(
    image_size=128,
    width=8,
    depths=(1, 2, 3, 1),
    windows=(4, 2, 6, 3),
    global_blocks=(4,),
    neck_width=32,
    decoder_heads=2,
    decoder_mlp=16,
)


@pytest.fixture(scope="module")
def model() -> Sam2:
    torch.manual_seed(0)
    made = Sam2(TINY).eval().requires_grad_(False)
    for parameter in made.parameters():  # zeros and ones would hide a mix-up
        parameter.copy_(torch.randn_like(parameter) * 0.2)
    return made


def image(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, 128, 128, generator=torch.Generator().manual_seed(1))


# -- the model ---------------------------------------------------------------------------------


def test_the_default_is_hiera_tiny():
    config = Sam2Config()
    blocks = config.blocks()
    assert [i for i, block in enumerate(blocks) if not block.window] == [5, 7, 9]
    assert {(blocks[i].heads, blocks[i].width // blocks[i].heads) for i in (5, 7, 9)} == {(4, 96)}
    assert [i for i, block in enumerate(blocks) if block.pools] == [1, 3, 10]
    assert [block.window for block in blocks[:5]] == [8, 8, 4, 4, 14]
    with torch.device("meta"):
        model = Sam2(config)
    assert model.grid_of(4096) == (1, 64, 64)
    assert model.grid_of(196) is None
    assert sum(parameter.numel() for parameter in model.parameters()) == 37_584_548


def test_masks_are_a_quarter_of_the_image(model):
    points = torch.tensor([[[30.0, 40.0]], [[90.0, 10.0]]])
    masks = model(image(2), points)
    assert masks.logits.shape == (2, 3, 32, 32)
    assert masks.expected_iou.shape == (2, 3)
    assert masks.logits.abs().max() <= 32
    alone = model(image(2)[1:], points[1:])
    torch.testing.assert_close(alone.logits[0], masks.logits[1], rtol=1e-4, atol=1e-4)


def test_all_attention_is_sdpa_by_named_modules(model, monkeypatch):
    """As many calls as modules named for attention, and nothing else mixes tokens of the image."""
    calls = []
    plain = F.scaled_dot_product_attention

    def spy(query, key, value):
        calls.append((tuple(query.shape), key.shape[2]))
        return plain(query, key, value)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model(image(), torch.tensor([[[64.0, 64.0]]]))
    names = [n for n, m in model.named_modules() if type(m).__name__.endswith("Attention")]
    assert len(calls) == len(names) == 7 + 7
    assert "encoder.blocks.4.attention" in names
    assert calls[4] == ((1, 4, 64, 8), 64)  # the whole grid of 8×8
    assert calls[1] == ((64, 2, 4, 8), 16)  # pooled queries of 4×4 windows
    assert calls[3] == ((64, 4, 1, 8), 4)
    assert calls[5] == ((4, 4, 36, 8), 36)  # windows of 6×6 over 8×8, filled up


def test_windows_are_joined_as_they_were_split():
    x = torch.randn(2, 8, 7, 5)
    windows = split_windows(x, 3)
    assert windows.shape == (2 * 3 * 3, 3, 3, 5)
    assert torch.equal(join_windows(windows, batch=2, height=8, width=7), x)
    assert torch.equal(windows[1, :, :, 0], x[0, :3, 3:6, 0])


def test_a_window_does_not_see_the_others_and_a_global_block_does():
    torch.manual_seed(0)
    block = HieraBlock(8, 8, heads=2, window=4, pools=False).eval()
    x = torch.randn(1, 8, 8, 8)
    other = x.clone()
    other[0, 0, 0] = torch.randn(8)  # adding a constant would not pass the norm
    changed = (block(x) - block(other)).abs().sum(-1)[0] > 1e-6
    assert changed[:4, :4].all()
    assert changed.sum() == 16
    block.window = 0
    assert ((block(x) - block(other)).abs().sum(-1) > 1e-6).all()


def test_points_and_labels_matter(model):
    there = model(image(), torch.tensor([[[30.0, 40.0]]])).logits
    elsewhere = model(image(), torch.tensor([[[100.0, 40.0]]])).logits
    beside = model(image(), torch.tensor([[[30.0, 40.0]]]), torch.zeros(1, 1)).logits
    assert not torch.allclose(there, elsewhere, atol=1e-3)
    assert not torch.allclose(there, beside, atol=1e-3)


def test_bfloat16_is_close(model):
    points = torch.tensor([[[30.0, 40.0]]])
    exact = model(image(), points).logits
    half = Sam2(TINY)
    half.load_state_dict(model.state_dict())
    rounded = half.bfloat16().eval()(image(), points).logits.float()
    assert (rounded - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize(
    "points, labels, message",
    [
        (torch.zeros(1, 2), None, r"points must be \[1, N, 2\]"),
        (torch.zeros(1, 0, 2), None, "with N ≥ 1"),
        (torch.zeros(2, 1, 2), None, r"got \[2, 1, 2\]"),
        (torch.zeros(1, 1, 2), torch.zeros(1, 2), r"labels must be \[1, 1\]"),
        (torch.zeros(1, 1, 2), torch.full((1, 1), -1), "labels must be 1"),
    ],
)
def test_prompts_are_checked(model, points, labels, message):
    with pytest.raises(ValueError, match=message):
        model(image(), points, labels)


def test_an_image_of_another_size_is_refused(model):
    with pytest.raises(ValueError, match=r"image must be \[B, 3, 128, 128\], got \[1, 3, 64, 64\]"):
        model(torch.zeros(1, 3, 64, 64), torch.zeros(1, 1, 2))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"image_size": 100}, "image_size must be a multiple of 32"),
        ({"depths": (1, 2, 3)}, "depths must be 4 positive numbers"),
        ({"windows": (3, 2, 6, 3)}, "windows must be even"),
        ({"global_blocks": (7,)}, "global_blocks must be in 0 to 6"),
        ({"heads": 3}, "width must be a multiple"),
        ({"neck_width": 30}, "neck_width must be a multiple"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


# -- conversion --------------------------------------------------------------------------------


def test_conversion_finds_every_weight(model, tmp_path):
    state = convert_sam2(ort_file(export_encoder(model)), export_decoder(model), config=TINY)
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    save_file(state, tmp_path / "model.safetensors")
    again = Sam2(TINY).eval()
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    points = torch.tensor([[[30.0, 40.0]]])
    assert torch.equal(again(image(), points).logits, model(image(), points).logits)


def test_conversion_refuses_another_model(model):
    encoder, decoder = export_encoder(model), export_decoder(model)
    larger = replace(TINY, width=16)
    with pytest.raises(
        ValueError, match=r"encoder.patches.weight must be of shape \[16, 3, 7, 7\]"
    ):
        convert_sam2(ort_file(encoder), decoder, config=larger)
    del encoder["no_mem_embed"]
    with pytest.raises(ValueError, match="no_mem_embed must be among the weights"):
        convert_sam2(ort_file(encoder), decoder, config=TINY)
    only = onnx_file({"weight": torch.zeros(2)}, {})
    with pytest.raises(ValueError, match="gaussian_matrix must be among the weights"):
        convert_sam2(ort_file(export_encoder(model)), only, config=TINY)


def test_an_ort_file_is_read():
    given = {"matrix": torch.randn(2, 3), "shape": torch.tensor([1, -1]), "one": torch.tensor(0.5)}
    weights = read_ort_weights(ort_file(given))
    assert weights.keys() == {"matrix", "one"}  # int64 is no weight
    assert torch.equal(weights["matrix"], given["matrix"])
    assert torch.equal(weights["one"], given["one"])
    assert weights["one"].shape == ()


def test_bad_ort_files_are_refused():
    good = ort_file({"matrix": torch.randn(8, 8)})
    with pytest.raises(ValueError, match="must be an ONNX Runtime file"):
        read_ort_weights(b"")
    with pytest.raises(ValueError, match="must be an ONNX Runtime file"):
        read_ort_weights(onnx_file({"matrix": torch.zeros(8, 8)}, {}))
    for end in range(8, len(good) - 4):  # the last bytes may be padding
        with pytest.raises(ValueError, match="data "):
            read_ort_weights(good[:end])
    with pytest.raises(ValueError, match="data must have field 1"):
        read_ort_weights(b"\x0c\0\0\0ORTM\x04\0\x04\0\x04\0\0\0")


@pytest.mark.parametrize("data", [b"no model", b""])
def test_bad_onnx_files_are_refused(model, data):
    with pytest.raises(ValueError, match="decoder_onnx: data must be an ONNX model"):
        convert_sam2(ort_file(export_encoder(model)), data, config=TINY)


# -- the task ----------------------------------------------------------------------------------


def test_images_are_normalized():
    grey = torch.full((3, 5, 3), 128, dtype=torch.uint8)
    image = prepare_image(grey, size=16)
    assert image.shape == (1, 3, 16, 16)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (128 / 255 - mean) / std
    torch.testing.assert_close(image, expected.view(1, 3, 1, 1).expand_as(image))
    with pytest.raises(TypeError, match="pixels must be uint8"):
        prepare_image(grey.float())
    with pytest.raises(ValueError, match=r"pixels must be \[H, W, 3\]"):
        prepare_image(grey[..., :1])


def test_the_photographs_are_in_the_package():
    task = PointToMask()
    photos = task.inputs(8)
    assert len({task.caption(photo) for photo in photos}) == 8 == len(PROMPTS)
    for photo in photos:
        height, width, channels = photo.pixels.shape
        assert channels == 3
        assert min(height, width) >= 300
        assert 0 < photo.point[0] < width
        assert 0 < photo.point[1] < height
    assert [p.name for p in task.inputs(2, seed=7)] == [photos[7].name, photos[0].name]
    for n, message in ((0, "at least 1"), (9, "at most 8")):
        with pytest.raises(ValueError, match=message):
            task.inputs(n)


def test_a_run_is_as_large_as_the_photograph(model):
    photo = Photo("tiny", torch.randint(0, 256, (40, 60, 3), dtype=torch.uint8), (30.0, 20.0))
    task = PointToMask()
    logits = task.run(model, photo)
    assert logits.shape == (40, 60)
    assert not logits.requires_grad
    prompt = torch.tensor([[[30.0 * 128 / 60, 20.0 * 128 / 40]]])
    masks = model(prepare_image(photo.pixels, size=128), prompt)
    best = masks.logits[0, masks.expected_iou[0].argmax()]
    expected = F.interpolate(best[None, None], (40, 60), mode="bilinear")[0, 0]
    torch.testing.assert_close(logits, expected)


def test_masks_are_compared_by_iou():
    task = PointToMask()
    left, half = -torch.ones(4, 8), -torch.ones(4, 8)
    left[:, :4], half[:, 2:6] = 1, 1
    assert task.compare(left, left) == {"iou": 1.0, "relative_l2": 0.0}
    assert task.compare(left, half)["iou"] == pytest.approx(8 / 24)
    assert task.compare(-left.abs(), -left.abs())["iou"] == 1.0  # both empty
    assert next(iter(task.compare(left, half))) == task.metric


def test_the_picture_shows_mask_and_point():
    photo = Photo("grey", torch.full((50, 80, 3), 100, dtype=torch.uint8), (10.0, 10.0))
    logits = -torch.ones(50, 80)
    logits[20:40, 30:60] = 1
    picture = PointToMask().picture(photo, logits)
    assert picture.shape == (50, 80, 3)
    assert picture.dtype == np.uint8
    assert picture[30, 45].tolist() == [178, 98, 50]  # half tint
    assert picture[45, 75].tolist() == [100, 100, 100]
    assert picture[10, 10].tolist() != [100, 100, 100]
