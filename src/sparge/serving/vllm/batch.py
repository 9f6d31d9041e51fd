"""One step of vLLM's: which requests it holds, and those that are attended here as one pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...values.call import BLOCK_Q, allowed_blocks

Gather = Callable[[int, Tensor, Tensor], None]
"""Copies the cached keys and values of request i into `[Lk, Hk, D]` tensors."""


@dataclass(frozen=True)
class Request:
    """Query rows `start` to `stop` of a step; they are the last of `Lk` tokens."""

    start: int
    stop: int
    Lk: int

    @property
    def Lq(self) -> int:
        return self.stop - self.start

    @property
    def fresh(self) -> bool:
        """Whether every key is in this step, none in the cache alone."""
        return self.Lq == self.Lk

    @property
    def lead(self) -> int:
        """Rows between the start of the first query's block, counted from the prompt's first token,
        and that query."""
        return (self.Lk - self.Lq) % BLOCK_Q

    @property
    def blocks(self) -> int:
        """Key blocks that the query blocks of this prefill may read, in one head."""
        Lq = self.Lq + self.lead
        return allowed_blocks(Lq, self.Lk, is_causal=True, offset=self.Lk - Lq)


@dataclass(frozen=True)
class Step:
    """The requests of a step. decode_only: none has more than one query."""

    requests: tuple[Request, ...]
    decode_only: bool

    @classmethod
    def of(cls, query_starts: Sequence[int], seq_lens: Sequence[int]) -> Step:
        pairs = zip(query_starts, query_starts[1:], seq_lens, strict=False)
        requests = tuple(Request(*each) for each in pairs)
        return cls(requests, all(each.Lq <= 1 for each in requests))


def rows_of(requests: Sequence[Request], device: torch.device) -> slice | Tensor:
    """Rows of some requests among those of a step: a slice where they lie together."""
    if _lie_together(requests):
        return slice(requests[0].start, requests[-1].stop)
    parts = [torch.arange(each.start, each.stop) for each in requests]
    return torch.cat(parts).to(device)


@dataclass(frozen=True)
class PromptPack:
    """Requests packed for `attention_varlen`, with `causal_align="bottom_right"`.

    Query blocks are those of the whole prompt, wherever a chunk begins: a chunk that begins inside
    of a block has copies of its first rows in front, up to the start of that block, whose results
    are not used. So no block of the prompt is ever counted from another row.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cuts_q: list[int]
    cuts_k: list[int]
    requests: tuple[Request, ...]

    def write(self, result: Tensor, output: Tensor) -> None:
        """Copy the rows of the result to those of the step. Both are `[T, Hq, D]`."""
        for request, start in zip(self.requests, self.cuts_q, strict=False):
            rows = result[start + request.lead : start + request.lead + request.Lq]
            output[request.start : request.stop] = rows


def make_pack(
    step: Step, chosen: Sequence[int], query: Tensor, key: Tensor, value: Tensor, gather: Gather
) -> PromptPack:
    """Requests `chosen` of a step as one pack; keys come from the step or from the cache. Rows that
    lie together are not copied."""
    requests = tuple(step.requests[i] for i in chosen)
    cuts_q = list(accumulate((each.Lq + each.lead for each in requests), initial=0))
    cuts_k = list(accumulate((each.Lk for each in requests), initial=0))
    together, rows = _lie_together(requests), slice(requests[0].start, requests[-1].stop)
    if together and not any(each.lead for each in requests):
        queries = query[rows]
    else:
        queries = torch.cat([part for each in requests for part in _led(each, query)])
    if together and all(each.fresh for each in requests):
        return PromptPack(queries, key[rows], value[rows], cuts_q, cuts_k, requests)
    shape = (cuts_k[-1], *key.shape[1:])
    keys, values = key.new_empty(shape), value.new_empty(shape)
    for i, each, (start, stop) in zip(chosen, requests, pairwise(cuts_k), strict=True):
        if each.fresh:
            keys[start:stop] = key[each.start : each.stop]
            values[start:stop] = value[each.start : each.stop]
        else:
            gather(i, keys[start:stop], values[start:stop])
    return PromptPack(queries, keys, values, cuts_q, cuts_k, requests)


def _led(request: Request, query: Tensor) -> list[Tensor]:
    """The rows of a request behind copies of its first ones, as far as its block began before."""
    rows = query[request.start : request.stop]
    if not request.lead:
        return [rows]
    return [rows[torch.arange(request.lead, device=query.device) % request.Lq], rows]


def _lie_together(requests: Sequence[Request]) -> bool:
    return all(a.stop == b.start for a, b in pairwise(requests))
