"""Tiny offline diffusers pipelines around the tiny denoisers: real schedulers, encoders and VAEs.

Latents are returned by default, so that a VAE runs only where a test asks for a picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from diffusers import (
    AllegroPipeline,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    FluxPipeline,
    HunyuanVideoPipeline,
    LattePipeline,
    LTXPipeline,
    MochiPipeline,
    PixArtAlphaPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UniPCMultistepScheduler,
    WanPipeline,
)
from diffusers.utils import logging

import tiny_denoisers as denoisers
import tiny_encoders as encoders
from tiny_denoiser_parts import IMAGE, TEXT, VIDEO, randn

logging.set_verbosity_error()
transformers.logging.set_verbosity_error()

_, H, W = VIDEO
_, IMAGE_H, IMAGE_W = IMAGE
VIDEO_SIZE = {"height": 16 * H, "width": 16 * W, "max_sequence_length": TEXT}
IMAGE_SIZE = {"height": 2 * IMAGE_H, "width": 2 * IMAGE_W}


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline and the arguments of a call; calling it returns latents (or a picture)."""

    pipe: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    denoiser: str = "transformer"

    @property
    def model(self) -> Any:
        return getattr(self.pipe, self.denoiser)

    def __call__(self, steps: int = 4, *, seed: int = 0, **changes: Any) -> torch.Tensor:
        given = {"output_type": "latent", **self.arguments, **changes}
        generator = torch.Generator().manual_seed(seed)
        result = self.pipe(
            num_inference_steps=steps, generator=generator, return_dict=False, **given
        )
        return torch.as_tensor(result[0])

    def trace(self, steps: int = 4, **changes: Any) -> list[torch.Tensor]:
        """The latents after every step."""
        seen: list[torch.Tensor] = []

        def at_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen.append(tensors["latents"].clone())
            return tensors

        self(steps, callback_on_step_end=at_end, **changes)
        return seen


def _made(kind: Any, arguments: dict[str, Any], denoiser: str = "transformer", **parts: Any) -> Any:
    pipe = kind(**parts)
    pipe.set_progress_bar_config(disable=True)
    return TinyPipeline(pipe, arguments, denoiser)


def _t5(longest: int = 77) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"tokenizer": encoders.tokenizer(longest), "text_encoder": encoders.t5()}


def cogvideox() -> TinyPipeline:
    return _made(
        CogVideoXPipeline,
        {"prompt": "a cat", "num_frames": 9, "guidance_scale": 6.0, **VIDEO_SIZE},
        **_t5(),
        vae=encoders.cogvideox_vae(),
        transformer=denoisers.cogvideox().model,
        scheduler=CogVideoXDDIMScheduler(),
    )


