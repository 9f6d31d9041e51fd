"""One document with a needle in it, read by a model with dense attention and with sparge.

One prefill of each variant gives the seconds to the first token; then, untimed, the perplexity
from its hidden states and the answer from its cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import (
    BLOCK_K,
    BLOCK_Q,
    DEFAULT,
    Recipe,
    accelerate,
    attention,
    make_plan,
    output_error,
    record,
)
from sparge.api.accuracy import exact_weights
from sparge.models.handle import Handle
from sparge.support.turns import take_turns
from sparge.values.call import diagonal_offset, in_blocks
from sparge.values.tokenmask import TokenMask

from .. import zoo
from ..evaluate.logits import Outputs, compare, outputs_of, splits
from ..evaluate.settings import DENSE_VARIANT, SPARGE_VARIANT, VARIANTS
from ..evaluate.tested_model import directory_fingerprint, tokenizer_of, total_runs
from ..evaluate.texts import make_needle, prompt_of, read_text, tokenize
from ..measuring import no_garbage_collection
from .result import AttentionMap, HiddenFact, Reading, Showcase

SHOWN = 6  # heads that are drawn, from the sparsest to the densest


@dataclass(frozen=True)
class LayerCall:
    """One call of `attention` by a layer. options: its arguments besides the tensors."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]


def head_errors(call: LayerCall, recipe: Recipe) -> list[float]:
    """Relative L1 of each head's output on sampled rows; the call is computed again."""
    inputs = (call.query, call.key, call.value)
    out = attention(*inputs, recipe=recipe, **call.options)
    assert isinstance(out, Tensor)
    errors: list[float] = output_error(*inputs, out, **call.options)[0].tolist()
    return errors


