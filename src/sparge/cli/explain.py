"""`sparge explain`: which backend a call would get, from its shape alone."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from ..check import check_call
from ..dispatch import AUTO, choose
from ..geometry import CAUSAL_ALIGNS
from ..recipe import DEFAULT, Recipe
from . import OK, add_json, console, deliver, whole, wholes

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", required=True, type=wholes, metavar="B,H,L,D", help="of query")
    parser.add_argument("--kv-heads", type=whole, metavar="N", help="default: the query's heads")
    parser.add_argument("--kv-length", type=whole, metavar="N", help="default: the query's length")
    parser.add_argument("--value-dim", type=whole, metavar="N", help="default: the query's D")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--align", choices=CAUSAL_ALIGNS, default=CAUSAL_ALIGNS[0])
    parser.add_argument("--backend", default=AUTO, metavar="NAME", help="default: %(default)s")
    parser.add_argument("--recipe", metavar="JSON", help="a JSON object, or a file that holds one")
    parser.add_argument("--lse", action="store_true", help="the call returns the LSE too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    query, key, value = tensors_without_memory(args)
    recipe = DEFAULT if args.recipe is None else read_recipe(args.recipe)
    call = check_call(
        query,
        key,
        value,
        is_causal=args.causal,
        enable_gqa=True,
        causal_align=args.align,
        recipe=recipe,
        backend=args.backend,
        return_lse=args.lse,
    )
    choice = choose(call, args.backend)
    document = {
        "format": "sparge.explain/1",
        "call": str(call),
        "return_lse": args.lse,
        "recipe": recipe.to_dict(),
        "choice": choice.to_dict(),
    }
    deliver(document, args, lambda: console().print(f"{call}\n{choice}", soft_wrap=True))
    return OK


def tensors_without_memory(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """One number seen as a tensor of any shape: a call can be explained that would not fit."""
    if len(args.shape) != 4:
        raise ValueError(f"--shape must be B,H,L,D, four numbers; got {len(args.shape)}")
    B, Hq, Lq, D = args.shape
    Hk, Lk = args.kv_heads or Hq, args.kv_length or Lq
    try:
        number = torch.empty((), dtype=DTYPES[args.dtype], device=args.device)
    except (RuntimeError, AssertionError) as error:  # torch raises either, by device
        first_line = str(error).splitlines()[0]
        raise ValueError(f"--device {args.device!r} is not usable: {first_line}") from None
    return (
        number.expand(B, Hq, Lq, D),
        number.expand(B, Hk, Lk, D),
        number.expand(B, Hk, Lk, args.value_dim or D),
    )


def read_recipe(text: str) -> Recipe:
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        return Recipe.from_json(text)
    except TypeError as mistake:  # a value of a wrong kind is the caller's, not a fault of ours
        raise ValueError(f"--recipe: {mistake}") from None
    except OSError as error:
        raise ValueError(
            f"--recipe must be a JSON object or a file that holds one; {text!r} does not begin "
            f"with {{ and cannot be read: {error.strerror}"
        ) from None
