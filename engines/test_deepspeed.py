"""DeepSpeed's Ulysses (`UlyssesSPAttentionHF`) around sparge's attention, on 2 and 4 processes.

Each rank holds its part of the tokens of one sequence; logits are compared with one process's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
pytest.importorskip("deepspeed")

import sparge
from gloo_ranks import run_ranks
from sparge import KeepAll, KeepFraction, Recipe

L = 768
SAME = Recipe(KeepAll(), precision="exact")
HEADS = Recipe(KeepFraction((0.2, 0.4, 0.6, 0.8)), precision="exact", sink_blocks=0)
"""How much each of the four heads keeps: no two the same."""
FIRST = 300
"""Tokens of the first of two documents; no multiple of anything."""


def llama(kv_heads=2, **changes):
    """A random Llama whose attention is far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
        **changes,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            sharp = any(part in name for part in ("q_proj", "k_proj"))
            weight.mul_(5.0 if sharp else 4.0 if "proj" in name else 1.0)
    return model


def inputs():
    ids = torch.randint(0, 64, (1, L), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.arange(L)[None], "use_cache": False}


def two_documents():
    given = inputs()
    given["position_ids"] = torch.cat([torch.arange(FIRST), torch.arange(L - FIRST)])[None]
    return given


@torch.no_grad()
def logits(model, given):
    return model(**given).logits


def part(given, rank, world):
    """What a rank gets, as DeepSpeed's data loader deals it."""
    n = L // world
    return {
        name: x[:, rank * n : (rank + 1) * n] if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }


def error(out, want, rank, world):
    n = L // world
    want = want[:, rank * n : (rank + 1) * n]
    return float((out - want).norm() / want.norm())


def split(model, world):
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sparge", sequence_parallel_size=world, micro_batch_size=1
    )


def documents_alone(model):
    """The logits of two documents, each in a call of its own."""
    ids = inputs()["input_ids"]
    parts = [ids[:, :FIRST], ids[:, FIRST:]]
    return torch.cat([logits(model, {"input_ids": each}) for each in parts], dim=1)


def rank_of_two(rank, world):
    model, given = llama(), inputs()
    dense = logits(model, given)
    documents = documents_alone(model)
    wants = {}
    for name, recipe in (("same", SAME), ("heads", HEADS)):
        with sparge.accelerate(model, recipe, backend="cpu"):
            wants[name] = logits(model, given)
    sparge.accelerate(model, SAME, backend="cpu")  # sets the name that DeepSpeed looks for
    split(model, world)
    mine, found = part(given, rank, world), {}
    for name, recipe in (("same", SAME), ("heads", HEADS)):
        handle = sparge.accelerate(model, recipe, backend="cpu")
        out = logits(model, mine)
        report = handle.report()
        found[name] = {
            "dense": error(out, dense, rank, world),
            "alone": error(out, wants[name], rank, world),
            "sparse": all(layer.calls == layer.sparse_calls == 1 for layer in report.layers),
            "parallel": report.parallel,
            "heads": [len(layer.density_by_head) for layer in report.layers],
        }
    handle = sparge.accelerate(model, SAME, backend="cpu")
    packed = part(two_documents(), rank, world)
    found["documents"] = {"dense": error(logits(model, packed), documents, rank, world)}
    handle = sparge.accelerate(model, SAME, backend="cpu", layers=["*.0.*"])
    out = logits(model, packed)  # the second layer is left to the model's own attention
    found["own"] = {
        "dense": error(out, documents, rank, world),
        "fallbacks": handle.report().fallbacks,
    }
    model(**mine).logits.sum().backward()
    found["gradient"] = handle.report().fallbacks
    return found


def rank_of_four(rank, world):
    """More ranks than key heads: DeepSpeed repeats those."""
    model, given = llama(kv_heads=2), inputs()
    with sparge.accelerate(model, HEADS, backend="cpu"):
        want = logits(model, given)
    handle = sparge.accelerate(model, HEADS, backend="cpu")
    split(model, world)
    out = logits(model, part(given, rank, world))
    density = [layer.density_by_head for layer in handle.report().layers]
    return {"alone": error(out, want, rank, world), "density": density}


def rank_by_name(rank, world):
    """The name alone, without `accelerate`; and a model with a sliding window."""
    import sparge.models.transformers

    model, given = llama(), inputs()
    dense = logits(model, given)
    model.set_attn_implementation("sparge")
    with sparge.record() as runs:
        split(model, world)
        out = logits(model, part(given, rank, world))
    found = {"dense": error(out, dense, rank, world), "recipes": [run.recipe for run in runs]}
    from sparge.models.transformers.adapter import attention_forward
    from sparge.support.errors import Unsupported

    q = torch.randn(1, 4 // world, L, 16)
    try:
        attention_forward(model.model.layers[0].self_attn, q, q, q, None, sliding_window=64)
    except Unsupported as told:
        found["window"] = str(told)
    return found


@pytest.fixture(scope="module")
def two():
    return run_ranks(rank_of_two, 2, timeout=120)


def test_everything_kept_is_one_process(two):
    for found in two:
        assert found["same"]["dense"] < 2e-5
        assert found["same"]["sparse"]
        assert found["same"]["parallel"] == {"ulysses": 2}


def test_each_rank_has_the_numbers_of_its_heads(two):
    for found in two:
        assert found["heads"]["alone"] < 2e-5 < 0.01 < found["heads"]["dense"]
        assert found["heads"]["heads"] == [2, 2]


def test_positions_that_begin_again_begin_a_document(two):
    for found in two:
        assert found["documents"]["dense"] < 2e-5
        assert found["own"]["dense"] < 2e-5
        assert found["own"]["fallbacks"] == {"not among `layers`": 1}


def test_training_is_left_to_the_model(two):
    for found in two:
        assert any("gradient" in reason for reason in found["gradient"])


def test_key_heads_that_are_fewer_than_ranks():
    found = run_ranks(rank_of_four, 4, timeout=120)
    for each in found:
        assert each["alone"] < 2e-5
        assert [len(density) for density in each["density"]] == [1, 1]
    first = [each["density"][0][0] for each in found]
    assert first == sorted(first), "every head keeps more than the one before"
    assert first[0] < 0.75 * first[-1]


def test_the_name_alone():
    for found in run_ranks(rank_by_name, 2, timeout=120):
        assert found["dense"] < 0.2
        assert set(found["recipes"]) == {sparge.DEFAULT}
        assert "DeepSpeed's Ulysses drops the mask" in found["window"]
