"""The adapter of `sparge.accelerate` for transformers models and pipelines.

The configs of the model are replaced by copies first, because other models may share them; the
implementation's name is set on the copies.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..adapters import Found
from ..site import Site, site_of
from .attention_function import EAGER, NAME, SDPA, SELECTIONS, OwnAttention, eager_function
from .masks import own_by_class

Implementations = list[tuple[PreTrainedConfig, str | None]]
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
NO_INTERFACE = "its code does not call attention through transformers' attention interface"


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
    names = [each for each in (code.co_consts if code else ()) if isinstance(each, tuple)]
    return any(selection in each for each in names for selection in SELECTIONS)
