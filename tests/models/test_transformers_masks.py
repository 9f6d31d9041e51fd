"""Padding, windows, caches, chunks and packing: with everything kept, what the model had before."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, StaticCache, T5Config
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

import sparge
import tiny_models as tiny
from sparge.models.transformers.masks import (
    ADDITIVE,
    BOOL,
    PADDING,
    make_mask,
    style_of,
    to_attention,
)
from tiny_models import ids_of, only_sparse, padded, same

CLOSE = {"rtol": 0.0, "atol": 2e-6}
WINDOWS = {"qwen2": tiny.qwen2, "mistral": tiny.mistral, "gemma3": tiny.gemma3}
DECODERS = {"llama": tiny.llama, **WINDOWS, "gpt-oss": tiny.gpt_oss}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=DECODERS)
def decoder(request):
    return DECODERS[request.param]()


def assert_same(model, run, keep=slice(None)):
    """The same from the sparse kernel as from the model's own attention."""
    want = run(model)
    with same(model) as handle:
        got = run(model)
        only_sparse(handle)
    torch.testing.assert_close(got[keep], want[keep], **CLOSE)
    return want


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(decoder, side):
    ids, mask = padded(ids_of(), side)
    logits = assert_same(decoder, lambda m: m(ids, attention_mask=mask).logits, mask.bool())
    blind = decoder(ids).logits
    if side == "left":  # the test has teeth: without its mask, padding is seen
        assert (logits - blind)[mask.bool()].abs().max() > 1e-3


def test_no_padding_needs_no_mask(decoder):
    ids = ids_of()
    assert_same(decoder, lambda m: m(ids, attention_mask=torch.ones_like(ids)).logits)
    assert_same(decoder, lambda m: m(ids, use_cache=False).logits)


def test_windows_are_narrower_than_the_text():
    for make in WINDOWS.values():
        model = make()
        wide = make(sliding_window=512)
        ids = ids_of(B=1)
        assert (model(ids).logits - wide(ids).logits).abs().max() > 1e-3


def in_two(model, ids, mask, cache):
    cut = 41
    first = model(ids[:, :cut], attention_mask=mask[:, :cut], past_key_values=cache)
    second = model(ids[:, cut:], attention_mask=mask, past_key_values=cache)
    return torch.cat([first.logits, second.logits], 1)


@pytest.mark.parametrize("side", ["left", "right", None])
def test_chunks_with_a_dynamic_cache(decoder, side):
    ids, mask = padded(ids_of(), side or "left", (0, 9) if side else (0, 0))
    run = lambda m: in_two(m, ids, mask, DynamicCache(config=m.config))  # noqa: E731
    chunked = assert_same(decoder, run, mask.bool())
    whole = decoder(ids, attention_mask=mask).logits
    torch.testing.assert_close(chunked[mask.bool()], whole[mask.bool()], **CLOSE)


@pytest.mark.parametrize("side", ["left", None])
def test_chunks_with_a_static_cache(decoder, side):
    """The cache gives its length as a tensor, and has room behind the queries."""
    ids, mask = padded(ids_of(), side or "left", (0, 9) if side else (0, 0))
    run = lambda m: in_two(m, ids, mask, StaticCache(config=m.config, max_cache_len=100))  # noqa: E731
    assert_same(decoder, run, mask.bool())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("cache, chunk", [("dynamic", None), ("static", None), (None, 16)])
