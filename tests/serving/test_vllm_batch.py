"""Steps of vLLM's, without vLLM: packing, the blocks of chunks, routing, counters."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import sparge
from calls import FIXED
from sparge import KeepAll, KeepFraction, KeepMass, Recipe
from sparge.models.route import ONE_QUERY
from sparge.serving.vllm import WorkerExtension, report
from sparge.serving.vllm.batch import Request, Step, make_pack, rows_of
from sparge.serving.vllm.routing import (
    FEW_QUERIES,
    PREDICTED_DENSE,
    PREDICTED_OWN,
    OwnCost,
    Shape,
    chosen_backend,
    why_layer_not_served,
    why_not,
    why_step_not_served,
)
from sparge.serving.vllm.worker import ServedLayer
from sparge.synthetic import structured_qkv
from sparge.values.backend import UnitCosts

L = 1100
CHUNKS = (256, 300, 512, L)


def no_gather(i, key, value):
    raise AssertionError("nothing is cached")


@pytest.fixture(scope="module")
def prompt():
    """query, key, value `[L, H, D]` of one prompt."""
    return [x[0].transpose(0, 1).bfloat16() for x in structured_qkv(Hq=4, Hk=2, L=L, D=64)]


def chunk_pack(prompt, start, stop):
    _, key, value = prompt

    def gather(i, keys, values):
        keys.copy_(key[:stop])
        values.copy_(value[:stop])

    rows = [x[start:stop] for x in prompt]
    return make_pack(Step.of([0, stop - start], [stop]), [0], *rows, gather)


def batched(x):
    return x.transpose(0, 1)[None]


def chunks(size):
    return [(start, min(start + size, L)) for start in range(0, L, size)]


@pytest.mark.parametrize("precision", ["exact", "half"])
@pytest.mark.parametrize("keep", [KeepMass(0.9), KeepFraction(0.4)])
@pytest.mark.parametrize("size", CHUNKS)
def test_chunks_keep_the_blocks_of_the_whole_prompt(prompt, size, keep, precision):
    """Blocks of 128 queries that lie in one chunk are planned as in the whole prompt, to the bit.
    The prompt's last block is one of them, though it is not full."""
    settings = {"is_causal": True, "enable_gqa": True, "recipe": Recipe(keep, precision=precision)}
    whole = sparge.make_plan(*map(batched, prompt[:2]), **settings).to_mask()[0]
    assert 0.1 < whole.float().mean() < 0.9
    checked = 0
    for start, stop in chunks(size):
        pack = chunk_pack(prompt, start, stop)
        given = map(batched, (pack.query, pack.key))
        mask = sparge.make_plan(*given, causal_align="bottom_right", **settings).to_mask()[0]
        for i, i_q in enumerate(range(start // 128, -(-stop // 128))):
            if start <= 128 * i_q and (128 * (i_q + 1) <= stop or stop == L):
                assert torch.equal(mask[:, i], whole[:, i_q, : mask.shape[2]])
                checked += 1
    assert checked >= 4


@pytest.mark.parametrize("size", CHUNKS)
def test_with_8_bits_chunks_differ_in_few_blocks(prompt, size):
    """The mean key that is subtracted is the mean of the keys so far, so codes differ a little."""
    settings = {"is_causal": True, "enable_gqa": True, "recipe": Recipe(KeepMass(0.9))}
    whole = sparge.make_plan(*map(batched, prompt[:2]), **settings).to_mask()[0]
    same, n = 0, 0
    for start, stop in chunks(size):
        pack = chunk_pack(prompt, start, stop)
        given = map(batched, (pack.query, pack.key))
        mask = sparge.make_plan(*given, causal_align="bottom_right", **settings).to_mask()[0]
        first = start // 128
        expected = whole[:, first : first + mask.shape[1], : mask.shape[2]]
        same, n = same + int((mask == expected).sum()), n + mask.numel()
    assert same / n > (0.999 if size % 128 == 0 or size == L else 0.9)


@pytest.mark.parametrize("size", CHUNKS)
def test_chunks_together_are_the_whole_prompt(prompt, size):
    recipe = Recipe(KeepAll(), precision="exact")
    settings = {"is_causal": True, "enable_gqa": True, "recipe": recipe, "backend": "cpu"}
    whole = sparge.attention(*map(batched, prompt), **settings)[0].transpose(0, 1)
    output = torch.full_like(prompt[0], float("nan"))
    for start, stop in chunks(size):
        pack = chunk_pack(prompt, start, stop)
        given = map(batched, (pack.query, pack.key, pack.value))
        result = sparge.attention(*given, causal_align="bottom_right", **settings)
        pack.write(result[0].transpose(0, 1), output[start:stop])
    if size % 16 == 0 or size == L:
        assert torch.equal(output, whole)
    else:  # rows beside others in a group of 16 may be rescaled at another block
        torch.testing.assert_close(output, whole)


def test_requests_of_a_step():
    step = Step.of([0, 1, 301, 301, 400], [700, 500, 0, 99, 7])
    assert [each.Lq for each in step.requests] == [1, 300, 0, 99]
    assert [each.fresh for each in step.requests] == [False, False, True, True]
    assert [each.lead for each in step.requests] == [699 % 128, 200 % 128, 0, 0]
    assert not step.decode_only
    assert Step.of([0, 1, 2], [5, 9]).decode_only


def test_fresh_prompts_that_lie_together_are_not_copied(prompt):
    step = Step.of([0, 200, 500, 501], [200, 300, 40])
    rows = [x[:501] for x in prompt]
    pack = make_pack(step, [0, 1], *rows, no_gather)
    for packed, given in zip((pack.query, pack.key, pack.value), rows, strict=True):
        assert packed.data_ptr() == given.data_ptr()
        assert packed.shape[0] == 500
    assert (pack.cuts_q, pack.cuts_k) == ([0, 200, 500], [0, 200, 500])


def test_a_mixed_step_is_packed_and_written_back(prompt):
    """A fresh prompt, a decoding one and a chunk: the first and the last are packed."""
    query, key, value = prompt
    step = Step.of([0, 150, 151, 351], [150, 90, 700])

    def gather(i, keys, values):
        assert i == 2
        keys.copy_(key[:700])
        values.copy_(value[:700])

    rows = [torch.cat([x[:150], x[:1], x[500:700]]) for x in prompt]
    pack = make_pack(step, [0, 2], *rows, gather)
    lead = 500 % 128
    assert pack.cuts_q == [0, 150, 350 + lead]
    assert pack.cuts_k == [0, 150, 850]
    assert torch.equal(pack.query[150 + lead :], query[500:700])
    assert torch.equal(pack.query[150 : 150 + lead], query[500 : 500 + lead])
    output = torch.zeros(351, 4, 64)
    pack.write(torch.ones(350 + lead, 4, 64), output)
    assert output[150].sum() == 0
    assert output.sum() == 350 * 4 * 64


def test_rows_lie_together_or_are_listed():
    requests = Step.of([0, 2, 5, 6], [9, 9, 9]).requests
    assert rows_of(requests[:2], torch.device("cpu")) == slice(0, 5)
    assert rows_of(requests[::2], torch.device("cpu")).tolist() == [0, 1, 5]


def shape_of(recipe):
    return Shape(9, 3, 64, torch.bfloat16, "cpu", 0.125, recipe)


def reason(Lq, Lk, *, backend="auto", own=None, recipe=sparge.DEFAULT, density=None):
    request = Request(0, Lq, Lk)
    return why_not(shape_of(recipe), request, backend=backend, own=own, density=density)


def test_routing():
    fast, slow = OwnCost(1e-15, 0.0), OwnCost(1.0, 0.0)
    assert reason(1, 5000) == ONE_QUERY
    assert reason(1, 5000, backend="cpu") == ONE_QUERY
    assert reason(100, 5000) == FEW_QUERIES
    assert reason(100, 5000, backend="cpu") == ""
    assert reason(2048, 4096, own=slow) == ""
    assert reason(2048, 4096, own=fast) == PREDICTED_OWN
    assert reason(2048, 4096, own=fast, backend="cpu") == ""


def test_choices_are_made_again_for_other_numbers_and_backends(new_router, register):
    """They were kept by the call alone, whatever backends and instruction sets there were."""
    ours = {name: UnitCosts(9.0, 9.0, 9.0) for name in FIXED.costs if "dense" not in name}
    dear = replace(FIXED, costs={**FIXED.costs, **ours})
    assert reason(2048, 4096) == ""
    new_router(costs={"cpu": dear})
    assert reason(2048, 4096) == PREDICTED_DENSE
    register("mine")
    assert chosen_backend(shape_of(sparge.DEFAULT), Request(0, 2048, 4096), "auto") == "mine"


def test_copying_keys_and_the_density_so_far_count():
    """Between the costs at which ours is surely faster and surely slower."""
    costs = [10.0**-n for n in range(7, 12)] + [3.0 * 10**-n for n in range(8, 12)]
    served = {
        density: [c for c in costs if not reason(1024, 8192, own=OwnCost(c, 0.0), density=density)]
        for density in (0.1, 1.0)
    }
    assert set(served[1.0]) < set(served[0.1])
    dear = OwnCost(min(served[0.1]), 1.0)
    assert reason(1024, 8192, own=dear, density=0.1) == PREDICTED_OWN


def impl(**changes):
    plain = {"attn_type": "decoder", "sliding_window": -1, "alibi_slopes": None, "sinks": None}
    plain |= {"logits_soft_cap": 0, "kv_cache_dtype": "auto"}
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, ""),
        ({"sliding_window": (-1, -1)}, ""),
        ({"sliding_window": 512}, "sliding window"),
        ({"sliding_window": (511, 0)}, "sliding window"),
        ({"alibi_slopes": [0.5]}, "ALiBi slopes"),
        ({"logits_soft_cap": 30.0}, "soft-capping"),
        ({"sinks": object()}, "attention sinks"),
        ({"attn_type": "encoder_only"}, "encoder-only attention"),
        ({"attn_type": "encoder_decoder"}, "encoder-decoder attention"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache in fp8"),
        ({"chunk_lookback": 1}, "chunked local attention"),
    ],
)
def test_layers_that_are_left_to_vllm(changes, said):
    assert why_layer_not_served(impl(**changes)) == said


