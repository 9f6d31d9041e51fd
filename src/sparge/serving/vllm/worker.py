"""A worker of vLLM's: its layers with their settings and counts, its log and its report.

Layers are bound to their settings when a worker starts; vLLM's state is read there alone.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...api.attention import attention_and_run
from ...api.varlen import attend_packed
from ...models.report import Report, Tally
from ...values.recipe import Recipe
from ...values.run import Run
from .batch import PromptPack, Request
from .refusals import DECODE, FOREIGN_STEP, LEFT_DENSE, why_layer_not_served
from .routing import ENOUGH_CALLS, OwnCost, Shape, calibrate_backend, chosen_backend, why_not
from .settings import ServingSettings, asked_for, read_settings

RECORD_EVERY = {"cpu": 1}
RECORD_EVERY_ON_GPU = 16
"""Counting adds some launches to a call, so one call in so many is counted there."""
Measure = Callable[[Any, Shape], OwnCost | None]


@dataclass(eq=False)
class ServedLayer:
    """One attention layer of vLLM's. why: the reason why none of its calls is served, or "".

    tally: its prefills; a call is one request in one step. tokens: query rows that were `served`
    here, went to vLLM's `own` attention, or were `decode`. decode_seconds: time in vLLM's kernel
    for steps of decode alone. calls: packs that were attended here.
    """

    name: str
    shape: Shape | None
    backend: str
    why: str = ""
    own: OwnCost | None = None
    tally: Tally = field(default_factory=Tally)
    tokens: Counter[str] = field(default_factory=Counter)
    decode_seconds: float = 0.0
    calls: int = 0

    @property
    def recipe(self) -> Recipe | None:
        return None if self.shape is None else self.shape.recipe

    def why_not(self, request: Request) -> str:
        """Why vLLM's attention shall run a request; "" if it is served here."""
        if self.shape is None:
            return self.why or LEFT_DENSE
        density = self.tally.sparse_density(calls=ENOUGH_CALLS)
        return why_not(self.shape, request, backend=self.backend, own=self.own, density=density)

    def attend(self, pack: PromptPack, output: Tensor) -> None:
        """Attend a pack and write its rows to the step's output `[T, Hq, D]`, counted."""
        start = time.perf_counter()
        every = RECORD_EVERY.get(pack.query.device.type, RECORD_EVERY_ON_GPU)
        recorded = self.calls % every == 0
        self.calls += 1
        result, run = self._attend(pack, recorded=recorded)
        pack.write(result, output)
        seconds = time.perf_counter() - start
        self.tokens["served"] += sum(request.Lq for request in pack.requests)
        if run is None or self.recipe is None:
            self.tally.add_unrecorded(len(pack.requests), seconds)
        else:
            self.tally.add(run, recipe=self.recipe, seconds=seconds)

    def _attend(self, pack: PromptPack, *, recorded: bool) -> tuple[Tensor, Run | None]:
        shape = self.shape
        assert shape is not None
        longest = max(pack.requests, key=lambda request: request.Lq)
        options: dict[str, Any] = {
            "is_causal": True,
            "causal_align": "bottom_right",
            "scale": shape.scale,
            "enable_gqa": shape.Hq != shape.Hk,
            "recipe": shape.recipe,
            "backend": chosen_backend(shape, longest, self.backend),
            "recorded": recorded,
        }
        tensors = (pack.query, pack.key, pack.value)
        if len(pack.requests) == 1:
            query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
            out, _, run = attention_and_run(query, key, value, **options)
            return out[0].transpose(0, 1), run
        out, _, run = attend_packed(*tensors, (pack.cuts_q, pack.cuts_k), **options)
        return out, run

    def note_decode(self, tokens: int, seconds: float) -> None:
        """vLLM's own attention ran a step of requests with one query each."""
        self.tokens["decode"] += tokens
        self.decode_seconds += seconds

    def note_own(self, requests: Sequence[tuple[Request, str]], Hq: int, seconds: float) -> None:
        """vLLM's own attention ran these requests, each for a reason; decoding is counted apart."""
        prefills = [each for each in requests if each[1] != DECODE]
        self.note_decode(len(requests) - len(prefills), 0.0 if prefills else seconds)
        for request, reason in prefills:
            self.tally.add_own(reason, seconds, Hq * request.blocks)
            self.tokens["own"] += request.Lq
            seconds = 0.0  # of all together

    def note_foreign_step(self, tokens: int, seconds: float) -> None:
        """vLLM's own attention ran a step whose requests are not known."""
        self.tally.add_own(FOREIGN_STEP, seconds, 0)
        self.tokens["own"] += tokens

    def reset(self) -> None:
        self.tally, self.tokens, self.decode_seconds = Tally(), Counter(), 0.0


