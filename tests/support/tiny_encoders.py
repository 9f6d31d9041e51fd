"""Tiny text encoders and VAEs of pipelines, built from configs; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKL,
    AutoencoderKLAllegro,
    AutoencoderKLCogVideoX,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
T5 = {"vocab_size": 64, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
FOUR = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1}


def tokenizer(longest: int = 77) -> PreTrainedTokenizerFast:
    """A token for each letter."""
    vocabulary = [*SPECIAL.values(), *"abcdefghijklmnopqrstuvwxyz0123456789.,!?-{}|"]
    numbers = {token: i for i, token in enumerate(vocabulary)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")]
    )
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", numbers["</s>"])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=longest, **SPECIAL)


def t5(width: int = 32) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**T5, d_model=width)).eval()


def umt5(width: int = 16) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**T5, d_model=width)).eval()


def _clip(width: int, projection: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=projection,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
    )


def clip(width: int = 32) -> CLIPTextModel:
    return CLIPTextModel(_clip(width, width)).eval()


def clip_projected() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(_clip(32, 32)).eval()


def llama() -> LlamaModel:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    return LlamaModel(config).eval()


def image_vae(channels: int, **changes: Any) -> AutoencoderKL:
    """A latent for each pixel."""
    config = {"block_out_channels": (4,), "norm_num_groups": 1, "latent_channels": channels}
    return AutoencoderKL(**config, **changes)


def shifted_vae(channels: int) -> AutoencoderKL:
    factors = {"shift_factor": 0.06, "scaling_factor": 1.5}
    return image_vae(channels, **factors, use_quant_conv=False, use_post_quant_conv=False)


def flux2_vae() -> AutoencoderKLFlux2:
    blocks = {"block_out_channels": (4,), "norm_num_groups": 1, "layers_per_block": 1}
    kinds = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    return AutoencoderKLFlux2(**blocks, **kinds, latent_channels=1)


def cogvideox_vae() -> AutoencoderKLCogVideoX:
    return AutoencoderKLCogVideoX(**FOUR, latent_channels=4, norm_num_groups=2)


def mochi_vae() -> AutoencoderKLMochi:
    widths = (32, 32, 32, 32)
    return AutoencoderKLMochi(
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        layers_per_block=(1, 1, 1, 1, 1),
    )


def hunyuan_vae() -> AutoencoderKLHunyuanVideo:
    return AutoencoderKLHunyuanVideo(**FOUR, latent_channels=4, norm_num_groups=4)


def allegro_vae() -> AutoencoderKLAllegro:
    return AutoencoderKLAllegro(**FOUR, latent_channels=4, norm_num_groups=2)


def wan_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def qwen_vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def ltx_vae() -> AutoencoderKLLTXVideo:
    return AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
    )
