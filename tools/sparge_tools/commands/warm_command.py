"""`sparge warm`: compile the GPU kernels of a model's attention ahead, into Triton's cache.

    sparge warm --model ./Llama-3.1-8B
    sparge warm --heads 24/24 --head-dim 128 --recipe vision --dtype bf16

Kernels depend on head dims, dtype, recipe, and whether attention is causal or packed; not on
lengths. Nothing is launched. Later processes on this card read the cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import DEFAULT, VISION, Recipe, attention, attention_varlen, warm
from sparge.backends.triton import NAME
from sparge.cli import OK
from sparge.cli.arguments import DTYPES, add_json, read_json, whole
from sparge.cli.machine import devices
from sparge.cli.screen import console, deliver

from ..machine import where_it_runs
from ..screen import progress
from .arguments import fill_in

FORMAT = "sparge.warm/1"
LENGTH = 1024
"""Tokens of the calls whose kernels are compiled; they serve every other length."""
RECIPES = {"default": DEFAULT, "vision": VISION}


@dataclass(frozen=True)
class Layer:
    """The attention of a model's layers, as far as kernels depend on it."""

    Hq: int
    Hk: int
    D: int
    is_causal: bool
    recipe: Recipe
    dtype: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "a directory whose config.json tells the heads: of transformers or diffusers"
    add("--model", metavar="DIR", help=about)
    add("--heads", type=heads, metavar="HQ[/HK]", help="query heads, and key heads if fewer")
    add("--head-dim", type=whole, metavar="N", help="default: that of the model")
    add("--dtype", choices=DTYPES, help="default: that of the model, else bf16")
    add("--causal", action=argparse.BooleanOptionalAction, help="default: as the model is")
    add("--varlen", action="store_true", help="packed sequences, too")
    add("--lse", action="store_true", help="calls that return the LSE, too")
    names = f"a JSON object, a file that holds one, or a name: {', '.join(RECIPES)}"
    add("--recipe", type=named_recipe, metavar="JSON", help=names)
    add("--device", default=None, help="default: the accelerator that torch finds")
    add_json(parser)


def heads(text: str) -> tuple[int, int]:
    """`32/8`: query heads and key heads."""
    query, slash, key = text.partition("/")
    found = whole(query), whole(key) if slash else whole(query)
    if found[0] % found[1]:
        raise argparse.ArgumentTypeError(f"key heads must divide query heads, got {text!r}")
    return found


def named_recipe(text: str) -> Recipe:
    return RECIPES[text] if text in RECIPES else read_json(text, Recipe.from_json)


def run(args: argparse.Namespace) -> int:
    layer = layer_of(args)
    device = args.device or devices()[-1]
    calls = calls_of(args, layer, device)
    done = {}
    with progress("compiling", len(calls)) as step:
        for name, call in calls.items():
            done[name] = warm(call)
            step(f"{name}: {done[name]}")
    document = {
        "format": FORMAT,
        **where_it_runs(),
        "device": device,
        "head_dim": layer.D,
        "heads": [layer.Hq, layer.Hk],
        "dtype": args.dtype,
        "causal": layer.is_causal,
        "recipe": layer.recipe.to_dict(),
        "seconds": sum(found.seconds for found in done.values()),
        "calls": [
            {
                "call": name,
                "launches": found.launches,
                "kernels": [vars(kernel) for kernel in found.kernels],
            }
            for name, found in done.items()
        ],
    }

    def show() -> None:
        for name, found in done.items():
            console().print(f"{name}: {found}", soft_wrap=True)

    deliver(document, args, show)
    return OK


def layer_of(args: argparse.Namespace) -> Layer:
    """What was asked for: options first, then the model's configuration."""
    if args.model is None and (args.heads is None or args.head_dim is None):
        raise ValueError("--model, or --heads and --head-dim, must be given")
    if args.model is not None:
        base = read_config(args.model)
    else:
        base = Layer(args.heads[0], args.heads[1], args.head_dim, False, DEFAULT)
    Hq, Hk = args.heads or (base.Hq, base.Hk)
    fill_in(args, {"dtype": base.dtype or "bf16"})
    is_causal = base.is_causal if args.causal is None else args.causal
    return Layer(Hq, Hk, args.head_dim or base.D, is_causal, args.recipe or base.recipe)


def read_config(model: str) -> Layer:
    """The layer of a directory's config.json; a pipeline's is in the folder of its denoiser."""
    places = [Path(model, *parts, "config.json") for parts in ((), ("transformer",), ("unet",))]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ValueError(f"--model {model!r} has no config.json; give --heads and --head-dim")
    found = layer_from(json.loads(file.read_text(encoding="utf-8")))
    if found is None:
        raise ValueError(
            f"--model: {file} does not tell heads and head dim; give --heads and --head-dim"
        )
    return found


def layer_from(config: Mapping[str, Any]) -> Layer | None:
    """Of a configuration of transformers (also nested, as `text_config`) or diffusers."""
    config = config.get("text_config", config)
    Hq = config.get("num_attention_heads")
    if not isinstance(Hq, int):
        return None
    denoises = "_class_name" in config
    if denoises:
        D, Hk = config.get("attention_head_dim"), Hq
    else:
        D = config.get("head_dim") or config.get("hidden_size", 0) // Hq
        Hk = config.get("num_key_value_heads") or Hq
    if not isinstance(D, int) or D < 1:
        return None
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtype = names.get(str(config.get("dtype") or config.get("torch_dtype")))
    return Layer(Hq, Hk, D, not denoises, VISION if denoises else DEFAULT, dtype)


def calls_of(
    args: argparse.Namespace, layer: Layer, device: str
) -> Mapping[str, Callable[[], object]]:
    """Calls whose kernels are compiled, by name."""
    shape = f"{layer.Hq}/{layer.Hk} heads of {layer.D}, {args.dtype}"
    name = f"{shape}, {'causal' if layer.is_causal else 'not causal'}"
    options: dict[str, Any] = {"is_causal": layer.is_causal, "recipe": layer.recipe}
    options |= {"backend": NAME, "enable_gqa": True}
    rows = (layer.Hq, layer.Hk, layer.Hk)

    def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.empty(shape, dtype=DTYPES[args.dtype], device=device) for shape in shapes]

    batch = inputs(*((1, H, LENGTH, layer.D) for H in rows))
    calls = {name: partial(attention, *batch, **options)}
    if args.lse:
        calls[f"{name}, with LSE"] = partial(attention, *batch, **options, return_lse=True)
    if args.varlen:
        cuts = torch.tensor([0, LENGTH // 4, LENGTH], dtype=torch.int32)
        pack = inputs(*((LENGTH, H, layer.D) for H in rows))
        calls[f"{name}, packed"] = partial(attention_varlen, *pack, cuts, cuts, **options)
    return calls
