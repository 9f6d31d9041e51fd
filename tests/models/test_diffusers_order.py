"""The order of visual tokens: permuted once or in every call, and a mistake in it shows."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge.models.diffusers.stack import Stack
from sparge.models.tokens import Placed
from tiny_denoiser_parts import SAME, SPARSE, VIDEO, B, Tiny, assert_same, ran_sparse, randn
from tiny_denoisers import DENOISERS, flux, hunyuan, ltx, qwen, wan

ONCE = ["cogvideox", "mochi", "flux", "flux_kontext", "sd3", "hunyuan", "wan", "wan_i2v", "ltx"]
ONCE += ["qwen", "qwen_edit", "pixart", "dit", "unet"]
ROTARY = ["cogvideox", "mochi", "flux", "hunyuan", "wan", "ltx", "qwen"]
ORDERS = ["hilbert", "column", "time", "tiles:2x3x5"]


class Counted:
    """Counts the tensors that are put in order."""

    def __init__(self, monkeypatch):
        self.shapes = []
        plain = Placed.reorder

        def reorder(placed, x, dim=-2):
            self.shapes.append(tuple(x.shape))
            return plain(placed, x, dim)

        monkeypatch.setattr(Placed, "reorder", reorder)


@pytest.mark.parametrize("name", DENOISERS)
def test_tokens_are_permuted_once_where_the_model_allows(name, monkeypatch):
    tiny = DENOISERS[name]()
    counted = Counted(monkeypatch)
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        tiny()
    in_attention = [shape for shape in counted.shapes if len(shape) == 4 and shape[1] == 2]
    in_attention = [shape for shape in in_attention if shape[-1] != shape[-2]]
    assert bool(in_attention) == (name not in ONCE), counted.shapes
    hidden = [shape for shape in counted.shapes if len(shape) == 3 and shape[0] == B]
    assert bool(hidden) == (name in ONCE), counted.shapes
    if name in ONCE and name != "unet":
        assert len(hidden) == (3 if name == "ltx" else 1), "once, and LTX' two tables"


@pytest.mark.parametrize("name", DENOISERS)
def test_tokens_that_are_not_put_back_show(name, monkeypatch):
    tiny = DENOISERS[name]()
    want = tiny()
    monkeypatch.setattr(Placed, "restore", lambda placed, x, dim=-2: x)
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        assert (tiny() - want).norm() > 0.05 * want.norm()


@pytest.mark.parametrize("name", ROTARY)
def test_positions_that_are_not_permuted_show(name, monkeypatch):
    tiny = DENOISERS[name]()
    want = tiny()
    monkeypatch.setattr(Stack, "_reordered_rotary", lambda stack, tables, given: tables)
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        assert (tiny() - want).norm() > 0.01 * want.norm()


def test_a_mask_that_is_not_permuted_shows(monkeypatch):
    """Allegro's, over visual tokens."""
    tiny = DENOISERS["allegro"]()
    want = tiny()
    monkeypatch.setattr(Placed, "reorder_mask", lambda placed, mask, Lq, Lk: mask)
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        assert (tiny() - want).norm() > 0.01 * want.norm()


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_exact(order):
    tiny = wan()
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu", order=order) as handle:
        assert_same(tiny(), want)
        assert f"3×10×12, in order '{order}'" in " ".join(handle.report().notes)


def test_orders_change_what_is_kept():
    tiny, found = wan(), []
    for order in ("row", "hilbert", "tiles:2x4x4"):
        with sparge.accelerate(tiny.model, SPARSE, backend="cpu", order=order):
            found.append(tiny())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_another_size_has_another_grid():
    tiny = wan()
    wider = {"hidden_states": randn(B, 4, 2, 16, 28)}
    want, want_wider = tiny(), tiny(**wider)
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        assert_same(tiny(), want)
        assert_same(tiny(**wider), want_wider)
        assert "2×8×14" in " ".join(handle.report().notes)
        assert_same(tiny(), want)


def test_packed_latents_of_another_shape_with_as_many_tokens():
    """The grid is read from the positions, not from the number of tokens."""
    tiny = flux()
    ids = tiny.inputs["img_ids"]
    turned = torch.stack([ids[:, 0], torch.arange(18).repeat_interleave(14),
                          torch.arange(14).repeat(18)], dim=1).to(ids)  # fmt: skip
    want, want_turned = tiny(), tiny(img_ids=turned)
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        assert_same(tiny(), want)
        assert "1×14×18" in " ".join(handle.report().notes)
        assert_same(tiny(img_ids=turned), want_turned)
        assert "1×18×14" in " ".join(handle.report().notes)


