"""Tuning: capture q, k and v of a model, and search each head's settings under error bounds.

trace = sparge_tools.tuning.trace_model(model, inputs, "trace")
profile = sparge_tools.tuning.tune(trace, l1=0.08, l2=0.09)
profile.save("model.json")

Or to a target of the model's own output, verified on held-out texts:

profile = sparge_tools.tuning.tune_output(model, inputs, held_out, max_kl=0.005)

Or to a bound on what a diffusers pipeline renders, verified on held-out seeds:

profile = sparge_tools.tuning.tune_renders(pipe, prompts, min_psnr=30)
"""

from .capture import Capture, captures_of
from .output_target import TargetNotMet, tune_denoiser, tune_output
from .render_target import schedule_of, tune_renders
from .tracing import Trace, trace_model, trace_pipeline
from .tuner import PRESETS, bounds_of, tune, tune_head_settings

__all__ = [
    "PRESETS",
    "Capture",
    "TargetNotMet",
    "Trace",
    "bounds_of",
    "captures_of",
    "schedule_of",
    "trace_model",
    "trace_pipeline",
    "tune",
    "tune_denoiser",
    "tune_head_settings",
    "tune_output",
    "tune_renders",
]
