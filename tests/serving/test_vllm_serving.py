"""A step split between sparge and an engine's own attention; a plain engine stands for vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sparge import KeepAll, Recipe
from sparge.serving.vllm import WorkerExtension
from sparge.serving.vllm.batch import Step
from sparge.serving.vllm.routing import (
    FEW_QUERIES,
    FOREIGN_STEP,
    OTHER_KEYS,
    PAUSED,
    UNBOUND,
    UNKNOWN_LAYOUT,
    Shape,
)
from sparge.serving.vllm.worker import (
    STEP,
    WORKER,
    ServedLayer,
    ServingBuilder,
    ServingImpl,
    Worker,
)

Hq, Hk, D = 4, 2, 32
EXACT = Recipe(KeepAll(), precision="exact")


@dataclass
class Metadata:
    """Of a step, with the fields that vLLM's metadata has."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_actual_tokens: int
    max_query_len: int = 0
    max_seq_len: int = 0
    causal: bool = True
    extra: dict = field(default_factory=dict)


class PlainImpl:
    """Dense attention, request by request. The cache is one row of tokens for each request."""

    def __init__(self):
        self.ran = []

    def forward(self, layer, query, key, value, cache, metadata, output, *_):
        if metadata is None:
            return output.zero_()
        starts = metadata.query_start_loc.tolist()
        lengths = metadata.seq_lens.tolist()
        rows = metadata.block_table[:, 0].tolist()
        for start, stop, Lk, row in zip(starts, starts[1:], lengths, rows, strict=False):
            self.ran.append((stop - start, Lk))
            given = query[start:stop], *(x[:Lk] for x in cache[row])
            q, k, v = (x.transpose(0, 1)[None] for x in given)
            mask = torch.ones(stop - start, Lk, dtype=torch.bool).tril(Lk - (stop - start))
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            output[start:stop] = out[0].transpose(0, 1)
        return output


class Impl(ServingImpl, PlainImpl):
    readable = True

    def reader(self, layer, cache, metadata):
        def gather(i, key, value):
            k, v = cache[int(metadata.block_table[i, 0])]
            key.copy_(k[: len(key)])
            value.copy_(v[: len(value)])

        return gather if self.readable else None


@pytest.fixture
def worker(monkeypatch):
    """The process's worker, as new."""
    for name, value in vars(Worker()).items():
        monkeypatch.setattr(WORKER, name, value)
    return WORKER


@pytest.fixture
def impl(worker):
    impl = Impl()
    shape = Shape(Hq, Hk, D, torch.float32, "cpu", D**-0.5, EXACT)
    impl.served = worker.layers["a"] = ServedLayer("a", shape, "cpu")
    return impl


