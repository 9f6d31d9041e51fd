"""The attention function that transformers calls, and the adapter of `sparge.accelerate`.

Its masks are those of `masks.make_mask`, or the user's. The adapter sets the implementation's name
on copies of the model's configs, because other models may share them.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from ...support.errors import Unsupported
from ...values.recipe import DEFAULT
from ..adapters import Found
from ..route import SdpaCall, why_own
from ..site import SITE, Site, site_of
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
Implementations = list[tuple[PreTrainedConfig, str | None]]
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
NO_INTERFACE = "its code does not call attention through transformers' attention interface"


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
    share, found = ulysses_share(module, query), None
    if share is not None:
        check_window(kwargs.get("sliding_window"), query.shape[2])
        found = documents(kwargs.get("position_ids"), query)
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"][share.start : share.stop]
        site.tally.add_parallel(ULYSSES)
    in_mask = causal and found is None and attention_mask is not None and attention_mask.dim() != 2
    recipe = site.recipe_now(diagonal_in_mask=in_mask)
    if share is not None and recipe is not None:
        recipe = share.recipe_of(recipe)
    call = SdpaCall(query, key, value, dropout_p=dropout, enable_gqa=True)
    left_out = "" if recipe is not None else site.left_out
    reason, eager = _why_own(module, call, left_out, kwargs)
    if recipe is not None and not reason:
        sinks = kwargs.get("s_aux")
        plain: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        options: dict[str, Any] = {"recipe": recipe, "return_lse": sinks is not None}
        if found is not None:
            options |= {"is_causal": causal, **plain}
            result = attend_documents(site, query, key, value, found, **options)
        else:
            key, value, arguments = to_attention(attention_mask, query, key, value, causal)
            result = site.attend(query, key, value, arguments | plain, **options)
        if sinks is not None:  # each is one more key, with a value of zero
            out, lse = result
            left = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
            result = out * left[..., None].to(out.dtype)
        return result.transpose(1, 2).contiguous(), None
    if found is not None:
        attention_mask = document_mask(found, query, is_causal=causal)
    function, is_eager = _own_function(module, site.own, reason, eager)
    key, value, mask = to_own(attention_mask, query, key, value, causal, is_eager)
    given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    own: Callable[[], tuple[Tensor, Tensor | None]]
    own = partial(function, module, query, key, value, mask, **given)
    # Without a mask the first query is at the first key; with one, the last at the last.
    at_start = attention_mask is None and query.shape[2] > 1
    offset = 0 if at_start else key.shape[2] - query.shape[2]
    return site.run_own(reason, own, query, key, is_causal=causal, offset=offset)


def _why_own(
    module: nn.Module, call: SdpaCall, left_out: str, kwargs: dict[str, Any]
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
    return why_own(call, left_out=left_out), eager


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


class TransformersAdapter:
    name = "transformers"

    def find(self, model: Any) -> Found | str:
        root = model if isinstance(model, nn.Module) else getattr(model, "model", None)
        if not isinstance(root, nn.Module):
            return "it is neither a module nor a pipeline of one"
        left_alone = parts_left_alone(root)
        modules = attention_modules(root, left_alone)
        # The model itself has no name among its parts.
        named = {name or type(root).__name__: why for name, why in left_alone.items()}
        if not modules:
            return "; ".join(named.values()) or NO_INTERFACE
        return Found(root, modules, named)

    def attach(self, found: Found, sites: Mapping[str, Site]) -> Callable[[], None]:
        modules = found.modules
        before = _take_over(found.model, modules, parts_left_alone(found.model))
        for name, site in sites.items():
            site.own = OwnAttention(_own_of(modules[name], before), eager_function(modules[name]))
        return partial(_give_back, before)


ADAPTER = TransformersAdapter()


def _take_over(
    model: nn.Module, modules: Mapping[str, nn.Module], left_alone: Container[str]
) -> Implementations:
    """Give all modules their own copies of configs, with our name; returns the names before."""
    memo: dict[int, Any] = {}
    configs: list[PreTrainedConfig] = []
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                own = copy.deepcopy(value, memo)
                setattr(module, attribute, own)
                configs.append(own)
    for config in configs:
        parts = [getattr(config, name, None) for name in config.sub_configs]
        configs += [part for part in parts if isinstance(part, PreTrainedConfig)]
    unique = {id(config): config for config in configs}.values()
    before = [(config, _before(config, modules.values())) for config in unique]
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # the report names the parts that cannot change
        for name, part in model.named_modules():
            if isinstance(part, PreTrainedModel) and name not in left_alone:
                part.set_attn_implementation(NAME)
        for module in modules.values():  # attention outside of any transformers model
            module.config._attn_implementation_internal = NAME  # type: ignore[union-attr]
    except BaseException:
        _give_back(before)
        raise
    finally:
        logger.setLevel(level)
    return before


def _give_back(implementations: Implementations) -> None:
    for config, implementation in implementations:
        if config._attn_implementation == NAME:  # otherwise the user has changed it since
            config._attn_implementation_internal = implementation


def _before(config: PreTrainedConfig, modules: Iterable[nn.Module]) -> str | None:
    """The implementation of a config; in a part copied out of an accelerated model, the own one."""
    name: str | None = config._attn_implementation
    sites = [site_of(module) for module in modules if getattr(module, "config", None) is config]
    return next((site.own.name for site in sites if site is not None and name == NAME), name)


def _own_of(module: nn.Module, before: Implementations) -> str:
    """The implementation that a module had; others than eager and SDPA have masks of their own."""
    mine = getattr(module, "config", None)
    name = next((name for config, name in before if config is mine), None)
    return name if name in (EAGER, SDPA) else own_by_class(type(mine))


def attention_modules(model: nn.Module, left_alone: Container[str]) -> dict[str, nn.Module]:
    """The modules of a model that get their attention from the interface, by name.

    Those of a part that is left alone are not among them, unless a part within can be changed.
    """
    parts = [name for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    found = {}
    for name, module in model.named_modules():
        around = [part for part in parts if not part or f"{name}.".startswith(f"{part}.")]
        innermost = max(around, key=len, default=None)
        if _interface_code(type(module)) and innermost not in left_alone:
            found[name] = module
    return found


def parts_left_alone(model: nn.Module) -> dict[str, str]:
    """The parts of a model whose attention cannot be replaced, by name, and why."""
    reasons = {}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            if not part._can_set_attn_implementation():
                reasons[name] = f"{type(part).__name__}: {NO_INTERFACE}"
            elif any(_selects_keys(type(module)) for module in part.modules()):
                reasons[name] = f"{type(part).__name__}: it selects the keys to attend itself"
    return reasons


def _interface_code(kind: type[nn.Module]) -> CodeType | None:
    """The code of a `forward` that calls attention through the interface; None for others."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code if code is not None and _INTERFACE in code.co_names else None


def _selects_keys(kind: type[nn.Module]) -> bool:
    """Attention that hands the keys it selected to the interface, by the names of its arguments."""
    code = _interface_code(kind)
    names = [const for const in (code.co_consts if code else ()) if isinstance(const, tuple)]
    return any(not set(SELECTIONS).isdisjoint(some) for some in names)