@dataclass(frozen=True)
class WorkerReport:
    """What one worker did since its start or the last `reset()`.

    rank, ranks: of its tensor-parallel group. threads: torch's, in the worker. settings: where
    recipe or profile came from.
    report: its prefills, layer by layer; a call is one request in one step, dense ones included.
    tokens, decode_seconds: of each layer, see `ServedLayer`.
    """

    rank: int
    ranks: int
    threads: int
    settings: str
    report: Report
    tokens: Mapping[str, Mapping[str, int]]
    decode_seconds: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "format": "sparge.vllm.report/1",
            "rank": self.rank,
            "ranks": self.ranks,
            "threads": self.threads,
            "settings": self.settings,
            "tokens": {name: dict(each) for name, each in self.tokens.items()},
            "decode_seconds": dict(self.decode_seconds),
            "report": self.report.to_dict(),
        }

    @property
    def line(self) -> str:
        """One line for a log."""
        total = sum((Counter(each) for each in self.tokens.values()), Counter[str]())
        layers = max(len(self.tokens), 1)
        rows = {name: total[name] // layers for name in ("served", "own", "decode")}
        report = self.report
        why = "; ".join(f"{n}x {reason}" for reason, n in report.fallbacks.items())
        return (
            f"sparge rank {self.rank} of {self.ranks}: {rows['served']} prompt tokens served at "
            f"density {report.sparse_density:.3f}, {rows['own']} by vLLM's attention, "
            f"{rows['decode']} decoded; {report.seconds:.2f} s in prefill attention"
            + (f"; not served: {why}" if why else "")
        )

    def __str__(self) -> str:
        return f"{self.line}\n{self.report}"


@dataclass
class Worker:
    """The layers of this process, and the log."""

    rank: int = 0
    ranks: int = 1
    settings: ServingSettings = field(default_factory=ServingSettings)
    layers: dict[str, ServedLayer] = field(default_factory=dict)
    write_line: Callable[[str], None] | None = None
    last_line: float = field(default_factory=time.monotonic)
    last_tokens: int = 0
    paused: bool = False

    def start_log(self, write_line: Callable[[str], None]) -> None:
        if self.write_line is None:
            atexit.register(self.log)
        self.write_line = write_line

    def log_if_due(self) -> None:
        """A line, where the last one is long ago and prompts came since."""
        every = self.settings.log_seconds
        if every and time.monotonic() - self.last_line >= every:
            self.log()

    def log(self) -> None:
        self.last_line = time.monotonic()
        tokens = sum(sum(layer.tokens.values()) for layer in self.layers.values())
        if self.write_line is not None and self.settings.log_seconds and tokens > self.last_tokens:
            self.last_tokens = tokens
            self.write_line(self.report().line)

    def report(self) -> WorkerReport:
        layers = self.layers.values()
        profile = self.settings.profile is not None
        return WorkerReport(
            rank=self.rank,
            ranks=self.ranks,
            threads=torch.get_num_threads(),
            settings=self.settings.origin,
            report=Report(
                layers=tuple(layer.tally.report(layer.name, layer.recipe) for layer in layers),
                recipe=None if profile else self.settings.recipe,
                left_alone={layer.name: layer.why for layer in layers if layer.why},
            ),
            tokens={layer.name: dict(layer.tokens) for layer in layers},
            decode_seconds={layer.name: layer.decode_seconds for layer in layers},
        )

    def reset(self) -> None:
        for layer in self.layers.values():
            layer.reset()
        self.last_tokens = 0


WORKER = Worker()
"""Of this process: a worker of vLLM's is one."""


def bind_layers(
    layer_names: list[str], config: Any, *, measure: Measure, implementation: type[Any]
) -> None:
    """Give the layers of a cache group their recipes. ValueError or `Unsupported` ends the start:
    a setting is wrong, or does not fit this model.

    implementation: the class of the layers that can be served; others are passed over.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )
    from vllm.logger import init_logger
    from vllm.model_executor.layers.attention import Attention

    logger = init_logger("vllm.sparge")
    asked_for()
    WORKER.settings = settings = read_settings(config.additional_config)
    WORKER.rank = get_tensor_model_parallel_rank()
    WORKER.ranks = get_tensor_model_parallel_world_size()
    for name, layer in get_layers_from_vllm_config(config, Attention, layer_names).items():
        impl: Any = layer.impl
        if isinstance(impl, implementation):
            impl.served = WORKER.layers[name] = _bind_layer(name, impl, config, measure)
    bound = [WORKER.layers[name] for name in layer_names if name in WORKER.layers]
    left = {layer.why for layer in bound if layer.why}
    logger.info(
        "sparge serves %d of %d layers with %s%s",
        sum(not layer.why for layer in bound),
        len(bound),
        settings.origin,
        f"; left to vLLM: {', '.join(sorted(left))}" if left else "",
    )
    WORKER.start_log(logger.info)


def _bind_layer(name: str, impl: Any, config: Any, measure: Measure) -> ServedLayer:
    settings = WORKER.settings
    if why := why_layer_not_served(impl):
        return ServedLayer(name, None, settings.backend, why)
    if config.parallel_config.decode_context_parallel_size > 1:
        return ServedLayer(name, None, settings.backend, "decode context parallelism")
    heads = impl.num_heads
    recipe = settings.recipe_of(
        name, first=WORKER.rank * heads, heads=heads, all_heads=WORKER.ranks * heads
    )
    if recipe is None:
        return ServedLayer(name, None, settings.backend, LEFT_DENSE)
    on_card = config.device_config.device_type != "cpu"
    shape = Shape(
        Hq=heads,
        Hk=impl.num_kv_heads,
        D=impl.head_size,
        dtype=config.model_config.dtype,
        device=config.device_config.device_type,
        scale=impl.scale,
        recipe=recipe,
        # A worker's own card is the current one.
        index=max(torch.accelerator.current_device_index(), 0) if on_card else 0,
    )
    calibrate_backend(shape, settings.backend)
    return ServedLayer(name, shape, settings.backend, own=measure(impl, shape))
