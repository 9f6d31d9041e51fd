"""Which modules of a model attend through transformers' attention interface."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import CodeType

from torch import nn
from transformers import PreTrainedModel

from .attention_function import SELECTIONS

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
NO_INTERFACE = "its code does not call attention through transformers' attention interface"


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
