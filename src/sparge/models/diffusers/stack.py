"""Blocks of a denoiser, hooked: what its tokens are, and their permutation once for all blocks.

All hooks are methods of a stack, which has plain attributes: compiled graphs trace them, and copies
of a model carry them along.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from ..site import Site
from ..tokens import Placed, TokenMap, Tokens
from .backend import PARALLEL
from .models import HARMLESS, ForwardArguments, Rule, never

ROW = "row"


class Stack:
    """The blocks that one map of tokens holds for.

    first, last: between these blocks attention is sparse now; tokens are permuted before the first
    and restored after the last, so that what runs dense before is as in the plain model.
    once: this pass permutes its tokens for all blocks.
    """

    def __init__(self, model: nn.Module, rule: Rule, tokens: Tokens) -> None:
        self.model, self.rule, self.tokens = model, rule, tokens
        lists = [getattr(model, name, None) or () for name in rule.blocks]
        self.blocks = [block for blocks in lists for block in blocks]
        self.names = _parameters(model)
        known = HARMLESS.union(rule.rotary)
        self.may_permute = rule.once is not never and all(
            known.issuperset(_parameters(block)) for block in self.blocks
        )
        self.sites: list[tuple[int, Site]] = []
        self.first, self.last, self.once = 0, -1, False
        self.rotary: tuple[Any, Any] = (None, None)

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
        handles = [self.model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        if not self.may_permute:
            return handles
        for i, block in enumerate(self.blocks):
            permute = partial(self._permute, i, _parameters(block))
            handles += [
                block.register_forward_pre_hook(permute, with_kwargs=True),
                block.register_forward_hook(partial(self._restore, i)),
            ]
        return handles

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the denoiser runs: what its tokens are."""
        given, tokens = _by_name(self.names, args, kwargs), self.tokens
        tokens.permuted, tokens.map, tokens.why_own = False, None, ""
        self.rotary = (None, None)
        found = self.rule.tokens(self.model, given)
        if isinstance(found, str):
            tokens.why_own = f"its tokens are not known: {found}"
            self.once = False
            return
        tokens.map = self._checked(found)
        parallel = getattr(self.model, PARALLEL, None)
        self.once = (
            self.may_permute
            and self.last >= 0
            and tokens.order != ROW
            and self.rule.once(self.model, given)
            # A block that is run again for its gradient would not know where it stands.
            and not torch.is_grad_enabled()
            # Graphs of single blocks cannot tell one another.
            and (
                torch.compiler.is_compiling()
                or all(block._compiled_call_impl is None for block in self.blocks)
            )
            # A cache of block outputs would mix those of permuted and of plain passes.
            and not any(hasattr(block, "_diffusers_hook") for block in self.blocks)
            # Each process has a part of the tokens, and all of them inside attention only.
            and getattr(parallel, "context_parallel_config", None) is None
        )

    def _permute(
        self, i: int, names: list[str], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before block i runs: its tokens and the tables of their positions, permuted."""
        if not self.once or not self.first <= i <= self.last:
            return None
        changes: dict[str, Any] = {}
        given = _by_name(names, args, kwargs)
        if i == self.first:
            # Blocks get visual tokens alone; text comes apart from them. What stands behind the
            # grid, such as a reference picture, stays where it is.
            self.tokens.permuted = True
            changes["hidden_states"] = self._placed().reorder(given["hidden_states"], dim=1)
        for name in self.rule.rotary:
            if given.get(name) is not None:
                changes[name] = self._reordered_rotary(given[name], given)
        listed = tuple(changes.get(name, x) for name, x in zip(names, args, strict=False))
        return listed, {name: changes.get(name, x) for name, x in kwargs.items()}

    def _reordered_rotary(self, tables: Any, given: ForwardArguments) -> Any:
        """The tables of a pass, permuted once: blocks get the same ones."""
        before, after = self.rotary
        if before is tables:
            return after
        rule = self.rule
        placed = self._placed(given["encoder_hidden_states"].shape[1] if rule.rotary_text else 0)
        made = tuple(
            placed.reorder(table, dim=rule.rotary_dim) if part < rule.rotary_parts else table
            for part, table in enumerate(tables)
        )
        self.rotary = (tables, made)
        return made

    def _restore(self, i: int, module: nn.Module, args: Any, result: Any) -> Any:
        """After block i ran: its tokens restored, if it is the last one."""
        if not self.tokens.permuted or i != self.last:
            return None
        self.tokens.permuted = False
        at = self.rule.result
        if at is None:
            return self._placed().restore(result, dim=1)
        parts = list(result)
        parts[at] = self._placed().restore(parts[at], dim=1)
        return tuple(parts)

    def _placed(self, start: int = 0) -> Placed:
        assert self.tokens.map is not None
        return Placed(self.tokens.map.grid, start, self.tokens.order)

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


def _parameters(module: nn.Module) -> list[str]:
    return [*inspect.signature(type(module).forward).parameters][1:]


def _by_name(names: list[str], args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}
