"""The model under test: found and checked before it is loaded, then run in two variants."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..errors import Unsupported
from ..geometry import BLOCK_Q
from ..integrations import accelerate
from ..recipe import Recipe
from . import harness
from .logits import splits
from .model_directory import config_of, directory_of, fingerprint, max_tokens, tokenizer_of
from .needle import Needle, counter, make_needle
from .settings import DENSE_VARIANT, NEEDLE, SPARGE_VARIANT, TASKS, WITH_HARNESS, Settings
from .texts import Text, cut, read_text


@dataclass(frozen=True)
class Checked:
    """Everything that can be known without loading weights.

    needles: by length and depth.
    """

    settings: Settings
    directory: Path
    fingerprint: dict[str, Any]
    text: Text
    needles: dict[tuple[int, int], Needle]

    def key(self) -> dict[str, Any]:
        """What the results depend on; the caller adds versions and machine."""
        return {
            **self.settings.of_a_cell(),
            "model": self.fingerprint["digest"],
            "text": self.text.digest,
        }


def check(settings: Settings) -> Checked:
    """Raise for every mistake that can be found without reading the weights."""
    if find_spec("transformers") is None:
        raise Unsupported(
            "sparge eval needs transformers, which is not installed",
            {},
            'install it with: pip install "sparge[eval]"',
        )
    for measure in WITH_HARNESS:
        if measure in settings.measures:
            harness.require_lm_eval(f"the measure {measure}")
    if settings.profile is not None and not Path(settings.profile).is_file():
        raise ValueError(f"--profile must name a file, got {settings.profile!r}")
    directory = directory_of(settings.model)
    config = config_of(directory)
    _check_lengths(settings, max_tokens(config))
    if TASKS in settings.measures:
        harness.check_tasks(
            settings.tasks, length=min(settings.lengths), tokenizer_path=str(directory.resolve())
        )
    tokenizer = tokenizer_of(directory)
    if settings.needed_tokens or harness.LONGTEXT_TASK in settings.tasks:
        raw = read_text(settings.text)
        text = cut(settings.text, raw, tokenizer, needed=settings.needed_tokens)
    else:
        text = Text("none", "", ())  # tasks bring their own
    needles: dict[tuple[int, int], Needle] = {}
    if NEEDLE in settings.measures:
        count = counter(tokenizer)
        for length in sorted(set(settings.lengths)):
            for depth in settings.depth_percents:
                needles[length, depth] = make_needle(
                    text, tokenizer, length=length, depth=depth, seed=settings.seed, count=count
                )
    return Checked(settings, directory, fingerprint(settings.model, directory), text, needles)


def _check_lengths(settings: Settings, limit: int | None) -> None:
    beyond = [length for length in settings.lengths if limit is not None and length > limit]
    if beyond:
        raise ValueError(
            f"--lengths must be at most {limit} for {settings.model} (max_position_embeddings), "
            f"got {max(beyond)}"
        )


class TestedModel:
    """The model in its two variants, loaded at first use."""

    def __init__(self, checked: Checked, run_path: Path) -> None:
        self.checked, self.settings = checked, checked.settings
        self.task_directory = run_path / "tasks"
        self._written: dict[str, Any] = {}

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        from .. import zoo

        dtype = getattr(torch, self.settings.dtype)
        return zoo.load(os.fspath(self.checked.directory.resolve()), dtype=dtype)

    @property
    def model(self) -> Any:
        return self.loaded[0]

    @property
    def tokenizer(self) -> Any:
        return self.loaded[1]

    @cached_property
    def split(self) -> bool:
        return splits(self.model, self.window(BLOCK_Q))

    def window(self, length: int, i: int = 0) -> torch.Tensor:
        return self.checked.text.window(length, i).to(self.model.device)

    @contextmanager
    def variant(self, name: str, *, measure_error: bool = False) -> Iterator[Any]:
        """Yield None for the model as it is, or the handle of the model with sparge."""
        if name == DENSE_VARIANT:
            yield None
            return
        assert name == SPARGE_VARIANT
        recipe: Recipe | None = self.settings.recipe
        profile = self.settings.profile
        with accelerate(self.model, recipe, profile=profile, measure_error=measure_error) as handle:
            yield handle

    def needle_task(self) -> Any:
        """The lm-eval task with every needle of this run, in the order of `checked.needles`."""
        name = harness.NEEDLE_TASK
        if name not in self._written:
            documents = [needle.to_dict() for needle in self.checked.needles.values()]
            harness.write_task(name, documents, self.task_directory)
            self._written[name] = harness.load_task(name, self.task_directory)
        return self._written[name]

    def own_task_directory(self, name: str) -> Path | None:
        """The directory of the task sparge_longtext, written if needed; None for other tasks."""
        if name != harness.LONGTEXT_TASK:
            return None
        if name not in self._written:
            # One document per page, so --limit can take some of them.
            pages = pages_of(read_text(self.settings.text))
            harness.write_task(name, [{"page": page} for page in pages], self.task_directory)
            self._written[name] = True
        return self.task_directory


def total_runs(report: Any) -> dict[str, int]:
    """How often each way of attention ran, over all layers."""
    total: Counter[str] = Counter()
    for layer in report.layers:
        total.update(layer.ran)
    return dict(total)


PAGE = 100_000  # characters per document of the task sparge_longtext, more than any window


def pages_of(text: str) -> list[str]:
    return [text[start : start + PAGE] for start in range(0, len(text), PAGE)]