@pytest.mark.parametrize("ids", ["all zero", "shuffled"])
def test_positions_without_a_grid_are_one_row(ids):
    tiny = flux()
    given = tiny.inputs["img_ids"]
    given = torch.zeros_like(given) if ids == "all zero" else given[torch.randperm(len(given))]
    want = tiny(img_ids=given)
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        assert_same(tiny(img_ids=given), want)
        assert ran_sparse(handle) == 3


def test_tokens_without_a_known_grid_run_the_models_own_attention():
    tiny = ltx()
    sizes = {"num_frames": None, "height": None, "width": None}
    coordinates = randn(B, 3, tiny.tokens).abs()
    want = tiny(**sizes, video_coords=coordinates)
    with sparge.accelerate(tiny.model, SPARSE, backend="cpu") as handle:
        assert torch.equal(tiny(**sizes, video_coords=coordinates), want)
        (reason,) = handle.report().fallbacks
    assert "no grid of frames" in reason


def per_token_timesteps(tiny):
    return {"timestep": tiny.inputs["timestep"][:, None].expand(-1, tiny.tokens).contiguous()}


@pytest.mark.parametrize("make", [wan, ltx])
def test_a_timestep_for_every_token_is_permuted_in_attention(make):
    """As Wan 2.2's and LTX' image-to-video: modulation is by token."""
    tiny = make()
    given = per_token_timesteps(tiny)
    given["timestep"][:, : tiny.tokens // 3] = 0
    want = tiny(**given)
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        assert_same(tiny(**given), want)
        assert ran_sparse(handle) == 2


def test_a_first_frame_with_its_own_modulation_is_permuted_in_attention():
    tiny = hunyuan(image_condition_type="token_replace")
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        assert_same(tiny(), want)
        assert ran_sparse(handle) == 3


@pytest.mark.parametrize("make, argument", [
    (flux, "controlnet_block_samples"), (flux, "controlnet_single_block_samples"),
    (qwen, "controlnet_block_samples"),
])  # fmt: skip
def test_residuals_of_a_controlnet_are_added_to_the_right_tokens(make, argument):
    tiny = make()
    width = 32
    given = {argument: [randn(B, tiny.tokens - tiny.before, width)]}
    want = tiny(**given)
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        assert_same(tiny(**given), want)


def test_residuals_for_sd3():
    tiny = DENOISERS["sd3"]()
    given = {"block_controlnet_hidden_states": [randn(B, tiny.tokens - tiny.after, 16)] * 3}
    want = tiny(**given)
    assert (want - tiny()).norm() > 0.01 * want.norm()
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        assert_same(tiny(**given), want)


@pytest.mark.parametrize("skipped", [[0], [2], [0, 2]])
def test_skipped_layers_do_not_lose_the_order(skipped):
    """Skip-layer guidance leaves blocks out, maybe the last one, which restores the order."""
    tiny = DENOISERS["sd3"]()
    want = tiny(skip_layers=skipped)
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        assert_same(tiny(skip_layers=skipped), want)


@pytest.mark.parametrize("layers", [["blocks.1.*"], ["blocks.0.*"]])
def test_blocks_before_and_behind_the_sparse_ones_see_plain_tokens(layers):
    tiny = wan(num_layers=3)
    want = tiny()
    seen = {}
    block = tiny.model.blocks[0 if layers == ["blocks.1.*"] else 1]
    block.register_forward_hook(lambda module, args, out: seen.setdefault("out", out.clone()))
    tiny()
    plain = seen.pop("out")
    with sparge.accelerate(tiny.model, SAME, backend="cpu", layers=layers):
        assert_same(tiny(), want)
    assert_same(seen["out"], plain)


def test_a_hidden_state_tapped_in_between_is_permuted():
    """The reverse of the test before: between the first and the last block tokens are in order."""
    tiny = wan(num_layers=3)
    seen = []
    tiny.model.blocks[1].norm1.register_forward_hook(lambda module, args, out: seen.append(out))
    tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        tiny()
    assert (seen[0] - seen[1]).norm() > 0.1 * seen[0].norm()
    assert_same(Placed(VIDEO, 0, "hilbert").restore(seen[1], dim=1), seen[0])


def test_a_cache_of_blocks_is_not_mixed_with_permuted_tokens():
    """First-block cache: it adds outputs of earlier passes, in whatever order they were."""
    from diffusers import FirstBlockCacheConfig

    tiny = flux()
    twin = Tiny(flux().model, tiny.inputs, tiny.grid)
    for each in (tiny, twin):
        each.model.enable_cache(FirstBlockCacheConfig(threshold=0.5))

    def passes(one):
        with one.model.cache_context("cond"):
            return [one(), one(timestep=torch.tensor([0.49, 0.49]))]

    want = passes(twin)
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        for out, expected in zip(passes(tiny), want, strict=True):
            assert_same(out, expected)
