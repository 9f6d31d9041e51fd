"""What a process of its own tells of `torch.compile(mode="reduce-overhead")` on a card that is not
here: `python tests/support/pretended_graphs.py sm_89`.

Dynamo and Inductor trace and compile a model on fake tensors of the card. Where Inductor then hands
its code over to be captured in a CUDA graph, that code is run on the pretended card: once as the
warm-up, and once while the stream is captured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

import sparge
from pretended_calls import told
from pretended_card import CARDS, Properties, Traffic
from pretended_driver import card_here
from pretended_faults import raised
from pretended_tensors import TensorsOnCard
from sparge import KeepMass, Recipe
from sparge.backends.triton import arguments
from tiny_llama import tiny_llama

EXTRA = ("on the processor", "read")
INDUCTOR = {
    "triton.cudagraph_or_error": True,  # a graph that Inductor will not capture raises
    "graph_partition": False,  # nor may it leave some of it out
    "use_static_cuda_launcher": False,  # written in C, for CUDA alone
    "joint_graph_constant_folding": False,  # by running parts of the graph
    "compile_threads": 1,
    "force_disable_caches": True,
}


class Block(torch.nn.Module):
    """Attention with its projection, which calls sparge itself. extra: what a graph must not do."""

    def __init__(self, extra: str = "") -> None:
        super().__init__()
        self.extra, self.projection = extra, torch.nn.Linear(256, 3 * 256, bias=False)
        self.register_buffer("table", torch.empty(64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).view(1, -1, 3, 4, 64).permute(2, 0, 3, 1, 4)
        if self.extra == "on the processor":
            q = q + self.table.to(q.device)
        if self.extra == "read" and q.max() > 0:
            q = q + 1
        out = sparge.attention(q, k, v, is_causal=True, backend="triton")
        return torch.relu(out.transpose(1, 2).reshape(x.shape)) + x


@contextmanager
def inductor_for(policy: Any) -> Iterator[None]:
    """What Inductor's code calls in C, and what it tries on real tensors, by way of torch's own
    operations. Its patterns of dense attention are left out."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._dynamo.utils import common_constant_types
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")

    def reinterpret(x: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
        return x.as_strided(size, stride, x.storage_offset() + offset)

    in_c = torch._C._dynamo.guards
    common_constant_types.add(Properties)  # as the type is that torch has for them
    # It keeps the functions that torch had when it was imported.
    of_cuda = {
        "exchange_device": staticmethod(torch.cuda._exchange_device),
        "maybe_exchange_device": staticmethod(torch.cuda._maybe_exchange_device),
        "get_raw_stream": staticmethod(torch._C._cuda_getCurrentRawStream),
        "device_count": staticmethod(torch.cuda.device_count),
    }
    with (
        mock.patch.multiple(CudaInterface, **of_cuda),
        config.patch({**INDUCTOR, "cudagraph_policy": policy}),
        mock.patch.object(joint_graph, "lazy_init", return_value=None),
        mock.patch.object(CachingAutotuner, "bench", return_value=1.0),  # all equally fast
        mock.patch.object(triton_helpers, "set_driver_to_gpu", return_value=None),
        mock.patch.object(in_c, "_empty_strided_cuda", empty, create=True),
        mock.patch.object(in_c, "_reinterpret_tensor", reinterpret),
    ):
        yield


def capturing(traffic: Traffic, found: list[dict[str, Any]]) -> Any:
    """Captures in place of Inductor's own: a warm-up, then a run with the stream captured."""
    from torch._inductor.cudagraph_utils import CUDAGraphPolicy

    def like(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    class Capture(CUDAGraphPolicy):
        def cudagraphify(self, model: Callable[..., Any], *_: Any, **facts: Any) -> Any:
            mutated = list(facts["mutated_input_idxs"])

            def run(inputs: list[Any]) -> list[Any]:
                with unset_fake_temporarily(), TensorsOnCard(traffic):
                    there = [like(x) for x in inputs]
                    traffic.clear()
                    model(list(there))
                    warm_up = told(traffic)
                    traffic.clear()
                    with traffic.capture():
                        outputs = model(list(there))
                    captured = told(traffic)
                found.append({"mutated": mutated, "warm-up": warm_up, "captured": captured})
                inputs.clear()
                return [like(x) for x in outputs]

            return run

    return Capture()


def compiled(make: Callable[[], Any], call: Callable[[Any], Any], card: str) -> dict[str, Any]:
    """One call of a compiled model."""
    from torch._dynamo.utils import counters

    traffic, graphs = Traffic(), []
    torch.compiler.reset()
    counters.clear()
    with (
        card_here(CARDS[card], traffic),
        inductor_for(capturing(traffic, graphs)),
        FakeTensorMode(),
        torch.no_grad(),
    ):
        with torch.device("cuda:0"):
            model = make()
        call(torch.compile(model, mode="reduce-overhead", fullgraph=True))
    return {
        "graphs": graphs,
        "unique graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "skips": counters["inductor"]["cudagraph_skips"],
    }


def of_block(card: str, extra: str = "") -> dict[str, Any]:
    def call(run: Any) -> None:
        run(torch.empty(1, 1024, 256, dtype=torch.bfloat16, device="cuda:0"))

    return compiled(lambda: Block(extra), call, card)


def of_llama(card: str) -> dict[str, Any]:
    """Two layers, accelerated, so that the calls of each carry its label."""

    def make() -> Any:
        model = tiny_llama()
        sparge.accelerate(model, recipe=Recipe(KeepMass(0.9)), backend="triton")
        return model

    def call(run: Any) -> None:
        ids = torch.zeros(1, 1024, dtype=torch.int64, device="cuda:0")
        run(ids, use_cache=False)

    return compiled(make, call, card)


def faults(card: str) -> dict[str, str]:
    """What is raised of graphs that cannot be captured."""
    always_copied = mock.patch.object(arguments, "constant", arguments.constant.__wrapped__)
    found = {extra: raised(lambda x=extra: of_block(card, x)) for extra in EXTRA}
    with always_copied:
        found["tables of each call"] = raised(lambda: of_block(card))
    return found


if __name__ == "__main__":
    card = sys.argv[1]
    torch.set_default_dtype(torch.bfloat16)  # fake parameters cannot be converted
    found = {"block": of_block(card), "llama": of_llama(card)}
    print(json.dumps({**found, "faults": faults(card)}))
