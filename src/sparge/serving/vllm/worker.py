"""A worker of vLLM's: its layers with their settings and counts, its steps, its log and its report.

Layers are bound to their settings when a worker starts; vLLM's state is read there alone. A step is
split and counted by `ServingImpl` and `ServingBuilder`, which CPU and GPU share. Both are mixed in
before vLLM's own classes, whose attention runs everything that is not served. vLLM is imported only
when layers are bound.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...api.attention import attention_and_run
from ...api.varlen import attend_packed
from ...models.report import Report, Tally
from ...models.route import ONE_QUERY
from ...routing import current_router
from ...values.recipe import Recipe
from ...values.run import Run
from .batch import PromptPack, Request, Step, make_pack, rows_of
from .routing import (
    ENOUGH_CALLS,
    FOREIGN_STEP,
    LEFT_DENSE,
    OTHER_KEYS,
    PAUSED,
    UNBOUND,
    UNKNOWN_LAYOUT,
    OwnCost,
    Shape,
    chosen_backend,
    why_layer_not_served,
    why_not,
    why_step_not_served,
)
from .settings import ServingSettings, asked_for, read_settings

RECORD_EVERY_ON_GPU = 16
"""Counting adds some launches to a call, so one call in so many is counted there."""
LONG = 8192
"""Tokens of the prompt that settings are checked with when a worker starts."""


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

    def why_not(self, request: Request, left_out: str) -> str:
        """Why vLLM's attention shall run a request; "" if it is served here. left_out: why it runs
        all prefills of the step, or ""."""
        if request.Lq <= 1:
            return ONE_QUERY
        if left_out or self.shape is None:
            return left_out
        density = self.tally.sparse_density(calls=ENOUGH_CALLS)
        return why_not(self.shape, request, backend=self.backend, own=self.own, density=density)

    def attend(self, pack: PromptPack, output: Tensor) -> None:
        """Attend a pack and write its rows to the step's output `[T, Hq, D]`, counted."""
        start = time.perf_counter()
        every = 1 if pack.query.device.type == "cpu" else RECORD_EVERY_ON_GPU
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
        prefills = [each for each in requests if each[1] != ONE_QUERY]
        self.note_decode(len(requests) - len(prefills), 0.0 if prefills else seconds)
        for request, reason in prefills:
            self.tally.add_own(reason, seconds, Hq * request.blocks)
            self.tokens["own"] += request.Lq
            seconds = 0.0  # of all together

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
    tokens: dict[str, dict[str, int]]
    decode_seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        report = self.report.to_dict()
        return {"format": "sparge.vllm.report/1", **vars(self), "report": report}

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
    layer_names: list[str],
    config: Any,
    *,
    measure: Callable[[Shape], OwnCost | None] | None,
    implementation: type[Any],
) -> None:
    """Give the layers of a cache group their recipes. ValueError or `Unsupported` ends the start:
    a setting is wrong, or does not fit this model.

    measure: times vLLM's attention of a layer, which `auto` then compares with.
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
            impl.served = served = WORKER.layers[name] = _bind_layer(name, impl, config)
            if measure is not None and served.shape is not None:
                served.own = measure(served.shape)
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


def _bind_layer(name: str, impl: Any, config: Any) -> ServedLayer:
    settings = WORKER.settings
    why = why_layer_not_served(impl)
    if not why and config.parallel_config.decode_context_parallel_size > 1:
        why = "decode context parallelism"
    if why:
        return ServedLayer(name, None, settings.backend, why)
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
    # Refuses a named backend that cannot serve such a call.
    call, router = shape.call(Request(0, LONG, LONG)), current_router()
    router.calibrate(call, router.choose(call, settings.backend))
    return ServedLayer(name, shape, settings.backend)


STEP, PARTS = "sparge_step", "sparge_parts"
"""Attributes of a step's metadata: its requests, and the metadata of some of them."""


