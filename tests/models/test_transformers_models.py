"""Kinds of models: grouped heads, other value dims, encoders, vision; and what goes elsewhere."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import sparge
import tiny_models as tiny
from tiny_models import ids_of, only_sparse, padded, same, sparse_calls

CLOSE = {"rtol": 0.0, "atol": 2e-6}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def assert_same(model, run, keep=slice(None)):
    want = run(model)
    with same(model) as handle:
        got = run(model)
        layers = only_sparse(handle)
    torch.testing.assert_close(got[keep], want[keep], **CLOSE)
    return layers


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_keys_are_not_repeated_for_their_group(heads):
    model, ids = tiny.llama(num_key_value_heads=heads), ids_of()
    assert_same(model, lambda m: m(ids).logits)
    with same(model), sparge.record() as runs:
        model(ids)
    assert len(runs) == 2
    for run in runs:
        assert run.call.startswith("[2, 4, 70" if heads == 4 else f"[2, 4/{heads}, 70")


def test_values_of_another_head_dim():
    model, ids = tiny.deepseek(), ids_of()
    assert_same(model, lambda m: m(ids).logits)
    seen = []
    with same(model) as handle:
        handle.tap("model.layers.0.self_attn", lambda q, k, v, facts: seen.append((q, v)))
        model(ids)
    ((query, value),) = seen
    assert (query.shape[-1], value.shape[-1]) == (24, 16)


@pytest.mark.parametrize("side", ["left", "right"])
def test_bert_with_padding(side):
    ids, mask = padded(ids_of(), side)
    model = tiny.bert()
    run = lambda m: m(ids, attention_mask=mask).last_hidden_state  # noqa: E731
    assert assert_same(model, run, mask.bool()) == 2
    assert_same(model, lambda m: m(ids).last_hidden_state)


def test_bert_as_a_decoder_that_reads_an_encoder():
    model = tiny.bert(is_decoder=True, add_cross_attention=True)
    ids, mask = padded(ids_of(), "left")
    read, seen = torch.randn(2, 50, 32), torch.ones(2, 50)
    seen[1, 30:] = 0

    def run(m):
        return m(
            ids, attention_mask=mask, encoder_hidden_states=read, encoder_attention_mask=seen
        ).last_hidden_state

    assert assert_same(model, run, mask.bool()) == 4


def test_whisper_encoder_decoder_and_what_lies_between():
    model = tiny.whisper()
    sound = torch.randn(2, 8, 160, generator=torch.Generator().manual_seed(0))
    ids = ids_of(2, 20)
    run = lambda m: m(input_features=sound, decoder_input_ids=ids).logits  # noqa: E731
    assert assert_same(model, run) == 6
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    want = model.generate(sound, **options)
    with same(model):
        assert torch.equal(model.generate(sound, **options), want)


def test_bart_with_padding_in_both_halves():
    config = hf.BartConfig(
        vocab_size=tiny.VOCAB,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=128,
        **tiny.TOKENS,
    )
    model = tiny.build(hf.BartModel, config)
    ids, mask = padded(ids_of(), "right")
    answer, answer_mask = padded(ids_of(L=33, seed=5), "right", (4, 0))

    def run(m):
        return m(
            ids, attention_mask=mask, decoder_input_ids=answer, decoder_attention_mask=answer_mask
        ).last_hidden_state

    assert assert_same(model, run, answer_mask.bool()) == 3


def test_clip_sees_and_reads():
    model = tiny.clip()
    image = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    ids, mask = padded(ids_of(2, 20), "right", (0, 5))
    ids[0, -1] = ids[1, 14] = 2
    run = lambda m: m(input_ids=ids, attention_mask=mask, pixel_values=image)  # noqa: E731
    assert assert_same(model, lambda m: run(m).image_embeds) == 4
    assert_same(model, lambda m: run(m).text_embeds)


def test_vision_and_language_through_generate():
    model, inputs = tiny.qwen_vl(), tiny.qwen_vl_inputs()
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    want = model.generate(**inputs, **options)
    before = model(**inputs).logits
    with same(model) as handle:
        torch.testing.assert_close(model(**inputs).logits, before, **CLOSE)
        only_sparse(handle)
        names = [layer.name for layer in handle.report().layers]
        assert torch.equal(model.generate(**inputs, **options), want)
    assert len([name for name in names if "visual" in name]) == 2
    assert len([name for name in names if "language_model" in name]) == 2
    assert torch.equal(model(**inputs).logits, before)


def test_sinks_take_their_share():
    """Computed through the LSE; the model's own attention is eager, as SDPA ignores them."""
    model, ids = tiny.gpt_oss(), ids_of()
    assert model.config._attn_implementation == "eager"
    assert_same(model, lambda m: m(ids).logits)
    with torch.no_grad():
        want = model(ids).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        assert (model(ids).logits - want).abs().max() > 1e-3


def test_sinks_survive_where_the_layer_is_left_out_and_in_decode():
    model, ids = tiny.gpt_oss(), ids_of(1)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    want, tokens = model(ids).logits, model.generate(ids, **options)
    with same(model, layers="*.0.self_attn"):
        torch.testing.assert_close(model(ids).logits, want, **CLOSE)
        assert torch.equal(model.generate(ids, **options), tokens)
    model.set_attn_implementation("sparge")  # nothing is known of an own attention here
    torch.testing.assert_close(model(ids).logits, want, rtol=0.0, atol=2e-3)
    with torch.enable_grad():
        torch.testing.assert_close(model(ids).logits, want, **CLOSE)


