"""The stages and the gradient, as `Stages` names them."""

from __future__ import annotations

from dataclasses import dataclass

from ...values.call import Call, Inputs
from ...values.qtensor import Operands
from ...values.stages import Prepared, PreparedKeys, PreparedQueries, Statistics
from .attend import attend
from .backward import backward
from .predict import predict
from .prepare import prepare_keys, prepare_queries
from .select import select

__all__ = ["attend", "backward", "predict", "prepare", "prepare_keys", "prepare_queries", "select"]


@dataclass(frozen=True)
class _Joined(Prepared):
    """Both halves, where the fields of the whole are read, too."""

    halves: tuple[PreparedQueries, PreparedKeys] | None = None

    @property
    def queries(self) -> PreparedQueries:
        assert self.halves is not None
        return self.halves[0]

    @property
    def keys(self) -> PreparedKeys:
        assert self.halves is not None
        return self.halves[1]

    def query_blocks(self, start: int, stop: int) -> Prepared:
        return joined(self.queries.blocks(start, stop), self.keys)


def prepare(call: Call, inputs: Inputs, *, to_plan: bool, to_attend: bool) -> Prepared:
    keys = prepare_keys(
        call,
        inputs.key,
        inputs.value,
        mean=inputs.key_mean,
        to_plan=to_plan,
        to_attend=to_attend,
    )
    queries = prepare_queries(
        call, inputs.query, mean=keys.mean, to_plan=to_plan, to_attend=to_attend
    )
    return joined(queries, keys)


def joined(queries: PreparedQueries, keys: PreparedKeys) -> Prepared:
    return _Joined(
        Operands(queries.rows, keys.key, keys.value, queries.lse_shift),
        Statistics(queries.pooled, keys.pooled, queries.similarity, keys.similarity),
        queries.own,
        keys.own_key,
        keys.own_value,
        keys.entries,
        keys.mean,
        (queries, keys),
    )
