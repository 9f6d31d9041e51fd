"""Tiny denoisers under diffusers' context parallelism: what every rank does, and what it returns.

`in_two` and `in_four` run in spawned processes (see gloo_ranks.py). They return plain numbers by
name, which tests/models/test_diffusers_parallel.py looks at.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from diffusers import ContextParallelConfig
from diffusers.hooks import context_parallel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.utils import logging

import sparge
from sparge import KeepError, KeepFraction, Recipe
from sparge.models.diffusers.context_parallel import gather_parts
from tiny_denoiser_parts import SAME, TEXT, B, Tiny, latents, randn
from tiny_denoisers import flux, flux_kontext, ltx, qwen, wan

MODES: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses_degree": 2},
    "ulysses_anything": {"ulysses_degree": 2, "ulysses_anything": True},
    "ring": {"ring_degree": 2},
    "ring_anything": {"ring_degree": 2, "ring_anything": True},
}
RINGS = ("ring", "ring_anything")
NO_MASK = {"encoder_hidden_states_mask": None}
ODD = (3, 9, 11)
"""A video whose tokens do not divide by two."""


def by_head(*shares: float) -> Recipe:
    """How much each head keeps; no two the same, so that a head at the wrong rank shows."""
    return Recipe(KeepFraction(shares), precision="exact", sink_blocks=0)


def odd_wan() -> Tiny:
    tiny = wan(num_attention_heads=3)
    tiny.inputs["hidden_states"] = latents(ODD, 2)
    return tiny


def odd_flux() -> Tiny:
    tiny = flux()
    tiny.inputs["encoder_hidden_states"] = randn(B, TEXT + 1, 32)
    tiny.inputs["txt_ids"] = torch.zeros(TEXT + 1, 3)
    return tiny


def plain_qwen() -> Tiny:
    tiny = qwen()
    tiny.inputs.update(NO_MASK)
    return tiny


def gather_uneven(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """In place of diffusers' own at the end of a model: gloo gathers tensors of one shape only."""
    sizes = context_parallel.gather_size_by_comm(x.shape[dim], group)
    return gather_parts(x, dim, list(sizes), group)


@contextmanager
def one_device():
    """diffusers takes the rank modulo the number of accelerators, which is zero here."""
    before = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = before


def split(tiny: Tiny, **degrees: Any) -> None:
    logging.set_verbosity_error()
    context_parallel._all_gather_anything = gather_uneven
    with one_device():
        tiny.model.enable_parallelism(config=ContextParallelConfig(**degrees))


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out - want).norm() / want.norm())


def facts(handle: Any) -> dict[str, Any]:
    report = handle.report()
    return {
        "parallel": report.parallel,
        "fallbacks": report.fallbacks,
        "heads": [len(layer.density_by_head) for layer in report.layers],
        "sparse": all(layer.calls == layer.sparse_calls > 0 for layer in report.layers),
        "text": str(report),
    }


def compare(make: Any, recipe: Recipe, degrees: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Dense, sparse in one process, and sparse when split; on the same inputs."""
    tiny = make()
    dense = tiny()
    with sparge.accelerate(tiny.model, recipe, backend="cpu", **options):
        alone = tiny()
    handle = sparge.accelerate(tiny.model, recipe, backend="cpu", **options)
    split(tiny, **degrees)
    out = tiny()
    found = {"dense": error(out, dense), "alone": error(out, alone), **facts(handle)}
    handle.remove()
    return found


def in_two(rank: int, world: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for mode, degrees in MODES.items():
        uneven = mode.endswith("anything")
        makes = (odd_wan, odd_flux, plain_qwen) if uneven else (wan, flux, plain_qwen)
        for make in makes:
            heads = by_head(0.2, 0.5, 0.8) if make is odd_wan else by_head(0.2, 0.7)
            name = make.__name__.split("_")[-1]
            found[f"{name} {mode} same"] = compare(make, SAME, degrees)
            found[f"{name} {mode} heads"] = compare(make, heads, degrees)
        # Without text, and in the order of the model, a ring has the sequence of one process.
        heads = by_head(0.2, 0.5, 0.8) if uneven else by_head(0.2, 0.7)
        found[f"wan {mode} row"] = compare(makes[0], heads, degrees, order="row")
        found[f"qwen {mode} mask"] = compare(qwen, SAME, MODES[mode])
    budget = Recipe(KeepError((0.05, 0.3)), precision="exact")
    for mode in ("ulysses", "ring"):
        found[f"wan {mode} budget"] = compare(wan, budget, MODES[mode], order="row")
    found["kontext ulysses heads"] = compare(flux_kontext, by_head(0.2, 0.7), MODES["ulysses"])
    found["kontext ring same"] = compare(flux_kontext, SAME, MODES["ring"])
    for mode in ("ulysses", "ring"):
        found[f"ltx {mode} name"] = by_name(ltx, MODES[mode])
    found["before"] = split_first()
    found["after"] = removed()
    found["gradient"] = with_gradient()
    found["disagree"] = disagreeing(rank)
    return found


def in_four(rank: int, world: int) -> dict[str, dict[str, Any]]:
    both = {"ulysses_degree": 2, "ring_degree": 2}
    found = {"wan same": compare(wan, SAME, both)}
    found["flux same"] = compare(flux, SAME, both)
    found["wan row"] = compare(wan, by_head(0.2, 0.7), both, order="row")
    found["qwen mask"] = compare(qwen, SAME, both)
    return found


def by_name(make: Any, degrees: dict[str, Any]) -> dict[str, Any]:
    """A model that only chose the name: cross-attention with a mask per head, dense."""
    tiny = make()
    dense = tiny()
    tiny.model.set_attention_backend("sparge")
    split(tiny, **degrees)
    with sparge.record() as runs:
        out = tiny()
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    return {"dense": error(out, dense), "runs": len(runs)}


def split_first() -> dict[str, Any]:
    """Split before it is accelerated."""
    tiny = wan()
    dense = tiny()
    split(tiny, ulysses_degree=2)
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        return {"dense": error(tiny(), dense), **facts(handle)}


def removed() -> dict[str, Any]:
    """Split while it was accelerated; removed, it is split still."""
    tiny = flux()
    dense = tiny()
    handle = sparge.accelerate(tiny.model, by_head(0.2, 0.7), backend="cpu")
    tiny()
    split(tiny, ulysses_degree=2)
    tiny()
    heads = facts(handle)["heads"]  # two heads before the split, and one since
    handle.remove()
    return {"dense": error(tiny(), dense), "heads": heads}


def with_gradient() -> dict[str, Any]:
    tiny = wan()
    dense = tiny()
    with sparge.accelerate(tiny.model, SAME, backend="cpu") as handle:
        split(tiny, ulysses_degree=2)
        out = tiny.model(**tiny.inputs, return_dict=False)[0]
        return {"dense": error(out.detach(), dense), **facts(handle)}


def disagreeing(rank: int) -> dict[str, Any]:
    """One rank wants its own attention in a ring: both must say so, and neither may wait."""
    tiny = wan()
    sparge.accelerate(tiny.model, lambda context: SAME if rank else None, backend="cpu")
    split(tiny, ring_degree=2)
    try:
        tiny()
    except RuntimeError as told:
        return {"error": str(told)}
    return {"error": ""}
