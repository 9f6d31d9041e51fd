"""Universal, training-free, sparse and quantized attention."""

from importlib import import_module as _import_module
from typing import Any as _Any

from .api.accuracy import output_error
from .api.attention import attend, attention, explain, make_plan
from .api.merge import merge
from .api.varlen import attention_varlen
from .backends.triton.warm import warm
from .engine.recording import record
from .models import accelerate
from .routing import Backend, Choice, register_backend
from .support.errors import Unsupported
from .values.backend import FixedCost
from .values.blockplan import BlockPlan
from .values.call import BLOCK_K, BLOCK_Q
from .values.profile import Profile
from .values.recipe import DEFAULT, VISION, KeepAll, KeepError, KeepFraction, KeepMass, Recipe
from .values.run import Run
from .values.schedule import Schedule
from .values.stages import QTensor

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
    "warm",
]


def __getattr__(name: str) -> _Any:
    """The parts that are imported when they are first named."""
    if name in ("compat", "interop", "parallel", "reorder"):
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
