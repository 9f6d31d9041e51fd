"""The adapter of `sparge.accelerate` for transformers models and pipelines.

The configs of the model are replaced by copies first, because other models may share them; the
implementation's name is set on the copies.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    model: nn.Module, modules: Mapping[str, nn.Module], left_alone: Iterable[str]
) -> Implementations:
    """Give all modules their own copies of configs, with our name; returns the names before."""
    memo: dict[int, Any] = {}
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                own = copy.deepcopy(value, memo)
                setattr(module, attribute, own)
                for each in _with_parts(own):
                    configs[id(each)] = each
    before = [(config, _before(config, modules.values())) for config in configs.values()]
    try:
        with _without_warnings():
            for name, part in model.named_modules():
                if isinstance(part, PreTrainedModel) and name not in left_alone:
                    part.set_attn_implementation(NAME)
        for module in modules.values():  # attention outside of any transformers model
            module.config._attn_implementation_internal = NAME  # type: ignore[union-attr]
    except BaseException:
        _give_back(before)
        raise
    return before


def _give_back(implementations: Implementations) -> None:
    for config, implementation in implementations:
        if config._attn_implementation == NAME:  # otherwise the user has changed it since
            config._attn_implementation_internal = implementation


def _before(config: PreTrainedConfig, modules: Iterable[nn.Module]) -> str | None:
    """The implementation of a config; of a part copied out of an accelerated model, the one
    before that."""
    name: str | None = config._attn_implementation
    if name == NAME:
        for module in modules:
            site = site_of(module)
            if site is not None and getattr(module, "config", None) is config:
                return str(site.own.name)
    return name


def _with_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _with_parts(part)


def _own_of(module: nn.Module, before: Implementations) -> str:
    """The implementation that a module had; others than eager and SDPA have masks of their own."""
    mine = getattr(module, "config", None)
    name = next((name for config, name in before if config is mine), None)
    return name if name in (EAGER, SDPA) else own_by_class(type(mine))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence transformers on parts that cannot change; the report names them."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def attention_modules(model: nn.Module, left_alone: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The modules of a model that get their attention from the interface, by name.

    Those of a part that is left alone are not among them, unless a part within can be changed.
    """
    parts = [name for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    closed = set(left_alone)
    return {
        name: module
        for name, module in model.named_modules()
        if _interface_code(type(module)) and _part_of(name, parts) not in closed
    }


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


def _part_of(name: str, parts: Iterable[str]) -> str | None:
    """The innermost of the parts that a module is in; None if it is in none."""
    around = [p for p in parts if not p or name == p or name.startswith(f"{p}.")]
    return max(around, key=len, default=None)


def _interface_code(kind: type[nn.Module]) -> CodeType | None:
    """The code of a `forward` that calls attention through the interface; None for others."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code if code is not None and _INTERFACE in code.co_names else None


def _selects_keys(kind: type[nn.Module]) -> bool:
    """Attention that hands the keys it selected to the interface, by the names of its arguments."""
    code = _interface_code(kind)
    names = [each for each in (code.co_consts if code else ()) if isinstance(each, tuple)]
    return any(selection in each for each in names for selection in SELECTIONS)
