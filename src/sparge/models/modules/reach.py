"""Which modules of a model call `F.scaled_dot_product_attention`, found by reading their code.

Names are followed from `forward` through functions and methods of the model's own packages. Calls
of submodules are not followed: each module answers for itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import nn

SDPA = "scaled_dot_product_attention"
DEPTH = 6
"""Functions that call functions; deeper ones are not read."""
_NOT_OWN = ("torch", "sparge", "diffusers")
_PRODUCTS = {"matmul", "einsum", "bmm", "baddbmm", "mm"}
HIDDEN = (
    "nn.MultiheadAttention calls its attention inside torch, where it cannot be replaced; "
    "call F.scaled_dot_product_attention in its place"
)
BY_HAND = (
    "its code multiplies matrices and takes a softmax itself, which looks like attention and "
    "cannot be replaced; call F.scaled_dot_product_attention in its place"
)


def attention_modules(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Modules that call SDPA, by name; and those whose attention cannot be seen, with why."""
    found: dict[str, nn.Module] = {}
    unseen: dict[str, str] = {}
    inside_torch: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            unseen[name] = HIDDEN
            inside_torch |= {id(part) for part in module.modules()}
        elif id(module) in inside_torch or type(module).__module__.startswith("torch."):
            continue
        elif calls_sdpa(module):
            found[name] = module
        elif attends_by_hand(module):
            unseen[name] = BY_HAND
    return found, unseen


def calls_sdpa(module: nn.Module) -> bool:
    sdpa = F.scaled_dot_product_attention
    return any(
        SDPA in names or any(value is sdpa for value in values) for names, values in _read(module)
    )


def attends_by_hand(module: nn.Module) -> bool:
    """A softmax and a product of matrices in the code of one module."""
    names = {name for each, _ in _read(module) for name in each}
    return "softmax" in names and bool(names & _PRODUCTS or _has_product(module))


def _has_product(module: nn.Module) -> bool:
    """Whether `forward` has the operator @, which is no name."""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return any(" @ " in line for line in source.splitlines())


def _read(module: nn.Module) -> Iterator[tuple[set[str], list[Any]]]:
    """Names in the code of `forward` and of what it calls, and the values that they stand for."""
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(vars(module).get("forward", type(module).forward), 0)]
    while todo:
        function, depth = todo.pop()
        function = inspect.unwrap(getattr(function, "__func__", function))
        code = getattr(function, "__code__", None)
        if code is None or id(code) in seen or depth > DEPTH:
            continue
        seen.add(id(code))
        names = _names(code)
        values = [function.__globals__.get(name) for name in names]
        values += [inspect.getattr_static(module, name, None) for name in names]
        values = [each.__func__ if isinstance(each, staticmethod) else each for each in values]
        values += [_content(cell) for cell in function.__closure__ or ()]
        values += [type(each).__call__ for each in values if _is_processor(each)]
        yield names, values
        todo += [(each, depth + 1) for each in values if _is_own(each)]


def _names(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*(_names(each) for each in inner))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _is_processor(value: Any) -> bool:
    """An object of the model's own packages that is called, such as an attention processor.

    Those of diffusers are left to its adapter, which knows where their text is.
    """
    kind = type(value)
    if isinstance(value, type | nn.Module | FunctionType | MethodType):
        return False
    home = (kind.__module__ or "").partition(".")[0]
    return isinstance(vars(kind).get("__call__"), FunctionType) and home not in _NOT_OWN


def _is_own(value: Any) -> bool:
    """A function of the model's own packages: torch's would all lead to SDPA in the end."""
    if not isinstance(value, FunctionType | MethodType):
        return False
    return not (value.__module__ or "").startswith(("torch.", "sparge."))
