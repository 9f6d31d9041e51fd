"""A plain module of the zoo run on its task, with its own attention and with sparge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparge import VISION, Recipe
from sparge.routing import AUTO
from sparge.support.turns import timer

from ..zoo import ZooModule
from .compare import Settings, refuse_accelerated
from .result import Pair, Renders


def compare_results(
    loaded: ZooModule,
    *,
    inputs: int = 4,
    seed: int = 0,
    recipe: Recipe | None = None,
    profile: Any = None,
    order: str | None = None,
    layers: Any = None,
    backend: str = AUTO,
    warm_up: bool = True,
    done: Callable[[str], None] = lambda what: None,
) -> Renders:
    """Run the task of a module on some inputs, dense and sparse, and compare by its own figures.

    loaded: of `zoo.load_module`. inputs, seed: how many inputs, and which. recipe to backend: as in
    `sparge.accelerate`; the grids of the module are given to it. Without a recipe and a profile
    the module runs `VISION`. done: called before each run.
    """
    task, model = loaded.task, loaded.model
    if recipe is None and profile is None:
        recipe = VISION
    given = task.inputs(inputs, seed)
    refuse_accelerated(model)
    settings = Settings(recipe, profile, None, order, loaded.grids, layers, backend)
    timed = timer(next(model.parameters()).device.type)
    pairs = []
    with torch.no_grad():
        if warm_up:
            done("warming up")
            task.run(model, given[0])
            with settings.accelerate(model):
                task.run(model, given[0])
        for i, each in enumerate(given):
            caption = task.caption(each)
            results: dict[str, tuple[float, Tensor]] = {}
            report = None
            for way in ("dense", "sparse") if i % 2 == 0 else ("sparse", "dense"):
                done(f"{way}: {caption}")
                if way == "dense":
                    results[way] = timed(lambda each=each: task.run(model, each))  # type: ignore[misc]
                    continue
                with settings.accelerate(model) as handle:
                    results[way] = timed(lambda each=each: task.run(model, each))  # type: ignore[misc]
                    report = handle.report()
            assert report is not None
            (dense_seconds, dense), (sparse_seconds, sparse) = results["dense"], results["sparse"]
            pictures = [task.picture(each, result) for result in (dense, sparse)]
            frames = [None if picture is None else picture[None] for picture in pictures]
            pair = Pair(
                caption=caption,
                seed=None,
                dense_seconds=dense_seconds,
                sparse_seconds=sparse_seconds,
                figures=task.compare(dense, sparse),
                report=report,
                dense=frames[0],
                sparse=frames[1],
            )
            pairs.append(pair)
    told = {**settings.to_dict(), "inputs": inputs, "seed": seed}
    return Renders(loaded.name, task.about, task.metric, tuple(pairs), told)
