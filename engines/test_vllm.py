"""SmolLM2 served by vLLM on the CPU: the same tokens as transformers, in every form of prefill."""

from __future__ import annotations

import pytest
import vllm_engine as engine

import sparge
from sparge import KeepAll, Recipe
from sparge.serving.vllm.routing import FEW_QUERIES, PREDICTED_OWN, OwnCost
from sparge_tools import zoo

EXACT = Recipe(KeepAll(), precision="exact")
FIRST = "model.layers.0.self_attn.attn"


@pytest.fixture(scope="module")
def llm(smollm2):
    llm = engine.start(smollm2, sparge={"log_seconds": 0})
    yield llm
    engine.stop(llm)


@pytest.fixture(scope="module")
def prompts(essay):
    return [essay[:900], essay[2000:2417], essay[3000:3130]]


@pytest.fixture(scope="module")
def expected(smollm2, prompts):
    """From transformers, in the precision of the engine."""
    import torch

    model, _ = zoo.load(smollm2, dtype=torch.float32)
    return engine.transformers_tokens(model, prompts)


@pytest.mark.parametrize("chunk", [0, 512, 300, 256])
def test_tokens_are_those_of_transformers(llm, prompts, expected, chunk):
    """Three prompts at once: chunks of prompts beside the decoding of others."""
    with engine.recipe_of(EXACT, "cpu") as worker, engine.chunks_of(llm, chunk):
        assert engine.generate(llm, prompts) == expected
    counts = worker.layers[FIRST]
    assert counts.tokens["served"] == sum(map(len, prompts))
    assert counts.tokens["own"] == 0
    assert counts.tally.fallbacks == {}
    pieces = sum(-(-len(prompt) // chunk) if chunk else 1 for prompt in prompts)
    assert sum(counts.tally.ran.values()) == pieces
    # The first token of a prompt comes from its prefill.
    assert counts.tokens["decode"] == sum(map(len, expected)) - len(prompts)


def test_a_prefix_from_the_cache_changes_no_token(llm, prompts, expected):
    with engine.recipe_of(EXACT, "cpu") as worker, engine.chunks_of(llm, 0):
        engine.generate(llm, [prompts[0][:600]], tokens=1)
        worker.reset()
        assert engine.generate(llm, prompts[:1]) == expected[:1]
    # 600 tokens are four whole blocks of 128 of the cache.
    assert worker.layers[FIRST].tokens["served"] == 900 - 512


def test_chunks_change_no_token_of_the_default_recipe(llm, essay):
    found, densities = {}, {}
    with engine.recipe_of(sparge.DEFAULT, "cpu") as worker:
        for chunk in (0, 512, 300, 256):
            worker.reset()
            with engine.chunks_of(llm, chunk):
                (found[chunk],) = engine.generate(llm, [essay[:1500]], tokens=8)
            densities[chunk] = worker.report().report.sparse_density
    assert found == dict.fromkeys(found, found[0])
    assert densities[0] < 0.85
    assert densities == pytest.approx(dict.fromkeys(densities, densities[0]), abs=0.05)


@pytest.mark.parametrize("depth", [20, 60])
def test_a_needle_is_found_with_the_default_recipe(llm, smollm2, depth):
    from transformers import AutoTokenizer

    from sparge_tools.evaluate.texts import Text, make_needle

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    words = zoo.text("essays")[:40000]
    text = Text("essays", words, tokenizer(words)["input_ids"])
    needle = make_needle(text, tokenizer, length=3000, depth=depth, seed=1)
    chat = [{"role": "user", "content": f"{needle.context}\n\n{needle.question}"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(prompt + needle.prefix, add_special_tokens=False)["input_ids"]
    with engine.recipe_of(sparge.DEFAULT) as worker, engine.chunks_of(llm, 1024):
        (answer,) = engine.generate(llm, [tokens], tokens=12)
    assert needle.answer in tokenizer.decode(answer)
    report = worker.report().report
    assert report.sparse_density < 0.75
    assert worker.layers[FIRST].tokens["served"] > 2500


def test_prefills_and_decoding_share_a_step(llm, essay, expected, prompts):
    """Another request decodes while a prompt is read, and neither changes the other."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    inner = llm.llm_engine
    found = {}
    with engine.recipe_of(EXACT, "cpu") as worker, engine.chunks_of(llm, 256):
        inner.add_request("decoding", {"prompt_token_ids": prompts[2]}, params)
        for _ in range(3):
            inner.step()
        before = worker.layers[FIRST].tokens["decode"]
        assert before == 2
        inner.add_request("reading", {"prompt_token_ids": prompts[0]}, params)
        while inner.has_unfinished_requests():
            for done in inner.step():
                if done.finished:
                    found[done.request_id.split("-")[0]] = list(done.outputs[0].token_ids)
    assert found == {"decoding": expected[2], "reading": expected[0]}


def test_short_prompts_go_to_vllm_and_are_counted(llm, essay):
    with engine.recipe_of(sparge.DEFAULT) as worker, engine.chunks_of(llm, 0):
        engine.generate(llm, [essay[:100]], tokens=2)
    counts = worker.layers[FIRST]
    assert counts.tally.fallbacks == {FEW_QUERIES: 1}
    assert counts.tokens["own"] == 100
    line = worker.report().line
    assert f"30x {FEW_QUERIES}" in line
    assert "0 prompt tokens served" in line


def test_what_vllm_does_faster_goes_to_vllm(llm, essay):
    """With the time of its kernel as it would be on another machine."""
    with engine.recipe_of(sparge.DEFAULT) as worker, engine.chunks_of(llm, 0):
        before = {name: each.own for name, each in worker.layers.items()}
        assert all(own is not None and own.pair > 0 and own.key > 0 for own in before.values())
        for each in worker.layers.values():
            each.own = OwnCost(pair=1e-15, key=0.0)
        engine.generate(llm, [essay[:1000]], tokens=1)
        for name, own in before.items():
            worker.layers[name].own = own
    assert worker.layers[FIRST].tally.fallbacks == {PREDICTED_OWN: 1}


def test_a_report_has_every_layer(llm, essay):
    with engine.recipe_of(sparge.DEFAULT, "cpu") as worker, engine.chunks_of(llm, 0):
        engine.generate(llm, [essay[:600]], tokens=2)
    document = worker.report().to_dict()
    assert len(document["report"]["layers"]) == len(document["tokens"]) == 30
    layer = document["report"]["layers"][0]
    assert layer["name"] == FIRST
    assert layer["calls"] == 1
    assert layer["seconds"] > 0
    assert 0 < layer["density"] <= 1
    assert len(layer["density_by_head"]) == 9
    assert document["decode_seconds"][FIRST] > 0
    assert FIRST in str(worker.report())