def attention_maps(
    calls: Mapping[int, LayerCall], errors: Mapping[int, list[float]], recipe: Recipe
) -> tuple[AttentionMap, ...]:
    """Maps of SHOWN heads of these layers, evenly spread from the sparsest to the densest."""
    plans = {
        i: make_plan(c.query, c.key, value=c.value, recipe=recipe, **c.options)
        for i, c in calls.items()
    }
    heads = sorted(
        (density, i, h)
        for i, plan in plans.items()
        for h, density in enumerate(plan.head_density()[0].tolist())
    )
    n = min(SHOWN, len(heads))
    maps = []
    for density, i, h in (heads[j * (len(heads) - 1) // max(n - 1, 1)] for j in range(n)):
        mass, kept = block_mass(calls[i], h), plans[i].to_mask()[0, h].cpu()
        mass_kept = float((mass * kept).sum() / mass.sum())
        maps.append(AttentionMap(i, h, density, mass_kept, errors[i][h], mass, kept))
    return tuple(maps)


def block_mass(call: LayerCall, h: int) -> Tensor:
    """`[n_q, n_k]` fp32: the share of attention that each key block gets, mean over the rows."""
    Lq, Lk, options = call.query.shape[2], call.key.shape[2], call.options
    offset = diagonal_offset(Lq, Lk, options["causal_align"])
    tokens = TokenMask(Lq, Lk, options["is_causal"], offset, options["attn_mask"])
    scale = call.query.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
    mass = []
    for rows in torch.arange(Lq, device=call.query.device).split(BLOCK_Q):
        weights = exact_weights(call.query, call.key, tokens, 0, h, rows, scale=scale)
        mass.append(in_blocks(weights, -1, BLOCK_K).sum(-1).mean(0))
    return torch.stack(mass).float().cpu()


DEPTH = 40  # percent of the document before the needle
ANSWER_TOKENS = 12
WARMUP_TOKENS = 512
"""Read by both variants before timing: starts threads, and calibrates the CPU if needed."""


@dataclass(frozen=True)
class DemoInputs:
    """What is known before the weights are loaded. ids: the prompt, `[1, L]`."""

    directory: Path
    model: dict[str, Any]
    text: dict[str, Any]
    tokenizer: Any
    ids: Tensor
    needle: HiddenFact


def prepare_inputs(*, model: str, text: str, tokens: int, seed: int) -> DemoInputs:
    """Check the arguments and make the prompt, at most `tokens` long with its question."""
    if tokens < BLOCK_Q:
        raise ValueError(f"--tokens must be at least one block of {BLOCK_Q}, got {tokens}")
    directory = zoo.directory_of(model)
    facts = directory_fingerprint(model, directory)
    limit = facts["max_tokens"]
    if limit is not None and tokens + ANSWER_TOKENS > limit:
        raise ValueError(
            f"--tokens must be at most {limit - ANSWER_TOKENS}, got {tokens}: {model} supports "
            f"{limit} tokens, and its answer takes {ANSWER_TOKENS}"
        )
    tokenizer = tokenizer_of(directory)
    document = tokenize(text, read_text(text), tokenizer, needed=tokens)
    found = make_needle(document, tokenizer, length=tokens, depth=DEPTH, seed=seed)
    prompt = prompt_of(tokenizer, found.context, found.question, found.prefix)
    special = tokenizer.chat_template is None  # a template writes them itself

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    token = len(encode(prompt[: prompt.index(found.fact)]))
    needle = HiddenFact(found.fact, found.question, found.prefix, found.answer, found.depth, token)
    origin = {"name": text, "digest": document.digest}
    return DemoInputs(directory, facts, origin, tokenizer, torch.tensor([encode(prompt)]), needle)


@torch.inference_mode()
def measure_showcase(
    prepared: DemoInputs,
    model: Any,
    *,
    recipe: Recipe | None,
    repeats: int,
    command: str,
    where: Mapping[str, Any],
    step: Callable[[str], None] = lambda what: None,
) -> Showcase:
    """Read the document `repeats` times with each variant. step: called before each step."""
    start = time.perf_counter()
    ids, chosen = prepared.ids, DEFAULT if recipe is None else recipe
    step("warming up")
    few = ids[:, :WARMUP_TOKENS]
    split = splits(model, few)
    readers = {name: _Reader(prepared, model, name, recipe, split, step) for name in VARIANTS}
    for reader in readers.values():
        with reader.running():
            read(model, few, split=split)
    turns = [reader.take_turn for reader in readers.values()]
    times = take_turns(turns, rounds=repeats)
    step("perplexity of both")
    dense, sparge = readers.values()
    assert dense.outputs is not None
    assert sparge.outputs is not None
    found = compare(dense.outputs, sparge.outputs, ids)
    step("attention maps of a few heads")
    by_head = tuple(layer.density_by_head or None for layer in sparge.report.layers)
    sparse = {i: call for i, call in sparge.calls.items() if by_head[i] is not None}
    errors = {i: head_errors(call, chosen) for i, call in sparse.items()}
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
        order=tuple(v for i in range(repeats) for v in VARIANTS[:: 1 if i % 2 == 0 else -1]),
        warmup_tokens=few.shape[1],
        dense=dense.reading(times[0], found.dense),
        sparge=sparge.reading(times[1], found.sparge),
        density=sparge.report.density,
        density_by_head=by_head,
        error=sum(every) / len(every) if every else None,
        error_layers=tuple(errors),
        agreement=float(found.agree.double().mean()),
        kl=float(found.kl.mean()),
        heads=attention_maps(sparse, errors, chosen),
        took_seconds=time.perf_counter() - start,
    )


@dataclass
class _Reader:
    """One variant. Besides `attention`, all that is gathered comes from its first turn."""

    prepared: DemoInputs
    model: Any
    name: str
    recipe: Recipe | None
    split: bool
    step: Callable[[str], None]
    attention: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    outputs: Outputs | None = None
    answer: str = ""
    report: Any = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    calls: dict[int, LayerCall] = field(default_factory=dict)

    def running(self) -> Handle:
        """The model with sparge's hook, which also measures the time in dense attention."""
        if self.name == DENSE_VARIANT:
            return accelerate(self.model, backend="dense")
        return accelerate(self.model, self.recipe)

    def keep_call(
        self, i: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> None:
        if query.shape[2] > 1:  # not the tokens of the answer, which come one by one
            self.calls[i] = LayerCall(query, key, value, dict(options))

    def take_turn(self) -> float:
        self.step(f"{self.name} reads {self.prepared.ids.shape[1]} tokens")
        is_first = not self.attention
        with self.running() as handle, record() as runs:
            if is_first and self.name == SPARGE_VARIANT:
                names = [layer.name for layer in handle.report().layers]
                for i in layers_to_see(len(names)):
                    handle.tap(names[i], partial(self.keep_call, i))
            with no_garbage_collection():
                seconds, token, outputs = read(self.model, self.prepared.ids, split=self.split)
            report = handle.report()
            self.attention.append(report.seconds)
            if not is_first:
                return seconds
            stages = dict.fromkeys(name for run in runs for name in run.seconds if name != "total")
            self.stages = {name: sum(run.seconds.get(name, 0.0) for run in runs) for name in stages}
            self.outputs, self.report = outputs, report
            self.answer = write_answer(self.model, self.prepared.tokenizer, token, outputs.cache)
            if self.name == SPARGE_VARIANT:  # dense has nothing to fall back from
                self.fallbacks = handle.report().fallbacks
        return seconds

    def reading(self, seconds: list[float], losses: Tensor) -> Reading:
        return Reading(
            seconds=tuple(seconds),
            attention=tuple(self.attention),
            stages=dict(self.stages),
            perplexity=float(losses.mean().exp()),
            answer=self.answer,
            found=self.prepared.needle.answer in self.answer,
            ran=total_runs(self.report),
            fallbacks=dict(self.fallbacks),
        )


def read(model: Any, ids: Tensor, *, split: bool) -> tuple[float, int, Outputs]:
    """Seconds until the next token is known, that token, and the outputs."""
    start = time.perf_counter()
    outputs = outputs_of(model, ids, split=split, use_cache=True)
    token = int(outputs.rows(-1).argmax())  # waits for the device
    return time.perf_counter() - start, token, outputs


def write_answer(model: Any, tokenizer: Any, token: int, cache: Any) -> str:
    """What the model writes after its prompt by greedy decoding, as text."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends, tokenizer.eos_token_id}
    written: list[int] = []
    while token not in ends and len(written) < ANSWER_TOKENS:
        written.append(token)
        ids = torch.tensor([[token]], device=model.device)
        token = int(model(ids, past_key_values=cache, use_cache=True).logits[0, -1].argmax())
    return str(tokenizer.decode(written, skip_special_tokens=True))


def layers_to_see(n: int) -> list[int]:
    """An early, a middle and a late layer, whose calls are kept; all calls would not fit."""
    return sorted({n // 6, n // 2, n - 1 - n // 6})
