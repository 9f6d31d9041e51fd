"""A run of the demo as data: one document, read with dense attention and with sparge."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from sparge import Recipe

FORMAT = "sparge.showcase/2"


@dataclass(frozen=True)
class Reading:
    """One variant's results.

    seconds: to the first token (the prefill and one row of logits), one per round. attention: the
    part of it spent in attention; stages: that of the first round, by stage of sparge.
    perplexity: over all tokens of the prompt but the first. answer: the text it wrote.
    ran: how often each way of attention ran in the prefill. fallbacks: reasons why calls were not
    sparse, with counts, the answer's tokens included.
    """

    seconds: tuple[float, ...]
    attention: tuple[float, ...]
    stages: Mapping[str, float]
    perplexity: float
    answer: str
    found: bool
    ran: Mapping[str, int]
    fallbacks: Mapping[str, int]

    @property
    def first_token(self) -> float:
        return statistics.median(self.seconds)

    @property
    def attention_seconds(self) -> float:
        return statistics.median(self.attention)

    @property
    def attention_share(self) -> float:
        pairs = zip(self.attention, self.seconds, strict=True)
        return statistics.median(inside / whole for inside, whole in pairs)

    def to_dict(self) -> dict[str, Any]:
        return _plain(self, "first_token", "attention_seconds", "attention_share")


@dataclass(frozen=True)
class AttentionMap:
    """The exact attention of one head, and the blocks that its plan keeps.

    mass: `[n_q, n_k]`, the share of a query block's attention that goes to a key block, mean over
    its rows. kept: the plan as a mask. error: relative L1 of the head's output on sampled rows.
    """

    layer: int
    head: int
    density: float
    mass_kept: float
    error: float
    mass: Tensor
    kept: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Without the two tensors, which are for the figures."""
        return {name: v for name, v in _plain(self).items() if name not in ("mass", "kept")}


@dataclass(frozen=True)
class HiddenFact:
    """The fact in the document, the question, and the given beginning of the answer."""

    fact: str
    question: str
    prefix: str
    answer: str
    depth: int
    token: int


@dataclass(frozen=True)
class Showcase:
    """order: the variants in the order they ran.

    density: kept / allowed blocks over all attention calls, a dense call counting as 1;
    density_by_head: None for a layer that ran dense. error: relative L1 of attention's output,
    mean over the heads of `error_layers`; None without any.
    agreement: share of tokens with the same most likely next token; kl: of dense from sparge.
    """

    command: str
    model: Mapping[str, Any]
    text: Mapping[str, Any]
    where: Mapping[str, Any]
    dtype: str
    recipe: Recipe
    tokens: int
    needle: HiddenFact
    order: tuple[str, ...]
    warmup_tokens: int
    dense: Reading
    sparge: Reading
    density: float
    density_by_head: tuple[tuple[float, ...] | None, ...]
    error: float | None
    error_layers: tuple[int, ...]
    agreement: float
    kl: float
    heads: tuple[AttentionMap, ...]
    took_seconds: float

    @property
    def rounds(self) -> int:
        return len(self.dense.seconds)

    @property
    def speedup(self) -> float:
        """Of the time to the first token; ratios are taken within a round."""
        return _ratio(self.dense.seconds, self.sparge.seconds)

    @property
    def attention_speedup(self) -> float:
        return _ratio(self.dense.attention, self.sparge.attention)

    @property
    def limit(self) -> float:
        """The speed-up if attention took no time at all."""
        return 1 / (1 - self.dense.attention_share)

    @property
    def perplexity_change(self) -> float:
        return self.sparge.perplexity / self.dense.perplexity - 1

    def to_dict(self) -> dict[str, Any]:
        derived = ("rounds", "speedup", "attention_speedup", "limit", "perplexity_change")
        return {"format": FORMAT, **_plain(self, *derived)} | {
            "recipe": self.recipe.to_dict(),
            "needle": _plain(self.needle),
            "dense": self.dense.to_dict(),
            "sparge": self.sparge.to_dict(),
            "heads": [head.to_dict() for head in self.heads],
        }


def _ratio(dense: tuple[float, ...], sparge: tuple[float, ...]) -> float:
    return statistics.median(d / s for d, s in zip(dense, sparge, strict=True))


def _plain(item: Any, *derived: str) -> dict[str, Any]:
    """The fields of a dataclass, and derived properties, by name."""
    return {name: getattr(item, name) for name in (*(f.name for f in fields(item)), *derived)}
