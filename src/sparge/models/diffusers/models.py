"""What is known of each denoiser: its tokens, its blocks, and when they may be reordered once.

A rule gives the tokens of a forward pass from its arguments. Tokens may be permuted once, at the
first block, and restored after the last, where all that a block gets per token is known; otherwise
every attention call permutes its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor

from ..tokens import Grid, TokenMap

ForwardArguments = Mapping[str, Any]
"""The arguments of a forward, by name."""


def always(model: Any, given: ForwardArguments) -> bool:
    return True


def never(model: Any, given: ForwardArguments) -> bool:
    return False


@dataclass(frozen=True)
class Rule:
    """One kind of denoiser.

    blocks: its lists of blocks, in the order in which they run. tokens: the map of a forward pass,
    or why it is not known, which leaves attention dense. once: whether tokens may be permuted once.
    result: where a block's result holds the hidden states; None if it is them.
    rotary, rotary_dim: names of the argument of a block with tables of positions, and their
    dimension of tokens; a pair of tensors. rotary_text: the tables begin with the tokens before
    the grid. rotary_parts: how many of the pair are of visual tokens.
    cross: attention modules of a block that attend to text, where they do not say so themselves.
    """

    blocks: tuple[str, ...]
    tokens: Callable[[Any, ForwardArguments], TokenMap | str]
    once: Callable[[Any, ForwardArguments], bool] = always
    result: int | None = None
    rotary: tuple[str, ...] = ()
    rotary_dim: int = 0
    rotary_text: bool = False
    rotary_parts: int = 2
    cross: tuple[str, ...] = ()


HARMLESS = {
    "hidden_states",
    "encoder_hidden_states",
    "encoder_hidden_states_mask",
    "encoder_attention_mask",
    "attention_mask",
    "attention_kwargs",
    "joint_attention_kwargs",
    "cross_attention_kwargs",
    "added_cond_kwargs",
    "class_labels",
    "timestep",
    "temb",
    # None unless the rule says that tokens cannot be permuted once:
    "token_replace_emb",
    "first_frame_num_tokens",
    "modulate_index",
    "args",
    "kwargs",
}
"""Arguments of blocks that do not depend on the order of visual tokens. (Attention permutes masks.)
A block that has others, of a later diffusers, gets its tokens as they are."""


def _without(names: tuple[str, ...], model: Any, given: ForwardArguments) -> bool:
    return all(given.get(name) is None for name in names)


def _one_timestep(model: Any, given: ForwardArguments) -> bool:
    """Wan 2.2 and image-to-video models may give every token its own."""
    return given["timestep"].dim() < 2 or given["timestep"].shape[1] == 1


def _all_frames_alike(model: Any, given: ForwardArguments) -> bool:
    """Image-to-video may treat the tokens of the first frame in another way."""
    return bool(model.config.image_condition_type != "token_replace")


def _all_pictures_alike(model: Any, given: ForwardArguments) -> bool:
    """Reference pictures may have a timestep of their own."""
    return given.get("controlnet_block_samples") is None and not model.config.zero_cond_t


def _latents(
    model: Any, given: ForwardArguments, *, frames_first: bool = False, **around: None
) -> TokenMap:
    """The tokens of `[B, C, T, H, W]` (or `[B, C, H, W]`) latents cut into patches.

    around: `before` or `after`, where there is text.
    """
    sizes, patch = given["hidden_states"].shape, model.config.patch_size
    if len(sizes) == 4:
        return TokenMap((1, sizes[2] // patch, sizes[3] // patch), **around)
    if isinstance(patch, int):
        patch = (getattr(model.config, "patch_size_t", None) or 1, patch, patch)
    T = sizes[1] if frames_first else sizes[2]
    return TokenMap((-(-T // patch[0]), sizes[3] // patch[1], sizes[4] // patch[2]), **around)


_text_behind = partial(_latents, after=None)


def _latte(model: Any, given: ForwardArguments) -> TokenMap:
    _, H, W = _latents(model, given).grid
    return TokenMap((1, H, W))


def _ltx(model: Any, given: ForwardArguments) -> TokenMap | str:
    T, H, W = (given.get(name) for name in ("num_frames", "height", "width"))
    if T is None or H is None or W is None or given["hidden_states"].shape[1] != T * H * W:
        return "its tokens have no grid of frames, height and width"
    return TokenMap((T, H, W))


def _qwen(model: Any, given: ForwardArguments) -> TokenMap | str:
    shapes = given.get("img_shapes")
    if not shapes:
        return "img_shapes were not given, so the grid of its tokens is not known"
    first = shapes[0] if isinstance(shapes[0], list) else [shapes[0]]
    T, H, W = first[0]
    # Reference pictures stand behind the one that is made.
    return TokenMap((T, H, W), before=None, after=sum(map(prod, first[1:])))


GRIDS = "_sparge_grids"
"""The attribute of a denoiser that holds its `GridsById`, which is forgotten with it."""


class GridsById:
    """Grids of packed latents, read from the positions that the pipeline passes with them.

    Reading waits for the device, so it is done once for a tensor, which a pipeline passes in every
    step. A compiled graph cannot read; it takes the grid that was read last for as many tokens, or
    else a square, or else none. A wrong grid costs density, and changes no result.
    """

    def __init__(self) -> None:
        self.read: weakref.ref[Tensor] | None = None
        self.by_tokens: dict[int, Grid] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"by_tokens": dict(self.by_tokens), "read": None}

    def grid_of(self, ids: Tensor) -> Grid:
        n = int(ids.shape[-2])
        if torch.compiler.is_compiling():
            side = isqrt(n)
            return self.by_tokens.get(n, (1, side, side) if side * side == n else (1, 1, n))
        if self.read is None or self.read() is not ids:
            self.by_tokens[n] = _read_grid(ids)
            self.read = weakref.ref(ids)
        return self.by_tokens[n]


def _read_grid(ids: Tensor) -> Grid:
    """Height and width of the picture that is made; reference pictures have another first index."""
    ids = ids[0] if ids.dim() == 3 else ids
    n = ids.shape[0]
    made = ids[:, 0] == ids[0, 0]
    count = int(made.sum())
    H, W = (int(ids[made][:, axis].max()) + 1 for axis in (1, 2))
    row_major = count == H * W and bool(made[:count].all())
    return (1, H, W) if row_major else (1, 1, n)


def _flux(model: Any, given: ForwardArguments) -> TokenMap | str:
    if given.get("kv_cache") is not None or given.get("kv_cache_mode") is not None:
        return "it keeps keys of reference pictures in a cache"
    text = given["encoder_hidden_states"].shape[1]
    grids: GridsById = vars(model)[GRIDS]
    return TokenMap(grids.grid_of(given["img_ids"]), before=text, after=None)


BLOCKS = ("transformer_blocks",)
WITH_SINGLE = (*BLOCKS, "single_transformer_blocks")
ROTARY = ("image_rotary_emb",)
_no_controlnet = partial(_without, ("controlnet_block_samples", "controlnet_single_block_samples"))
_all_blocks_alike = partial(_without, ("block_controlnet_hidden_states", "skip_layers"))
RULES = {
    "CogVideoXTransformer3DModel": Rule(
        BLOCKS, partial(_latents, frames_first=True, before=None), result=0, rotary=ROTARY
    ),
    "MochiTransformer3DModel": Rule(BLOCKS, _text_behind, result=0, rotary=ROTARY),
    "FluxTransformer2DModel": Rule(
        WITH_SINGLE, _flux, once=_no_controlnet, result=1, rotary=ROTARY, rotary_text=True
    ),
    "ChromaTransformer2DModel": Rule(WITH_SINGLE, _flux, once=never),
    "Flux2Transformer2DModel": Rule(WITH_SINGLE, _flux, once=never),
    "SD3Transformer2DModel": Rule(BLOCKS, _text_behind, once=_all_blocks_alike, result=1),
    "HunyuanVideoTransformer3DModel": Rule(
        WITH_SINGLE, _text_behind, once=_all_frames_alike, result=0, rotary=("freqs_cis", *ROTARY)
    ),
    "WanTransformer3DModel": Rule(
        ("blocks",), _latents, once=_one_timestep, rotary=("rotary_emb",), rotary_dim=1
    ),
    "SkyReelsV2Transformer3DModel": Rule(("blocks",), _latents, once=never),
    "WanVACETransformer3DModel": Rule(("blocks", "vace_blocks"), _latents, once=never),
    "LTXVideoTransformer3DModel": Rule(
        BLOCKS, _ltx, once=_one_timestep, rotary=ROTARY, rotary_dim=1, cross=("attn2",)
    ),
    "QwenImageTransformer2DModel": Rule(
        BLOCKS, _qwen, once=_all_pictures_alike, result=1, rotary=ROTARY, rotary_parts=1
    ),
    "AllegroTransformer3DModel": Rule(BLOCKS, _latents, once=never),
    "LatteTransformer3DModel": Rule((*BLOCKS, "temporal_transformer_blocks"), _latte, once=never),
    "PixArtTransformer2DModel": Rule(BLOCKS, _latents),
    "DiTTransformer2DModel": Rule(BLOCKS, _latents),
}
"""By the name of the class."""


def _picture(model: Any, given: ForwardArguments) -> TokenMap:
    _, _, H, W = given["hidden_states"].shape
    return TokenMap((1, H, W))


IN_UNET = Rule(BLOCKS, _picture)
"""A `Transformer2DModel` inside a UNet; each has a grid of its own."""
UNETS = (
    "UNet2DConditionModel",
    "UNet2DModel",
    "UNet3DConditionModel",
    "UNetMotionModel",
    "UNetSpatioTemporalConditionModel",
    "ControlNetModel",
)
