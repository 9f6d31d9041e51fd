"""The model under test: found and checked before it is loaded, then run in its variants."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparge import BLOCK_Q, accelerate

from .. import zoo
from ..optional_libraries import need_libraries
from . import harness
from .logits import splits
from .settings import DENSE_VARIANT, NEEDLE, SPARGE_VARIANT, TASKS, Settings, digest_of
from .texts import Needle, Text, make_needle, read_text, tokenize

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
ENDS = 1 << 20
"""Bytes at both ends of a weight file that go into its digest; a whole file takes minutes."""


def tokenizer_of(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def directory_fingerprint(name: str, directory: Path) -> dict[str, Any]:
    """Facts about the model; digest: of its config and of the size and both ends of each file."""
    files = sorted(file for pattern in WEIGHTS for file in directory.glob(pattern))
    if not files:
        raise ValueError(f"there are no weights in {str(directory)!r}, such as model.safetensors")
    # Private fields, such as the transformers version, say nothing about the weights.
    config = {k: v for k, v in config_of(directory).items() if not k.startswith("_")}
    parts = [json.dumps(config, sort_keys=True)]
    for file in files:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            data = opened.read(ENDS)
            opened.seek(max(0, size - ENDS))
            data += opened.read(ENDS)
        parts.append(f"{file.name} {size} {digest_of(data)}")
    return {
        "name": name,
        "type": config.get("model_type"),
        "layers": config.get("num_hidden_layers"),
        "heads": config.get("num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads"),
        "max_tokens": max_tokens(config),
        "weight_bytes": sum(file.stat().st_size for file in files),
        "digest": digest_of("\n".join(parts).encode()),
    }


def config_of(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config.json in {str(directory)!r} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"config.json in {str(directory)!r} does not hold an object")
    return {**config, **(config.get("text_config") or {})}


def max_tokens(config: dict[str, Any]) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return None


CLOCKED = "clocked"
"""Dense attention through sparge's hook, which measures the time spent in attention."""
PAGE = 100_000  # characters per document of the task sparge_longtext, more than any window


class TestedModel:
    """Made without reading the weights, which are loaded at first use.

    Raises for every mistake that can be found before. needles: by length and depth.
    """

    def __init__(self, settings: Settings, run_path: Path) -> None:
        self.settings, self.task_directory = settings, run_path / "tasks"
        need_libraries("sparge eval cannot run", "transformers", extra="eval")
        for measure in (NEEDLE, TASKS):
            if measure in settings.measures:
                need_libraries(f"the measure {measure} cannot run", "lm_eval", extra="eval")
        if settings.profile is not None and not Path(settings.profile).is_file():
            raise ValueError(f"--profile must name a file, got {settings.profile!r}")
        self.directory = zoo.directory_of(settings.model).resolve()
        limit, longest = max_tokens(config_of(self.directory)), max(settings.lengths)
        if limit is not None and longest > limit:
            raise ValueError(
                f"--lengths must be at most {limit} for {settings.model} "
                f"(max_position_embeddings), got {longest}"
            )
        if TASKS in settings.measures:
            shortest = min(settings.lengths)
            harness.check_tasks(settings.tasks, length=shortest, tokenizer_path=str(self.directory))
        tokenizer = tokenizer_of(self.directory)
        self.text = Text("none", "", ())  # tasks bring their own
        if settings.needed_tokens or harness.LONGTEXT_TASK in settings.tasks:
            raw = read_text(settings.text)
            self.text = tokenize(settings.text, raw, tokenizer, needed=settings.needed_tokens)
        self.needles: dict[tuple[int, int | None], Needle] = {}
        if NEEDLE in settings.measures:
            for n in sorted(set(settings.lengths)):
                for depth in settings.depth_percents:
                    self.needles[n, depth] = make_needle(
                        self.text, tokenizer, length=n, depth=depth, seed=settings.seed
                    )
        self.fingerprint = directory_fingerprint(settings.model, self.directory)

    def key(self) -> dict[str, Any]:
        """What the results depend on; the caller adds versions and machine."""
        digests = {"model": self.fingerprint["digest"], "text": self.text.digest}
        return {**self.settings.of_a_cell(), **digests}

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        return zoo.load(os.fspath(self.directory), dtype=getattr(torch, self.settings.dtype))

    @property
    def model(self) -> Any:
        return self.loaded[0]

    def wrapped(self, **options: Any) -> Any:
        """The model for lm-eval."""
        return harness.wrap(*self.loaded, **options)

    @cached_property
    def split(self) -> bool:
        return splits(self.model, self.window(BLOCK_Q))

    def window(self, length: int, i: int = 0) -> torch.Tensor:
        return self.text.window(length, i).to(self.model.device)

    @contextmanager
    def variant(self, name: str, *, measure_error: bool = False) -> Iterator[Any]:
        """Yield None for the model as it is, or the handle of the model with sparge."""
        if name == DENSE_VARIANT:
            yield None
            return
        options: dict[str, Any] = {"backend": "dense"}
        if name == SPARGE_VARIANT:
            options = {"recipe": self.settings.recipe, "profile": self.settings.profile}
        with accelerate(self.model, measure_error=measure_error, **options) as handle:
            yield handle

    @cached_property
    def needle_task(self) -> Any:
        """The lm-eval task with every needle of this run, in the order of `needles`."""
        documents = [needle.to_dict() for needle in self.needles.values()]
        harness.write_task(harness.NEEDLE_TASK, documents, self.task_directory)
        return harness.load_task(harness.NEEDLE_TASK, self.task_directory)

    @cached_property
    def longtext_directory(self) -> Path:
        """Of the task sparge_longtext: one document per page, so --limit can take some of them."""
        text = read_text(self.settings.text)
        pages = [{"page": text[start : start + PAGE]} for start in range(0, len(text), PAGE)]
        harness.write_task(harness.LONGTEXT_TASK, pages, self.task_directory)
        return self.task_directory


def total_runs(report: Any) -> dict[str, int]:
    """How often each way of attention ran, over all layers."""
    total: Counter[str] = Counter()
    for layer in report.layers:
        total.update(layer.ran)
    return dict(total)
