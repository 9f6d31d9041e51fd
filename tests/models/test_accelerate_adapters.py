"""Adapters by the kind of model, and recipes that depend on a context."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparge
import tiny_models as tiny
from sparge import KeepFraction, Profile, Recipe
from sparge.models import Found, Site, adapters, register_adapter, unregister_adapter
from sparge.values.profile import HeadSettings, LayerSettings, fingerprint
from sparge.values.tokenmask import EXCLUDED, TokenMask
from tiny_models import ids_of

SPARSE = Recipe(KeepFraction(0.3), precision="exact", local_blocks=0)
SPARSER = Recipe(KeepFraction(0.1), precision="exact", local_blocks=0)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class PlainAttention(nn.Module):
    """Attention of no framework; an adapter may set `attend`."""

    num_heads = 2
    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


class PlainModel(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(PlainAttention(), nn.Linear(32, 32), PlainAttention())


class Through:
    """What stands in the place of a module's attention; it can be copied with the model."""

    def __init__(self, site):
        self.site = site

    def __call__(self, query, key, value):
        recipe = self.site.recipe_now()
        if recipe is not None:
            return self.site.attend(query, key, value, {}, recipe=recipe)
        own = partial(F.scaled_dot_product_attention, query, key, value)
        return self.site.run_own(self.site.left_out, own, query, key, is_causal=False)


class Undo:
    def __init__(self, modules):
        self.modules = modules

    def __call__(self):
        for module in self.modules:
            del module.attend


class PlainAdapter:
    name = "plain"

    def find(self, model):
        modules = {n: m for n, m in model.named_modules() if isinstance(m, PlainAttention)}
        return Found(model, modules) if modules else "it has no PlainAttention"

    def attach(self, found, sites):
        for name, site in sites.items():
            found.modules[name].attend = Through(site)
        return Undo(list(found.modules.values()))


@pytest.fixture
def plain():
    register_adapter(PlainAdapter())
    yield PlainModel()
    unregister_adapter("plain")


def test_an_adapter_for_a_plain_module(plain):
    x = torch.randn(2, 700, 32)
    before = plain(x)
    with sparge.accelerate(
        plain, SPARSE, backend="cpu", layers=["2"], measure_error=True
    ) as handle:
        changed = plain(x)
        report = handle.report()
    assert [layer.name for layer in report.layers] == ["0", "2"]
    assert report.layers[0].fallbacks == {"not among `layers`": 1}
    assert report.layers[1].sparse_calls == 1
    assert report.layers[1].density < 0.5 < report.density
    assert 0 < report.error < 1
    assert not torch.equal(changed, before)
    assert torch.equal(plain(x), before)
    assert tiny.is_plain(plain)


def test_a_plain_module_is_copied_with_its_handle(plain):
    x = torch.randn(1, 300, 32)
    handle = sparge.accelerate(plain, SPARSE, backend="cpu")
    changed = plain(x)
    for twin in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert torch.equal(twin(x), changed)
        sparge.accelerate(twin).remove()
        assert tiny.is_plain(twin)
    assert handle.report().layers[0].calls == 1
    with pytest.raises(ValueError, match=r"2 query heads"):
        sparge.accelerate(plain, Recipe(KeepFraction((0.1, 0.2, 0.3))))
    assert handle.active


def test_transformers_models_still_find_their_own(plain):
    with tiny.same(tiny.llama()) as handle:
        handle.model(ids_of())
        assert tiny.only_sparse(handle) == 2


def test_a_model_that_no_adapter_takes_names_each_with_its_reason(plain):
    with pytest.raises(sparge.Unsupported) as caught:
        sparge.accelerate(nn.Linear(2, 2))
    assert list(caught.value.reasons) == ["plain", "transformers", "diffusers", "torch"]
    assert caught.value.reasons["plain"] == "it has no PlainAttention"
    assert "attention interface" in caught.value.reasons["transformers"]
    assert "scaled_dot_product_attention" in caught.value.reasons["torch"]


def test_a_name_is_registered_once(plain):
    for name in ("plain", "transformers", "diffusers", "torch"):
        again = PlainAdapter()
        again.name = name
        with pytest.raises(ValueError, match=f"name must be free, got '{name}'"):
            register_adapter(again)
    assert list(adapters._registered) == ["plain"]


@pytest.mark.parametrize("Lq, Lk, causal, offset", [
    (700, 700, True, 0), (700, 700, False, 0), (1, 129, True, 128), (200, 330, True, 130),
    (300, 100, True, 0), (300, 100, True, -200),
])  # fmt: skip
def test_allowed_blocks_are_those_of_a_plan(Lq, Lk, causal, offset):
    query, key = torch.zeros(2, 3, Lq, 4), torch.zeros(2, 1, Lk, 4)
    kinds = TokenMask(Lq, Lk, causal, offset).block_kinds(query.device)
    want = 6 * int((kinds != EXCLUDED).sum())
    site = Site("a", None)
    site.run_own("why", lambda: None, query, key, is_causal=causal, offset=offset)
    assert site.report().allowed == want


# --- context ----------------------------------------------------------------------------------


def by_noise(context):
    if context.step == 0:
        return None
    return SPARSER if (context.noise_level or 0.0) > 0.5 else SPARSE


