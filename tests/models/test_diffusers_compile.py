"""Compiled denoisers: whole graphs, the same result, and one graph for each recipe."""

from __future__ import annotations

import pytest
import torch
from test_any_module import is_plain as is_plain_module
from test_diffusers_models import is_plain
from torch._dynamo import lookup_backend

import sparge
from sparge import KeepFraction, Recipe, Schedule
from tiny_denoiser_parts import SAME, SPARSE, Tiny, assert_same
from tiny_denoisers import DENOISERS, flux, wan
from tiny_modules import GRID, video_inputs, video_transformer
from tiny_pipelines import flux as flux_pipeline
from tiny_pipelines import stable_diffusion

SMALL = {
    "cogvideox": {"num_layers": 1},
    "sd3": {"num_layers": 2},
    "flux": {"num_single_layers": 1},
    "wan": {"num_layers": 1},
    "ltx": {"num_layers": 1},
    "pixart": {"num_layers": 1},
    "qwen": {"num_layers": 1},
    "hunyuan": {"num_single_layers": 1},
}
AHEAD_OF_TIME = ("cogvideox", "flux", "wan")
"""Of the two ways to SDPA: these go on to what inductor is given."""
RUN = Schedule(dense_first=0.25, dense_last=0.25)


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts graphs; a hook of the whole model is one without operations."""

    def __init__(self, name):
        self.backend, self.count = lookup_backend(name), 0

    def __call__(self, graph, inputs):
        self.count += len(graph.graph.nodes) > 1
        return self.backend(graph, inputs)


def compiled(tiny, graphs):
    model = torch.compile(tiny.model, backend=graphs, fullgraph=True)
    return Tiny(model, tiny.inputs, tiny.grid)


@pytest.mark.parametrize("name", SMALL)
def test_a_run_compiles_a_graph_for_each_recipe_and_none_for_each_step(name):
    tiny = DENOISERS[name](**SMALL[name])
    plain, graphs = tiny(), Graphs("aot_eager" if name in AHEAD_OF_TIME else "eager")
    with sparge.accelerate(tiny.model, SPARSE, backend="cpu", schedule=RUN) as handle:
        with handle.context(progress=0.5):
            eager = tiny()  # the grid of packed latents is read outside of graphs
        handle.reset()
        fast = compiled(tiny, graphs)
        for again in range(2):
            for step in range(8):
                with handle.context(progress=step / 8, step=step, noise_level=1 - step / 8):
                    out = fast()
                assert_same(out, plain if step in (0, 1, 6, 7) else eager)
            assert graphs.count == 2, again
        assert [layer.sparse_calls for layer in handle.report().layers] == [8] * len(
            handle.report().layers
        )
        assert {*handle.report().density_by_step} == {2, 3, 4, 5}
    assert (eager - plain).norm() > 1e-3 * plain.norm()


def test_bands_compile_a_graph_each():
    tiny, graphs = wan(num_layers=1), Graphs("eager")
    more, less = Recipe(KeepFraction(0.7)), Recipe(KeepFraction(0.3))
    bands = ((0.2, 0.4, more), (0.4, 0.8, less), (0.8, 1.0, more))
    with sparge.accelerate(
        tiny.model, SAME, backend="cpu", schedule=Schedule(bands=bands)
    ) as handle:
        fast, eager = compiled(tiny, graphs), []
        for step in range(10):
            with handle.context(progress=step / 10):
                assert_same(fast(), tiny())
                eager.append(tiny())
    assert graphs.count == 3
    assert not torch.equal(eager[3], eager[5])
    assert torch.equal(eager[3], eager[9])


@pytest.mark.parametrize("name", ["flux2", "allegro"])
def test_other_denoisers_compile_too(name):
    tiny = DENOISERS[name]()
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        tiny()
        handle.reset()
        model = torch.compile(tiny.model, backend="eager", fullgraph=True)
        assert_same(Tiny(model, tiny.inputs, tiny.grid)(), want)
        assert all(layer.sparse_calls for layer in handle.report().layers)


@pytest.mark.parametrize("first", ["compile", "accelerate"])
def test_a_pipeline_with_a_compiled_transformer(first):
    tiny = flux_pipeline(num_single_layers=1)
    want = tiny.trace(steps=5)
    transformer, graphs = tiny.pipe.transformer, Graphs("eager")
    if first == "compile":
        tiny.pipe.transformer = torch.compile(transformer, backend=graphs, fullgraph=True)
    handle = sparge.accelerate(tiny.pipe, SPARSE, backend="cpu")
    if first == "accelerate":
        tiny.pipe.transformer = torch.compile(transformer, backend=graphs, fullgraph=True)
    latents = tiny.trace(steps=5)
    assert_same(latents[0], want[0])
    assert (latents[-1] - want[-1]).norm() > 1e-3 * want[-1].norm()
    assert graphs.count == 2
    report = handle.report()
    assert all(layer.sparse_calls == 4 for layer in report.layers)
    assert list(report.density_by_step) == [1, 2, 3, 4]
    tiny(steps=3)
    assert graphs.count == 2
    handle.remove()
    assert is_plain(transformer)
    if first == "accelerate":
        assert_same(tiny(steps=5), want[-1])


def test_compiled_by_blocks():
    """Graphs of single blocks: tokens are permuted in each of them."""
    tiny = wan()
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        tiny.model.compile_repeated_blocks(backend="eager", fullgraph=True)
        assert_same(tiny(), want)
        assert [layer.sparse_calls for layer in handle.report().layers] == [1, 1]


def test_a_compiled_module_of_no_framework():
    model, inputs = video_transformer(), video_inputs()
    want, graphs = model(*inputs), Graphs("eager")
    with sparge.accelerate(model, SPARSE, backend="cpu", grid=GRID, schedule=RUN) as handle:
        with handle.context(progress=0.5):
            eager = model(*inputs)
        fast = torch.compile(model, backend=graphs, fullgraph=True)
        for step in range(8):
            with handle.context(progress=step / 8):
                assert_same(fast(*inputs), want if step in (0, 1, 6, 7) else eager)
        assert graphs.count == 2
    assert is_plain_module(model)
    assert_same(fast(*inputs), want)


def test_a_grid_that_a_graph_cannot_read_is_one_row():
    """Packed latents whose positions were never seen outside of a graph."""
    tiny = flux(num_single_layers=1)
    want = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        out = compiled(tiny, "eager")()
        assert_same(out, want)
        assert "1×1×252" in " ".join(handle.report().notes)


def test_mistakes_show_while_the_dense_part_is_compiled():
    tiny = stable_diffusion()
    recipe = Recipe(KeepFraction(0.5), protect=((0, 5000),))
    tiny.pipe.unet = torch.compile(tiny.pipe.unet, backend="eager", fullgraph=True)
    with (
        sparge.accelerate(tiny.pipe, recipe, backend="cpu"),
        pytest.raises(Exception, match="protect must be ranges within"),
    ):
        tiny()
