"""`sparge explain`: which backend a call would use, from its shape alone."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from ..engine.check import check_call
from ..routing import AUTO, choose
from ..values.call import CAUSAL_ALIGNS
from ..values.recipe import DEFAULT
from . import OK, arguments
from .arguments import add_json, add_recipe, whole, wholes
from .screen import console, deliver

DTYPES = {**arguments.DTYPES, "fp64": torch.float64}
MAX_ELEMENTS = 2**48  # of one tensor: 512 TB in bf16, far above any real call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", required=True, type=wholes, metavar="B,H,L,D", help="shape of the query")
    add("--kv-heads", type=whole, metavar="N", help="default: the query's heads")
    add("--kv-length", type=whole, metavar="N", help="default: the query's length")
    add("--value-dim", type=whole, metavar="N", help="head dim of the value; default: D")
    add("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    add("--device", default="cpu", help="default: %(default)s")
    add("--causal", action="store_true", help="causal attention")
    align = "causal diagonal where lengths differ; default: %(default)s"
    add("--align", choices=CAUSAL_ALIGNS, default=CAUSAL_ALIGNS[0], help=align)
    add("--backend", default=AUTO, metavar="NAME", help="default: %(default)s")
    add_recipe(parser, default=DEFAULT)
    add("--lse", action="store_true", help="the call also returns the LSE")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    call = check_call(
        *tensors_without_memory(args),
        is_causal=args.causal,
        enable_gqa=True,
        causal_align=args.align,
        recipe=args.recipe,
        backend=args.backend,
        return_lse=args.lse,
    )
    choice = choose(call, args.backend)
    document = {
        "format": "sparge.explain/1",
        "call": str(call),
        "return_lse": args.lse,
        "recipe": args.recipe.to_dict(),
        "choice": choice.to_dict(),
    }
    deliver(document, args, lambda: console().print(f"{call}\n{choice}", soft_wrap=True))
    return OK


def tensors_without_memory(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as views of one element, so a call larger than memory is explained."""
    if len(args.shape) != 4:
        raise ValueError(f"--shape must be B,H,L,D, four numbers; got {len(args.shape)}")
    B, Hq, Lq, D = args.shape
    keys = (B, args.kv_heads or Hq, args.kv_length or Lq)
    shapes = {"query": args.shape, "key": (*keys, D), "value": (*keys, args.value_dim or D)}
    for name, shape in shapes.items():
        if math.prod(shape) > MAX_ELEMENTS:
            raise ValueError(
                f"--shape, --kv-heads, --kv-length and --value-dim must give tensors of at most "
                f"2**48 elements; the {name} would be {list(shape)}"
            )
    try:
        element = torch.empty((), dtype=DTYPES[args.dtype], device=args.device)
    except (RuntimeError, AssertionError) as error:  # depends on the device
        first_line = str(error).splitlines()[0]
        raise ValueError(f"--device {args.device!r} is not usable: {first_line}") from None
    query, key, value = (element.expand(shape) for shape in shapes.values())
    return query, key, value
