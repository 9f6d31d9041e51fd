"""The attention function that transformers calls, and the model's own attention beside it.

The masks that come here are those of `masks.make_mask`, or the user's.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...support.errors import Unsupported
from ...values.geometry import MAX_HEAD_DIM
from ...values.recipe import DEFAULT, Recipe
from ..site import SITE, Site, allowed_blocks
from ..ulysses import ULYSSES
from .masks import make_mask, own_by_class, to_attention, to_own
from .sequence_parallel import (
    attend_documents,
    check_window,
    document_mask,
    documents,
    ulysses_share,
)

NAME = "sparge"
EAGER, SDPA = "eager", "sdpa"
_EAGER_FUNCTION = "eager_attention_forward"
# Arguments that change what attention means and that sparge does not compute.
_MEANINGS = {
    "softcap": "the scores are soft-capped",
    "position_bias": "a position bias is added inside",
    "cache": "the cache is paged",
}
# Of the arguments of that kind, those that torch's SDPA refuses or ignores.
_EAGER_ONLY = ("softcap", "s_aux")
# The model keeps these out of its mask for implementations that it does not know.
SELECTIONS = ("indices", "block_indices")


@dataclass(frozen=True)
class OwnAttention:
    """The attention that a module had: its name, and its eager function if there is one."""

    name: str
    eager: Callable[..., Any] | None


_ANYWHERE = Site("attn_implementation='sparge'", DEFAULT)
"""For a model that chose the name itself and was not accelerated."""


def register() -> None:
    """Make the name known to transformers; harmless to repeat."""
    AttentionInterface.register(NAME, attention_forward)
    # Without a mask function of its own, a name is never given any padding.
    AttentionMaskInterface.register(NAME, make_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query `[B, Hq, Lq, D]`, key and value with their own heads; returns `[B, Lq, Hq, Dv]`."""
    site: Site = getattr(module, SITE, _ANYWHERE)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    recipe, windowed = site.recipes()
    left_out = "" if recipe else site.left_out
    reason, eager = _why_own(module, (query, key, value), left_out, dropout, kwargs)
    share, found = ulysses_share(module, query), None
    if share is not None:
        check_window(kwargs.get("sliding_window"), query.shape[2])
        found = documents(kwargs.get("position_ids"), query)
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"][share.start : share.stop]
        site.note_parallel(ULYSSES)
    if reason:
        if found is not None:
            attention_mask = document_mask(found, query, is_causal=causal)
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        function, is_eager = _own_function(module, site.own, reason, eager)
        key, value, mask = to_own(attention_mask, query, key, value, causal, is_eager)
        compiling = torch.compiler.is_compiling()
        start = 0.0 if compiling else time.perf_counter()
        result: tuple[Tensor, Tensor | None] = function(module, query, key, value, mask, **given)
        if not compiling:
            seconds = time.perf_counter() - start
            # Without a mask the first query is at the first key; with one, the last at the last.
            at_start = attention_mask is None and query.shape[2] > 1
            offset = 0 if at_start else key.shape[2] - query.shape[2]
            blocks = allowed_blocks(query, key, is_causal=causal, offset=offset)
            site.note_own(reason, seconds, blocks)
        return result
    if share is not None and recipe is not None and windowed is not None:
        recipe, windowed = share.recipe_of(recipe), share.recipe_of(windowed)
    sinks = kwargs.get("s_aux")
    if found is not None:
        plain = {"attn_mask": None, "is_causal": causal, "scale": scaling}
        plain["enable_gqa"] = query.shape[1] != key.shape[1]
        attend = partial(_attend, site, recipe=recipe, sinks=sinks, arguments=plain)
        out = attend_documents(attend, query, key, value, found, alone=sinks is None)
        return out.transpose(1, 2).contiguous(), None
    key, value, arguments = to_attention(attention_mask, query, key, value, causal)
    arguments |= {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    recipe = windowed if causal and not arguments["is_causal"] else recipe
    out = _attend(site, query, key, value, arguments=arguments, recipe=recipe, sinks=sinks)
    return out.transpose(1, 2).contiguous(), None


def _attend(
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    arguments: dict[str, Any],
    recipe: Recipe | None,
    sinks: Tensor | None,
) -> Tensor:
    if sinks is None:
        out: Tensor = site.attend(query, key, value, arguments, recipe=recipe)
        return out
    # A sink is one more key, with a value of zero.
    out, lse = site.attend(query, key, value, arguments, recipe=recipe, return_lse=True)
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return out * share[..., None].to(out.dtype)


def _why_own(
    module: nn.Module, qkv: Sequence[Tensor], left_out: str, dropout: float, kwargs: dict[str, Any]
) -> tuple[str, bool]:
    """Why the model's own attention must run ("" if it need not), and whether it must be eager."""
    eager = any(kwargs.get(name) is not None for name in _EAGER_ONLY)
    for name, why in _MEANINGS.items():
        if kwargs.get(name) is not None:
            return f"{name}: {why}, which sparge does not compute", eager
    for name in SELECTIONS:
        if kwargs.get(name) is not None:
            raise Unsupported(
                f"{type(module).__name__} gives {name}, the keys that it selected itself:",
                {NAME: "it has no attention over them, nor has it the mask of them"},
                "load the model with attn_implementation='sdpa', which it gives that mask",
            )
    config = getattr(module, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        return "output_attentions: sparge never makes the attention weights", True
    head_dim = max(x.shape[3] for x in qkv)
    for holds, why in (
        (left_out, left_out),
        (dropout > 0.0, f"dropout {dropout}: sparge has none"),
        (qkv[0].shape[2] == 1, "one query (decode): dense attention is faster"),
        (
            torch.is_grad_enabled() and any(x.requires_grad for x in qkv),
            "a gradient is wanted: torch's own is faster; sparge runs under no_grad",
        ),
        (head_dim > MAX_HEAD_DIM, f"head dim {head_dim} is over {MAX_HEAD_DIM}"),
    ):
        if holds:
            return why, eager
    return "", False


def _own_function(
    module: nn.Module, own: OwnAttention | None, reason: str, eager: bool
) -> tuple[Callable[..., Any], bool]:
    """The attention that the model had before, and whether it is the eager one."""
    name = own.name if own else own_by_class(type(getattr(module, "config", None)))
    if not eager and name != EAGER:
        return AttentionInterface()[name], False
    # A graph cannot look for the function, but can read what was found at the start.
    function = (own and own.eager) or eager_function(module)
    if function is None:
        raise Unsupported(
            f"{reason}, and {type(module).__name__} has no eager attention that would:",
            {NAME: reason},
            "load the model with another attn_implementation",
        )
    return function, True


def eager_function(module: nn.Module) -> Callable[..., Any] | None:
    """The eager function beside the `forward` that asks the interface, if there is one."""
    forward: Any = inspect.unwrap(type(module).forward)
    names = [name for name in forward.__code__.co_names if name.endswith(_EAGER_FUNCTION)]
    found: Callable[..., Any] | None = forward.__globals__.get(names[0]) if names else None
    return found