def step_of(requests):
    """query, key, value, cache and metadata of `(Lq, Lk)` requests, in a shuffled cache."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(2, Lk, Hk, D, generator=generator) for _, Lk in requests]
    query = torch.randn(sum(Lq for Lq, _ in requests), Hq, D, generator=generator)
    key, value = (
        torch.cat([x[half][Lk - Lq :] for x, (Lq, Lk) in zip(tokens, requests, strict=True)])
        for half in (0, 1)
    )
    order = torch.randperm(len(requests), generator=generator)
    cache = [tokens[i] for i in order.argsort().tolist()]
    table = order[:, None]
    starts = list(accumulate((Lq for Lq, _ in requests), initial=0))
    lengths = [Lk for _, Lk in requests]
    metadata = Metadata(torch.tensor(starts), torch.tensor(lengths), table, starts[-1])
    setattr(metadata, STEP, Step.of(starts, lengths))
    return query, key, value, cache, metadata


def forward(impl, given):
    query, *_ = given
    output = torch.full_like(query, float("nan"))
    layer = SimpleNamespace(layer_name="a")
    assert impl.forward(layer, *given, output) is output
    return output


STEPS = {
    "whole prompts": [(200, 200), (150, 150)],
    "a chunk": [(200, 333)],
    "a chunk between decoding ones": [(1, 90), (200, 333), (1, 7), (140, 140), (1, 200)],
    "decoding ones first": [(1, 90), (1, 33), (200, 333), (160, 512)],
    "an empty request": [(200, 300), (0, 0), (1, 5)],
}


@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
def test_a_step_is_that_of_dense_attention(impl, requests):
    given = step_of(requests)
    dense = PlainImpl().forward(None, *given, torch.empty_like(given[0]))
    torch.testing.assert_close(forward(impl, given), dense)
    torch.testing.assert_close(forward(impl, given), dense)  # with the metadata made before
    prefills = [Lq for Lq, _ in requests if Lq > 1]
    assert impl.ran == 2 * [each for each in requests if each[0] == 1]
    counts = impl.served
    assert counts.tokens["served"] == 2 * sum(prefills)
    assert counts.tokens["decode"] == 2 * sum(Lq == 1 for Lq, _ in requests)
    assert sum(counts.tally.ran.values()) == 2 * len(prefills)


def test_decoding_alone_is_the_engines(impl):
    given = step_of([(1, 90), (1, 33)])
    assert forward(impl, given).isfinite().all()
    assert impl.ran == [(1, 90), (1, 33)]
    assert impl.served.tokens == {"decode": 2}
    assert impl.served.decode_seconds > 0


def test_memory_is_measured_without_a_step(impl):
    given = step_of([(5, 5)])
    assert impl.forward(None, *given[:4], None, torch.ones(5, Hq, D)).sum() == 0
    assert impl.served.tokens == {}


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda impl, given: vars(WORKER).update(paused=True), PAUSED),
        (lambda impl, given: vars(impl).update(readable=False), UNKNOWN_LAYOUT),
        (lambda impl, given: vars(impl.served).update(why="sliding window"), "sliding window"),
        (lambda impl, given: vars(impl.served).update(backend="auto"), FEW_QUERIES),
        (lambda impl, given: vars(given[4]).update(causal=False), "not causal"),
        (lambda impl, given: delattr(given[4], STEP), FOREIGN_STEP),
        (lambda impl, given: given.__setitem__(slice(1, 3), [None, None]), OTHER_KEYS),
        (lambda impl, given: setattr(impl, "served", None), UNBOUND),
    ],
)
def test_what_is_not_served_is_counted_with_its_reason(impl, worker, change, reason):
    given = list(step_of([(100, 200)]))
    worker.layers.pop("a") if reason == UNBOUND else None
    change(impl, given)
    dense = PlainImpl().forward(None, *given, torch.empty_like(given[0]))
    assert torch.equal(forward(impl, given), dense)
    assert impl.ran == [(100, 200)]
    found = worker.layers["a"] if reason == UNBOUND else impl.served
    assert found.tally.fallbacks == {reason: 1}
    assert found.tokens == {"own": 100} | ({"decode": 0} if reason != FOREIGN_STEP else {})


def test_fused_output_quantization_is_the_engines(impl):
    given = step_of([(200, 200)])
    output = torch.zeros_like(given[0])
    impl.forward(None, *given, output, torch.ones(1))
    assert impl.served.tally.fallbacks == {"output quantization inside attention": 1}


def test_lines_of_the_log(impl, worker):
    said = []
    worker.write_line = said.append
    worker.settings = replace(worker.settings, log_seconds=1e-9)
    forward(impl, step_of([(200, 200)]))
    assert len(said) == 1
    assert "200 prompt tokens served at density 1.000" in said[0]
    worker.log()
    assert len(said) == 1  # nothing came since
    worker.settings = replace(worker.settings, log_seconds=0.0)
    forward(impl, step_of([(200, 200)]))
    assert len(said) == 1


class PlainBuilder:
    def __init__(self, spec, names, config, device):
        self.made = names

    def build(self, common_prefix_len, common, fast_build=False):
        return SimpleNamespace()


class Builder(ServingBuilder, PlainBuilder):
    def bind(self, names, config):
        if config is None:
            raise ValueError("no settings")

    def seq_lens(self, common):
        return common.lengths


def test_a_builder_describes_steps_and_refuses_at_the_start():
    common = SimpleNamespace(num_reqs=2, query_start_loc_cpu=torch.tensor([0, 1, 4, 4]))
    common.lengths = [9, 3, 0]
    builder = Builder(None, ["a"], {}, None)
    found = getattr(builder.build(0, common), STEP)
    assert [(each.Lq, each.Lk) for each in found.requests] == [(1, 9), (3, 3)]
    common.lengths = None
    assert not hasattr(builder.build(0, common), STEP)
    with pytest.raises(ValueError, match="no settings"):
        Builder(None, ["a"], None, None)


def test_the_extension_turns_serving_off_and_on(worker):
    extension = WorkerExtension()
    extension.sparge_serve(False)
    assert worker.paused
    extension.sparge_serve(True)
    assert not worker.paused
    extension.sparge_reset()
