"""Blocks of a denoiser, hooked: what its tokens are, and their permutation once for all blocks.

All hooks are objects with plain attributes, which compiled graphs trace and copies of a model
carry along.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..site import Site
from ..tokens import Placed, TokenMap, Tokens
from .models import HARMLESS, ForwardArguments, Rule, never

ROW = "row"
UNKNOWN = "its tokens are not known: "


class Stack:
    """The blocks that one map of tokens holds for.

    first, last: between these blocks attention is sparse now; tokens are permuted before the first
    and restored after the last, so that what runs dense before is as in the plain model.
    once: this pass permutes its tokens for all blocks.
    """

    def __init__(self, model: nn.Module, rule: Rule, tokens: Tokens) -> None:
        self.model, self.rule, self.tokens = model, rule, tokens
        lists = [getattr(model, name, None) for name in rule.blocks]
        self.blocks = [block for each in lists if each is not None for block in each]
        self.names = _parameters(model)
        known = HARMLESS.union(rule.rotary)
        self.may_permute = rule.once is not never and all(
            known.issuperset(_parameters(block)) for block in self.blocks
        )
        self.sites: list[tuple[int, Site]] = []
        self.first, self.last, self.once = 0, -1, False
        self.rotary: tuple[Any, Any] = (None, None)
        self.placed: Placed | None = None

    def add(self, module: nn.Module, site: Site) -> bool:
        """Take a site, if its module is inside one of the blocks."""
        for i, block in enumerate(self.blocks):
            if any(part is module for part in block.modules()):
                self.sites.append((i, site))
                return True
        return False

    def follow(self) -> None:
        """Look up where attention is sparse now."""
        sparse = [i for i, site in self.sites if site.is_sparse]
        self.first, self.last = (min(sparse), max(sparse)) if sparse else (0, -1)

    def hook(self) -> list[Any]:
        """Register all hooks; returns their handles."""
        handles = [self.model.register_forward_pre_hook(Entry(self), with_kwargs=True)]
        if not self.may_permute:
            return handles
        for i, block in enumerate(self.blocks):
            names = _parameters(block)
            handles += [
                block.register_forward_pre_hook(BlockEntry(self, i, names), with_kwargs=True),
                block.register_forward_hook(BlockExit(self, i)),
            ]
        return handles

    def begin(self, given: ForwardArguments) -> None:
        """A forward pass begins, with these arguments."""
        tokens = self.tokens
        tokens.permuted, tokens.map, tokens.why_own, self.placed = False, None, "", None
        self.rotary = (None, None)
        found = self.rule.tokens(self.model, given)
        if isinstance(found, str):
            tokens.why_own = UNKNOWN + found
            self.once = False
            return
        tokens.map = self._checked(found)
        self.once = (
            self.may_permute
            and self.last >= 0
            and tokens.order != ROW
            and self.rule.once(self.model, given)
            # A block that is run again for its gradient would not know where it stands.
            and not torch.is_grad_enabled()
            # Graphs of single blocks cannot tell one another.
            and (torch.compiler.is_compiling() or not any(map(_is_compiled, self.blocks)))
            # A cache of block outputs would mix those of permuted and of plain passes.
            and not any(hasattr(block, "_diffusers_hook") for block in self.blocks)
            # Each process has a part of the tokens, and all of them inside attention only.
            and not _is_split(self.model)
        )

    def _checked(self, found: TokenMap) -> TokenMap:
        """The map of this pass, in which a grid that was given must be the model's."""
        grid = self.tokens.grid
        if grid is None or callable(grid) or grid == found.grid:
            return found
        (T, H, W), (t, h, w) = grid, found.grid
        raise ValueError(
            f"grid {T}×{H}×{W} does not match the tokens of {type(self.model).__name__}: this "
            f"input has {t}×{h}×{w}; leave grid out, it is known for this model"
        )


class Entry:
    """Before the denoiser runs."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.begin(_by_name(self.stack.names, args, kwargs))


class BlockEntry:
    """Before a block runs: its tokens and the tables of their positions, permuted."""

    def __init__(self, stack: Stack, index: int, names: list[str]) -> None:
        self.stack, self.index, self.names = stack, index, names

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        stack, i = self.stack, self.index
        if not stack.once or not stack.first <= i <= stack.last:
            return None
        changes: dict[str, Any] = {}
        given = _by_name(self.names, args, kwargs)
        if i == stack.first:
            hidden = given["hidden_states"]
            found = stack.tokens.map
            assert found is not None
            # Blocks get visual tokens alone; text comes apart from them. What stands behind the
            # grid, such as a reference picture, stays where it is.
            stack.placed = Placed(found.grid, 0, stack.tokens.order)
            stack.tokens.permuted = True
            changes["hidden_states"] = stack.placed.reorder(hidden, dim=1)
        for name in stack.rule.rotary:
            if given.get(name) is not None:
                changes[name] = _reordered_rotary(stack, given[name], given)
        return _with_changes(self.names, args, kwargs, changes)


class BlockExit:
    """After a block ran: its tokens restored, if it is the last one."""

    def __init__(self, stack: Stack, index: int) -> None:
        self.stack, self.index = stack, index

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        stack = self.stack
        if not stack.tokens.permuted or self.index != stack.last or stack.placed is None:
            return None
        stack.tokens.permuted = False
        at = stack.rule.result
        if at is None:
            return stack.placed.restore(result, dim=1)
        parts = list(result)
        parts[at] = stack.placed.restore(parts[at], dim=1)
        return tuple(parts)


def _reordered_rotary(stack: Stack, given: Any, arguments: ForwardArguments) -> Any:
    """The tables of a pass, permuted once: blocks get the same ones."""
    before, after = stack.rotary
    if before is given:
        return after
    rule, placed = stack.rule, stack.placed
    assert placed is not None
    start = 0
    if rule.rotary_text:
        start = arguments["encoder_hidden_states"].shape[1]
    at = Placed(placed.grid, start, placed.order)
    made = tuple(
        at.reorder(table, dim=rule.rotary_dim) if part < rule.rotary_parts else table
        for part, table in enumerate(given)
    )
    stack.rotary = (given, made)
    return made


def _is_split(model: nn.Module) -> bool:
    """Whether diffusers' context parallelism splits the tokens of a model over processes."""
    config = getattr(model, "_parallel_config", None)
    return getattr(config, "context_parallel_config", None) is not None


def _is_compiled(block: nn.Module) -> bool:
    return block._compiled_call_impl is not None


def _parameters(module: nn.Module) -> list[str]:
    return [*inspect.signature(type(module).forward).parameters][1:]


def _by_name(names: list[str], args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _with_changes(
    names: list[str], args: Any, kwargs: Any, changes: dict[str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    listed = tuple(changes.get(name, x) for name, x in zip(names, args, strict=False))
    named = {name: changes.get(name, x) for name, x in kwargs.items()}
    return listed, named
