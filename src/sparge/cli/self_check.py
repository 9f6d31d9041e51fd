"""Quick correctness checks that run real calls, for `sparge doctor` and before a benchmark.

Every backend and precision with all blocks kept, against dense fp64; and sparse recipes in bf16,
against fp64 over the same blocks, which must be the blocks that the reference chooses. A benchmark
prints no numbers if a check fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api.accuracy import exact_weights
from ..api.attention import attention, make_plan
from ..engine.recording import record
from ..routing import AUTO, DENSE, backends
from ..support.errors import Unsupported
from ..synthetic import structured_qkv
from ..values.blockplan import BlockPlan
from ..values.call import BLOCK_K, BLOCK_Q, block_sizes, in_blocks
from ..values.recipe import DEFAULT, KeepAll, KeepFraction, Recipe
from ..values.tokenmask import TokenMask

Inputs = tuple[Tensor, Tensor, Tensor]
# About three times the reference's error on these inputs; a wrong block costs far more.
TOLERANCES = {"exact": 1e-5, "half": 0.01, "int8": 0.01, "int8-fast": 0.02}
LENGTH = 331  # the last query block and the last key block are partial
SPARSE = {
    "40 % by mean": Recipe(keep=KeepFraction(0.4), predictor="mean"),
    "40 % by mean, fast": Recipe(keep=KeepFraction(0.4), predictor="mean", precision="int8-fast"),
    "default": DEFAULT,
}
SPARSE_LENGTH = 1000
OTHER_BLOCKS = 0.02
"""Share of the blocks that may differ from the reference's: rounding decides between blocks of
nearly equal mass."""


@dataclass(frozen=True)
class Check:
    """verdict: "passed", "failed" or "refused". error: the largest relative L1, None if not run."""

    backend: str
    precision: str
    device: str
    verdict: str
    error: float | None
    why: str
    isa: str | None = None
    recipe: str = "all"


def check_backends(
    device: str = "cpu",
    wanted: Iterable[tuple[str, str, Recipe]] | None = None,
    error_of: Callable[[str, Recipe], float] | None = None,
) -> list[Check]:
    """Run backends; one check for each. wanted: backend, name of the recipe, recipe; error_of: the
    error of a backend with a recipe, which may raise. Without them: every backend, dense attention,
    and what `auto` chooses, with all blocks kept, against dense attention in fp64."""
    if wanted is None or error_of is None:
        error_of = _error_beside_dense(device)
        pairs = [(backend.name, precision) for backend in backends() for precision in TOLERANCES]
        wanted = [
            (name, "all", Recipe(keep=KeepAll(), precision=precision))
            for name, precision in (*pairs, (DENSE, "exact"), (AUTO, "exact"))
        ]
    return [_check(device, error_of, *named_recipe) for named_recipe in wanted]


def check_sparse(names: Iterable[str], device: str = "cpu") -> list[Check]:
    """Recipes like those of a benchmark, in bf16, with as many key heads as queries."""
    inputs = structured_qkv(Hk=4, L=SPARSE_LENGTH, dtype=torch.bfloat16, device=device)
    rows = torch.arange(SPARSE_LENGTH)
    truths = [Truth(*inputs, rows=rows, is_causal=causal) for causal in (True, False)]
    wanted = [(name, title, SPARSE[title]) for name in names for title in SPARSE]
    return check_backends(device, wanted, partial(_error, inputs, truths))


class Truth:
    """Attention of some query rows in fp64, on the CPU; Lq == Lk.

    dense: `[B, Hq, rows, Dv]`, over all keys that each row may attend.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, *, rows: Tensor, is_causal: bool
    ) -> None:
        q, k, v = (x.cpu().double() for x in (query, key, value))
        B, Hq, L, D = q.shape
        tokens = TokenMask(L, L, is_causal)
        weights = [
            exact_weights(q, k, tokens, b, h, rows, scale=D**-0.5)
            for b in range(B)
            for h in range(Hq)
        ]
        self.rows, self.tokens = rows, tokens
        self.query, self.key = q[:, :, rows], k.repeat_interleave(Hq // k.shape[1], 1)
        self.weights = torch.stack(weights).unflatten(0, (B, Hq))
        self.value = v.repeat_interleave(Hq // k.shape[1], 1)
        self.dense = self.weights @ self.value

    def of_blocks(self, plan: BlockPlan, pool_group: int | None = None) -> Tensor:
        """Attention over the kept blocks, and over pooled entries of the others if they are pooled.
        Comparing with it leaves out the sparsity error."""
        kept = plan.to_mask().cpu()[:, :, self.rows // BLOCK_Q]
        keys = kept.repeat_interleave(BLOCK_K, -1)[..., : self.weights.shape[-1]]
        weights, value = self.weights * keys, self.value
        if pool_group is not None:
            entries, means = self._entries(kept, pool_group)
            weights, value = torch.cat([weights, entries], -1), torch.cat([value, means], -2)
        return weights @ value / weights.sum(-1, keepdim=True)

    def _entries(self, kept: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Weights of pooled entries, in units of the dense weights, and their values."""
        scale = self.query.shape[-1] ** -0.5
        L = self.key.shape[2]
        sizes = block_sizes(L, group).double()
        k, v = (in_blocks(x, -2, group).sum(-2) / sizes[:, None] for x in (self.key, self.value))
        scores = self.query @ self.key.mT * scale
        if self.tokens.is_causal:
            scores = scores.masked_fill(torch.arange(L) > self.rows[:, None], -torch.inf)
        entries = self.query @ k.mT * scale + sizes.log() - scores.logsumexp(-1, keepdim=True)
        # A block is pooled if every row of its query block may attend all of its keys.
        last_key = block_sizes(L, BLOCK_K).cumsum(0) - 1
        is_open = last_key <= self.rows[:, None] // BLOCK_Q * BLOCK_Q
        is_open |= not self.tokens.is_causal
        pools = (~kept & is_open).repeat_interleave(BLOCK_K // group, -1)
        return entries.exp() * pools[..., : len(sizes)], v


def relative_l1(out: Tensor, truth: Tensor) -> float:
    """Σ|out - truth| / Σ|truth|, in fp64."""
    out, truth = out.cpu().double(), truth.cpu().double()
    return float((out - truth).abs().sum() / truth.abs().sum())


class WrongBlocksError(Exception):
    """The backend keeps other blocks than the reference."""


def _check(
    device: str,
    error_of: Callable[[str, Recipe], float],
    name: str,
    recipe_name: str,
    recipe: Recipe,
) -> Check:
    error, verdict, why = None, "passed", ""
    limit = TOLERANCES[recipe.precision]
    with record() as runs:
        try:
            error = error_of(name, recipe)
            if not error < limit:  # also fails for NaN
                verdict, why = "failed", f"the error must be below {limit:g}"
        except Unsupported as refusal:
            verdict, why = "refused", refusal.reasons.get(name, str(refusal))
        except Exception as fault:  # reported as a failed check
            verdict, why = "failed", f"{type(fault).__name__}: {fault}"
    isa, kind = runs[0].isa if runs else None, torch.device(device).type
    return Check(name, recipe.precision, kind, verdict, error, why, isa, recipe_name)


def _error_beside_dense(device: str) -> Callable[[str, Recipe], float]:
    """The larger error of two calls, causal and not, against torch's dense attention in fp64."""
    inputs = structured_qkv(L=LENGTH, device=device)
    q, k, v = (x.cpu().double() for x in inputs)
    dense = {
        causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        for causal in (True, False)
    }

    def error_of(name: str, recipe: Recipe) -> float:
        options: dict[str, Any] = {"enable_gqa": True, "recipe": recipe, "backend": name}
        return max(
            relative_l1(attention(*inputs, is_causal=causal, **options), truth)
            for causal, truth in dense.items()
        )

    return error_of


def _error(inputs: Inputs, truths: Iterable[Truth], name: str, recipe: Recipe) -> float:
    """The largest error against fp64 over the same blocks, which must be those that the reference
    chooses."""
    errors = []
    for truth in truths:
        is_causal = truth.tokens.is_causal
        options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True, "recipe": recipe}
        plan, meant = (
            make_plan(*inputs[:2], backend=backend, value=inputs[2], **options)
            for backend in (name, "reference")
        )
        others = int((plan.to_mask() ^ meant.to_mask()).sum()) / int(meant.counts.sum())
        if others > OTHER_BLOCKS:
            raise WrongBlocksError(f"{others:.0%} of its blocks are not the reference's")
        expected = truth.of_blocks(plan, recipe.pool_group if recipe.pools else None)
        errors.append(relative_l1(attention(*inputs, backend=name, **options), expected))
    return max(errors)
