"""The parts of a model: which of its modules attend through the interface, and what they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .transformers import SELECTIONS

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
NO_INTERFACE = "its code does not call attention through transformers' attention interface"


def model_of(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    inner = getattr(model, "model", None)  # a transformers pipeline
    if isinstance(inner, nn.Module):
        return inner
    raise TypeError(
        f"accelerate takes a transformers model or pipeline, got {type(model).__name__}; for "
        "anything else call sparge.attention"
    )


def _why_none(model: nn.Module) -> dict[str, str]:
    """The parts of a model that cannot be given another attention."""
    why = "its code does not use the attention interface"
    return {
        name or type(part).__name__: f"{type(part).__name__}: {why}"
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation()
    } or ({} if attention_modules(model) else {type(model).__name__: why})


def attention_modules(model: nn.Module, left_alone: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The modules of a model that get their attention from the interface, by name.

    Those of a part that is left alone are not among them, unless a part within can be changed.
    """
    parts = [name for name, m in model.named_modules() if isinstance(m, PreTrainedModel)]
    closed = set(left_alone)
    return {
        name: module
        for name, module in model.named_modules()
        if _uses_interface(type(module)) and _part_of(name, parts) not in closed
    }


def _part_of(name: str, parts: Iterable[str]) -> str | None:
    """The innermost of the parts that a module is in; None if it is in none."""
    around = [p for p in parts if not p or name == p or name.startswith(f"{p}.")]
    return max(around, key=len, default=None)


def _uses_interface(kind: type[nn.Module]) -> bool:
    code = _code_of(kind)
    return code is not None and _INTERFACE in code.co_names


def _selects_keys(kind: type[nn.Module]) -> bool:
    """Attention that hands the keys it selected to the interface, by the names of its arguments."""
    code = _code_of(kind) if _uses_interface(kind) else None
    names = [each for each in (code.co_consts if code else ()) if isinstance(each, tuple)]
    return any(selection in each for each in names for selection in SELECTIONS)


def _code_of(kind: type[nn.Module]) -> CodeType | None:
    return getattr(inspect.unwrap(kind.forward), "__code__", None)


def left_alone_of(model: nn.Module) -> dict[str, str]:
    """The parts of a model whose attention cannot be another, by name, and why."""
    reasons = {}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            if not part._can_set_attn_implementation():
                reasons[name] = f"{type(part).__name__}: {NO_INTERFACE}"
            elif any(_selects_keys(type(module)) for module in part.modules()):
                reasons[name] = f"{type(part).__name__}: it selects the keys to attend itself"
    return reasons


def named(reasons: dict[str, str], model: nn.Module) -> dict[str, str]:
    """The model itself has no name among its parts."""
    return {name or type(model).__name__: why for name, why in reasons.items()}


def heads_of_module(module: nn.Module) -> int | None:
    """Query heads of an attention module, where it says them."""
    for name in ("num_heads", "num_attention_heads", "n_heads"):
        if isinstance(number := getattr(module, name, None), int):
            return number
    number = getattr(getattr(module, "config", None), "num_attention_heads", None)
    return number if isinstance(number, int) else None


def chosen_of(
    names: Iterable[str], layers: Iterable[str] | Callable[[str], bool] | None
) -> set[str]:
    if layers is None:
        return set(names)
    some = ", ".join(list(names)[:3])
    if callable(layers):
        chosen = {name for name in names if layers(name)}
        missing = [] if chosen else [getattr(layers, "__name__", repr(layers))]
    elif isinstance(layers, Iterable):
        patterns = [layers] if isinstance(layers, str) else list(layers)
        found = {p: {name for name in names if fnmatchcase(name, p)} for p in patterns}
        chosen = set().union(*found.values())
        missing = [pattern for pattern in patterns if not found[pattern]] if patterns else ["[]"]
    else:
        raise TypeError(f"layers must be names or a function of a name, got {layers!r}")
    if missing:
        raise ValueError(f"layers {missing} match no attention module; there are {some}, …")
    return chosen
