"""NOUN the four stages of a backend: prepare → predict → select → attend.

    prepare   one pass over query, key and value: block statistics, 8-bit codes, scales
    predict   the mass map: how much of its attention each query block gives each key block
    select    the blocks that are kept, a `BlockPlan`
    attend    online softmax over the kept blocks

`predict` and `select` are apart because a caller on several machines reduces the mass map between
them. A module or an object that has all of them satisfies `Stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from .blockplan import BlockPlan
from .call import Call, Inputs
from .geometry import BLOCK_Q
from .qtensor import Operands, Pooled, QTensor, heads_of
from .tokenmask import TokenMask


@dataclass(frozen=True)
class Statistics:
    """Pooled tokens `[B, H, n, D]` and self-similarities `[B, H, n]` of q and k, fp32.

    None where the recipe does not need them.
    """

    q_pooled: Tensor | None = None
    k_pooled: Tensor | None = None
    q_similarity: Tensor | None = None
    k_similarity: Tensor | None = None


@dataclass(frozen=True)
class PreparedQueries:
    """Queries as the later stages read them.

    rows: the caller's tensor, or its 8-bit codes. own: the caller's tensor, which `KeepError`
    measures with. lse_shift: fp32 `[B, Hq, Lq]`, `scale * q . mean key`, where smoothed keys were
    coded; the LSE adds it back. pooled `[B, Hq, n_q, D]`, similarity `[B, Hq, n_q]`: block
    statistics, fp32; None where the recipe needs none.
    """

    rows: Tensor | QTensor
    own: Tensor | None = None
    lse_shift: Tensor | None = None
    pooled: Tensor | None = None
    similarity: Tensor | None = None

    def blocks(self, start: int, stop: int) -> PreparedQueries:
        """Query blocks `start … stop-1` alone."""
        rows, blocks = slice(start * BLOCK_Q, stop * BLOCK_Q), slice(start, stop)
        return replace(
            self,
            rows=_rows(self.rows, rows),
            own=None if self.own is None else self.own[:, :, rows],
            lse_shift=_cut(self.lse_shift, rows),
            pooled=_cut(self.pooled, blocks),
            similarity=_cut(self.similarity, blocks),
        )


@dataclass(frozen=True)
class PreparedKeys:
    """Keys and values as the later stages read them; they may outlive the queries of one call.

    key, value: the caller's tensors, or 8-bit codes. own_key, own_value: the caller's tensors.
    mean: fp32 `[B, Hk, D]`, what smoothing subtracted from the keys; None where nothing was
    smoothed. pooled, similarity: block statistics as of the queries. entries: what skipped blocks
    contribute; None if nothing.
    """

    key: Tensor | QTensor
    value: Tensor | QTensor
    own_key: Tensor | None = None
    own_value: Tensor | None = None
    mean: Tensor | None = None
    pooled: Tensor | None = None
    similarity: Tensor | None = None
    entries: Pooled | None = None


@dataclass(frozen=True)
class Prepared:
    """What the later stages read. query, key, value: the caller's own, which `KeepError` measures
    with. pooled: what skipped blocks contribute; None where they contribute nothing. key_mean: fp32
    `[B, Hk, D]`, where keys were smoothed."""

    operands: Operands
    statistics: Statistics = Statistics()
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    pooled: Pooled | None = None
    key_mean: Tensor | None = None

    @property
    def queries(self) -> PreparedQueries:
        read, found = self.operands, self.statistics
        return PreparedQueries(
            read.query, self.query, read.lse_shift, found.q_pooled, found.q_similarity
        )

    @property
    def keys(self) -> PreparedKeys:
        read, found = self.operands, self.statistics
        return PreparedKeys(
            read.key,
            read.value,
            self.key,
            self.value,
            self.key_mean,
            found.k_pooled,
            found.k_similarity,
            self.pooled,
        )

    def query_blocks(self, start: int, stop: int) -> Prepared:
        """The same keys and values with query blocks `start … stop-1` alone."""
        rows, blocks = slice(start * BLOCK_Q, stop * BLOCK_Q), slice(start, stop)
        shift, found = self.operands.lse_shift, self.statistics
        operands = replace(
            self.operands,
            query=_rows(self.operands.query, rows),
            lse_shift=None if shift is None else shift[:, :, rows].contiguous(),
        )
        statistics = replace(
            found,
            q_pooled=_cut(found.q_pooled, blocks),
            q_similarity=_cut(found.q_similarity, blocks),
        )
        query = None if self.query is None else self.query[:, :, rows]
        return replace(self, operands=operands, statistics=statistics, query=query)

    def heads(self, keys: slice, queries: slice) -> Prepared:
        """Some key heads and their query heads, to attend."""
        own = self.operands
        shift = own.lse_shift
        return Prepared(
            Operands(
                heads_of(own.query, queries),
                heads_of(own.key, keys),
                heads_of(own.value, keys),
                None if shift is None else shift[:, queries].contiguous(),
            ),
            pooled=None if self.pooled is None else self.pooled.heads(keys),
        )


def raised_key_heads(plan: BlockPlan, Hk: int) -> list[bool]:
    """Key heads, of `Hk`, any of whose query heads run in the caller's own precision."""
    return [False] * Hk if plan.raised is None else by_key_head(plan.raised, Hk)