def test_sinks_are_never_left_to_sdpa():
    """It ignores them; forced on the model before, it still must not run for one query."""
    model, ids = tiny.gpt_oss(), ids_of()[:, :1]
    want = model(ids).logits
    model.config._attn_implementation_internal = "sdpa"
    assert (model(ids).logits - want).abs().max() > 1e-3
    with same(model):
        torch.testing.assert_close(model(ids).logits, want, **CLOSE)


NOT_COMPUTED = {
    "gemma2": (tiny.gemma2, "softcap: the scores are soft-capped"),
    "t5": (tiny.t5, "position_bias: a position bias is added inside"),
}


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_what_is_not_computed_is_not_ignored(name):
    make, reason = NOT_COMPUTED[name]
    model, (ids, mask) = make(), padded(ids_of(), "right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        inputs["decoder_input_ids"] = ids_of(L=11)
    want = model(**inputs).logits
    with same(model) as handle:
        got = model(**inputs).logits
        report = handle.report()
    keep = mask.bool() if name == "gemma2" else slice(None)
    torch.testing.assert_close(got[keep], want[keep], **CLOSE)
    assert all(layer.ran == {"own attention": layer.calls} for layer in report.layers)
    assert all(why.startswith(reason) for why in report.fallbacks)


SMALL = {"vocab_size": tiny.VOCAB, "n_layer": 1, "n_head": 2}
NO_INTERFACE = {
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig(**SMALL, hidden_size=32)),
    "gptj": (hf.GPTJForCausalLM, hf.GPTJConfig(**SMALL, n_embd=32, rotary_dim=8)),
}
"""Their attention is matrix products of their own."""


@pytest.mark.parametrize("name", NO_INTERFACE)
def test_a_model_without_the_interface_is_refused_untouched(name):
    model_class, config = NO_INTERFACE[name]
    model, ids = tiny.build(model_class, config), ids_of(L=12)
    before, want = vars(model).copy(), model(ids).logits
    with pytest.raises(sparge.Unsupported, match="attention interface") as refused:
        sparge.accelerate(model)
    assert model_class.__name__ in str(refused.value)
    assert "sparge.attention" in str(refused.value)
    assert vars(model) == before
    assert model.config is config
    assert torch.equal(model(ids).logits, want)


def test_a_model_without_the_interface_that_calls_sdpa_is_taken_as_any_module():
    """Falcon, whose one key head for all queries SDPA broadcasts."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = tiny.build(hf.FalconForCausalLM, hf.FalconConfig(vocab_size=tiny.VOCAB, **sizes))
    ids, mask = padded(ids_of(2, 140), "left")
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        with same(model) as handle:
            out = model(ids, attention_mask=mask).logits
    assert sparse_calls(handle) == 1
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def dsa():
    config = hf.DeepseekV32Config(
        **tiny.TEXT,
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_topk=8,
        index_n_heads=2,
        index_head_dim=16,
    )
    return tiny.build(hf.DeepseekV32ForCausalLM, config)


def test_a_model_that_selects_keys_itself_is_refused():
    """It gives its selection to unknown implementations, and no mask of it: never dropped."""
    model, ids = dsa(), ids_of()
    want = model(ids).logits
    with pytest.raises(sparge.Unsupported, match="selects the keys"):
        sparge.accelerate(model)
    assert torch.equal(model(ids).logits, want)
    model.set_attn_implementation("sparge")
    with pytest.raises(sparge.Unsupported, match="indices"):
        model(ids)


def test_a_model_that_adds_keys_of_its_own_behind_those_of_the_cache():
    """Compressed keys follow the plain ones: no mask must be taken for causal over them all."""
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    config = hf.DeepseekV4Config(**tiny.TEXT, **tiny.HEADS, layer_types=kinds, compress_rates=rates)
    model = tiny.build(hf.DeepseekV4ForCausalLM, config)
    ids, mask = padded(ids_of(), "left")
    lengths = []
    with same(model) as handle:
        for name in [layer.name for layer in handle.report().layers]:
            handle.tap(name, lambda query, key, value, facts: lengths.append(key.shape[2]))
        model(ids)
    assert min(lengths) > ids.shape[1]
    assert_same(model, lambda m: m(ids).logits)
    assert_same(model, lambda m: m(ids, attention_mask=mask).logits, mask.bool())


@pytest.mark.parametrize("pads", [(0, 0), (0, 9)])
def test_a_decoder_that_looks_both_ways(pads):
    """Its modules still say that they are causal; padding goes through the mask for both ways."""
    model = tiny.llama(is_causal=False)
    ids, mask = padded(ids_of(), "left", pads)
    assert_same(model, lambda m: m(ids, attention_mask=mask).logits, mask.bool())


def test_paged_caches_are_refused_by_transformers():
    """Continuous batching takes no names that it does not know."""
    model = tiny.llama()
    settings = hf.GenerationConfig(max_new_tokens=2, eos_token_id=2)
    with same(model), pytest.raises(ValueError, match="sparge is not supported for continuous"):
        model.generate_batch([[5, 6, 7]], generation_config=settings)


def test_a_head_dim_too_large_goes_to_the_own_attention():
    model, ids = tiny.llama(head_dim=320, num_hidden_layers=1), ids_of()
    want = model(ids).logits
    with same(model) as handle:
        assert torch.equal(model(ids).logits, want)
        assert handle.report().fallbacks == {"head dim 320 is over 256": 1}
        assert sparse_calls(handle) == 0
