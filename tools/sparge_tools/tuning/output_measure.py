"""How far a model's output moves when its attention is sparse: of language models and denoisers.

The changes that layers cause are small and nearly uncorrelated, so the measures below add up over
layers: divergence of the next-token distributions, and squared relative error of an output. What
was measured so far is kept in an `OutputState`, from which the same request resumes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparge.support.atomic_files import replace_file
from sparge.support.json_text import parse_json, read_json_text

from ..evaluate.logits import Outputs, compare, divergence, outputs_of, splits
from .tracing import Inputs, moved_to

ROWS = 1024
"""Positions of a text at which the sensitivity is measured, evenly spread."""
CHUNK = 512
"""Neighbouring positions are not independent; standard errors are over means of this many."""
KL, PERPLEXITY, RELATIVE_L2 = "kl", "perplexity", "relative_l2"


class Measure(Protocol):
    """What is measured of one kind of model, which runs as it is at the moment.

    judged: the figure that a target is compared with; its standard error is `…_error`.
    """

    model: nn.Module
    judged: str

    def run(self, given: Inputs) -> Any:
        """The output on one input."""

    def change(self, dense: Any, sparse: Any, given: Inputs) -> float:
        """How far the output moved, in a measure that adds up over layers."""

    def parts(self, dense: Any, sparse: Any, given: Inputs) -> list[dict[str, float]]:
        """Sums over parts of a held-out input that are nearly independent."""

    def figures(self, parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """What is told of held-out inputs, from all of their parts."""

    def sum_for(self, target: float) -> float:
        """The sum of changes that a target allows, if they add up."""


class LanguageMeasure:
    """Next-token distributions of a causal language model. judge: `KL` or `PERPLEXITY`."""

    def __init__(self, model: nn.Module, judge: str = KL, rows: int = ROWS) -> None:
        self.model, self.rows = model, rows
        self.judged = "kl" if judge == KL else "relative"
        self._split: bool | None = None

    def run(self, given: Inputs) -> Outputs:
        ids = _tokens(given, self.model)
        if self._split is None:
            self._split = splits(self.model, ids)
        return outputs_of(self.model, ids, split=self._split)

    def change(self, dense: Outputs, sparse: Outputs, given: Inputs) -> float:
        """Mean KL(dense ‖ sparse) over some positions, the last one included."""
        n = len(dense.kept)
        rows = torch.linspace(n - 1, 0, min(self.rows, n)).round().long().unique()
        return float(divergence(dense, sparse, rows).mean())

    def parts(self, dense: Outputs, sparse: Outputs, given: Inputs) -> list[dict[str, float]]:
        found = compare(dense, sparse, _tokens(given, self.model))
        columns = {"kl": found.kl, "dense": found.dense, "sparse": found.sparge}
        chunks = {name: numbers.split(CHUNK) for name, numbers in columns.items()}
        return [
            {"n": len(chunks["kl"][i]), **{name: float(c[i].sum()) for name, c in chunks.items()}}
            for i in range(len(chunks["kl"]))
        ]

    def figures(self, parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        n = sum(part["n"] for part in parts)
        total = {name: sum(part[name] for part in parts) for name in ("kl", "dense", "sparse")}
        lost = [{"n": part["n"], "lost": part["sparse"] - part["dense"]} for part in parts]
        relative = math.expm1((total["sparse"] - total["dense"]) / n)
        return {
            "kl": total["kl"] / n,
            "kl_error": _standard_error(parts, "kl"),
            "dense_perplexity": math.exp(total["dense"] / n),
            "perplexity": math.exp(total["sparse"] / n),
            "relative": relative,
            "relative_error": (1.0 + relative) * _standard_error(lost, "lost"),
            "tokens": int(n),
        }

    def sum_for(self, target: float) -> float:
        # If the text were drawn from the model itself, its loss would rise by the divergence.
        return target if self.judged == "kl" else math.log1p(target)


class DenoiserMeasure:
    """The output tensor of a denoiser: squared relative L2 per input; the target is its root."""

    judged = RELATIVE_L2

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run(self, given: Inputs) -> Tensor:
        with torch.inference_mode():
            return output_tensor(self.model(**moved_to(self.model, given))).float().cpu()

    def change(self, dense: Tensor, sparse: Tensor, given: Inputs) -> float:
        return float((sparse - dense).square().sum() / dense.square().sum())

    def parts(self, dense: Tensor, sparse: Tensor, given: Inputs) -> list[dict[str, float]]:
        return [{"n": 1, "change": math.sqrt(self.change(dense, sparse, given))}]

    def figures(self, parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        mean = sum(part["change"] for part in parts) / len(parts)
        error = _standard_error(parts, "change")
        return {RELATIVE_L2: mean, f"{RELATIVE_L2}_error": error, "inputs": len(parts)}

    def sum_for(self, target: float) -> float:
        return target * target


def output_tensor(output: Any) -> Tensor:
    """The tensor in what a model returns: itself, its `sample`, or the first of its values."""
    if isinstance(output, Tensor):
        return output
    sample = getattr(output, "sample", None)
    if isinstance(sample, Tensor):
        return sample
    values = list(output.values()) if isinstance(output, Mapping) else list(output)
    if not values or not isinstance(values[0], Tensor):
        raise TypeError(f"the model must return a tensor first, got {type(output).__name__}")
    return values[0]


def _tokens(given: Inputs, model: nn.Module) -> Tensor:
    if not isinstance(given, Tensor) or given.ndim != 2 or len(given) != 1:
        came = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"inputs must be token ids [1, L], one text each; got {came}")
    return given.to(next((p.device for p in model.parameters()), given.device))


def _standard_error(parts: Sequence[Mapping[str, float]], name: str) -> float:
    """Of the mean Σ name / Σ n, with the parts as independent samples; infinite for one part."""
    if len(parts) < 2:
        return math.inf
    n = sum(part["n"] for part in parts)
    mean = sum(part[name] for part in parts) / n
    squares = sum((part[name] - mean * part["n"]) ** 2 for part in parts)
    return math.sqrt(squares * len(parts) / (len(parts) - 1)) / n


FORMAT = "sparge.tune.output/1"


class OutputState:
    """Results by kind and key, written after each; without a path they are kept in memory.

    asked: what every result depends on. The target is not part of it: a file serves any target.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, asked: Mapping[str, Any] | None = None
    ) -> None:
        self.path = None if path is None else Path(path)
        self.asked = json.loads(json.dumps(asked or {}))
        self._results: dict[str, Any] = {}
        if self.path is not None and self.path.is_file():
            self._results = self._read(self.path)

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """The result of a key, measured if it is not known; it is on disk when this returns.

        It comes as it would be read.
        """
        if key not in self._results:
            self._results[key] = json.loads(json.dumps(measure()))
            if self.path is not None:
                data = {"format": FORMAT, "asked": self.asked, "results": self._results}
                replace_file(self.path, f"{json.dumps(data)}\n".encode())
        return self._results[key]

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            data = parse_json(read_json_text(path), "it")
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            differing = [
                name
                for name in {**self.asked, **data["asked"]}
                if self.asked.get(name) != data["asked"].get(name)
            ]
            if differing:
                raise ValueError(f"it is of another request: other {', '.join(differing)}")
            return dict(data["results"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} cannot be resumed: {error}; remove it to begin again, or name another "
                "state file"
            ) from None
