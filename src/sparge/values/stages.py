"""The stages of a backend: prepare keys, then queries → predict → select → attend.

    prepare_keys      one pass over key and value: block statistics, 8-bit codes, scales
    prepare_queries   one pass over the query, likewise
    predict           the mass map: how much of its attention each query block gives each key block
    select            the blocks that are kept, a `BlockPlan`
    attend            online softmax over the kept blocks

Keys and queries are prepared apart because they are needed at different times and places: a ring
attends the keys of other ranks, and prepared keys may outlive the queries of one call. `predict`
and `select` are apart because a caller on several machines reduces the mass map between them. A
module or an object that has all of them satisfies `Stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..support.ordered_sums import mean_over_rows
from .blockplan import BlockPlan
from .call import BLOCK_Q, Call, Inputs, block_sizes, half_dtype, in_blocks, n_blocks, work_dtype
from .tokenmask import TokenMask

STAGES = ("prepare", "predict", "select", "attend")
"""As the seconds of a record name them."""
WAITED = "waited"
"""Among the seconds of a whole call: for threads that other programs kept from running."""
CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class QTensor:
    """`x ≈ codes · scale`: symmetric 8-bit codes and the granularity of their scales.

    codes: int8, or fp8 for values on GPUs that multiply it, `[B, H, L, D]`.
    scale: fp32; `[B, H, ceil(L / rows_per_scale)]`, or with `per_channel` one more `D` at the end.
    rows_per_scale: consecutive rows that share a scale; 1 is one scale per token.
    A scale that is not finite marks rows whose numbers were not finite.
    """

    codes: Tensor
    scale: Tensor
    rows_per_scale: int = 1
    per_channel: bool = False

    def __post_init__(self) -> None:
        for name, x, dtypes, words in (
            ("codes", self.codes, CODES, "int8 or fp8"),
            ("scale", self.scale, (torch.float32,), "float32"),
        ):
            if not isinstance(x, Tensor) or x.dtype not in dtypes:
                came = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name} must be {words}, got {came}")
        if isinstance(self.rows_per_scale, bool) or not isinstance(self.rows_per_scale, int):
            raise TypeError(f"rows_per_scale must be a whole number, got {self.rows_per_scale!r}")
        if self.rows_per_scale < 1:
            raise ValueError(f"rows_per_scale must be at least 1, got {self.rows_per_scale}")
        if self.codes.dim() != 4:
            raise ValueError(f"codes must be [B, H, L, D], got shape {list(self.codes.shape)}")
        if self.scale.device != self.codes.device:
            raise ValueError(f"codes are on {self.codes.device}, scale on {self.scale.device}")
        B, H, L, D = self.codes.shape
        groups = (B, H, n_blocks(L, self.rows_per_scale))
        needed = (*groups, D) if self.per_channel else groups
        if tuple(self.scale.shape) != needed:
            raise ValueError(
                f"scale must have shape {needed} for codes {tuple(self.codes.shape)} and "
                f"rows_per_scale {self.rows_per_scale}, got {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def granularity(self) -> str:
        rows = "token" if self.rows_per_scale == 1 else f"{self.rows_per_scale} tokens"
        return f"one scale per {rows}" + (" and channel" if self.per_channel else "")

    def row_scale(self) -> Tensor:
        """The scale of every row, `[B, H, L]` or `[B, H, L, D]`."""
        if self.rows_per_scale == 1:
            return self.scale
        return self.scale.repeat_interleave(self.rows_per_scale, dim=2)[:, :, : self.shape[2]]

    def dequantize(self) -> Tensor:
        scale = self.row_scale()
        return self.codes.float() * (scale if self.per_channel else scale.unsqueeze(-1))


@dataclass(frozen=True)
class Pooled:
    """Means of `group` consecutive keys and values each, for the blocks that are skipped.

    key `[B, Hk, n, D]`, value `[B, Hk, n, Dv]`, `n = ceil(Lk / group)`; in the run's precision.
    Entry `e` stands for keys `e · group …` of key block `e · group // 64`; the last entry for fewer
    keys where `Lk` is no multiple. Means that are not finite are zero here: their block is known
    not to be finite by its own keys and values.
    """

    key: Tensor | QTensor
    value: Tensor | QTensor
    group: int


def group_means(x: Tensor, group: int) -> Tensor:
    """Mean of each `group` rows, fp32 (fp64 for fp64 inputs); 0 where it is not finite."""
    x = x.to(work_dtype(x.dtype))
    means = mean_over_rows(in_blocks(x, -2, group), block_sizes(x.shape[2], group, x.device))
    return means.nan_to_num(0.0, 0.0, 0.0)


def finite_rows(x: Tensor | QTensor) -> Tensor:
    """Which rows hold only finite numbers, bool `[B, H, L]`."""
    if isinstance(x, QTensor):
        finite = torch.isfinite(x.row_scale())
        return finite.all(-1) if x.per_channel else finite
    return torch.isfinite(x).all(-1)


def working(x: Tensor, precision: str) -> Tensor:
    """The numbers a precision computes with, held in fp32 (fp64 for fp64 in `"exact"`)."""
    if precision == "exact":
        return x if x.dtype == torch.float64 else x.float()
    half, x = half_dtype(x.dtype), x.float()
    # Finite fp32 values beyond the range of 16 bits become its largest number, not infinity.
    most = torch.finfo(half).max
    return torch.where(x.isinf(), x, x.clamp(-most, most)).to(half).float()


@dataclass(frozen=True)
class PreparedQueries:
    """Queries as the later stages read them.

    rows: the caller's tensor, or its 8-bit codes. own: the caller's tensor, which `KeepError`
    measures with.
    lse_shift: fp32 `[B, Hq, Lq]`, `scale * q . mean key`, where smoothed keys were coded; the LSE
    adds it back.
    pooled `[B, Hq, n_q, D]`, similarity `[B, Hq, n_q]`: block statistics, fp32; None where the
    recipe needs none.
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
            rows=_cut_rows(self.rows, rows),
            own=None if self.own is None else self.own[:, :, rows],
            lse_shift=_cut(self.lse_shift, rows),
            pooled=_cut(self.pooled, blocks),
            similarity=_cut(self.similarity, blocks),
        )


