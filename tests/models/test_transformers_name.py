"""The conventional way: importing the adapter registers the name `sparge`."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import sparge
import sparge.models.transformers.adapter as adapter
import tiny_models as tiny
from sparge.models import Site
from tiny_models import ids_of, padded

CLOSE = {"rtol": 0.0, "atol": 2e-6}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def exactly(monkeypatch):
    """The name keeps everything, and runs in the sparse kernel."""
    monkeypatch.setattr(adapter, "_ANYWHERE", Site("by name", tiny.SAME, "cpu"))


def runs_of(model, *args, **kwargs):
    with sparge.record() as runs:
        out = model(*args, **kwargs).logits
    return out, runs


def test_from_config_from_pretrained_and_set(exactly, tmp_path):
    plain, (ids, mask) = tiny.llama(), padded(ids_of(), "left")
    want = plain(ids, attention_mask=mask).logits
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sparge")
    made = AutoModelForCausalLM.from_config(tiny.llama_config(), attn_implementation="sparge")
    made.eval().load_state_dict(plain.state_dict())
    plain.set_attn_implementation("sparge")
    for model in (loaded, made, plain):
        got, runs = runs_of(model, ids, attention_mask=mask)
        assert [run.backend for run in runs] == ["cpu", "cpu"]
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **CLOSE)
    plain.set_attn_implementation("sdpa")
    assert torch.equal(plain(ids, attention_mask=mask).logits, want)


@pytest.mark.parametrize("part, layers", [("text_config", 2), ("vision_config", 3)])
def test_one_part_of_a_model(exactly, part, layers):
    """Of the vision tower, the second layer sees two images whole, the first their windows."""
    model, inputs = tiny.qwen_vl(), tiny.qwen_vl_inputs()
    want = model(**inputs).logits
    model.set_attn_implementation({part: "sparge"})
    got, runs = runs_of(model, **inputs)
    assert len(runs) >= layers
    torch.testing.assert_close(got, want, **CLOSE)


def test_the_default_recipe_by_the_default_backend():
    model, ids = tiny.llama(), ids_of()
    want = model(ids).logits
    model.set_attn_implementation("sparge")
    got, runs = runs_of(model, ids)
    assert {run.recipe for run in runs} == {sparge.DEFAULT}
    torch.testing.assert_close(got, want, rtol=0.0, atol=2e-2)


def test_generate(exactly):
    model, (ids, mask) = tiny.llama(), padded(ids_of(L=40), "left")
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    want = model.generate(ids, **options)
    model.set_attn_implementation("sparge")
    assert torch.equal(model.generate(ids, **options), want)


def test_a_model_of_the_name_can_be_accelerated_and_keeps_its_name():
    model, ids = tiny.llama(), ids_of()
    want = model(ids).logits
    model.set_attn_implementation("sparge")
    with tiny.same(model) as handle:
        torch.testing.assert_close(model(ids).logits, want, **CLOSE)
        torch.testing.assert_close(model(ids[:, :1]).logits, want[:, :1], **CLOSE)
        layer = handle.report().layers[0]
        assert layer.sparse_calls == 1
        assert layer.ran["own attention"] == 1
    assert model.config._attn_implementation == "sparge"


def test_softcap_and_sinks_without_an_own_attention():
    for make in (tiny.gemma2, tiny.gpt_oss):
        model, ids = make(), ids_of()
        want = model(ids[:, :1]).logits, model(ids).logits
        model.set_attn_implementation("sparge")
        torch.testing.assert_close(model(ids[:, :1]).logits, want[0], **CLOSE)
        torch.testing.assert_close(model(ids).logits, want[1], rtol=0.0, atol=2e-2)


def test_registering_again_is_harmless():
    adapter.register()
    adapter.register()
    assert LlamaForCausalLM(tiny.llama_config(attn_implementation="sparge"))


def test_without_transformers_no_model_is_one_of_its_models(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(sparge.Unsupported, match="transformers is not imported"):
        sparge.accelerate(torch.nn.Linear(2, 2))
