"""Universal, training-free, sparse and quantized attention."""

from .api import attend, attention, explain, make_plan, sampled_error
from .backends import Backend, Choice, register_backend
from .blockplan import BlockPlan
from .errors import Unsupported
from .geometry import BLOCK_K, BLOCK_Q
from .merge import merge
from .qtensor import QTensor
from .recipe import KeepAll, KeepFraction, KeepMass, Recipe
from .record import Run, record
from .varlen import attention_varlen

__version__ = "0.1.0"

__all__ = [
    "BLOCK_K",
    "BLOCK_Q",
    "Backend",
    "BlockPlan",
    "Choice",
    "KeepAll",
    "KeepFraction",
    "KeepMass",
    "QTensor",
    "Recipe",
    "Run",
    "Unsupported",
    "attend",
    "attention",
    "attention_varlen",
    "explain",
    "make_plan",
    "merge",
    "record",
    "register_backend",
    "sampled_error",
]
