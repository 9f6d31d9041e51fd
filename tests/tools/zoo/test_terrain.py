"""The terrain model: its shape, its weights from ONNX, and the task that measures it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from sparge_tools.zoo.kinds import square_grid
from sparge_tools.zoo.vision.task import TerrainTask, shade
from sparge_tools.zoo.vision.terrain import HIGHEST, Attention, Terrain, TerrainConfig, heights_of
from sparge_tools.zoo.vision.weights import PREFIX, convert_terrain
from tiny_zoo_modules import onnx_of

TINY = TerrainConfig(
    channels=8, multipliers=(1, 2, 2), blocks=1, attention_levels=(1, 2), head_dim=4, groups=4
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Terrain(TINY).eval()


def make(model, size=16, difficulty=0.5, dtype=torch.float32):
    noisy = 80 * torch.randn(1, 1, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(noisy.to(dtype), torch.tensor([80.0]), torch.tensor([difficulty]))


def test_the_real_net_has_its_layers_and_parameters():
    with torch.device("meta"):
        real = Terrain()
    assert sum(p.numel() for p in real.parameters()) == 10_456_545
    names = [name for name, module in real.named_modules() if isinstance(module, Attention)]
    assert len(names) == 28
    assert "down.2.attention.0" in names
    assert "up.4.attention.4" in names
    assert real.config.multiple == 16


def test_all_attention_is_sdpa(model, monkeypatch):
    calls, own = [], F.scaled_dot_product_attention

    def watch(query, key, value, **rest):
        calls.append((tuple(query.shape), rest))
        return own(query, key, value, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    make(model)
    # Down, middle and up: one block and its attention on each level, two on the way up.
    assert [shape for shape, _ in calls] == [(1, 4, 64, 4)] + [(1, 4, 16, 4)] * 4 + [
        (1, 4, 64, 4)
    ] * 2
    assert all(not rest for _, rest in calls)


def test_attention_is_what_the_original_computes(model):
    """q and k are multiplied by head_dim**-0.25 each; heads are the channels' outer index."""
    layer, x = model.up[1].attention[0], torch.randn(1, 16, 8, 8)
    with torch.no_grad():
        flat = layer.norm(x).flatten(2)[0]
        q, k, v = (layer.qkv.weight @ flat + layer.qkv.bias[:, None]).chunk(3)
        heads = [t.unflatten(0, (4, 4)).double() for t in (q * 4**-0.25, k * 4**-0.25, v)]
        weights = torch.einsum("hct,hcs->hts", heads[0], heads[1]).softmax(-1)
        mixed = torch.einsum("hts,hcs->hct", weights, heads[2]).flatten(0, 1).float()
        exact = x + (layer.out.weight @ mixed + layer.out.bias[:, None]).view(x.shape)
        assert torch.allclose(layer(x), exact, atol=1e-5)


def test_the_input_matters_and_the_result_is_bounded(model):
    one, other = make(model, difficulty=0.1), make(model, difficulty=0.9)
    assert one.shape == (1, 1, 16, 16)
    assert one.abs().max() <= 1
    assert not torch.equal(one, other)
    assert make(model, size=24).shape == (1, 1, 24, 24)


def test_at_the_lowest_noise_the_image_is_kept(model):
    """The boundary of a consistency model: sigma_min changes nothing."""
    image = torch.rand(1, 1, 16, 16) * 2 - 1
    with torch.no_grad():
        same = model(image, torch.tensor([0.002]), torch.tensor([0.5]))
    assert torch.allclose(same, image, atol=1e-6)


def test_bfloat16_stays_close(model):
    low = Terrain(TINY).eval()
    low.load_state_dict(model.state_dict())
    result = make(low.to(torch.bfloat16))
    assert (result.float() - make(model)).abs().max() < 0.05


def test_sides_that_cannot_be_halved_are_refused(model):
    with pytest.raises(ValueError, match=r"multiples of 4, got \(18, 18\)"):
        make(model, size=18)


def test_weights_come_back_from_onnx(model):
    pytest.importorskip("onnx")
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    found = convert_terrain(onnx_of(state, TINY).SerializeToString(), TINY)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_other_onnx_files_are_refused(model):
    pytest.importorskip("onnx")
    with pytest.raises(ValueError, match="is no ONNX model"):
        convert_terrain(b"\x00 nothing of the kind", TINY)
    file = onnx_of(model.state_dict(), TINY)
    with pytest.raises(ValueError, match=r"time_embed\.0\.weight is of shape \(32, 8\), needed is"):
        convert_terrain(file.SerializeToString())
    deeper = dataclasses.replace(TINY, blocks=2)
    with pytest.raises(ValueError, match=r"input_blocks\..*\.weight is .*, needed is"):
        convert_terrain(file.SerializeToString(), deeper)
    extra = file.graph.initializer.add()
    extra.CopyFrom(file.graph.initializer[0])
    extra.name = f"{PREFIX}more.weight"
    with pytest.raises(ValueError, match=r"no terrain model: it also has more\.weight"):
        convert_terrain(file.SerializeToString(), TINY)
    file.graph.initializer.remove(extra)
    del file.graph.node[1]
    with pytest.raises(ValueError, match="leads nowhere"):
        convert_terrain(file.SerializeToString(), TINY)


def test_heights_are_metres():
    assert heights_of(torch.tensor([-1.0, 1.0, -2.0])).tolist() == pytest.approx([0, HIGHEST, 0])


def test_square_grids():
    assert square_grid(4096) == (1, 64, 64)
    assert square_grid(4097) is None


def test_the_task_repeats_itself(model):
    task = TerrainTask(size=16)
    first, second = task.inputs(2, seed=3)
    again = task.inputs(1, seed=4)[0]
    assert torch.equal(second.noise, again.noise)
    assert not torch.equal(first.noise, second.noise)
    assert task.caption(again) == "seed 4, difficulty 0.5"
    dense = task.run(model, first)
    assert dense.shape == (16, 16)
    assert torch.equal(dense, task.run(model, first))
    assert task.compare(dense, dense) == {"relative_l2": 0, "largest_error": 0}
    found = task.compare(dense, 1.1 * dense)
    assert next(iter(found)) == task.metric
    assert found["relative_l2"] == pytest.approx(0.1, rel=1e-5)
    assert dataclasses.replace(task, size=32).inputs(1)[0].noise.shape == (1, 1, 32, 32)


@pytest.mark.parametrize("size", [0, 8, 100])
def test_sizes_of_a_task_that_the_net_cannot_make(size):
    with pytest.raises(ValueError, match=f"size must be a multiple of 16, got {size}"):
        TerrainTask(size=size)


def test_no_inputs_are_refused():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        TerrainTask().inputs(0)


def test_relief_is_lit_from_the_upper_left():
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    hill = 5 * torch.exp(-((x - 32) ** 2 + (y - 32) ** 2) / 200)
    picture = TerrainTask().picture(None, hill)
    assert picture.shape == (64, 64, 3)
    assert picture.dtype.name == "uint8"
    assert picture[24, 24].sum() > picture[40, 40].sum() + 100
    flat = shade(torch.zeros(8, 8))
    assert (flat == flat[0, 0]).all()
