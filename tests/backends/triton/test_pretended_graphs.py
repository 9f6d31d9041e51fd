"""`torch.compile(mode="reduce-overhead")` of models that use sparge, on a card that is not here:
one graph, which Inductor gives to be captured, and which then only launches and allocates."""

from __future__ import annotations

import pytest

from static_runs import needs_triton, run_alone

inductor = pytest.importorskip("torch._inductor.cudagraph_utils")
pytestmark = [
    needs_triton,
    pytest.mark.skipif(
        not hasattr(inductor, "CUDAGraphPolicy"), reason="this torch captures in one way only"
    ),
]
MODELS = ("block", "llama")
OURS = ["sum_keys", "mean_keys", "prepare_keys", "prepare_queries"]


@pytest.fixture(scope="module")
def found():
    return run_alone("pretended_graphs.py", "sm_89")


@pytest.mark.parametrize("model", MODELS)
def test_one_graph_that_inductor_captures(found, model):
    """It asks of a graph that no tensor is on the processor, no input is written to, no operation
    is incompatible and no size depends on numbers; a graph that it skips raises."""
    assert found[model]["unique graphs"] == 1
    assert found[model]["breaks"] == {}
    assert found[model]["skips"] == 0
    assert [graph["mutated"] for graph in found[model]["graphs"]] == [[]]


@pytest.mark.parametrize("model", MODELS)
def test_a_captured_graph_only_launches_and_allocates(found, model):
    warm_up, captured = (found[model]["graphs"][0][name] for name in ("warm-up", "captured"))
    assert captured["launches"] == warm_up["launches"]
    assert captured["launches"].count("attend_blocks") == (1 if model == "block" else 2)
    assert [name for name in captured["launches"] if name in OURS][:4] == OURS
    for what in ("compiled", "reads", "later", "writes", "waits"):
        assert captured[what] == []


@pytest.mark.parametrize("model", MODELS)
def test_its_warm_up_waits_for_nothing(found, model):
    """The calls of the llama are labelled: the counts of each are copied without waiting."""
    warm_up = found[model]["graphs"][0]["warm-up"]
    assert (warm_up["reads"], warm_up["waits"]) == ([], [])
    assert len(warm_up["later"]) == (0 if model == "block" else 2)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("on the processor", "skipping cudagraphs due to cpu device"),
        ("read", "Unsupported"),
        ("tables of each call", "copies to the card while its stream is captured"),
    ],
)
def test_what_cannot_be_captured_is_seen(found, fault, why):
    assert why in found["faults"][fault]
