"""Denoisers of diffusers: same result with every block kept, text always kept, and the way back."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from diffusers import CogView4Transformer2DModel

import sparge
from sparge import KeepFraction, Recipe
from sparge.reorder import inverse_order
from sparge.values.call import BLOCK_K, BLOCK_Q
from tiny_denoiser_parts import SAME, SPARSE, TEXT, Tiny, assert_same, plans_of, ran_sparse
from tiny_denoisers import DENOISERS, flux, ltx, sd3, unet, wan, wan_i2v

LAYERS = {
    "cogvideox": 2, "mochi": 2, "flux": 3, "flux_kontext": 3, "flux2": 3, "chroma": 3, "sd3": 4,
    "hunyuan": 3, "wan": 2, "wan_i2v": 2, "skyreels": 2, "wan_vace": 3, "ltx": 2, "qwen": 2,
    "qwen_edit": 2, "allegro": 2, "latte": 4, "pixart": 2, "dit": 2, "unet": 4,
}  # fmt: skip
JOINT = ["cogvideox", "mochi", "flux", "flux_kontext", "flux2", "chroma", "sd3", "hunyuan", "qwen"]
JOINT += ["qwen_edit"]


@pytest.mark.parametrize("order", ["hilbert", "row", "tiles:2x4x4"])
@pytest.mark.parametrize("name", DENOISERS)
def test_keeping_all_is_the_dense_result_and_removal_is_exact(name, order):
    tiny = DENOISERS[name]()
    before = {n: m.processor for n, m in tiny.model.named_modules() if hasattr(m, "processor")}
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu", order=order) as handle:
        assert_same(tiny(), want)
        assert ran_sparse(handle) == LAYERS[name]
    assert torch.equal(tiny(), want)
    assert is_plain(tiny.model)
    for n, processor in before.items():
        assert tiny.model.get_submodule(n).processor is processor


def is_plain(model):
    """No hook, no attribute and no processor of ours is left in a model."""
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not [name for name in vars(module) if name.startswith("_sparge")]
        assert not type(getattr(module, "processor", None)).__name__.startswith("Sparge")
    return True


@pytest.mark.parametrize("name", ["cogvideox", "sd3", "wan", "unet"])
def test_the_reference_backend_agrees(name):
    tiny = DENOISERS[name]()
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="reference") as handle:
        assert_same(tiny(), want)
        assert ran_sparse(handle) == LAYERS[name]


@pytest.mark.parametrize("name", JOINT)
def test_text_and_references_are_kept_as_queries_and_as_keys_in_every_head(name):
    tiny, joint = DENOISERS[name](), 0
    for layer, L, plan in plans_of(tiny, SPARSE):
        kept = plan.to_mask()
        assert kept.float().mean() < 0.95, "the recipe is not sparse"
        if layer.endswith("attn2"):  # of SD3.5: visual tokens alone
            assert tiny.tokens - TEXT == L
            continue
        joint += 1
        visual = tiny.tokens - tiny.before - tiny.after
        text = L - visual - (tiny.after if tiny.before else 0)  # Mochi drops padding
        ranges = [(0, text)] if tiny.before else [(visual, L)]
        if tiny.before and tiny.after:
            ranges.append((L - tiny.after, L))
        for start, stop in ranges:
            assert stop > start
            assert kept[:, :, start // BLOCK_Q : (stop - 1) // BLOCK_Q + 1].all()
            assert kept[..., start // BLOCK_K : (stop - 1) // BLOCK_K + 1].all()
    assert joint


def test_ranges_of_the_recipe_count_in_the_models_own_order():
    """Two rows of a frame, which are in other blocks in Hilbert order."""
    tiny = wan()
    recipe = replace(SPARSE, protect=((136, 160),))
    places = inverse_order(tiny.grid, "hilbert")[136:160]
    blocks = (places // BLOCK_K).unique()
    assert blocks.tolist() != [2]
    for _, _, plan in plans_of(tiny, recipe):
        kept = plan.to_mask()
        assert kept[..., blocks].all()
        assert kept[:, :, (places // BLOCK_Q).unique()].all()
        assert not kept.all()


def test_cross_attention_and_refiners_are_left_alone():
    cases = {"wan": "blocks.0.attn2", "ltx": "transformer_blocks.1.attn2"}
    cases |= {"pixart": "transformer_blocks.0.attn2", "unet": "mid_block.attentions.0"}
    for name, layer in cases.items():
        with sparge.accelerate(DENOISERS[name]().model, SAME) as handle:
            left = handle.report().left_alone
            found = [why for n, why in left.items() if n.startswith(layer)]
            assert found, left
            assert "cross-attention" in found[0]
    with sparge.accelerate(DENOISERS["hunyuan"]().model, SAME) as handle:
        (left,) = handle.report().left_alone.items()
        assert "token_refiner" in left[0]
        assert "outside" in left[1]


@pytest.mark.parametrize("make", [wan, wan_i2v, ltx, unet])
def test_cross_attention_is_served_where_it_is_asked_for(make):
    tiny = make()
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        fewer = len(handle.report().layers)
    with sparge.accelerate(tiny.model, SAME, backend="cpu", cross_attention=True) as handle:
        assert_same(tiny(), want)
        assert ran_sparse(handle) == 2 * fewer
    assert torch.equal(tiny(), want)


@pytest.mark.parametrize("name", ["flux", "sd3", "wan", "ltx", "hunyuan", "qwen", "unet"])
def test_a_copy_is_accelerated_too_with_a_handle_of_its_own(name):
    tiny = DENOISERS[name]()
    want = tiny()
    handle = sparge.accelerate(tiny.model, SAME, backend="cpu")
    for model in (copy.deepcopy(tiny.model), pickle.loads(pickle.dumps(tiny.model))):
        twin = Tiny(model, tiny.inputs, tiny.grid)
        assert_same(twin(), want)
        own = model._sparge_handle
        assert ran_sparse(own) == LAYERS[name]
        own.remove()
        assert is_plain(model)
        assert torch.equal(twin(), want)
    assert all(layer.calls == 0 for layer in handle.report().layers)
    handle.remove()
    assert torch.equal(tiny(), want)


def test_a_second_call_replaces_the_first():
    tiny = sd3()
    want = tiny()
    first = sparge.accelerate(tiny.model, SPARSE, backend="cpu")
    sparse = tiny()
    second = sparge.accelerate(tiny.model, SAME, backend="cpu", order="row")
    assert not first.active
    assert_same(tiny(), want)
    assert (sparse - want).norm() > 0.01 * want.norm()
    second.remove()
    second.remove()
    assert torch.equal(tiny(), want)


def test_layers_choose_by_name():
    tiny = sd3()
    want = tiny()
    chosen = "transformer_blocks.1.*"
    with sparge.accelerate(tiny.model, SAME, backend="cpu", layers=[chosen]) as handle:
        assert_same(tiny(), want)
        ran = {layer.name: layer.sparse_calls for layer in handle.report().layers}
    assert ran == {name: int(name == "transformer_blocks.1.attn") for name in ran}
    with pytest.raises(ValueError, match="match no attention module"):
        sparge.accelerate(tiny.model, layers=["single*"])
    assert is_plain(tiny.model)


def test_a_gradient_with_checkpoints_is_the_plain_one():
    tiny = wan()
    tiny.model.train()
    tiny.model.enable_gradient_checkpointing()

    def gradient():
        tiny.model.zero_grad()
        tiny.model(**tiny.inputs).sample.square().mean().backward()
        return tiny.model.blocks[0].attn1.to_q.weight.grad.clone()

    want = gradient()
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        assert torch.equal(gradient(), want)


def test_an_error_in_a_pass_leaves_nothing_behind():
    tiny = flux()
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu"):
        with pytest.raises(RuntimeError, match=r"shape|size"):
            tiny(encoder_hidden_states=torch.zeros(2, TEXT, 5))
        block = tiny.model.single_transformer_blocks[0]
        forward, block.forward = block.forward, None  # fails between the permutation's two ends
        with pytest.raises(TypeError):
            tiny()
        block.forward = forward
        assert_same(tiny(), want)
    del block.forward
    assert torch.equal(tiny(), want)


def test_a_grid_that_does_not_match_is_refused_before_any_attention(no_work):
    tiny = wan()
    with (
        sparge.accelerate(tiny.model, SAME, backend="cpu", grid=(3, 12, 10)),
        pytest.raises(ValueError, match=r"grid 3×12×10 .* this input has 3×10×12"),
    ):
        tiny()


def test_protected_ranges_out_of_bounds_are_refused_before_any_attention(no_work):
    tiny = wan()
    recipe = Recipe(KeepFraction(0.5), protect=((350, 400),))
    with (
        sparge.accelerate(tiny.model, recipe, backend="cpu"),
        pytest.raises(ValueError, match=r"protect .* 360 tokens .* got \(350, 400\)"),
    ):
        tiny()


def test_numbers_for_other_heads_are_refused_at_once():
    tiny = wan()
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1: .* 3 numbers for 2 query heads"):
        sparge.accelerate(tiny.model, Recipe(KeepFraction((0.1, 0.2, 0.3))))
    assert is_plain(tiny.model)


def test_an_unknown_model_is_refused_and_the_known_ones_named():
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 1, "text_embed_dim": 8}
    heads = {"attention_head_dim": 4, "num_attention_heads": 2}
    model = CogView4Transformer2DModel(**sizes, **heads, time_embed_dim=8, condition_dim=4)
    with pytest.raises(sparge.Unsupported) as caught:
        sparge.accelerate(model)
    reason = caught.value.reasons["diffusers"]
    for part in ("CogView4Transformer2DModel", "WanTransformer3DModel", "UNet2DConditionModel"):
        assert part in reason
    assert is_plain(model)


@pytest.mark.parametrize("options, match", [
    ({"order": "spiral"}, "order must be one of"), ({"grid": (3, 0, 2)}, "grid"),
    ({"schedule": 0.2}, "schedule must be a sparge.Schedule"), ({"backend": "gpu"}, "backend"),
])  # fmt: skip
def test_bad_options_leave_the_model_as_it_is(options, match):
    tiny = wan()
    with pytest.raises((TypeError, ValueError), match=match):
        sparge.accelerate(tiny.model, **options)
    assert is_plain(tiny.model)
