"""Score the kept query blocks of a head once, for every setting that the search tries.

For each kept query block and key block j, with weights p of the run's own (8-bit) scores:

    outputs[j] = Σ_{k in j} p_k · v_k    [rows, Dv]        sums[j] = Σ_{k in j} p_k    [rows]

The output over any set of key blocks is Σ outputs / Σ sums. The kernels differ from this a little
(16-bit weights, a running maximum), so the settings that are found are run before they count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparge import BLOCK_K, BLOCK_Q, Backend, KeepMass, QTensor, Recipe
from sparge.rules.forced_blocks import forced_blocks
from sparge.values.geometry import ROW_GROUP, in_blocks, n_blocks, sampled_rows
from sparge.values.qtensor import working
from sparge.values.tokenmask import EXCLUDED

from .capture import Capture, call_of, exact_output, keys_seen, prepare_capture

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
class ScoredHead:
    """One head on one input, as the search reads it.

    right: Σ|truth| over all scored rows. mean, rows: P̂ without a judge, and of the sampled rows;
    they, may and forced are `[blocks, n_k]`; q_similarity `[blocks]`, k_similarity `[n_k]`.
    """

    blocks: tuple[ScoredBlock, ...]
    right: float
    mean: Tensor
    rows: Tensor
    may: Tensor
    forced: Tensor
    q_similarity: Tensor
    k_similarity: Tensor


class CaptureScorer:
    """One capture, ready to be scored head by head."""

    def __init__(self, capture: Capture, recipe: Recipe, backend: Backend) -> None:
        self.capture, self.recipe = capture, recipe
        self.exact = exact_output(capture)
        # Has the stages compute the block statistics; the numbers to attend with are the same.
        judged = replace(recipe, keep=KeepMass(), predictor="mean", min_similarity=-1.0)
        prepared = prepare_capture(capture, judged, backend)
        queries, keys = prepared.queries, prepared.keys
        self.q, self.k, self.v = (self._numbers(x) for x in (queries.rows, keys.key, keys.value))
        assert queries.similarity is not None
        assert keys.similarity is not None
        self.q_similarity, self.k_similarity = queries.similarity[0], keys.similarity[0]
        unjudged = replace(judged, min_similarity=None)
        each = [
            backend.stages().predict(
                call_of(capture, unjudged, i),
                replace(prepared, queries=queries.blocks(i, i + 1)),
                capture.tokens(i),
            )
            for i in range(len(capture.starts))
        ]
        self.mean = torch.cat(each, dim=2)[0]

    def _numbers(self, x: Tensor | QTensor) -> Tensor:
        """What the kernels compute with, `[H, L, D]`."""
        if isinstance(x, QTensor):
            return x.dequantize()[0]
        return working(x, "exact" if self.recipe.precision == "exact" else "half")[0]

    def score(self, h: int, thin: int = 1) -> ScoredHead:
        """One head; of the groups of rows every `thin`-th is scored."""
        each = [self._block(h, i, thin) for i in range(len(self.capture.starts))]
        blocks, rows, may, forced = zip(*each, strict=True)
        right = sum(float(block.truth.abs().sum(dtype=torch.float64)) for block in blocks)
        return ScoredHead(
            blocks=blocks,
            right=right,
            mean=self.mean[h],
            rows=torch.stack(rows).float(),
            may=torch.stack(may),
            forced=torch.stack(forced),
            q_similarity=self.q_similarity[h],
            k_similarity=self.k_similarity[h // self.capture.group],
        )

    def _block(self, h: int, i: int, thin: int) -> tuple[ScoredBlock, Tensor, Tensor, Tensor]:
        """The block; for every key block `[n_k]` the mass that its sampled rows give, and whether
        it may be attended and is forced."""
        capture, tokens = self.capture, self.capture.tokens(i)
        rows, stop = capture.rows(i), keys_seen(tokens)
        kv = h // capture.group
        scores = (self.q[h, rows] @ self.k[kv, :stop].mT) * capture.scale
        allowed, bias = tokens.region(0, h, slice(0, tokens.Lq), slice(0, stop), scores.device)
        scores = scores if bias is None else scores + bias.to(scores.dtype)
        scores = scores if allowed is None else scores.masked_fill_(~allowed, -math.inf)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top.masked_fill_(top == -math.inf, 0.0)).exp_()
        by_block = split_blocks(weights, -1, BLOCK_K)
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
        outputs = by_block.transpose(0, 1) @ split_blocks(self.v[kv, :stop], -2, BLOCK_K)
        maxima = split_blocks(scores, -1, BLOCK_K, fill=-math.inf).amax(-1)[chosen]
        truth = self.exact[h, rows][chosen]
        block = ScoredBlock(outputs, sums[chosen].T.contiguous(), maxima.T.contiguous(), truth)
        kinds = tokens.block_kinds(scores.device)
        may = kinds[0, h if kinds.shape[1] > 1 else 0, 0] != EXCLUDED
        return block, whole_mass, may, forced_blocks(tokens, self.recipe, scores.device)[0]


def split_blocks(x: Tensor, dim: int, block: int, *, fill: float = 0.0) -> Tensor:
    """`in_blocks`, without its copy where there is no tail."""
    if x.shape[dim] % block == 0:
        return x.unflatten(dim, (-1, block))
    return in_blocks(x, dim, block, fill=fill)


class LayerScorer:
    """The heads of a layer on every input, held in memory as far as `MOST_BYTES` allows."""

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
        """How often the whole layer was scored."""
        return max(self._times)

    def head(self, h: int) -> list[ScoredHead]:
        found = self._held.get(h)
        if found is None:
            self._times[h] += 1
            found = [scorer.score(h, self.thin) for scorer in self.scorers]
            if len(self._held) < self._room:
                self._held[h] = found
        return found
