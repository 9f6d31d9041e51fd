"""Trace a diffusers pipeline: run it dense on prompts, and keep q, k, v of its denoiser.

What attention sees is kept: tokens in the order in which they will be attended. An input of the
trace is one step of one run, with its noise level; settings must hold on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparge import DEFAULT, Recipe, Schedule, accelerate
from sparge.models import Layers, choose_layers
from sparge.models.adapters import find_adapter
from sparge.routing import DENSE
from sparge.values.profile import fingerprint
from sparge.values.schedule import Context

from ..renders.compare import Prompt, checked_call, plain, quiet_bars, render
from ..renders.media import LATENT
from .capture import BLOCKS
from .model_tracer import MAX_BYTES, TraceWriter, completed, inputs_digest
from .trace_directory import Trace, TracedInput

STEPS = 4
"""Steps that are kept of each run, evenly spread over its sparse part."""


def trace_pipeline(
    pipe: Any,
    prompts: Sequence[Prompt],
    directory: str | os.PathLike[str],
    *,
    seeds: Sequence[int] = (0,),
    call: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    schedule: Schedule | None = None,
    order: str | None = None,
    blocks: int = BLOCKS,
    layers: Layers = None,
    max_bytes: int = MAX_BYTES,
    dtype: torch.dtype | None = None,
    name: str = "",
    calibration: Mapping[str, Any] | None = None,
    done: Callable[[str], None] = lambda digest: None,
) -> Trace:
    """Run a pipeline on every prompt and seed, and keep q, k, v of some steps in a directory.

    call: arguments of every call of the pipeline. steps: how many to keep of each run. schedule:
    steps that it leaves dense are not kept; None is `Schedule()`. order: of visual tokens. blocks
    to done: as in `trace_model`. A directory that holds some of these runs is completed.

    The pipeline has its own attention again when this returns; settings of an earlier `accelerate`
    are gone.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
    given = checked_call(pipe, prompts, seeds, call or {})
    schedule = Schedule() if schedule is None else schedule
    names, model = chosen_layers(pipe, layers)
    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    facts = {"schedule": schedule.to_dict(), **({} if order is None else {"order": order})}
    facts |= {"call": plain(call or {}), **(calibration or {})}
    trace = completed(Trace(where, fingerprint(model), name, blocks, names, (), facts))
    runs = [(each, seed) for each in given for seed in seeds]
    with quiet_bars(pipe), torch.no_grad():
        for i, (one, seed) in enumerate(runs):
            asked = {"seed": seed, "steps": steps, "schedule": schedule.to_json(), "order": order}
            stem = inputs_digest({**one.arguments, **{f"sparge {n}": x for n, x in asked.items()}})
            if all(not each.digest.startswith(stem) for each in trace.inputs):
                left = len(names) * steps * (len(runs) - i)

                def writer_of(
                    step: int,
                    already: int,
                    *,
                    trace: Trace = trace,
                    stem: str = stem,
                    left: int = left,
                ) -> TraceWriter:
                    place = f"input-{stem[:12]}-{step:03d}"
                    return TraceWriter(trace, place, dtype, max_bytes, 1 if already else left)

                tracer = _Tracer(pipe, schedule, steps, writer_of)
                tracer.run(one.arguments, seed, order, names)
                traced = tracer.inputs(stem, f"{one.caption}, seed {seed}")
                trace = replace(trace, inputs=(*trace.inputs, *traced))
                trace.save()
            done(stem)
    return trace


def chosen_layers(pipe: Any, layers: Layers = None) -> tuple[tuple[str, ...], nn.Module]:
    """The attention modules of a pipeline that `layers` chooses, and the denoiser they are of."""
    _, found = find_adapter(pipe)
    return tuple(choose_layers(list(found.modules), layers)), found.model


class _Tracer:
    """One run of a pipeline: which of its steps are kept, and what was written of each."""

    def __init__(
        self,
        pipe: Any,
        schedule: Schedule,
        steps: int,
        writer_of: Callable[[int, int], TraceWriter],
    ) -> None:
        self.pipe, self.schedule, self.steps, self.writer_of = pipe, schedule, steps, writer_of
        self.writers: dict[int, TraceWriter] = {}
        self.levels: dict[int, float | None] = {}
        self.kept: set[int] = set()
        self.used = 0
        self.now = Context()

    def recipe(self, context: Context) -> Recipe | None:
        """None in steps that are not kept: they run the pipeline's own attention."""
        if context.step == 0 and self.now != context:  # the steps of this run are known now
            self.kept = _spread(_sparse_steps(self.pipe.scheduler, self.schedule), self.steps)
        self.now = context
        return DEFAULT if context.step in self.kept else None

    def add(self, layer: str, q: Tensor, k: Tensor, v: Tensor, facts: dict[str, Any]) -> None:
        step = self.now.step
        assert step is not None
        if step not in self.writers:
            self.writers[step] = self.writer_of(step, len(self.writers))
            self.levels[step] = self.now.noise_level
            self.used = max(self.used, self.writers[step].used)
        writer = self.writers[step]
        writer.used = self.used
        writer.add(layer, q, k, v, facts)
        self.used = writer.used

    def run(
        self, arguments: Mapping[str, Any], seed: int, order: str | None, layers: tuple[str, ...]
    ) -> None:
        chosen = {*layers}.__contains__
        options: dict[str, Any] = {"backend": DENSE, "schedule": self.schedule, "order": order}
        with accelerate(self.pipe, self.recipe, layers=chosen, **options) as handle:
            for layer in layers:
                handle.tap(layer, partial(self.add, layer))
            render(self.pipe, {**arguments, "output_type": LATENT}, seed)
        if not self.writers:
            raise ValueError(
                f"no attention of {type(self.pipe).__name__} was sparse in this run; give more "
                "steps, or a schedule that leaves fewer of them dense"
            )

    def inputs(self, stem: str, about: str) -> list[TracedInput]:
        return [
            TracedInput(
                f"{stem}-{step}",
                f"{about}, step {step}",
                self.levels[step],
                {layer: entries for layer, entries in writer.files.items() if entries},
            )
            for step, writer in sorted(self.writers.items())
        ]


def _sparse_steps(scheduler: Any, schedule: Schedule) -> list[int]:
    """The steps of a scheduler's run that a schedule does not leave dense."""
    from sparge.models.clock import context_of

    begin = getattr(scheduler, "begin_index", None) or 0
    found = []
    for step in range(len(scheduler.timesteps) - begin):
        position = schedule.position(context_of(scheduler, begin, step))
        if position is not None and schedule.recipe_at(position, DEFAULT) is not None:
            found.append(step)
    return found


def _spread(steps: Sequence[int], n: int) -> set[int]:
    """n of some steps, the first and the last among them."""
    n = min(n, len(steps))
    return {steps[i * (len(steps) - 1) // max(n - 1, 1)] for i in range(n)}