def by_key_head(raised: Tensor, Hk: int) -> list[bool]:
    """Query heads `[Hq]` to key heads, any of whose query heads are among them."""
    return [bool(x) for x in raised.view(Hk, -1).any(1).tolist()]


@dataclass(frozen=True)
class Attended:
    """out `[B, Hq, Lq, Dv]`; lse `[B, Hq, Lq]`, natural log over the kept keys; pv_skips int32
    `[B, Hq, n_q]`: row groups x blocks that the second filter skipped, in the backend's groups."""

    out: Tensor
    lse: Tensor
    pv_skips: Tensor


@dataclass(frozen=True)
class SomeOf:
    """Sequences of a pack. numbers: those to attend, ascending. routed: calls of those among them
    that `auto` chose, by number; each is left out if its plan shows that dense attention is
    faster. into: the out and lse of the whole pack, whose rows are written."""

    numbers: list[int]
    routed: Mapping[int, Call]
    into: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AttendedPack:
    """Packed sequences: out `[T, Hq, Dv]`, lse `[Hq, T]`. plans: makes each sequence's plan, with
    its `pv_skips`, for the record. left: numbers of sequences that were left out once planned;
    their rows, and those of sequences that were not asked for, are not written."""

    out: Tensor
    lse: Tensor
    plans: Callable[[], list[tuple[BlockPlan, Tensor]]]
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class Saved:
    """What the gradient reads: inputs and output of the forward, and gradients of the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    grad_out: Tensor
    grad_lse: Tensor


Gradients = tuple[Tensor, Tensor, Tensor]


class Stages(Protocol):
    """What a backend implements. Inputs are checked and on one device; autograd and autocast are
    off. `call` holds shapes, scale and recipe; `tokens` which pairs may attend."""

    def prepare(self, call: Call, inputs: Inputs, *, to_plan: bool, to_attend: bool) -> Prepared:
        """One pass. to_plan: statistics (and codes) that predict reads; to_attend: the operands
        of attend, and with `skipped="pool"` the pooled entries. Without a value, what planning
        alone needs."""
        ...

    def predict(self, call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
        """The mass map, fp32 `[B, Hq, n_q, n_k]`; a row that is not finite is not known."""
        ...

    def select(
        self, call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask
    ) -> BlockPlan:
        """The kept set by the recipe; no mass map for `KeepAll`."""
        ...

    def attend(
        self, call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask
    ) -> Attended:
        """The output over the blocks of a plan, in `call.dtype`; where there are pooled entries,
        with those of the blocks that are skipped and wholly open."""
        ...

    def backward(self, call: Call, saved: Saved, plan: BlockPlan, tokens: TokenMask) -> Gradients:
        """Gradients of query, key and value for `"half"` and `"exact"`; the plan is constant."""
        ...


class KeySums(Protocol):
    """What a backend whose mean key can be made of parts implements besides `Stages`."""

    def sum_keys(self, key: Tensor) -> Tensor:
        """Of each key block, `[B, Hk, n, D]`: what the mean is made of."""
        ...

    def mean_of_sums(self, sums: Tensor, n_keys: int) -> Tensor:
        """The mean `[B, Hk, D]` that `prepare` computes of all keys, of the sums of all blocks."""
        ...


class PackedStages(Protocol):
    """What a backend that attends packed sequences at once implements besides `Stages`."""

    def why_not_packed(self, call: Call, *, whole: bool) -> str | None:
        """Why sequences of this call run one after another, or None. whole: no sequence of the
        pack is left out."""
        ...

    def faster_than_dense(self, calls: Mapping[int, Call]) -> Mapping[int, str]:
        """Of sequences that keep every block, those that were measured to be faster in one pack
        than dense attention of each, and why."""
        ...

    def attend_packed(
        self,
        call: Call,
        inputs: Inputs,
        cuts: tuple[list[int], list[int]],
        align: str,
        stage: Callable[[str], AbstractContextManager[None]],
        some: SomeOf | None = None,
    ) -> AttendedPack:
        """All stages over the whole pack, viewed as one sequence `[1, H, T, D]`. stage: times what
        is run inside of it. some: the sequences to attend; None attends all."""
        ...


def _rows(x: Tensor | QTensor, rows: slice) -> Tensor | QTensor:
    if not isinstance(x, QTensor):
        return x[:, :, rows].contiguous()
    per = x.rows_per_scale
    assert BLOCK_Q % per == 0, "scales are shared across query blocks"
    scales = slice(rows.start // per, -(-rows.stop // per))
    return QTensor(x.codes[:, :, rows].contiguous(), x.scale[:, :, scales].contiguous(), per)


def _cut(x: Tensor | None, blocks: slice) -> Tensor | None:
    return None if x is None else x[:, :, blocks].contiguous()
