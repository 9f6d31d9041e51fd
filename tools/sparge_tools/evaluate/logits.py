"""The next-token distributions of two runs of one model, compared a few rows at a time.

The logits of 8192 tokens over 49152 words take 1.6 GB in fp32. Hidden states are small: they are
kept instead, and go through the output layer in slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256  # rows of logits in memory at once
PROBE = 8  # tokens used to test whether the output layer alone makes the logits


class Outputs:
    """The logits of one sequence, [rows, words] for any range of rows; cache: its keys and values.

    kept: hidden states if there is a `head` that makes logits of them, else logits.
    """

    def __init__(self, kept: Tensor, head: Any | None, cache: Any = None) -> None:
        self.kept, self.head, self.cache = kept, head, cache

    def rows(self, start: int, stop: int | None = None) -> Tensor:
        return self.at(slice(start, stop))

    def at(self, rows: slice | Tensor) -> Tensor:
        part = self.kept[rows]
        return part if self.head is None else self.head(part)


@torch.inference_mode()
def outputs_of(model: Any, ids: Tensor, *, split: bool, use_cache: bool = False) -> Outputs:
    """Outputs of a sequence [1, L]: hidden states if `split`, else logits."""
    if not split:
        done = model(ids, use_cache=use_cache)
        return Outputs(done.logits[0], None, done.past_key_values)
    done = model.base_model(ids, use_cache=use_cache)
    hidden = done.last_hidden_state[0]
    return Outputs(hidden, model.get_output_embeddings(), done.past_key_values)


@torch.inference_mode()
def splits(model: Any, ids: Tensor) -> bool:
    """Whether the logits are the output layer applied to the last hidden state.

    Some models scale or cap them. A few tokens are compared.
    """
    few, head = ids[:, :PROBE], model.get_output_embeddings()
    if head is None:
        return False
    try:
        own = head(model.base_model(few, use_cache=False).last_hidden_state)
    except (AttributeError, TypeError, RuntimeError):
        return False
    whole = model(few, use_cache=False).logits
    if own.shape != whole.shape:
        return False
    own, whole = own.float(), whole.float()
    return bool((own - whole).abs().max() <= 0.01 * whole.abs().max())


@dataclass(frozen=True)
class Comparison:
    """fp64 numbers per predicted token. dense, sparge: losses. agree: same most likely token."""

    dense: Tensor
    sparge: Tensor
    kl: Tensor
    agree: Tensor


@torch.inference_mode()
def compare(dense: Outputs, sparge: Outputs, ids: Tensor) -> Comparison:
    """ids: [1, L]; row t predicts token t + 1, so there are L - 1 of each number."""
    targets = ids[0, 1:]
    parts: list[list[Tensor]] = [[], [], [], []]
    for start in range(0, len(targets), ROWS):
        stop = min(start + ROWS, len(targets))
        p, q = (F.log_softmax(x.rows(start, stop).float(), -1) for x in (dense, sparge))
        wanted = targets[start:stop, None]
        numbers = (
            -p.gather(1, wanted)[:, 0],
            -q.gather(1, wanted)[:, 0],
            _kl(p, q),
            p.argmax(-1) == q.argmax(-1),
        )
        for part, number in zip(parts, numbers, strict=True):
            part.append(number.double().cpu())
    return Comparison(*(torch.cat(part) for part in parts))


@torch.inference_mode()
def divergence(dense: Outputs, sparge: Outputs, rows: Tensor) -> Tensor:
    """KL(dense ‖ sparge) of some rows, fp64; cheaper than `compare`, which takes them all."""
    parts = []
    for some in rows.split(ROWS):
        p, q = (F.log_softmax(x.at(some).float(), -1) for x in (dense, sparge))
        parts.append(_kl(p, q).double().cpu())
    return torch.cat(parts)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Rounding can make the divergence of equal distributions slightly negative."""
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1).clamp(min=0)