def test_generate_gives_the_same_tokens(name, cache, chunk):
    model = DECODERS[name]()
    ids, mask = padded(ids_of(L=40), "left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"prefill_chunk_size": chunk} if chunk else {"cache_implementation": cache}
    want = model.generate(ids, attention_mask=mask, **options)
    with same(model) as handle:
        got = model.generate(ids, attention_mask=mask, **options)
        layer = handle.report().layers[0]
    assert torch.equal(got, want)
    assert layer.sparse_calls == (-(-40 // chunk) if chunk else 1)
    assert layer.fallbacks == {"one query (decode): dense attention is faster": 5}


ENCODERS = {
    "bert": ("Bert", "LMHeadModel"),
    "bert-generation": ("BertGeneration", "Decoder"),
    "camembert": ("Camembert", "ForCausalLM"),
    "data2vec": ("Data2VecText", "ForCausalLM"),
    "electra": ("Electra", "ForCausalLM"),
    "ernie": ("Ernie", "ForCausalLM"),
    "roberta": ("Roberta", "ForCausalLM"),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", "ForCausalLM"),
    "roc-bert": ("RoCBert", "ForCausalLM"),
    "xlm-roberta": ("XLMRoberta", "ForCausalLM"),
    "xlm-roberta-xl": ("XLMRobertaXL", "ForCausalLM"),
    "xmod": ("Xmod", "ForCausalLM"),
}


@pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_static_cache_with_left_padding_in_the_bert_family(name, is_decoder):
    """As an encoder it hides padding both ways, but `generate` gives it a causal mask."""
    family, head = ENCODERS[name]
    small = {"embedding_size": 32, "enable_pronunciation": False, "enable_shape": False}
    config = getattr(transformers, f"{family}Config")(
        **{**tiny.TEXT, **small, "num_attention_heads": 4, "default_language": "en_XX"},
        is_decoder=is_decoder,
    )
    model = tiny.build(getattr(transformers, f"{family}{head}"), config)
    ids, mask = padded(ids_of(L=40), "left")
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}

    def run():
        made = model.generate(ids, attention_mask=mask, cache_implementation="static", **options)
        return torch.stack(made.logits)

    want = run()
    with same(model) as handle:
        torch.testing.assert_close(run(), want, **CLOSE)
        assert handle.report().layers[0].sparse_calls == 1


def test_beams_share_a_prefill():
    model, (ids, mask) = tiny.llama(), padded(ids_of(L=40), "left")
    options = {"attention_mask": mask, "max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    want = model.generate(ids, **options)
    with same(model) as handle:
        assert torch.equal(model.generate(ids, **options), want)
        assert handle.report().layers[0].sparse_calls == 1


def test_half_precision_in_bf16_stays_within_its_noise():
    model = tiny.llama().bfloat16()
    ids = ids_of(L=150)
    exact = tiny.llama()(ids).logits
    noise = (model(ids).logits - exact).abs().max()
    with same(model, sparge.Recipe(sparge.KeepAll(), precision="half")) as handle:
        got = model(ids).logits
        only_sparse(handle)
    assert (got - exact).abs().max() < 2 * noise


def test_packed_sequences():
    model = tiny.llama()
    first, second = ids_of(1, 40, seed=2), ids_of(1, 30, seed=3)
    ids = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(40), torch.arange(30)])[None]
    run = lambda m: m(ids, position_ids=positions, use_cache=False).logits  # noqa: E731
    logits = assert_same(model, run)
    torch.testing.assert_close(logits[:, 40:], model(second).logits, **CLOSE)


def custom_mask(kind):
    """Causal, and the first five tokens seen by all."""
    may = torch.ones(70, 70).tril().bool()
    may[:, :5] = True
    if kind == "bool":
        return may[None, None].expand(2, 1, 70, 70)
    lowest = {"lowest": torch.finfo(torch.float32).min, "inf": -torch.inf}[kind]
    return torch.zeros(2, 1, 70, 70).masked_fill(~may, lowest)


@pytest.mark.parametrize("kind", ["bool", "lowest", "inf"])
def test_masks_of_the_user(kind):
    model, ids, mask = tiny.llama(), ids_of(), custom_mask(kind)
    logits = assert_same(model, lambda m: m(ids, attention_mask=mask).logits)
    assert (logits - model(ids).logits).abs().max() > 1e-3


def test_a_bias_of_the_user_is_added():
    model, ids = tiny.llama(), ids_of()
    bias = torch.randn(2, 1, 70, 70, generator=torch.Generator().manual_seed(0))
    bias = bias + custom_mask("lowest").clamp(min=-1e30)
    assert_same(model, lambda m: m(ids, attention_mask=bias).logits)


def test_the_lowest_number_hides_whole_blocks():
    query = key = torch.zeros(1, 1, 200, 8)
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(1, 1, 200, 200).masked_fill(~torch.ones(200, 200).tril().bool(), lowest)
    *_, facts = to_attention(mask, query, key, key, causal=True)
    assert facts["attn_mask"].dtype == torch.bool
    assert not facts["is_causal"]
    plan = sparge.make_plan(query, key, attn_mask=facts["attn_mask"], recipe=tiny.SAME)
    assert plan.allowed.tolist() == [[[2, 4]]]
    *_, facts = to_attention(mask + 1, query, key, key, causal=True)
    assert (facts["attn_mask"] == -torch.inf).sum() == 200 * 199 // 2


def mask_of(config, q=6, kv=6, **arguments):
    return make_mask(batch_size=2, q_length=q, kv_length=kv, config=config, **arguments)


def test_masks_are_as_small_as_the_model_allows():
    llama = tiny.llama_config()
    padding = torch.tensor([[1] * 6, [0] * 2 + [1] * 4]).bool()
    assert style_of(LlamaConfig) == PADDING
    assert mask_of(llama) is None
    assert mask_of(llama, attention_mask=torch.ones_like(padding)) is None
    assert torch.equal(mask_of(llama, attention_mask=padding), padding)
    # a static cache with room behind, then a chunk whose offset is a tensor
    assert mask_of(llama, kv=20) is None
    assert mask_of(llama, kv=20, q_offset=torch.tensor(4)).tolist() == [[True] * 10] * 2
    assert mask_of(llama, q=1, kv=7, q_offset=6) is None
    windowed = sliding_window_causal_mask_function(3)
    assert mask_of(llama, mask_function=windowed, attention_mask=padding).shape == (2, 1, 6, 6)


def test_padding_both_ways_is_a_view_in_full():
    padding = torch.tensor([[1] * 6, [0] * 2 + [1] * 4]).bool()
    both = {"mask_function": bidirectional_mask_function, "allow_is_causal_skip": False}
    for config in (tiny.llama_config(), T5Config()):
        mask = mask_of(config, q=5, attention_mask=padding, **both)
        assert mask.shape == (2, 1, 5, 6)
        assert mask.stride(2) == 0
        assert torch.equal(mask[:, 0, 3], padding)
        query, key = torch.zeros(2, 1, 5, 8), torch.zeros(2, 1, 6, 8)
        *_, facts = to_attention(mask, query, key, key, causal=True)
        assert facts["attn_mask"].shape == (2, 1, 1, 6)
        assert not facts["is_causal"]
        skip = {**both, "allow_is_bidirectional_skip": True}
        assert mask_of(config, attention_mask=torch.ones_like(padding), **skip) is None
        assert mask_of(config, **skip) is None
        # all of a mask that is narrower than the keys is still a mask
        narrow = mask_of(config, kv=8, attention_mask=torch.ones_like(padding), **skip)
        assert narrow[0, 0, 0].tolist() == [True] * 6 + [False] * 2


def test_a_model_that_may_slice_its_mask_never_sees_one_of_two_dimensions():
    assert style_of(T5Config) == BOOL
    padding = torch.tensor([[1] * 6, [0] * 2 + [1] * 4]).bool()
    mask = mask_of(T5Config(), attention_mask=padding, mask_function=causal_mask_function)
    assert mask.shape == (2, 1, 6, 6)
    assert mask.dtype == torch.bool


def test_a_model_that_adds_to_its_mask_gets_numbers():
    """Neither flash attention nor SDPA: its code may count on a float mask, and always on one."""
    from transformers import DeepseekV4Config

    assert style_of(DeepseekV4Config) == ADDITIVE
    config = type("Config", (DeepseekV4Config,), {})
    assert style_of(config) == BOOL  # nothing is known of it
    mask = mask_of(DeepseekV4Config(), dtype=torch.float32)
    assert mask.dtype == torch.float32
    assert mask.shape == (2, 1, 6, 6)
