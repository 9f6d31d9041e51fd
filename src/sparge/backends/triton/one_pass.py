"""Both halves of `Prepared` in one value, as this backend's kernels still take them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...values.blockplan import BlockPlan
from ...values.call import Call, Inputs
from ...values.qtensor import Pooled, QTensor
from ...values.stages import Attended, PreparedKeys, PreparedQueries
from ...values.stages import Prepared as Halves
from ...values.tokenmask import TokenMask


@dataclass(frozen=True)
class Operands:
    query: Tensor | QTensor
    key: Tensor | QTensor
    value: Tensor | QTensor
    lse_shift: Tensor | None = None


@dataclass(frozen=True)
class Statistics:
    q_pooled: Tensor | None = None
    k_pooled: Tensor | None = None
    q_similarity: Tensor | None = None
    k_similarity: Tensor | None = None


@dataclass(frozen=True)
class Prepared:
    operands: Operands
    statistics: Statistics = Statistics()
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    pooled: Pooled | None = None
    key_mean: Tensor | None = None


@dataclass(frozen=True)
class _Wanted:
    to_plan: bool
    to_attend: bool


@dataclass(frozen=True)
class _Keys(PreparedKeys):
    wanted: _Wanted = _Wanted(False, False)


def prepare_keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    *,
    mean: Tensor | None = None,
    to_plan: bool,
    to_attend: bool,
) -> PreparedKeys:
    from .packed import NOT_PACKED
    from .prepare import mean_key
    from .shapes import unit_rows

    if mean is None and call.recipe.quantized:
        part = replace(call, Lk=key.shape[2])
        mean = mean_key(part, unit_rows(key), NOT_PACKED)[..., : call.D]
    v = key if value is None else value
    return _Keys(key, v, key, value, mean, wanted=_Wanted(to_plan, to_attend))


def prepare_queries(
    call: Call, query: Tensor, *, mean: Tensor | None, to_plan: bool, to_attend: bool
) -> PreparedQueries:
    return PreparedQueries(query, query)


def predict(call: Call, prepared: Halves, tokens: TokenMask) -> Tensor:
    from .predict import predict

    return predict(call, _joined(call, prepared), tokens)


def select(call: Call, prepared: Halves, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    from .select import select

    return select(call, _joined(call, prepared), mass, tokens)


def attend(call: Call, prepared: Halves, plan: BlockPlan, tokens: TokenMask) -> Attended:
    from .attend import attend

    return attend(call, _joined(call, prepared), plan, tokens)


def _joined(call: Call, prepared: Halves) -> Prepared:
    from .prepare import prepare

    keys, query = prepared.keys, prepared.queries.own
    assert isinstance(keys, _Keys)
    assert query is not None
    assert keys.own_key is not None
    inputs = Inputs(query, keys.own_key, keys.own_value)
    wanted = keys.wanted
    return prepare(call, inputs, to_plan=wanted.to_plan, to_attend=wanted.to_attend, mean=keys.mean)
