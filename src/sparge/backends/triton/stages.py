"""The four stages and the gradient, as `Stages` names them."""

from .attend import attend
from .backward import backward
from .predict import predict
from .prepare import prepare
from .select import select

__all__ = ["attend", "backward", "predict", "prepare", "select"]
