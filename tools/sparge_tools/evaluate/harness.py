"""EleutherAI's lm-eval on a model that is already in memory. It is optional, imported at use."""

from __future__ import annotations

import io
import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from sparge.support.atomic_files import replace_file

TASK_FILES = Path(__file__).parent / "tasks"
NEEDLE_TASK, LONGTEXT_TASK = "sparge_needle", "sparge_longtext"
OWN_TASKS = (NEEDLE_TASK, LONGTEXT_TASK)
SEED = 1234  # of few-shot examples, as in lm-eval's command line
ANSWER_ROWS = 64  # last rows of logits that a short answer needs; other rows are not computed


@contextmanager
def no_output() -> Iterator[None]:
    """Suppress lm-eval's progress bars and advice, which would break our bar; errors still show."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def check_tasks(names: Sequence[str], *, length: int, tokenizer_path: str) -> None:
    """Raise ValueError for a name that lm-eval does not know."""
    if set(names) <= set(OWN_TASKS):
        return
    known = {*task_manager(length, tokenizer_path).all_tasks, *OWN_TASKS}
    for name in names:
        if name not in known:
            near = get_close_matches(name, sorted(known), n=3)
            hint = f"; similar names: {', '.join(near)}" if near else ""
            raise ValueError(
                f"--tasks: lm-eval has no task {name!r}{hint}; for a list run: "
                "python -m sparge_tools.lm_eval ls tasks"
            )


@cache
@no_output()
def task_manager(length: int, tokenizer_path: str) -> Any:
    """The index of all lm-eval tasks, which takes many seconds to build.

    RULER's tasks generate their documents, of this length and with this tokenizer.
    """
    metadata = {"max_seq_lengths": [length], "tokenizer": tokenizer_path}
    return import_module("lm_eval.tasks").TaskManager(metadata=metadata)


def write_task(name: str, documents: Sequence[Mapping[str, Any]], directory: Path) -> None:
    """Write the task and its documents as files; lm-eval's command line can run them too."""
    directory.mkdir(parents=True, exist_ok=True)
    data = (directory / f"{name}.jsonl").resolve()
    lines = "".join(f"{json.dumps(document)}\n" for document in documents)
    replace_file(data, lines.encode())
    text = (TASK_FILES / f"{name}.yaml").read_text(encoding="utf-8")
    # Any JSON string is a valid YAML string.
    text = text.replace("DATA_FILE", json.dumps(str(data)))
    text = text.replace("CACHE_DIRECTORY", json.dumps(str(data.parent / "cache")))
    replace_file(directory / f"{name}.yaml", text.encode())


@no_output()
def load_task(name: str, directory: Path) -> Any:
    """Load a task that `write_task` wrote."""
    options = {"include_path": str(directory), "include_defaults": False}
    return import_module("lm_eval.tasks").TaskManager(**options).load([name])


def answer_of(loaded: Any, name: str, i: int, lm: Any) -> tuple[float, bool, int]:
    """Document i: mean loss of the answer's tokens, whether greedy writes it, number of tokens."""
    has_template = lm.tokenizer.chat_template is not None
    found = _evaluate(
        lm, loaded, samples={name: [i]}, log_samples=True, apply_chat_template=has_template
    )
    (sample,) = found["samples"][name]
    likelihood, is_greedy = sample["filtered_resps"][0]
    context, answer = sample["arguments"][0]
    tokens = len(lm.tok_encode(f"{context}{answer}")) - len(lm.tok_encode(context))
    return -float(likelihood) / tokens, bool(is_greedy), tokens


# Documents can take minutes to generate: dense and sparge share them.
@lru_cache(maxsize=1)
@no_output()
def _loaded(name: str, length: int, tokenizer_path: str) -> Any:
    manager = task_manager(length, tokenizer_path)
    # Seeded as in lm-eval's command line, so a resumed run generates the same documents.
    random.seed(0)
    import_module("numpy").random.seed(SEED)
    return manager.load([name])


def scores_of(
    name: str,
    lm: Any,
    *,
    length: int,
    limit: int,
    tokenizer_path: str,
    directory: Path | None = None,
) -> dict[str, float]:
    """The metrics of a task by name; of a group, those of its tasks.

    directory: where `write_task` wrote the task; None for a task of lm-eval.
    """
    if directory is None:
        loaded = _loaded(name, length, tokenizer_path)
    else:
        loaded = load_task(name, directory)
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    found = _evaluate(lm, loaded, limit=limit, log_samples=False)
    scores = {}
    for task, metrics in found["results"].items():
        for metric, value in metrics.items():
            # "acc,none": the metric and its filter. RULER reports -1 for other lengths.
            if isinstance(value, float | int) and "stderr" not in metric and value != -1:
                short = metric.removesuffix(",none")
                scores[short if task == name else f"{task} {short}"] = float(value)
    scores.pop("sample_len", None)
    return {metric: value for metric, value in scores.items() if math.isfinite(value)}


@no_output()
def _evaluate(lm: Any, loaded: Any, **options: Any) -> Any:
    evaluate = import_module("lm_eval.evaluator").evaluate
    return evaluate(lm=lm, task_dict=loaded, bootstrap_iters=0, **options)


@no_output()
def wrap(model: Any, tokenizer: Any, *, max_length: int, answers_only: bool = False) -> Any:
    """The model for lm-eval; `answers_only` computes the logits of the last rows only."""
    # bf16 would round the loss to three digits.
    options = {"batch_size": 1, "max_length": max_length, "softmax_dtype": "float32"}
    make = import_module("lm_eval.models.huggingface").HFLM
    lm = make(pretrained=model, tokenizer=tokenizer, **options)
    if answers_only:
        lm._model_call = partial(_last_logits, model)
    return lm


@torch.inference_mode()
def _last_logits(model: Any, ids: Any, *_: Any) -> Any:
    """lm-eval counts answer tokens from the end, so the last rows are enough."""
    return model(ids, logits_to_keep=ANSWER_ROWS, use_cache=False).logits
