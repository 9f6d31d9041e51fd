"""Calls that go to the model's own attention: the same numbers as before, and the reason."""

from __future__ import annotations

import copy

import pytest
import torch

import sparge
import tiny_models as tiny
from tiny_models import ids_of, padded, same, sparse_calls

CLOSE = {"rtol": 0.0, "atol": 2e-6}
MODELS = {"llama": tiny.llama, "gemma3": tiny.gemma3, "bert": tiny.bert}
GRADIENT = "a gradient is wanted"


def only_reason(handle):
    (reason,) = handle.report().fallbacks
    assert sparse_calls(handle) == 0
    return reason


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_weights_are_those_of_eager(name, side):
    model, (ids, mask) = MODELS[name](), padded(ids_of(), side)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    run = lambda m: m(ids, attention_mask=mask, output_attentions=True)  # noqa: E731
    with torch.no_grad():
        want = run(eager)
        with same(model) as handle:
            got = run(model)
            assert only_reason(handle).startswith("output_attentions")
    assert len(got.attentions) == 2
    for mine, theirs in zip(got.attentions, want.attentions, strict=True):
        keep = mask.bool()[:, None, :, None].expand_as(theirs)
        torch.testing.assert_close(mine[keep], theirs[keep], **CLOSE)


def test_attention_weights_without_a_mask():
    model, ids = tiny.llama(), ids_of()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad(), same(model):
        got, want = (m(ids, output_attentions=True) for m in (model, eager))
    for mine, theirs in zip(got.attentions, want.attentions, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_models_own(name, own):
    plain, (ids, mask) = MODELS[name](), padded(ids_of(), "left")
    plain.set_attn_implementation(own)
    model = copy.deepcopy(plain)
    grads = []
    with same(model) as handle:
        for each in (plain, model):
            each(ids, attention_mask=mask)[0][mask.bool()].square().sum().backward()
            grads.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
        assert only_reason(handle).startswith(GRADIENT)
    assert grads[0].keys() == grads[1].keys()
    assert grads[0]
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("trained", ["k_proj", "v_proj"])
def test_a_gradient_of_the_keys_or_values_alone(trained):
    """Adapters may train one projection of the last layer; the query then wants no gradient."""
    model, ids = tiny.llama(), ids_of()
    model.requires_grad_(False)
    weight = model.get_submodule(f"model.layers.1.self_attn.{trained}").weight
    weight.requires_grad_(True)
    model(ids).logits.square().sum().backward()
    want, weight.grad = weight.grad, None
    with same(model) as handle:
        model(ids).logits.square().sum().backward()
        first, last = handle.report().layers
    torch.testing.assert_close(weight.grad, want, rtol=1e-4, atol=2e-6)
    assert first.sparse_calls == 1
    assert last.sparse_calls == 0
    assert next(iter(last.fallbacks)).startswith(GRADIENT)


def test_checkpointing_a_gradient_changes_nothing():
    model, ids = tiny.llama().train(), ids_of()
    model(ids).logits.square().sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    with same(model):
        model(ids, use_cache=False).logits.square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-5, atol=1e-6)


def test_dropout_while_training():
    model, ids = tiny.llama(attention_dropout=0.5).train(), ids_of()
    with torch.no_grad():
        torch.manual_seed(0)
        want = model(ids).logits
        with same(model) as handle:
            torch.manual_seed(0)
            got = model(ids).logits
            assert only_reason(handle) == "dropout 0.5: sparge has none"
            model.eval()
            model(ids)
            assert sparse_calls(handle) == 2
    assert torch.equal(got, want)


def test_decode_runs_as_it_did():
    """One query after a prefill, with and without padding: the numbers of the own attention."""
    model = tiny.llama()
    for side, pads in (("left", (0, 0)), ("left", (0, 9))):
        ids, mask = padded(ids_of(), side, pads)
        outs = []
        for accelerated in (False, True):
            handle = sparge.accelerate(model, tiny.SAME, backend="cpu") if accelerated else None
            with torch.no_grad():
                cache = model(ids[:, :-1], attention_mask=mask[:, :-1]).past_key_values
                step = model(ids[:, -1:], attention_mask=mask, past_key_values=cache)
            outs.append(step.logits)
        layer = handle.report().layers[0]
        handle.remove()
        assert layer.ran["own attention"] == 1
        assert layer.sparse_calls == 1
        assert layer.fallbacks == {"one query (decode): dense attention is faster": 1}
        torch.testing.assert_close(*outs, **CLOSE)


def test_short_calls_go_to_dense_with_the_reason_of_auto():
    model, ids = tiny.llama(), ids_of(L=20)
    with torch.no_grad():
        want = model(ids).logits
        with sparge.accelerate(model) as handle:
            torch.testing.assert_close(model(ids).logits, want, **CLOSE)
            layer = handle.report().layers[0]
    assert layer.ran == {"dense": 1}
    assert len(layer.fallbacks) == 1
    assert layer.density == 1.0
    assert layer.density_by_head == ()
    assert layer.error is None


@pytest.mark.parametrize("mode", ["inference", "autocast", "float64"])
def test_around_the_model(mode):
    model, ids = tiny.llama(), ids_of(L=140)
    backend = "cpu"
    close = CLOSE
    around = torch.inference_mode()
    if mode == "autocast":
        around, close = torch.autocast("cpu", torch.bfloat16), {"rtol": 0.0, "atol": 2e-2}
    if mode == "float64":
        model, backend = model.double(), "auto"  # the native core has no float64
        close = {"rtol": 0.0, "atol": 1e-12}
    with torch.no_grad(), around:
        want = model(ids).logits
        with same(model, backend=backend) as handle:
            got = model(ids).logits
            assert (sparse_calls(handle) == 2) == (mode != "float64"), handle.report()
    torch.testing.assert_close(got, want, **close)
