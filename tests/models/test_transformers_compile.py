"""A compiled prefill holds sparge whole: no graph breaks, and the report counts its runs."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import sparge
import tiny_models as tiny
from tiny_models import ids_of, padded, same, sparse_calls

CLOSE = {"rtol": 0.0, "atol": 2e-6}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


def graph(model):
    return torch.compile(model, fullgraph=True, backend="eager")


def prefill(model, ids, mask=None):
    return lambda run: (
        run(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
    )


def cases(model):
    ids, (padded_ids, mask) = ids_of(), padded(ids_of(), "left")
    return {
        "cache": (prefill(model, ids), ...),
        "padding": (prefill(model, padded_ids, mask), mask.bool()),
        "no cache": (lambda run: run(ids, use_cache=False).logits, ...),
    }


ONE = {"num_hidden_layers": 1}
GRAPHS = [
    (lambda: tiny.llama(**ONE), "cache"),
    (lambda: tiny.llama(**ONE), "padding"),
    (lambda: tiny.llama(**ONE), "no cache"),
    (tiny.gemma3, "padding"),
    (lambda: tiny.gpt_oss(**ONE), "cache"),
]


@pytest.mark.parametrize("make, case", GRAPHS)
def test_one_graph(make, case):
    model = make()
    call, keep = cases(model)[case]
    want = call(model)
    with same(model) as handle:
        run = graph(model)
        for turn in (1, 2):
            torch.testing.assert_close(call(run)[keep], want[keep], **CLOSE)
            assert sparse_calls(handle) == len(model.model.layers) * turn


def test_a_graph_is_functionalised():
    """What every compiler after dynamo does, inductor too: fake tensors and no mutation."""
    model, ids = tiny.llama(**ONE), ids_of(1)
    call = prefill(model, ids)
    want = call(model)
    with same(model) as handle:
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(call(run), want, **CLOSE)
        assert sparse_calls(handle) == 1


def test_the_name_alone_compiles():
    """Nothing was looked up before: the graph must do without, or look itself."""
    model, (ids, mask) = tiny.llama(**ONE), padded(ids_of(), "left")
    call = prefill(model, ids, mask)
    want = call(model)
    model.set_attn_implementation("sparge")
    sparge.models.transformers.masks._models_of.cache_clear()
    torch.testing.assert_close(call(graph(model))[mask.bool()], want[mask.bool()], **CLOSE)


def test_encoders_compile():
    model, (ids, mask) = tiny.bert(**ONE), padded(ids_of(), "right")
    call = lambda run: run(ids, attention_mask=mask).last_hidden_state[mask.bool()]  # noqa: E731
    want = call(model)
    with same(model) as handle:
        torch.testing.assert_close(call(graph(model)), want, **CLOSE)
        assert sparse_calls(handle) == 1


def test_own_attention_compiles():
    """Soft-capping and one query: nothing of looking for the own attention breaks the graph."""
    model, ids = tiny.gemma2(**ONE), ids_of()
    call = prefill(model, ids)
    want = call(model)
    with same(model):
        torch.testing.assert_close(call(graph(model)), want, **CLOSE)
    llama = tiny.llama(**ONE)
    want = llama(ids[:, :1]).logits
    with same(llama):
        torch.testing.assert_close(graph(llama)(ids[:, :1]).logits, want, **CLOSE)


def test_a_compiled_model_follows_accelerate_and_remove():
    model, ids = tiny.llama(**ONE), ids_of()
    run = graph(model)
    want = run(ids, use_cache=False).logits
    for _ in range(2):
        with same(run) as handle:
            torch.testing.assert_close(run(ids, use_cache=False).logits, want, **CLOSE)
            assert sparse_calls(handle) == 1
        assert torch.equal(run(ids, use_cache=False).logits, want)
        assert sparse_calls(handle) == 1
    assert model.config._attn_implementation == "sdpa"