def test_steps_that_are_left_to_vllm():
    step = SimpleNamespace(causal=True)
    assert why_step_not_served(step, fused_output=False) == ""
    assert "quantization" in why_step_not_served(step, fused_output=True)
    assert why_step_not_served(SimpleNamespace(causal=False), fused_output=False) == "not causal"
    each = SimpleNamespace(causal=torch.tensor([True]))
    assert why_step_not_served(each, fused_output=False) == "not causal"


def test_what_is_served_is_counted(prompt):
    layer = ServedLayer("a", Shape(4, 2, 64, torch.bfloat16, "cpu", 0.125, sparge.DEFAULT), "cpu")
    output = torch.zeros_like(prompt[0])
    step = Step.of([0, 700, L], [700, L - 700])
    pack = make_pack(step, [0, 1], *prompt, no_gather)
    layer.attend(pack, output)
    assert output.isfinite().all()
    assert (output != 0).any(-1).all()
    layer.note_own([(Request(0, 60, 300), FEW_QUERIES)], Hq=4, seconds=0.5)
    layer.note_decode(3, 0.25)
    found = layer.tally.report("a", sparge.DEFAULT)
    assert found.calls == 3
    assert found.fallbacks == {FEW_QUERIES: 1}
    assert len(found.density_by_head) == 4
    assert 0 < found.sparse_density <= found.density <= 1
    assert found.seconds > 0.5
    assert layer.tokens == {"served": L, "own": 60, "decode": 3}
    alone = [
        sparge.attention(
            *(batched(x[request.start : request.stop]) for x in prompt),
            is_causal=True,
            enable_gqa=True,
            scale=0.125,
            backend="cpu",
        )[0].transpose(0, 1)
        for request in step.requests
    ]
    assert torch.equal(output, torch.cat(alone))


@pytest.mark.parametrize(
    "Lq, Lk, blocks", [(128, 128, 2), (130, 130, 2 + 3), (60, 300, 4 + 5), (2, 129, 2 + 3)]
)
def test_blocks_that_a_prefill_may_read(Lq, Lk, blocks):
    assert Request(0, Lq, Lk).blocks == blocks


def test_a_process_without_vllm_has_an_empty_report():
    document = WorkerExtension().sparge_report()
    assert document["report"]["layers"] == []
    assert (document["rank"], document["ranks"]) == (0, 1)
    assert "0 prompt tokens served" in report().line
