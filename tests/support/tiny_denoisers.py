"""Tiny random diffusers denoisers, built from a config: two heads, two or three blocks."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from diffusers import (
    ChromaTransformer2DModel,
    CogVideoXTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MochiTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)

from tiny_denoiser_parts import (
    IMAGE,
    REFERENCE,
    TEXT,
    VIDEO,
    B,
    Tiny,
    flux_inputs,
    latents,
    liven,
    randn,
    text_mask,
)
from tiny_dits import allegro, dit, latte, pixart, unet


def cogvideox(**changes: Any) -> Tiny:
    T, H, W = VIDEO
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 2 * W,
        "sample_height": 2 * H,
        "sample_frames": 9,
        "max_text_seq_length": TEXT,
        "use_rotary_positional_embeddings": True,
    }
    angles = randn(T * H * W, 16)
    inputs = {
        "hidden_states": latents(VIDEO, 2).transpose(1, 2),
        "encoder_hidden_states": randn(B, TEXT, 32),
        "timestep": torch.tensor([500, 500]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }
    model = CogVideoXTransformer3DModel(**{**config, **changes})
    return Tiny(liven(model), inputs, VIDEO, before=TEXT)


def mochi(**changes: Any) -> Tiny:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "pooled_projection_dim": 16,
        "in_channels": 4,
        "text_embed_dim": 16,
        "time_embed_dim": 4,
        "max_sequence_length": TEXT,
    }
    inputs = {
        "hidden_states": latents(VIDEO, 2),
        "encoder_hidden_states": randn(B, TEXT, 16),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": text_mask(),
    }
    model = MochiTransformer3DModel(**{**config, **changes})
    return Tiny(liven(model), inputs, VIDEO, after=TEXT)


def flux(references: int = 0, **changes: Any) -> Tiny:
    config = {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    }
    inputs = {**flux_inputs(3, 32, references), "pooled_projections": randn(B, 32)}
    model = FluxTransformer2DModel(**{**config, **changes})
    after = references * prod(REFERENCE)
    return Tiny(liven(model), inputs, IMAGE, before=TEXT, after=after)


def flux_kontext() -> Tiny:
    return flux(references=1)


def flux2(references: int = 0) -> Tiny:
    model = Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=8,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    inputs = flux_inputs(4, 32, references)
    after = references * prod(REFERENCE)
    return Tiny(liven(model), inputs, IMAGE, before=TEXT, after=after)


def chroma() -> Tiny:
    model = ChromaTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    mask = torch.cat([text_mask(), torch.ones(B, prod(IMAGE), dtype=torch.bool)], dim=1)
    inputs = {**flux_inputs(3, 32), "attention_mask": mask}
    return Tiny(liven(model), inputs, IMAGE, before=TEXT)


def sd3(**changes: Any) -> Tiny:
    """As 3.5: the first block has a second attention over visual tokens alone."""
    config = {
        "sample_size": 36,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 64,
        "out_channels": 4,
        "pos_embed_max_size": 20,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
    inputs = {
        "hidden_states": latents(IMAGE, 2),
        "encoder_hidden_states": randn(B, TEXT, 32),
        "pooled_projections": randn(B, 64),
        "timestep": torch.tensor([500, 500]),
    }
    model = SD3Transformer2DModel(**{**config, **changes})
    return Tiny(liven(model), inputs, IMAGE, after=TEXT)


def hunyuan(**changes: Any) -> Tiny:
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_layers": 1,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "patch_size": 2,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
    }
    inputs = {
        "hidden_states": latents(VIDEO, 2),
        "encoder_hidden_states": randn(B, TEXT, 16),
        "encoder_attention_mask": text_mask(),
        "pooled_projections": randn(B, 8),
        "timestep": torch.tensor([500, 500]),
        "guidance": torch.tensor([6.0, 6.0]),
    }
    model = HunyuanVideoTransformer3DModel(**{**config, **changes})
    return Tiny(liven(model), inputs, VIDEO, after=TEXT)


WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": latents(VIDEO, 2),
        "encoder_hidden_states": randn(B, TEXT, 16),
        "timestep": torch.tensor([500, 500]),
    }


def wan(**changes: Any) -> Tiny:
    return Tiny(liven(WanTransformer3DModel(**{**WAN, **changes})), wan_inputs(), VIDEO)


def wan_i2v() -> Tiny:
    """Image-to-video: a second cross-attention, to an image."""
    model = WanTransformer3DModel(**WAN, image_dim=8, added_kv_proj_dim=24)
    image = {"encoder_hidden_states_image": randn(B, 20, 8)}
    text = {"encoder_hidden_states": randn(B, 512, 16)}  # text is told by its number of tokens
    return Tiny(liven(model), {**wan_inputs(), **text, **image}, VIDEO)


def skyreels() -> Tiny:
    return Tiny(liven(SkyReelsV2Transformer3DModel(**WAN)), wan_inputs(), VIDEO)


def wan_vace() -> Tiny:
    model = WanVACETransformer3DModel(**WAN, vace_layers=[0], vace_in_channels=6)
    control = {"control_hidden_states": latents(VIDEO, 2, channels=6)}
    return Tiny(liven(model), {**wan_inputs(), **control}, VIDEO)


def ltx(**changes: Any) -> Tiny:
    config = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 16,
        "num_layers": 2,
        "caption_channels": 16,
    }
    model = LTXVideoTransformer3DModel(**{**config, **changes})
    T, H, W = VIDEO
    inputs = {
        "hidden_states": randn(B, T * H * W, 8),
        "encoder_hidden_states": randn(B, TEXT, 16),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": text_mask(),
        "num_frames": T,
        "height": H,
        "width": W,
    }
    return Tiny(liven(model), inputs, VIDEO)


def qwen(references: int = 0, **changes: Any) -> Tiny:
    config = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (8, 4, 4),
    }
    model = QwenImageTransformer2DModel(**{**config, **changes})
    shapes = [IMAGE, *[REFERENCE] * references]
    inputs = {
        "hidden_states": randn(B, sum(map(prod, shapes)), 16),
        "encoder_hidden_states": randn(B, TEXT, 16),
        "encoder_hidden_states_mask": text_mask().long(),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [shapes] * B,
    }
    after = references * prod(REFERENCE)
    return Tiny(liven(model), inputs, IMAGE, before=TEXT, after=after)


def qwen_edit() -> Tiny:
    return qwen(references=1)


DENOISERS: dict[str, Callable[[], Tiny]] = {
    make.__name__: make
    for make in (
        cogvideox,
        mochi,
        flux,
        flux_kontext,
        flux2,
        chroma,
        sd3,
        hunyuan,
        wan,
        wan_i2v,
        skyreels,
        wan_vace,
        ltx,
        qwen,
        qwen_edit,
        allegro,
        latte,
        pixart,
        dit,
        unet,
    )
}
"""By short name."""
