"""The stages and the gradient, as `Stages` names them."""

from .attend import attend
from .backward import backward
from .predict import predict
from .prepare import prepare_keys, prepare_queries
from .select import select

__all__ = ["attend", "backward", "predict", "prepare_keys", "prepare_queries", "select"]
