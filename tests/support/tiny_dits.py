"""Tiny denoisers whose text is not in the sequence; they call SDPA themselves."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AllegroTransformer3DModel,
    DiTTransformer2DModel,
    LatteTransformer3DModel,
    PixArtTransformer2DModel,
    UNet2DConditionModel,
)

from tiny_denoiser_parts import IMAGE, TEXT, VIDEO, B, Tiny, latents, liven, randn, text_mask


def allegro(**changes: Any) -> Tiny:
    T, H, W = VIDEO
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "cross_attention_dim": 24,
        "sample_width": 2 * W,
        "sample_height": 2 * H,
        "sample_frames": T,
        "caption_channels": 24,
    }
    model = AllegroTransformer3DModel(**{**config, **changes})
    inside = torch.ones(B, T, 2 * H, 2 * W)
    inside[1, ..., -6:] = 0.0  # a mask over visual tokens
    inputs = {
        "hidden_states": latents(VIDEO, 2),
        "encoder_hidden_states": randn(B, TEXT, 24),
        "timestep": torch.tensor([500, 500]),
        "attention_mask": inside,
        "encoder_attention_mask": text_mask().float(),
        "image_rotary_emb": None,
    }
    return Tiny(liven(model), inputs, VIDEO)


DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 36,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}


def latte(**changes: Any) -> Tiny:
    """Attention over the tokens of a frame and over the frames of a token, in turns."""
    T, _, W = VIDEO
    model = LatteTransformer3DModel(
        **{**DIT, "sample_size": 2 * W, "caption_channels": 24, **changes},
        cross_attention_dim=16,
        attention_bias=True,
        norm_type="ada_norm_single",
        video_length=T,
    )
    inputs = {
        "hidden_states": randn(B, 4, T, 2 * W, 2 * W),
        "encoder_hidden_states": randn(B, TEXT, 24),
        "timestep": torch.tensor([500, 500]),
    }
    return Tiny(liven(model), inputs, (1, W, W))


def pixart(**changes: Any) -> Tiny:
    config = {**DIT, "cross_attention_dim": 16, "caption_channels": 24, **changes}
    model = PixArtTransformer2DModel(**config)
    inputs = {
        "hidden_states": latents(IMAGE, 2),
        "encoder_hidden_states": randn(B, TEXT, 24),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": text_mask().float(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return Tiny(liven(model), inputs, IMAGE)


def dit() -> Tiny:
    """It takes square pictures only."""
    inputs = {
        "hidden_states": randn(B, 4, 36, 36),
        "timestep": torch.tensor([500, 500]),
        "class_labels": torch.tensor([1, 2]),
    }
    return Tiny(liven(DiTTransformer2DModel(**DIT, norm_num_groups=2)), inputs, (1, 18, 18))


def unet() -> Tiny:
    """As Stable Diffusion 1.5: transformers on the whole picture, and on half of it."""
    _, H, W = IMAGE
    model = UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=W,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=4,
        attention_head_dim=4,
    )
    inputs = {
        "sample": randn(B, 4, H, W),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": randn(B, TEXT, 16),
    }
    return Tiny(liven(model), inputs, IMAGE)
