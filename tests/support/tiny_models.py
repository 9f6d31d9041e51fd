"""Tiny random transformers models: a few thousand weights each, built from a config."""

from __future__ import annotations

import contextlib

import torch
import transformers as hf

import sparge
from sparge import KeepAll, Recipe

SAME = Recipe(KeepAll(), precision="exact")
VOCAB = 96
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 512, **SIZES, **TOKENS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def build(model_class, config, seed=0):
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # As initialised, attention is nearly uniform, and a wrong mask would hardly show.
            if any(part in name for part in ("q_proj", "k_proj", "query", "key", "q_b", "kv_b")):
                weight.mul_(8.0)
    return model


def llama_config(**changes):
    return hf.LlamaConfig(**{**TEXT, **HEADS, **changes})


def llama(seed=0, **changes):
    return build(hf.LlamaForCausalLM, llama_config(**changes), seed)


def qwen2(**changes):
    """A sliding window of 24 in both layers."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}
    return build(hf.Qwen2ForCausalLM, hf.Qwen2Config(**{**TEXT, **heads, **window, **changes}))


def mistral(**changes):
    config = hf.MistralConfig(**{**TEXT, **HEADS, "sliding_window": 24, **changes})
    return build(hf.MistralForCausalLM, config)


def gemma3(**changes):
    """One layer with a window and one without."""
    kinds = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    config = hf.Gemma3TextConfig(**{**TEXT, **HEADS, **kinds, **changes})
    return build(hf.Gemma3ForCausalLM, config)


def gemma2(**changes):
    """Soft-capped scores."""
    kinds = {"sliding_window": 24, "attn_logit_softcapping": 5.0}
    config = hf.Gemma2Config(**{**TEXT, **HEADS, **kinds, **changes})
    return build(hf.Gemma2ForCausalLM, config)


def gpt_oss(**changes):
    """Attention sinks, in a layer with a window and one without."""
    kinds = {"sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = hf.GptOssConfig(**{**TEXT, **HEADS, **kinds, **changes})
    model = build(hf.GptOssForCausalLM, config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.randn(4))
    return model


def deepseek():
    """Latent attention: keys of 24 numbers, values of 16."""
    experts = {
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = hf.DeepseekV3Config(**TEXT, **heads, **experts, **latent)
    return build(hf.DeepseekV3ForCausalLM, config)


def bert(**changes):
    config = hf.BertConfig(**{**TEXT, "num_attention_heads": 4, **changes})
    return build(hf.BertModel, config)


def whisper():
    config = hf.WhisperConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=80,
        max_target_positions=64,
        decoder_start_token_id=1,
        **TOKENS,
    )
    return build(hf.WhisperForConditionalGeneration, config)


def clip():
    text = {"vocab_size": VOCAB, "num_attention_heads": 2, "max_position_embeddings": 32}
    vision = {"num_attention_heads": 2, "image_size": 56, "patch_size": 8}
    config = hf.CLIPConfig(
        text_config={**SIZES, **text, **TOKENS},
        vision_config={**SIZES, **vision},
        projection_dim=16,
    )
    return build(hf.CLIPModel, config)


def t5():
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=2, **TOKENS
    )
    return build(hf.T5ForConditionalGeneration, config)


IMAGE = 91
VISION_START, VISION_END = 93, 94


def qwen_vl():
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 14,
        "window_size": 56,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    config = hf.Qwen2_5_VLConfig(
        text_config={**TEXT, **heads},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=92,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return build(hf.Qwen2_5_VLForConditionalGeneration, config)


def qwen_vl_inputs():
    """Two images among the text."""
    grid = torch.tensor([[1, 8, 8], [1, 4, 4]])
    pixels = torch.randn(
        int(grid.prod(-1).sum()), 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0)
    )
    first, second = [IMAGE] * 16, [IMAGE] * 4
    images = [VISION_START, *first, VISION_END, 7, VISION_START, *second, VISION_END]
    ids = torch.tensor([[5, 6, *images, 8, 9]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def ids_of(B=2, L=70, seed=1):
    """Tokens that are none of the special ones."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (B, L), generator=g)


def padded(ids, side, pads=(0, 9)):
    """The ids with the last sequences padded on one side, and their mask."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    for row, n in enumerate(pads):
        there = slice(0, n) if side == "left" else slice(ids.shape[1] - n, None)
        ids[row, there], mask[row, there] = 0, 0
    return ids, mask


@contextlib.contextmanager
def same(model, recipe=SAME, backend="cpu", **options):
    """The model with the sparse kernel computing what dense attention does."""
    with sparge.accelerate(model, recipe, backend=backend, **options) as handle:
        yield handle


def sparse_calls(handle):
    return sum(layer.sparse_calls for layer in handle.report().layers)


def only_sparse(handle):
    """The report says that every call ran in the sparse kernel."""
    layers = [layer for layer in handle.report().layers if layer.calls]
    assert layers
    for layer in layers:
        assert layer.sparse_calls == layer.calls, (layer.name, layer.ran, layer.fallbacks)
    return len(layers)


def implementations(model):
    """Of every config that a module of the model holds."""
    found = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if hasattr(value, "_attn_implementation"):
                found[name, attribute] = value._attn_implementation
                for part in value.sub_configs:
                    found[name, attribute, part] = getattr(value, part)._attn_implementation
    return found


def is_plain(model):
    return not any("_sparge" in key for module in model.modules() for key in vars(module))
