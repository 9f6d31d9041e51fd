"""One engine of vLLM's with sparge in it, for the study `serve`: prompts, rates, a soak."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sparge import Recipe

from .. import zoo

AT_ONCE = 64
SHORTEST = 128
ANSWER = 16
WARM_UP = 0.25
"""The share of a soak before memory is looked at."""
EXTENSION = "sparge.serving.vllm.WorkerExtension"


class Engine:
    """vLLM in processes of its own; `serve(False)` leaves all attention to vLLM."""

    def __init__(
        self, model: str, *, longest: int, chunk: int, recipe: Recipe | None, compiled: bool
    ) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        directory = zoo.fetch(model, quiet=True)
        from transformers import AutoTokenizer
        from vllm import LLM

        settings = {"log_seconds": 0} | ({} if recipe is None else {"recipe": recipe.to_dict()})
        self.tokens = AutoTokenizer.from_pretrained(directory)(zoo.text("essays"))["input_ids"]
        self.llm = LLM(
            str(directory),
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=AT_ONCE,
            max_num_batched_tokens=chunk,
            enforce_eager=not compiled,
            attention_backend="SPARGE",
            additional_config={"sparge": settings},
            worker_extension_cls=EXTENSION,
            disable_log_stats=True,
        )

    def serve(self, on: bool) -> None:
        self.llm.collective_rpc("sparge_serve", args=(on,))

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = self.llm.collective_rpc("sparge_report")[0]
        return found

    def first_token(self, length: int, *, seed: int) -> float:
        """Seconds to the first token of a prompt that is not cached; its answer is one token."""
        prompt = self.prompt(length - 1, random.Random(seed))
        self.llm.reset_prefix_cache()
        self.llm.collective_rpc("sparge_reset")
        start = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - start

    def rate(self, requests: int, longest: int, *, seed: int) -> float:
        """Requests per second, all of them given at once."""
        rng = random.Random(seed)
        lengths = mixed_lengths(requests, longest - ANSWER, rng)
        prompts = [self.prompt(length, rng) for length in lengths]
        self.llm.reset_prefix_cache()
        start = time.perf_counter()
        self._generate(prompts, ANSWER)
        return requests / (time.perf_counter() - start)

    def prompt(self, length: int, rng: random.Random) -> list[int]:
        start = rng.randrange(max(1, len(self.tokens) - length))
        found = self.tokens[start : start + length]
        return list(found) + list(self.tokens[: length - len(found)])

    def _generate(self, prompts: Sequence[list[int]], tokens: int) -> None:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.llm.generate(inputs, params(tokens), use_tqdm=False)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def params(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def mixed_lengths(n: int, longest: int, rng: random.Random) -> list[int]:
    """Lengths of prompts, as many short as long: even in their logarithm."""
    low = min(SHORTEST, longest)
    return [round(low * (longest / low) ** rng.random()) for _ in range(n)]


def soak(engine: Engine, seconds: float, longest: int) -> dict[str, Any]:
    """Keep `AT_ONCE` requests of mixed lengths at work; count errors, and look at memory."""
    rng = random.Random(0)
    engine.serve(True)
    inner = engine.llm.llm_engine
    numbers = itertools.count()
    at_work = done = errors = 0
    memory: list[float] = []
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or at_work:
        while spent < seconds and at_work < AT_ONCE:
            (length,) = mixed_lengths(1, longest - 4 * ANSWER, rng)
            prompt = {"prompt_token_ids": engine.prompt(length, rng)}
            answer = params(rng.randint(1, 4 * ANSWER))
            inner.add_request(f"soak-{next(numbers)}", prompt, answer)
            at_work += 1
        for each in inner.step():
            if each.finished:
                at_work, done = at_work - 1, done + 1
                errors += each.outputs[0].finish_reason not in ("length", "stop")
        if spent > WARM_UP * seconds:
            memory.append(worker_mib())
    return {
        "at_once": AT_ONCE,
        "seconds": time.perf_counter() - start,
        "done": done,
        "errors": errors,
        **growth(memory or [worker_mib()]),
        "fallbacks": engine.report()["report"]["fallbacks"],
    }


def growth(memory: Sequence[float]) -> dict[str, float]:
    """Medians of the first and the last tenth of the samples, and the most."""
    n = max(len(memory) // 10, 1)
    first, last = statistics.median(memory[:n]), statistics.median(memory[-n:])
    return {"first_mib": first, "last_mib": last, "most_mib": max(memory)}


def worker_mib() -> float:
    """Memory of all processes that this one started, in MiB."""
    return sum(_resident_bytes()) / 2**20


def _resident_bytes() -> Iterator[int]:
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            yield child.memory_info().rss
        except psutil.Error:  # it ended meanwhile
            continue