def test_a_recipe_may_depend_on_the_context():
    model, ids = tiny.llama(), ids_of(1, 700)
    own = model(ids).logits
    want = {}
    for recipe in (SPARSE, SPARSER):
        with sparge.accelerate(model, recipe, backend="cpu") as handle:
            want[recipe] = model(ids).logits
            assert handle.report().layers[0].by_recipe[0].recipe == recipe
    with sparge.accelerate(model, by_noise, backend="cpu") as handle:
        assert torch.equal(model(ids).logits, want[SPARSE])
        with handle.context(noise_level=0.9):
            assert torch.equal(model(ids).logits, want[SPARSER])
            with handle.context(noise_level=0.1, step=3):
                assert torch.equal(model(ids).logits, want[SPARSE])
            with handle.context(step=0):
                assert torch.equal(model(ids).logits, own)
            assert torch.equal(model(ids).logits, want[SPARSER])
        report = handle.report()
    layer = report.layers[0]
    assert {each.recipe: each.calls for each in layer.by_recipe} == {SPARSE: 2, SPARSER: 2}
    densities = {each.recipe: each.density for each in layer.by_recipe}
    assert densities[SPARSER] < densities[SPARSE] < layer.density < 1.0
    assert layer.fallbacks == {"its settings leave it dense": 1}
    assert layer.calls == 5
    assert layer.recipe is None
    assert report.recipe is None
    assert report.to_dict()["layers"][0]["by_recipe"][0]["calls"] == 2


def test_a_context_is_of_one_handle_and_one_thread():
    models = [tiny.llama(), tiny.llama()]
    seen, lock = [], threading.Lock()

    def note(context):
        with lock:
            seen.append(context.step)
        return SPARSE

    handles = [sparge.accelerate(model, note, backend="cpu", layers=["*.0.*"]) for model in models]
    ids = ids_of(1, 70)
    with handles[0].context(step=7):
        for model in models:
            model(ids)
        assert seen == [7, None]
        thread = threading.Thread(target=lambda: models[0](ids))
        thread.start()
        thread.join()
    models[0](ids)
    assert seen == [7, None, None, None]


def test_a_copy_has_a_context_of_its_own():
    model, ids = tiny.llama(), ids_of(1, 700)
    handle = sparge.accelerate(model, by_noise, backend="cpu")
    twin = pickle.loads(pickle.dumps(model))
    with handle.context(noise_level=1.0):
        sparser = model(ids).logits
        assert not torch.equal(twin(ids).logits, sparser)
    with twin._sparge_handle.context(noise_level=1.0):
        assert torch.equal(twin(ids).logits, sparser)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"noise_level": 500}, r"noise_level must be in \[0, 1\], got 500; for a timestep divide"),
        ({"noise_level": float("nan")}, "noise_level must be in"),
        ({"step": -1}, "step must be at least 0"),
    ],
)
def test_contexts_out_of_range(wrong, says):
    handle = sparge.accelerate(tiny.llama())
    with pytest.raises(ValueError, match=says):
        handle.context(**wrong)


def test_a_compiled_model_follows_the_context():
    torch.compiler.reset()
    model, ids = tiny.llama(num_hidden_layers=1), ids_of(1, 700)
    # A compiled model makes the whole mask, in which the diagonal is not forced but by the window.
    recipe_of = lambda context: replace(by_noise(context), local_blocks=1)  # noqa: E731
    with sparge.accelerate(model, recipe_of, backend="cpu") as handle:
        want = {}
        for noise in (0.1, 0.9):
            with handle.context(noise_level=noise):
                want[noise] = model(ids, use_cache=False).logits
        assert not torch.equal(want[0.1], want[0.9])
        run = torch.compile(model, backend="eager")
        for noise in (0.1, 0.9, 0.1):
            with handle.context(noise_level=noise):
                torch.testing.assert_close(run(ids, use_cache=False).logits, want[noise])
    torch.compiler.reset()


def test_a_profile_with_noise_bands_follows_the_noise_level():
    model, ids = tiny.llama(), ids_of(1, 700)
    settings = {"local_blocks": 0, "precision": "exact"}
    sparse = LayerSettings(heads=(HeadSettings(mass=0.3),) * 4, noise=(0.5, 1.0), **settings)
    dense = LayerSettings(heads=(HeadSettings(),) * 4, noise=(0.0, 0.5))
    names = [f"model.layers.{i}.self_attn" for i in (0, 1)]
    layers = {names[0]: LayerSettings(bands=(dense, sparse)), names[1]: replace(dense, noise=None)}
    profile = Profile(layers, fingerprint(model), (0.1, None))
    with sparge.accelerate(model, profile=profile, backend="cpu") as handle:
        with pytest.raises(ValueError, match=r"noise must be given"):
            model(ids)
        handle.reset()
        for noise in (0.2, 0.5, 1.0):
            with handle.context(noise_level=noise):
                model(ids)
        first, second = handle.report().layers
    assert first.sparse_calls == 2
    assert first.fallbacks == {"its settings leave it dense": 1}
    assert first.by_recipe[0].recipe == sparse.recipe()
    assert second.sparse_calls == 0
