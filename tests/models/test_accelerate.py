"""`sparge.accelerate`: one model is changed, nothing else, and it can be put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import sparge
import tiny_models as tiny
from sparge import KeepFraction, KeepMass, Recipe
from tiny_models import ids_of, implementations, is_plain, same, sparse_calls

CLOSE = {"rtol": 0.0, "atol": 2e-6}
NAMES = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return tiny.llama()


@pytest.fixture
def ids():
    return ids_of(L=140)


def test_a_model_that_shares_the_config_is_untouched(ids):
    config = tiny.llama_config()
    one, other = (tiny.build(LlamaForCausalLM, config) for _ in range(2))
    before, said = other(ids).logits, config.to_dict()
    recipe = Recipe(KeepFraction(0.3), precision="int8")
    with sparge.accelerate(one, recipe, backend="cpu") as handle:
        changed = one(ids).logits
        assert torch.equal(other(ids).logits, before)
        assert other.config is config
        assert config.to_dict() == said
        assert config._attn_implementation == "sdpa" == other.config._attn_implementation
        assert sparse_calls(handle) == 2
    assert not torch.equal(changed, before)
    assert torch.equal(one(ids).logits, before)


@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen_vl, tiny.whisper, tiny.gpt_oss, tiny.clip])
def test_remove_puts_everything_back(make):
    model = make()
    before = implementations(model)
    handle = sparge.accelerate(model)
    during = implementations(model)
    assert during.keys() == before.keys()
    assert all(during[key] == "sparge" for key in during if "rotary" not in key[0])
    handle.remove()
    assert implementations(model) == before
    assert is_plain(model)


def test_the_output_after_remove_is_the_same_bit_for_bit(model, ids):
    before = model(ids).logits
    handle = sparge.accelerate(model, Recipe(KeepFraction(0.3)), backend="cpu")
    assert handle.active
    assert "active" in repr(handle)
    assert not torch.equal(model(ids).logits, before)
    handle.remove()
    assert not handle.active
    assert "removed" in repr(handle)
    assert torch.equal(model(ids).logits, before)
    counted = handle.report().to_dict()
    handle.remove()  # harmless
    assert handle.report().to_dict() == counted  # and the report stays


def test_each_part_of_a_model_gets_back_what_it_had():
    model = tiny.qwen_vl()
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    before = implementations(model)
    assert set(before.values()) == {"eager", "sdpa"}
    with sparge.accelerate(model):
        pass
    assert implementations(model) == before


def test_an_exception_inside_still_restores(model, ids):
    before = model(ids).logits
    with pytest.raises(IndexError), sparge.accelerate(model, backend="cpu"):
        model(ids + tiny.VOCAB)
    assert is_plain(model)
    assert torch.equal(model(ids).logits, before)


def test_twice_and_removed_once(model, ids):
    before = model(ids).logits
    first = sparge.accelerate(model, tiny.SAME, backend="cpu")
    second = sparge.accelerate(model, tiny.SAME, backend="cpu")
    model(ids)
    assert not first.active
    assert sparse_calls(first) == 0
    assert sparse_calls(second) == 2
    second.remove()
    assert is_plain(model)
    assert torch.equal(model(ids).logits, before)
    first.remove()
    assert torch.equal(model(ids).logits, before)


def test_the_first_handle_cannot_remove_the_second(model, ids):
    first, second = sparge.accelerate(model), sparge.accelerate(model, tiny.SAME, backend="cpu")
    first.remove()
    model(ids)
    assert second.active
    assert sparse_calls(second) == 2


def test_another_recipe_replaces_the_first(model):
    sparge.accelerate(model, tiny.SAME, backend="cpu")
    sparse = Recipe(KeepFraction(0.5), precision="exact")
    handle = sparge.accelerate(model, sparse, backend="cpu")
    model(ids_of(L=400))
    report = handle.report()
    assert report.recipe == sparse
    assert {layer.recipe for layer in report.layers} == {sparse}
    assert report.density < 1.0


def test_reset_forgets(model, ids):
    with same(model, measure_error=True) as handle:
        model(ids)
        handle.reset()
        report = handle.report()
        assert [layer.calls for layer in report.layers] == [0, 0]
        assert report.error is None
        assert report.seconds == 0.0
        assert report.fallbacks == {}
        model(ids)
        assert sparse_calls(handle) == 2


def test_some_layers_only(model, ids):
    before = model(ids).logits
    for layers in (NAMES[1], ["*.1.*"], lambda name: "layers.1" in name):
        with same(model, layers=layers) as handle:
            torch.testing.assert_close(model(ids).logits, before, **CLOSE)
            first, second = handle.report().layers
        assert [first.name, second.name] == NAMES
        assert first.ran == {"own attention": 1}
        assert first.fallbacks == {"not among `layers`": 1}
        assert first.recipe is None
        assert second.sparse_calls == 1
        assert second.recipe == tiny.SAME


ANOTHER_HEAD_COUNT = Recipe(KeepMass((0.9, 0.9, 0.9)))
REFUSED = {
    "unknown pattern": ({"layers": ["*.1.*", "*.7.*"]}, ValueError, r"\*\.7\.\*.*layers\.0"),
    "function of no name": ({"layers": lambda name: False}, ValueError, "match no attention"),
    "no names": ({"layers": []}, ValueError, "match no attention"),
    "no names at all": ({"layers": 3}, TypeError, "layers must be names"),
    "heads": ({"recipe": ANOTHER_HEAD_COUNT}, ValueError, r"layers\.0\.self_attn.*3 numbers for 4"),
    "recipe": ({"recipe": {"keep": "all"}}, TypeError, "recipe must be a sparge.Recipe"),
    "backend": (
        {"backend": "gpu9"},
        ValueError,
        "backend must be one of auto.*got 'gpu9'",
    ),
    "both": ({"recipe": tiny.SAME, "profile": "p.json"}, ValueError, "a recipe or a profile"),
}


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_changes_nothing(model, name, accelerated):
    arguments, error, message = REFUSED[name]
    handle = sparge.accelerate(model, tiny.SAME, backend="cpu") if accelerated else None
    config, before = model.config, [vars(module).copy() for module in model.modules()]
    with pytest.raises(error, match=message):
        sparge.accelerate(model, **arguments)
    assert model.config is config
    assert [vars(module) for module in model.modules()] == before
    assert handle is None or handle.active


def test_a_recipe_by_heads_is_checked_where_it_is_used():
    """The towers of a model have other numbers of heads: two to see, four to read."""
    model = tiny.qwen_vl()
    by_head = Recipe(KeepFraction((0.5, 0.6, 0.7, 0.8)))
    with pytest.raises(ValueError, match=r"visual.*4 numbers for 2 query heads"):
        sparge.accelerate(model, by_head)
    with sparge.accelerate(model, by_head, layers="*language_model*"):
        pass


@pytest.mark.parametrize("thing", [None, "a path", 3, object()])
def test_what_is_no_model(thing):
    with pytest.raises(TypeError, match="model must be a module or a pipeline, got"):
        sparge.accelerate(thing)


def test_a_module_without_attention():
    with pytest.raises(sparge.Unsupported, match="Linear has no attention"):
        sparge.accelerate(nn.Linear(2, 2))


def test_a_failure_on_the_way_leaves_the_model_as_it_was(model, ids, monkeypatch):
    before = model(ids).logits

    def fail(self, name):
        self.config._attn_implementation_internal = name
        raise RuntimeError("half-way")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "set_attn_implementation", fail)
        with pytest.raises(RuntimeError, match="half-way"):
            sparge.accelerate(model)
    assert set(implementations(model).values()) == {"sdpa"}
    assert is_plain(model)
    assert torch.equal(model(ids).logits, before)


def test_what_the_user_changes_meanwhile_stays(model, ids):
    eager = tiny.llama()
    eager.set_attn_implementation("eager")
    with sparge.accelerate(model) as handle:
        model.config.my_note = "kept"
        model.config.rms_norm_eps = 1e-3
        model.set_attn_implementation("eager")
        assert torch.equal(model(ids).logits, eager(ids).logits)
        assert handle.report().layers[0].calls == 0
    assert model.config.my_note == "kept"
    assert model.config.rms_norm_eps == 1e-3
    assert model.config._attn_implementation == "eager"


def test_layers_dropped_meanwhile(model, ids):
    handle = sparge.accelerate(model)
    model.model.layers = model.model.layers[:1]
    handle.remove()
    assert is_plain(model)
