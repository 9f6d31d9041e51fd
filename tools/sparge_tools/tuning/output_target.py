"""Tune a model to a target of its own output: divergence or perplexity of a language model.

Each layer gets the error that buys the most sparsity for what it does to the output. The result is
verified on held-out inputs; what the profile promises is what was measured there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparge import DEFAULT, Profile, Recipe, __version__
from sparge.routing import AUTO
from sparge.support.cpuinfo import cpu_name
from sparge.values.profile import LayerSettings, fingerprint

from .capture import BLOCKS
from .model_tracer import Inputs, inputs_digest
from .output_measure import KL, PERPLEXITY, LanguageMeasure, Measure, evaluating
from .output_state import OutputState
from .scored_layers import (
    Layers,
    TunedModel,
    attention_layers,
    base_recipe,
    levels_of_layers,
    score_layers,
)
from .search import NO_GAIN
from .sensitivity import INPUTS, Sensitivity, layer_options, measure_sensitivity
from .verify import CHECKS, Checked, Verifier, scale_to_target

State = str | os.PathLike[str] | None
Step = Callable[[str], None]


class TargetNotMet(RuntimeError):  # noqa: N818 - reads as the answer it is
    """No sparse settings keep the output within the target; the message has the figures."""


@dataclass(frozen=True)
class OutputResult:
    """Settings found for one target on some inputs, and how."""

    checked: Checked
    sensitivities: Mapping[str, Sensitivity]
    provenance: Mapping[str, Any]


def tune_output(
    model: nn.Module,
    inputs: Sequence[Inputs],
    held_out: Sequence[Inputs],
    *,
    max_kl: float | None = None,
    max_perplexity: float | None = None,
    recipe: Recipe = DEFAULT,
    layers: Layers = None,
    blocks: int = BLOCKS,
    backend: str = AUTO,
    name: str = "",
    about: Mapping[str, Any] | None = None,
    state: State = None,
    done: Step = lambda what: None,
) -> Profile:
    """The sparsest profile found whose output on held-out texts stays within a target.

    inputs, held_out: token ids `[1, L]` to calibrate on and to verify on; none may be in both.
    max_kl: bound of the mean KL(dense ‖ sparse) of the next-token distributions. max_perplexity:
    bound of the relative rise of perplexity, 0.005 is +0.5 %. Give one of them. Both are met with
    one standard error to spare. recipe: precision, predictor, sink and local window.
    about: for the profile's `calibration`. state: a file of all results so far; the same call, also
    with another target, resumes from it. done: called after every step, with what it was.

    Raises `TargetNotMet` if nothing sparse meets the target. Run the model in fp32: in bf16 every
    change of attention, however small, moves the output by the rounding of all later layers.
    """
    if (max_kl is None) == (max_perplexity is None):
        raise ValueError("give max_kl or max_perplexity, one of them")
    judge, target = (KL, max_kl) if max_perplexity is None else (PERPLEXITY, max_perplexity)
    check_target(judge, target)
    assert target is not None
    check_disjoint(inputs, held_out)
    tuned = TunedModel(
        model,
        LanguageMeasure(model, judge),
        attention_layers(model, layers),
        base_recipe(recipe),
        backend,
        blocks,
    )
    kept = OutputState(None if state is None else Path(state), request_of(tuned, inputs, held_out))
    with evaluating(model), torch.inference_mode():
        result = tune_inputs(tuned, inputs, held_out, target, kept, done)
    found = {"measure": judge, "target": target, **result.provenance}
    return make_profile(tuned, result.checked.settings, found, name=name, about=about)


def check_target(judge: str, target: Any) -> None:
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0.0 < target < 1.0:
        what = {KL: "max_kl", PERPLEXITY: "max_perplexity"}.get(judge, "max_change")
        raise ValueError(f"{what} must be a number greater than 0 and less than 1, got {target!r}")


def check_disjoint(inputs: Sequence[Inputs], held_out: Sequence[Inputs]) -> None:
    if not inputs or len(held_out) < 2:
        raise ValueError(
            f"inputs needs at least 1 and held_out at least 2, for a standard error; got "
            f"{len(inputs)} and {len(held_out)}"
        )
    if {*map(inputs_digest, inputs)} & {*map(inputs_digest, held_out)}:
        raise ValueError("held_out must be other inputs than those to calibrate on; one is in both")


def request_of(
    tuned: TunedModel, inputs: Sequence[Inputs], held_out: Sequence[Inputs]
) -> dict[str, Any]:
    """All that a measured result depends on; the target is not among it."""
    dtype = next((str(p.dtype) for p in tuned.model.parameters()), "")
    return {
        "model": fingerprint(tuned.model).weights,
        "dtype": dtype,
        "layers": list(tuned.names),
        "recipe": tuned.recipe.to_dict(),
        "blocks": tuned.blocks,
        "backend": tuned.backend,
        "inputs": [inputs_digest(each) for each in inputs],
        "held_out": [inputs_digest(each) for each in held_out],
        "sparge": __version__,
    }


def steps_in_all(layers: int, inputs: int) -> int:
    """How often `done` is called at most, for a progress bar."""
    return inputs + min(inputs, INPUTS) * layers + CHECKS


def tune_inputs(
    tuned: TunedModel,
    inputs: Sequence[Inputs],
    held_out: Sequence[Inputs],
    target: float,
    state: OutputState,
    step: Step,
) -> OutputResult:
    """Score, measure, allocate, verify and scale."""
    layers = score_layers(tuned, inputs, state, step)
    levels = levels_of_layers(layers)
    sensitivities = measure_sensitivity(tuned, inputs, layers, levels, state, step)
    options = layer_options(layers, levels, sensitivities)
    verifier = Verifier(tuned, held_out, layers, levels, state, step)
    measure = tuned.measure
    best = scale_to_target(
        options,
        verifier.check,
        lambda found: measure.judged(found.figures).upper,
        target=target,
        first=measure.sum_for(target),
    )
    if best is None or best.density > NO_GAIN:
        raise TargetNotMet(_why_not(verifier, target, best))
    chosen = {name: levels[name][i - 1].error if i else 0.0 for name, i in best.options.items()}
    provenance = {
        "held_out": {
            **best.figures,
            "density": best.density,
            "digests": [inputs_digest(each) for each in held_out],
        },
        "calibrated_on": [inputs_digest(each) for each in inputs],
        "sensitivity": {
            name: {
                "errors": [round(e, 5) for e in of.errors],
                "changes": [float(f"{change:.4g}") for change in of.changes],
                "chosen": round(chosen[name], 5),
            }
            for name, of in sensitivities.items()
        },
    }
    return OutputResult(best, sensitivities, provenance)


def _why_not(verifier: Verifier, target: float, best: Checked | None) -> str:
    """The figures that stand against a target."""
    measure: Measure = verifier.tuned.measure
    kept = verifier.everything_kept()
    alone = measure.judged(kept.figures)
    precision = verifier.tuned.recipe.precision
    met = "" if best is None else f"; it is met at density {best.density:.3f} at the least"
    way_out = f"raise the target, or take another precision than {precision!r}"
    if alone.upper <= target / 2:
        way_out = "raise the target, or verify on more held-out text"
    return (
        f"the target {target:g} cannot be met by sparse attention on the held-out inputs{met}. "
        f"With everything kept, precision {precision!r} alone gives {alone.mean:.3g} ± "
        f"{alone.error:.2g}. {way_out}"
    )


def make_profile(
    tuned: TunedModel,
    settings: Mapping[str, LayerSettings],
    output: Mapping[str, Any],
    *,
    name: str,
    about: Mapping[str, Any] | None,
) -> Profile:
    dtype = next((str(p.dtype).removeprefix("torch.") for p in tuned.model.parameters()), "")
    return Profile(
        layers={layer: settings.get(layer, LayerSettings()) for layer in tuned.names},
        model=fingerprint(tuned.model),
        bounds=None,
        default=tuned.recipe,
        name=name,
        version=__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        calibration={**(about or {}), "dtype": dtype, "query_blocks": tuned.blocks},
        output=output,
    )
