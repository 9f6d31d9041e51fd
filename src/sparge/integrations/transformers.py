"""sparge as an attention implementation of transformers: `attn_implementation="sparge"`.

Importing this module registers the name. `sparge.accelerate(model)` is the same for one model,
reversible, with a report. The masks that come here are those of `masks.make_mask`, or the user's.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..accuracy import output_error
from ..api import attention
from ..errors import Unsupported
from ..geometry import MAX_HEAD_DIM
from ..recipe import DEFAULT
from .masks import additive, in_full, make_mask, takes_sdpa, to_attention
from .sites import Site

NAME = "sparge"
SITE = "_sparge_site"
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
_ANYWHERE = Site("attn_implementation='sparge'", DEFAULT, own="")
"""What a model gets that chose the name itself and was not accelerated."""


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
    reason, eager = _why_own(module, (query, key, value), site, dropout, kwargs)
    if reason:
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return _own_attention(
            module, query, key, value, attention_mask, causal, site, reason, eager, given
        )
    key, value, facts = to_attention(attention_mask, query, key, value, causal)
    facts |= {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    by_hand = not torch.compiler.is_compiling()
    if by_hand and site.tap is not None:
        site.tap(query, key, value, facts)
    sinks = kwargs.get("s_aux")
    recipe = site.windowed if causal and not facts["is_causal"] else site.recipe
    chosen: dict[str, Any] = {"recipe": recipe, "backend": site.backend, "label": site.label}
    if sinks is None:
        out = without = attention(query, key, value, **facts, **chosen)
    else:
        without, lse = attention(query, key, value, **facts, **chosen, return_lse=True)
        out = _with_sinks(without, lse, sinks)
    if by_hand and site.measure_error and site.ran_sparse():
        site.note_error(output_error(query, key, value, without, **facts).mean(0).tolist())
    return out.transpose(1, 2).contiguous(), None


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink is one more key with a score and no value: it takes its share and gives nothing."""
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return out * share[..., None].to(out.dtype)


def _why_own(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    site: Site,
    dropout: float,
    kwargs: dict[str, Any],
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
    if kwargs.get("output_attentions") or getattr(
        getattr(module, "config", None), "output_attentions", False
    ):
        return "output_attentions: sparge never makes the attention weights", True
    if site.recipe is None:
        return site.left_out, eager
    if dropout > 0.0:
        return f"dropout {dropout}: sparge has none", eager
    if tensors[0].shape[2] == 1:
        return "one query (decode): dense attention is faster", eager
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "a gradient is wanted: torch's own is faster; sparge runs under no_grad", eager
    head_dim = max(x.shape[3] for x in tensors)
    if head_dim > MAX_HEAD_DIM:
        return f"head dim {head_dim} is over {MAX_HEAD_DIM}", eager
    return "", False


def _own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    site: Site,
    reason: str,
    eager: bool,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The attention that the model had before, with a mask as it expects one."""
    name = EAGER if eager else site.own or own_by_class(type(getattr(module, "config", None)))
    # A graph cannot look for it, but can read what was found when the model was accelerated.
    function = (site.eager or eager_of(module)) if name == EAGER else AttentionInterface()[name]
    if function is None:
        raise Unsupported(
            f"{reason}, and {type(module).__name__} has no eager attention that would:",
            {NAME: reason},
            "load the model with another attn_implementation",
        )
    if mask is not None and mask.dim() == 2:
        key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
        mask = in_full(mask, query.shape[2])
    if name == EAGER:
        mask = additive(mask, query, key, causal)
    start = 0.0 if torch.compiler.is_compiling() else time.perf_counter()
    out: tuple[Tensor, Tensor | None] = function(module, query, key, value, mask, **given)
    if not torch.compiler.is_compiling():
        site.note_own(reason, time.perf_counter() - start)
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def own_by_class(config_class: type) -> str:
    """The implementation of a model that never had another than ours."""
    return SDPA if takes_sdpa(config_class) else EAGER


def eager_of(module: nn.Module) -> Callable[..., Any] | None:
    """The eager function beside the `forward` that asks the interface, if there is one."""
    forward: Any = inspect.unwrap(type(module).forward)
    names = [name for name in forward.__code__.co_names if name.endswith(_EAGER_FUNCTION)]
    found: Callable[..., Any] | None = forward.__globals__.get(names[0]) if names else None
    return found


register()
