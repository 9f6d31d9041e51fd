"""The four stages and the gradient, as `Stages` names them."""

from .backward import backward
from .one_pass import attend, predict, prepare_keys, prepare_queries, select

__all__ = ["attend", "backward", "predict", "prepare_keys", "prepare_queries", "select"]
