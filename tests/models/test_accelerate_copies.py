"""Accelerated models wrapped, in parts, copied, pickled, saved, dropped and in pipelines."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import sparge
import tiny_models as tiny
from sparge.engine.recording import GRAPH_LISTENERS
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


class Wrapper(nn.Module):
    """As adapters of other libraries do: the model within, and its attributes passed on."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_a_wrapped_model(model, ids):
    before = model(ids).logits
    wrapped = Wrapper(model)
    with same(wrapped) as handle:
        torch.testing.assert_close(wrapped(ids).logits, before, **CLOSE)
        assert [layer.name for layer in handle.report().layers] == [f"inner.{n}" for n in NAMES]
        assert sparse_calls(handle) == 2
    assert is_plain(wrapped)
    assert torch.equal(model(ids).logits, before)


def test_the_whole_after_its_part_and_the_part_after_the_whole(model, ids):
    before = model(ids).logits
    part = sparge.accelerate(model.model, tiny.SAME, backend="cpu")
    model(ids)
    assert sparse_calls(part) == 2
    whole = sparge.accelerate(Wrapper(model), tiny.SAME, backend="cpu")
    assert not part.active
    again = sparge.accelerate(model, tiny.SAME, backend="cpu")  # it has all that `whole` had
    assert not whole.active
    with pytest.raises(ValueError, match="covers more than this part"):
        sparge.accelerate(model.model.layers[0], tiny.SAME)
    assert again.active
    again.remove()
    assert is_plain(model)
    assert torch.equal(model(ids).logits, before)


def test_a_single_layer(model, ids):
    before = model(ids).logits
    with same(model.model.layers[1]) as handle:
        torch.testing.assert_close(model(ids).logits, before, **CLOSE)
        assert sparse_calls(handle) == 1
    assert torch.equal(model(ids).logits, before)


def test_a_deep_copy_is_accelerated_by_itself(model, ids):
    before = model(ids).logits
    handle = sparge.accelerate(model, tiny.SAME, backend="cpu")
    model(ids)
    twin = copy.deepcopy(model)
    twin(ids)
    assert sparse_calls(handle) == 2
    replaced = sparge.accelerate(twin, tiny.SAME, backend="cpu")
    assert handle.active
    replaced.remove()
    assert is_plain(twin)
    assert set(implementations(twin).values()) == {"sdpa"}
    assert torch.equal(twin(ids).logits, before)
    model(ids)
    assert sparse_calls(handle) == 4
    handle.remove()


def test_a_deep_copy_of_a_part(model, ids):
    sparge.accelerate(model, tiny.SAME, backend="cpu")
    part = copy.deepcopy(model.model)
    with same(part) as handle:
        part(ids)
        assert sparse_calls(handle) == 2
    assert is_plain(part)
    assert set(implementations(part).values()) == {"sdpa"}


def test_pickling_whole(model, ids):
    before = model(ids).logits
    sparge.accelerate(model, tiny.SAME, backend="cpu")
    back = pickle.loads(pickle.dumps(model))
    with sparge.record() as runs:
        torch.testing.assert_close(back(ids).logits, before, **CLOSE)
    assert len(runs) == 2
    assert {run.backend for run in runs} == {"cpu"}
    sparge.accelerate(back).remove()
    assert is_plain(back)
    assert torch.equal(back(ids).logits, before)


def test_saving_while_accelerated(model, ids, tmp_path):
    """What is saved knows nothing of sparge."""
    before = model(ids).logits
    with same(model):
        model.save_pretrained(tmp_path)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        assert not any("sparge" in name for name in model.state_dict())
    assert "sparge" not in (tmp_path / "config.json").read_text()
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert back.config._attn_implementation == "sdpa"
    assert torch.equal(back(ids).logits, before)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer, weights_only=True))
    assert json.loads(model.config.to_json_string())["model_type"] == "llama"


def test_a_dropped_model_is_freed(ids):
    model = tiny.llama()
    gc.collect()
    before = len(GRAPH_LISTENERS)
    sparge.accelerate(model, tiny.SAME, backend="cpu")
    assert len(GRAPH_LISTENERS) == before + 2
    copy.deepcopy(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(GRAPH_LISTENERS) == before


def test_a_pipeline(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, tiny.VOCAB)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.padding_side = "left"
    pipe = pipeline("text-generation", model=tiny.llama(), tokenizer=tokenizer, device="cpu")
    texts = [" ".join(f"w{i % 80 + 3}" for i in range(n)) for n in (40, 25)]
    options = {"max_new_tokens": 4, "do_sample": False, "batch_size": 2}
    want = pipe(texts, **options)
    with same(pipe) as handle:
        assert pipe(texts, **options) == want
        assert sparse_calls(handle) == 2
    assert is_plain(pipe.model)
