"""One document with a needle in it, read twice: by dense attention and by sparge.

One prefill of each variant gives everything: the seconds to the first token, then, off the clock,
the perplexity from its hidden states and the answer from its cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dispatch import AUTO
from ..geometry import BLOCK_Q
from ..integrations import accelerate
from ..recipe import DEFAULT, Recipe
from ..record import record
from ..report.race import quiet
from ..report.showcase import Hidden, Reading, Showcase
from .headviews import LayerCall, error_of, look
from .logits import Outputs, compare, splits
from .needle import FACT, Needle, counter, make_needle
from .settings import DENSE, SPARGE, VARIANTS
from .subject import density_of, directory_of, fingerprint, tokenizer_of
from .texts import cut, read_text

DEPTH = 40
"""Percent of the document before the needle."""
ANSWER_TOKENS = 12
WARMUP_TOKENS = 512
"""Read by both variants before the clock: threads start, and a crossover is measured if need be."""


@dataclass(frozen=True)
class Prepared:
    """All that can be had, and refused, without the weights. ids: the prompt, `[1, L]`."""

    directory: Path
    model: dict[str, Any]
    text: dict[str, Any]
    tokenizer: Any
    ids: Tensor
    needle: Hidden


def prepare(*, model: str, text: str, tokens: int, seed: int) -> Prepared:
    """The document, cut to at most `tokens` with its question, and the model it is for."""
    if tokens < BLOCK_Q:
        raise ValueError(
            f"--tokens must be at least one block of {BLOCK_Q}, got {tokens}; sparse attention "
            "has nothing to choose there"
        )
    directory = directory_of(model)
    facts = fingerprint(model, directory)
    limit = facts["max_tokens"]
    if limit is not None and tokens + ANSWER_TOKENS > limit:
        raise ValueError(
            f"--tokens must be at most {limit - ANSWER_TOKENS}, got {tokens}: {model} was made "
            f"for {limit} tokens and its answer takes {ANSWER_TOKENS}"
        )
    tokenizer = tokenizer_of(directory)
    document = cut(text, read_text(text), tokenizer, needed=tokens)
    found = make_needle(
        document, tokenizer, length=tokens, depth=DEPTH, seed=seed, count=counter(tokenizer)
    )
    city = found.question.rstrip("?").rsplit(" ", 1)[-1]
    fact = FACT.format(city=city, number=found.answer)
    prompt, special = prompt_of(found, tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    return Prepared(
        directory,
        facts,
        {"name": text, "digest": document.digest},
        tokenizer,
        torch.tensor([encode(prompt)]),
        Hidden(
            fact=fact,
            question=found.question,
            prefix=found.prefix,
            answer=found.answer,
            depth=found.depth,
            token=len(encode(prompt[: prompt.index(fact)])),
        ),
    )


def prompt_of(needle: Needle, tokenizer: Any) -> tuple[str, bool]:
    """In the chat template where there is one, the answer begun; and whether BOS is to be added."""
    asked = f"{needle.context}\n\n{needle.question}"
    if tokenizer.chat_template is None:
        return f"{asked} {needle.prefix}", True
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": needle.prefix}]
    made = tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    return str(made), False


@dataclass
class _Variant:
    """What is gathered of one variant, round by round."""

    seconds: list[float] = field(default_factory=list)
    attention: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    outputs: Outputs | None = None
    answer: str = ""
    report: Any = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    calls: dict[int, LayerCall] = field(default_factory=dict)


@torch.inference_mode()
def read_both(
    prepared: Prepared,
    model: Any,
    *,
    recipe: Recipe | None,
    repeats: int,
    command: str,
    where: Mapping[str, Any],
    told: Callable[[str], None] = lambda what: None,
) -> Showcase:
    """told: what begins now, before each step."""
    start = time.perf_counter()
    ids, chosen = prepared.ids, DEFAULT if recipe is None else recipe
    told("warming up")
    few = ids[:, :WARMUP_TOKENS]
    split = splits(model, few)
    for name in VARIANTS:
        with _running(model, name, recipe):
            read(model, few, split=split)
    order = [name for i in range(repeats) for name in VARIANTS[:: 1 if i % 2 == 0 else -1]]
    variants = {name: _Variant() for name in VARIANTS}
    for name in order:
        told(f"{name} reads {ids.shape[1]} tokens")
        _take_turn(prepared, model, name, recipe, variants[name], split=split)
    told("perplexity of both")
    dense, sparge = variants[DENSE], variants[SPARGE]
    assert dense.outputs is not None
    assert sparge.outputs is not None
    found = compare(dense.outputs, sparge.outputs, ids)
    told("true attention of a few heads")
    report = sparge.report
    by_head = tuple(layer.density_by_head or None for layer in report.layers)
    sparse = {i: call for i, call in sparge.calls.items() if by_head[i] is not None}
    errors = {i: error_of(call, chosen) for i, call in sparse.items()}
    every = [error for each in errors.values() for error in each]
    return Showcase(
        command=command,
        model=prepared.model,
        text=prepared.text,
        where=where,
        dtype=str(model.dtype).removeprefix("torch."),
        recipe=chosen,
        tokens=ids.shape[1],
        needle=prepared.needle,
        order=tuple(order),
        warmup_tokens=few.shape[1],
        dense=_reading(dense, found.dense, prepared.needle),
        sparge=_reading(sparge, found.sparge, prepared.needle),
        density=density_of(report),
        density_by_head=by_head,
        error=sum(every) / len(every) if every else None,
        error_layers=tuple(errors),
        agreement=float(found.agree.double().mean()),
        kl=float(found.kl.mean()),
        heads=look(sparse, errors, chosen),
        took_seconds=time.perf_counter() - start,
    )


@contextmanager
def _running(model: Any, name: str, recipe: Recipe | None) -> Iterator[Any]:
    """Either way our hook is in the model: it alone can say how long attention took."""
    backend = DENSE if name == DENSE else AUTO
    with accelerate(model, None if name == DENSE else recipe, backend=backend) as handle:
        yield handle


def _take_turn(
    prepared: Prepared,
    model: Any,
    name: str,
    recipe: Recipe | None,
    variant: _Variant,
    *,
    split: bool,
) -> None:
    is_first = not variant.seconds
    with _running(model, name, recipe) as handle, record() as runs:
        names = [layer.name for layer in handle.report().layers]
        if is_first and name == SPARGE:
            for i in layers_to_see(len(names)):
                handle.tap(names[i], _keep(variant.calls, i))
        with quiet():
            seconds, outputs, cache = read(model, prepared.ids, split=split)
        report = handle.report()
        variant.seconds.append(seconds)
        variant.attention.append(report.seconds)
        if not is_first:
            return
        for run in runs:
            for stage, spent in run.seconds.items():
                if stage != "total":
                    variant.stages[stage] = variant.stages.get(stage, 0.0) + spent
        variant.outputs, variant.report = outputs, report
        first = int(outputs.rows(len(outputs) - 1, len(outputs)).argmax())
        variant.answer = go_on(model, prepared.tokenizer, first, cache)
        # Dense has nothing to fall back from.
        variant.fallbacks = handle.report().fallbacks if name == SPARGE else {}


def read(model: Any, ids: Tensor, *, split: bool) -> tuple[float, Outputs, Any]:
    """Seconds until the next token is known, what else is known then, and the cache."""
    start = time.perf_counter()
    if split:
        done, head = model.base_model(ids, use_cache=True), model.get_output_embeddings()
        outputs = Outputs(done.last_hidden_state[0], head)
    else:
        done = model(ids, use_cache=True)
        outputs = Outputs(done.logits[0], None)
    int(outputs.rows(len(outputs) - 1, len(outputs)).argmax())  # waits for the device
    return time.perf_counter() - start, outputs, done.past_key_values


def go_on(model: Any, tokenizer: Any, token: int, cache: Any) -> str:
    """What the model writes after its prompt, always its favourite token, as text."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends, tokenizer.eos_token_id}
    written: list[int] = []
    while token not in ends and len(written) < ANSWER_TOKENS:
        written.append(token)
        ids = torch.tensor([[token]], device=model.device)
        token = int(model(ids, past_key_values=cache, use_cache=True).logits[0, -1].argmax())
    return str(tokenizer.decode(written, skip_special_tokens=True))


def layers_to_see(n: int) -> list[int]:
    """An early, a middle and a late layer: their calls are kept, which all of them could not be."""
    return sorted({n // 6, n // 2, n - 1 - n // 6})


def _keep(calls: dict[int, LayerCall], i: int) -> Callable[[Tensor, Tensor, Tensor, Any], None]:
    def tap(query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> None:
        if query.shape[2] > 1:  # the answer's own tokens come one by one, and are not looked at
            calls[i] = LayerCall(query, key, value, dict(facts))

    return tap


def _reading(variant: _Variant, losses: Tensor, needle: Hidden) -> Reading:
    ran: dict[str, int] = {}
    for layer in variant.report.layers:
        for way, n in layer.ran.items():
            ran[way] = ran.get(way, 0) + n
    return Reading(
        seconds=tuple(variant.seconds),
        attention=tuple(variant.attention),
        stages=dict(variant.stages),
        perplexity=float(losses.mean().exp()),
        answer=variant.answer,
        found=needle.answer in variant.answer,
        ran=ran,
        fallbacks=dict(variant.fallbacks),
    )