@dataclass(frozen=True)
class PreparedKeys:
    """Keys and values as the later stages read them; they may outlive the queries of one call.

    key, value: the caller's tensors, or 8-bit codes; value is the key where none was given.
    own_key, own_value: the caller's tensors, which `KeepError` measures with.
    mean: fp32 `[B, Hk, D]`, what smoothing subtracted from the keys; None where nothing was
    smoothed.
    pooled `[B, Hk, n_k, D]`, similarity `[B, Hk, n_k]`: block statistics as of the queries.
    entries: what skipped blocks contribute; None if nothing.
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
    """The two halves that `predict`, `select` and `attend` read."""

    queries: PreparedQueries
    keys: PreparedKeys


def prepare(
    stages: Stages, call: Call, inputs: Inputs, *, to_plan: bool, to_attend: bool
) -> Prepared:
    """Keys and queries of one call; keys first, because the LSE shift of the queries needs their
    mean."""
    keys = stages.prepare_keys(call, inputs.key, inputs.value, to_plan=to_plan, to_attend=to_attend)
    queries = stages.prepare_queries(
        call, inputs.query, mean=keys.mean, to_plan=to_plan, to_attend=to_attend
    )
    return Prepared(queries, keys)


def raised_key_heads(plan: BlockPlan, Hk: int) -> list[bool]:
    """Key heads, of `Hk`, any of whose query heads run in the caller's own precision."""
    return [False] * Hk if plan.raised is None else by_key_head(plan.raised, Hk)


def by_key_head(raised: Tensor, Hk: int) -> list[bool]:
    """Query heads `[Hq]` to key heads, any of whose query heads are among them."""
    return [bool(x) for x in raised.view(Hk, -1).any(1).tolist()]


class Attended(NamedTuple):
    """out `[B, Hq, Lq, Dv]`; lse `[B, Hq, Lq]`, natural log over the kept keys; pv_skips int32
    `[B, Hq, n_q]`: row groups x blocks that the second filter skipped, in the backend's groups."""

    out: Tensor
    lse: Tensor
    pv_skips: Tensor


class KeptLimit(NamedTuple):
    """From how much on the caller would rather run dense attention: sparse attention is faster
    while kept blocks (those of raised heads `raised_cost` times), and `pooled_cost` of the allowed
    ones if any is skipped, are fewer than `most_kept`, which is above 0."""

    most_kept: float
    pooled_cost: float
    raised_cost: float = 1.0


