"""Score the kept query blocks of a head once, for every setting that the search tries.

For each kept query block and key block j, with weights p of the run's own (8-bit) scores:

    outputs[j] = Σ_{k in j} p_k · v_k    [rows, Dv]        sums[j] = Σ_{k in j} p_k    [rows]

The output over any set of key blocks is Σ outputs / Σ sums. The kernels differ from this a little
(16-bit weights, a running maximum), so the settings that are found are run before they count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..backends.forced import forced_blocks
from ..backends.reference.predict import predict_mean
from ..backends.reference.prepare import block_statistics, smooth_keys
from ..call import work_dtype
from ..dispatch import Backend
from ..geometry import BLOCK_K, BLOCK_Q, ROW_GROUP, in_blocks, n_blocks, sampled_rows
from ..qtensor import QTensor, working
from ..recipe import Recipe
from ..tokenmask import EXCLUDED
from .capture import Capture
from .captured_run import exact_output, keys_seen, masked, prepare_capture

MOST_BYTES = 1 << 30
"""Limit of what is held at once. A head above it is scored on fewer groups of rows; a layer above
it has its heads scored again when they are needed again."""


@dataclass(frozen=True)
class ScoredBlock:
    """One kept query block of one head, over the `n` key blocks that it sees.

    outputs `[n, rows, Dv]`, sums and maxima (natural log) `[n, rows]`, truth `[rows, Dv]`.
    """

    outputs: Tensor
    sums: Tensor
    maxima: Tensor
    truth: Tensor

    def only(self, kept: Tensor) -> ScoredBlock:
        """Over some of the key blocks."""
        kept = kept[: len(self.sums)]
        return ScoredBlock(self.outputs[kept], self.sums[kept], self.maxima[kept], self.truth)


@dataclass(frozen=True)
class Prediction:
    """The planner's inputs for one head's kept query blocks, `[blocks, n_k]` each.

    mean: P̂ without a judge. rows: P̂ of the sampled rows. k_similarity `[n_k]`, q_similarity
    `[blocks]`.
    """

    mean: Tensor
    rows: Tensor
    may: Tensor
    forced: Tensor
    q_similarity: Tensor
    k_similarity: Tensor

    @property
    def blend(self) -> Tensor:
        return (self.mean + self.rows) * 0.5


@dataclass(frozen=True)
class ScoredHead:
    """One head on one input, as the search reads it."""

    blocks: tuple[ScoredBlock, ...]
    prediction: Prediction
    right: float
    """Σ|truth| over all scored rows."""


class CaptureScorer:
    """One capture, ready to be scored head by head."""

    def __init__(self, capture: Capture, recipe: Recipe, backend: Backend) -> None:
        self.capture, self.recipe = capture, recipe
        self.exact = exact_output(capture)
        self.work = work_dtype(capture.query.dtype)
        operands = prepare_capture(capture, recipe, backend).operands
        numbers = (operands.query, operands.key, operands.value)
        self.q, self.k, self.v = (self._numbers(x) for x in numbers)
        self.smooth, _ = smooth_keys(capture.key)

    def _numbers(self, x: Tensor | QTensor) -> Tensor:
        """What the kernels compute with, `[H, L, D]`."""
        if isinstance(x, QTensor):
            return x.dequantize()[0]
        precision = "exact" if self.recipe.precision == "exact" else "half"
        return working(x, precision)[0]

    def score(self, h: int, thin: int = 1) -> ScoredHead:
        """One head; of the groups of rows every `thin`-th is scored."""
        blocks, rows = [], []
        for i in range(len(self.capture.starts)):
            block, mass = self._block(h, i, thin)
            blocks.append(block)
            rows.append(mass)
        right = sum(float(block.truth.abs().sum(dtype=torch.float64)) for block in blocks)
        return ScoredHead(tuple(blocks), self._prediction(h, torch.stack(rows)), right)

    def _block(self, h: int, i: int, thin: int) -> tuple[ScoredBlock, Tensor]:
        """The block, and the mass that its sampled rows give to every key block `[n_k]`."""
        capture, tokens = self.capture, self.capture.tokens(i)
        rows, stop = capture.rows(i), keys_seen(tokens)
        kv = h // capture.group
        scores = masked((self.q[h, rows] @ self.k[kv, :stop].mT) * capture.scale, tokens, h)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top.masked_fill_(top == -math.inf, 0.0)).exp_()
        by_block = cut(weights, -1, BLOCK_K)
        sums = by_block.sum(-1)
        sampled = sums[sampled_rows(len(sums), self.recipe.sample_rows)]
        total = sampled.sum(-1, keepdim=True)
        mass = torch.where(total > 0, sampled / total, 0.0).sum(0) / (total > 0).sum().clamp(min=1)
        n_k = n_blocks(tokens.Lk, BLOCK_K)
        whole_mass = mass.new_zeros(n_k)
        whole_mass[: len(mass)] = mass
        group = torch.arange(len(sums), device=sums.device) // ROW_GROUP
        # Other groups in every block, so that all places of a block are seen; at least one.
        first = i % thin % n_blocks(len(sums), ROW_GROUP)
        chosen = (group % thin == first).nonzero().squeeze(1) if thin > 1 else slice(None)
        by_block = by_block[chosen]
        outputs = by_block.transpose(0, 1) @ cut(self.v[kv, :stop], -2, BLOCK_K)
        maxima = cut(scores, -1, BLOCK_K, fill=-math.inf).amax(-1)[chosen]
        truth = self.exact[h, rows][chosen]
        return ScoredBlock(
            outputs, sums[chosen].T.contiguous(), maxima.T.contiguous(), truth
        ), whole_mass

    def _prediction(self, h: int, rows: Tensor) -> Prediction:
        kv = h // self.capture.group
        (q_pooled, q_similarity), (k_pooled, k_similarity) = self._statistics
        may, forced = self._places(h)
        pooled = q_pooled[:, h : h + 1], k_pooled[:, kv : kv + 1]
        Lk, scale = self.capture.key.shape[2], self.capture.scale
        mean = predict_mean(*pooled, may[None, None], Lk=Lk, scale=scale)[0, 0]
        return Prediction(mean, rows.float(), may, forced, q_similarity[0, h], k_similarity[0, kv])

    @cached_property
    def _statistics(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return block_statistics(self.capture.query, BLOCK_Q), block_statistics(self.smooth, BLOCK_K)

    def _places(self, h: int) -> tuple[Tensor, Tensor]:
        """`(may, forced)` of every kept block, bool `[blocks, n_k]`."""
        device, may, forced = self.capture.query.device, [], []
        for i in range(len(self.capture.starts)):
            tokens = self.capture.tokens(i)
            kinds = tokens.block_kinds(device)
            may.append(kinds[0, h if kinds.shape[1] > 1 else 0, 0] != EXCLUDED)
            forced.append(forced_blocks(tokens, self.recipe, device)[0])
        return torch.stack(may), torch.stack(forced)


def cut(x: Tensor, dim: int, block: int, *, fill: float = 0.0) -> Tensor:
    """`in_blocks`, without its copy where there is no tail."""
    if x.shape[dim] % block == 0:
        return x.unflatten(dim, (-1, block))
    return in_blocks(x, dim, block, fill=fill)


class LayerScorer:
    """The heads of a layer on every input, held in memory as far as `MOST_BYTES` allows.

    scored: how often the whole layer was scored.
    """

    def __init__(self, scorers: Sequence[CaptureScorer]) -> None:
        self.scorers = scorers
        captures = [scorer.capture for scorer in scorers]
        sizes = [c.query.shape[2] * c.key.shape[2] * c.value.shape[3] for c in captures]
        of_a_head = 4 * sum(sizes) // BLOCK_K
        self.thin = min(max(1, -(-of_a_head // MOST_BYTES)), BLOCK_Q // ROW_GROUP)
        self._held: dict[int, list[ScoredHead]] = {}
        self._room = MOST_BYTES // of_a_head
        self._times = [0] * captures[0].Hq

    @property
    def scored(self) -> int:
        return max(self._times)

    def head(self, h: int) -> list[ScoredHead]:
        found = self._held.get(h)
        if found is None:
            self._times[h] += 1
            found = [scorer.score(h, self.thin) for scorer in self.scorers]
            if len(self._held) < self._room:
                self._held[h] = found
        return found