def mochi() -> TinyPipeline:
    return _made(
        MochiPipeline,
        {"prompt": "a cat", "num_frames": 13, "guidance_scale": 4.5, **VIDEO_SIZE},
        **_t5(),
        vae=encoders.mochi_vae(),
        transformer=denoisers.mochi(in_channels=12, text_embed_dim=32).model,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def flux(**changes: Any) -> TinyPipeline:
    return _made(
        FluxPipeline,
        {"prompt": "a cat", "max_sequence_length": TEXT, **IMAGE_SIZE},
        tokenizer=encoders.tokenizer(),
        text_encoder=encoders.clip(),
        tokenizer_2=encoders.tokenizer(),
        text_encoder_2=encoders.t5(),
        vae=encoders.shifted_vae(1),
        transformer=denoisers.flux(**changes).model,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def flux2() -> TinyPipeline:
    """Its text encoder is a large multimodal model; it takes embeddings in its place."""
    return _made(
        Flux2Pipeline,
        {"prompt_embeds": randn(1, TEXT, 32), **IMAGE_SIZE},
        tokenizer=None,
        text_encoder=None,
        vae=encoders.flux2_vae(),
        transformer=denoisers.flux2().model,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def sd3() -> TinyPipeline:
    return _made(
        StableDiffusion3Pipeline,
        {"prompt": "a cat", "max_sequence_length": TEXT, **IMAGE_SIZE},
        tokenizer=encoders.tokenizer(),
        text_encoder=encoders.clip_projected(),
        tokenizer_2=encoders.tokenizer(),
        text_encoder_2=encoders.clip_projected(),
        tokenizer_3=encoders.tokenizer(),
        text_encoder_3=encoders.t5(64),
        vae=encoders.shifted_vae(4),
        transformer=denoisers.sd3(joint_attention_dim=64).model,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def hunyuan() -> TinyPipeline:
    template = {"template": "{}", "crop_start": 0}
    return _made(
        HunyuanVideoPipeline,
        {"prompt": "a cat", "prompt_template": template, "num_frames": 9, **VIDEO_SIZE},
        tokenizer=encoders.tokenizer(512),
        text_encoder=encoders.llama(),
        tokenizer_2=encoders.tokenizer(),
        text_encoder_2=encoders.clip(8),
        vae=encoders.hunyuan_vae(),
        transformer=denoisers.hunyuan().model,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def _wan(**parts: Any) -> TinyPipeline:
    return _made(
        WanPipeline,
        {"prompt": "a cat", "num_frames": 9, **VIDEO_SIZE},
        tokenizer=encoders.tokenizer(),
        text_encoder=encoders.umt5(),
        vae=encoders.wan_vae(),
        transformer=denoisers.wan(in_channels=16, out_channels=16).model,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        **parts,
    )


def wan() -> TinyPipeline:
    return _wan()


def wan22() -> TinyPipeline:
    """Two denoisers: one for the noisier part of the run, one for the rest."""
    second = denoisers.wan(in_channels=16, out_channels=16).model
    return _wan(transformer_2=denoisers.liven(second, seed=1), boundary_ratio=0.7)


def ltx() -> TinyPipeline:
    size = {"height": 32, "width": 64, "max_sequence_length": TEXT}
    return _made(
        LTXPipeline,
        {"prompt": "a cat", "num_frames": 9, **size},
        **_t5(),
        vae=encoders.ltx_vae(),
        transformer=denoisers.ltx(caption_channels=32).model,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def qwen() -> TinyPipeline:
    """Its text encoder is a large multimodal model; it takes embeddings in its place."""
    ones = torch.ones(1, TEXT, dtype=torch.long)
    texts = {"prompt_embeds": randn(1, TEXT, 16), "prompt_embeds_mask": ones}
    others = {"negative_prompt_embeds": randn(1, 7, 16, seed=2)}
    others["negative_prompt_embeds_mask"] = ones[:, :7]
    return _made(
        QwenImagePipeline,
        {**texts, **others, "height": 16 * IMAGE_H, "width": 16 * IMAGE_W},
        tokenizer=None,
        text_encoder=None,
        vae=encoders.qwen_vae(),
        transformer=denoisers.qwen(in_channels=64, out_channels=16).model,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def allegro() -> TinyPipeline:
    return _made(
        AllegroPipeline,
        {"prompt": "a cat", "num_frames": 12, "clean_caption": False, **VIDEO_SIZE},
        **_t5(),
        vae=encoders.allegro_vae(),
        transformer=denoisers.allegro(caption_channels=32).model,
        scheduler=EulerDiscreteScheduler(),
    )


def latte() -> TinyPipeline:
    size = {"height": 2 * W, "width": 2 * W, "video_length": 3}
    return _made(
        LattePipeline,
        {"prompt": "a cat", "clean_caption": False, **size},
        **_t5(),
        vae=encoders.image_vae(4),
        transformer=denoisers.latte(caption_channels=32).model,
        scheduler=DDIMScheduler(),
    )


def pixart() -> TinyPipeline:
    plain = {"clean_caption": False, "use_resolution_binning": False, "max_sequence_length": TEXT}
    return _made(
        PixArtAlphaPipeline,
        {"prompt": "a cat", "height": 24, "width": 40, **plain},
        **_t5(),
        vae=encoders.image_vae(4),
        transformer=denoisers.pixart(caption_channels=32).model,
        scheduler=DPMSolverMultistepScheduler(),
    )


def stable_diffusion() -> TinyPipeline:
    return _made(
        StableDiffusionPipeline,
        {"prompt": "a cat", "height": 16, "width": 24},
        "unet",
        tokenizer=encoders.tokenizer(),
        text_encoder=encoders.clip(16),
        vae=encoders.image_vae(4),
        unet=denoisers.unet().model,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


PIPELINES: dict[str, Callable[[], TinyPipeline]] = {
    make.__name__: make
    for make in (
        cogvideox,
        mochi,
        flux,
        flux2,
        sd3,
        hunyuan,
        wan,
        wan22,
        ltx,
        qwen,
        allegro,
        latte,
        pixart,
        stable_diffusion,
    )
}
"""By short name."""