class ServingImpl:
    """Mixed in before an `AttentionImpl`. Subclasses say how the cache is read."""

    served: ServedLayer | None = None

    def reader(self, layer: Any, kv_cache: Tensor, metadata: Any) -> Callable[..., None] | None:
        """`gather(i, key, value)` for request i; None if the cache cannot be read."""
        raise NotImplementedError

    def metadata_of(self, layer: Any, metadata: Any, chosen: Sequence[Request], at: Any) -> Any:
        """The metadata of some requests of a step; `at` are their numbers, as a tensor."""
        starts = list(accumulate((each.Lq for each in chosen), initial=0))
        return replace(
            metadata,
            num_actual_tokens=starts[-1],
            max_query_len=max(each.Lq for each in chosen),
            query_start_loc=metadata.query_start_loc.new_tensor(starts),
            max_seq_len=max(each.Lk for each in chosen),
            seq_lens=metadata.seq_lens[at],
            block_table=metadata.block_table[at],
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """vLLM's contract: the rows of `output` are written, and it is returned."""

        def own() -> Tensor:
            rest = (attn_metadata, output, output_scale, output_block_scale)
            written: Tensor = super(ServingImpl, self).forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, *rest
            )
            return written

        if attn_metadata is None:  # vLLM measures its memory
            return own()
        served = self.served or _unbound(layer)
        step: Step | None = getattr(attn_metadata, STEP, None)
        start = time.perf_counter()
        if step is None:
            own()
            served.tally.add_own(FOREIGN_STEP, time.perf_counter() - start, 0)
            served.tokens["own"] += attn_metadata.num_actual_tokens
            return output
        if step.decode_only:
            own()
            served.note_decode(len(step.requests), time.perf_counter() - start)
            return output
        fused = output_scale is not None or output_block_scale is not None
        why = PAUSED if WORKER.paused else served.why
        why = why or why_step_not_served(attn_metadata, fused_output=fused)
        why = why or (OTHER_KEYS if key is None else "")
        gather = None if why else self.reader(layer, kv_cache, attn_metadata)
        why = why or (UNKNOWN_LAYOUT if gather is None else "")
        reasons = [served.why_not(request, why) for request in step.requests]
        mine = [i for i, reason in enumerate(reasons) if not reason]
        rest = [i for i, reason in enumerate(reasons) if reason and step.requests[i].Lq]
        if not mine:
            own()
        elif rest:
            self._attend_rest(layer, query, kv_cache, attn_metadata, output, step, rest)
        others = [(step.requests[i], reasons[i]) for i in rest]
        served.note_own(others, query.shape[1], time.perf_counter() - start)
        if mine:
            assert gather is not None
            pack = make_pack(step, mine, query, key, value, gather)
            served.attend(pack, output.view(query.shape))
        WORKER.log_if_due()
        return output

    def _attend_rest(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
        step: Step,
        rest: Sequence[int],
    ) -> None:
        """Some requests of a step by vLLM's attention, with metadata made once for all layers."""
        parts = vars(metadata).setdefault(PARTS, {})
        if tuple(rest) not in parts:
            chosen = [step.requests[i] for i in rest]
            at = metadata.seq_lens.new_tensor(rest).long()
            made = self.metadata_of(layer, metadata, chosen, at)
            parts[tuple(rest)] = (made, rows_of(chosen, query.device))
        made, rows = parts[tuple(rest)]
        together = isinstance(rows, slice)
        out = output[rows] if together else torch.empty_like(output[: made.num_actual_tokens])
        super().forward(layer, query[rows], None, None, kv_cache, made, out)  # type: ignore[misc]
        if not together:
            output[rows] = out


class ServingBuilder:
    """Mixed in before a metadata builder: describes each step, and binds the layers at the start.

    A subclass's `bind` raises for settings that do not fit; that ends the start of the worker.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, config, device)  # type: ignore[call-arg]
        self.bind(layer_names, config)

    def bind(self, layer_names: list[str], config: Any) -> None:
        raise NotImplementedError

    def seq_lens(self, common: Any) -> list[int] | None:
        """Tokens of each request, without waiting for a device; None if they are not known."""
        raise NotImplementedError

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        n = common_attn_metadata.num_reqs
        starts = common_attn_metadata.query_start_loc_cpu[: n + 1].tolist()
        lengths = self.seq_lens(common_attn_metadata)
        if lengths is not None:
            setattr(made, STEP, Step.of(starts, lengths[:n]))
        return made


def _unbound(layer: Any) -> ServedLayer:
    """A layer that no builder bound is counted, and left to vLLM."""
    name = str(getattr(layer, "layer_name", "?"))
    return WORKER.layers.setdefault(name, ServedLayer(name, None, "auto", UNBOUND))