class AttendedCall(NamedTuple):
    """What a whole call gave. plan: makes it, for those who read it. attended: None where the plan
    is beyond the limit, or was asked for alone. seconds: that all threads together spent in each
    stage, if they were timed."""

    plan: Callable[[], BlockPlan]
    attended: Attended | None
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class ChosenSequences:
    """Sequences of a pack to attend, where not all are. numbers: ascending. limits: by number; a
    sequence whose plan is beyond its own is left to dense attention. into: the out and lse of the
    whole pack, whose rows are written."""

    numbers: list[int]
    limits: Mapping[int, KeptLimit | None]
    into: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AttendedPack:
    """Packed sequences: out `[T, Hq, Dv]`, lse `[Hq, T]`. plans: makes each sequence's plan, with
    its `pv_skips`, for the record. left: numbers of sequences that were left out once planned;
    their rows, and those of sequences that were not asked for, are not written. seconds: as of
    `AttendedCall`, where stages overlapped."""

    out: Tensor
    lse: Tensor
    plans: Callable[[], list[tuple[BlockPlan, Tensor]]]
    left: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


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

    def prepare_keys(
        self,
        call: Call,
        key: Tensor,
        value: Tensor | None,
        *,
        mean: Tensor | None = None,
        to_plan: bool,
        to_attend: bool,
    ) -> PreparedKeys:
        """One pass over keys and values. to_plan: statistics (and codes) that predict reads;
        to_attend: what attend reads, and with `skipped="pool"` the pooled entries. Without a
        value, what planning alone needs.

        mean: fp32 `[B, Hk, D]`. Defaults to the mean of `key`. A caller that holds part of the
        sequence passes the mean over all of it."""
        ...

    def prepare_queries(
        self, call: Call, query: Tensor, *, mean: Tensor | None, to_plan: bool, to_attend: bool
    ) -> PreparedQueries:
        """One pass over the queries. mean: `PreparedKeys.mean`, for `lse_shift`."""
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


@runtime_checkable
class KeySums(Protocol):
    """What the stages of a backend with `Backend.sums_keys` have besides `Stages`."""

    def sum_keys(self, key: Tensor) -> Tensor:
        """Of each key block, `[B, Hk, n_k, D]`: what the mean is made of."""
        ...

    def mean_of_sums(self, sums: Tensor, n_keys: int) -> Tensor:
        """The mean `[B, Hk, D]` that `prepare_keys` computes, from the sums of all blocks."""
        ...


class WholeCalls(Protocol):
    """What a backend that runs all stages of a call at once implements besides `Stages`."""

    def run_call(
        self,
        call: Call,
        inputs: Inputs,
        *,
        plan: BlockPlan | None = None,
        attends: bool = True,
        keeps_plan: bool = True,
        limit: KeptLimit | None = None,
        timed: bool = False,
    ) -> AttendedCall:
        """The plan and the output of the stages, bit for bit. plan: given, not made. attends: not
        only planned. keeps_plan: else the result has none."""
        ...


class PackedStages(Protocol):
    """What a backend that attends packed sequences at once implements besides `Stages`."""

    def why_not_packed(self, call: Call, *, whole: bool) -> str | None:
        """Why sequences of this call run one after another, or None. whole: no sequence of the
        pack is left out."""
        ...

    def attend_packed(
        self,
        call: Call,
        inputs: Inputs,
        cuts: tuple[list[int], list[int]],
        align: str,
        stage: Callable[[str], AbstractContextManager[None]],
        some: ChosenSequences | None = None,
    ) -> AttendedPack:
        """All stages over the whole pack, viewed as one sequence `[1, H, T, D]`. stage: times what
        is run inside of it. some: the sequences to attend; None attends all."""
        ...


def _cut_rows(x: Tensor | QTensor, rows: slice) -> Tensor | QTensor:
    if not isinstance(x, QTensor):
        return x[:, :, rows].contiguous()
    per = x.rows_per_scale
    assert BLOCK_Q % per == 0, "scales are shared across query blocks"
    scales = slice(rows.start // per, -(-rows.stop // per))
    return QTensor(x.codes[:, :, rows].contiguous(), x.scale[:, :, scales].contiguous(), per)


def _cut(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[:, :, part].contiguous()
