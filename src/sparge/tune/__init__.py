"""Tuning: capture q, k and v of a model, and search each head's settings under error bounds.

trace = sparge.tune.trace_model(model, inputs, "trace")
profile = sparge.tune.tune(trace, l1=0.08, l2=0.09)
profile.save("model.json")
"""

from .capture import Capture, captures_of
from .model_tracer import trace_model
from .presets import PRESETS, bounds_of
from .trace_directory import Trace
from .tuner import tune, tune_head_settings

__all__ = [
    "PRESETS",
    "Capture",
    "Trace",
    "bounds_of",
    "captures_of",
    "trace_model",
    "tune",
    "tune_head_settings",
]
