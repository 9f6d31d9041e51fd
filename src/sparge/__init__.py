"""Universal, training-free, sparse and quantized attention."""

from importlib import import_module as _import_module
from typing import Any as _Any

from .accuracy import output_error
from .api import attend, attention, explain, make_plan, sampled_error
from .backend import FixedCost
from .backends.triton.warm import warm
from .blockplan import BlockPlan
from .dispatch import Backend, Choice, register_backend
from .errors import Unsupported
from .geometry import BLOCK_K, BLOCK_Q
from .integrations import accelerate
from .merge import merge
from .profile import Profile
from .qtensor import QTensor
from .recipe import DEFAULT, VISION, KeepAll, KeepError, KeepFraction, KeepMass, Recipe
from .record import Run, record
from .schedule import Schedule
from .varlen import attention_varlen

__version__ = "0.1.0"

__all__ = [
    "BLOCK_K",
    "BLOCK_Q",
    "DEFAULT",
    "VISION",
    "Backend",
    "BlockPlan",
    "Choice",
    "FixedCost",
    "KeepAll",
    "KeepError",
    "KeepFraction",
    "KeepMass",
    "Profile",
    "QTensor",
    "Recipe",
    "Run",
    "Schedule",
    "Unsupported",
    "accelerate",
    "attend",
    "attention",
    "attention_varlen",
    "explain",
    "make_plan",
    "merge",
    "output_error",
    "record",
    "register_backend",
    "sampled_error",
    "warm",
]


def __getattr__(name: str) -> _Any:
    """The parts that are imported when they are first named."""
    if name in ("compat", "parallel", "renders", "reorder", "tune", "zoo"):
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
