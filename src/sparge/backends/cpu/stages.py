"""The stages and the gradient, as `Stages` and `KeySums` name them."""

from .attend import attend, backward
from .predict import predict
from .prepare import mean_of_sums, prepare_keys, prepare_queries, sum_keys
from .select import select

__all__ = [
    "attend",
    "backward",
    "mean_of_sums",
    "predict",
    "prepare_keys",
    "prepare_queries",
    "select",
    "sum_keys",
]
