"""What tiny denoisers have in common: sizes, weights that show a mistake, and arguments.

Grids are neither square nor powers of two, so that a swapped axis shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

import sparge
from sparge import KeepAll, KeepFraction, Recipe

SAME = Recipe(KeepAll(), precision="exact")
"""The sparse kernel, computing what dense attention does."""
SPARSE = Recipe(KeepFraction(0.01), precision="exact", sink_blocks=0)
"""One block of each row."""
B = 2
VIDEO = (3, 10, 12)
IMAGE = (1, 14, 18)
REFERENCE = (1, 6, 10)
"""The grid of a picture that an editing model looks at."""
TEXT = 12
"""Tokens of text. Where a model takes a mask, four of the second input are padding."""
SHARP = ("to_q", "to_k", "qkv", "norm_q", "norm_k", "add_q", "add_k", "norm_added_q")


@dataclass(frozen=True)
class Tiny:
    """A denoiser, the arguments of a forward pass, and the tokens of its joint attention."""

    model: Any
    inputs: dict[str, Any]
    grid: tuple[int, int, int]
    before: int = 0
    after: int = 0

    @property
    def tokens(self) -> int:
        return self.before + prod(self.grid) + self.after

    @torch.no_grad()
    def __call__(self, **changes: Any) -> torch.Tensor:
        return self.model(**{**self.inputs, **changes}, return_dict=False)[0]


def liven(model: Any, seed: int = 0) -> Any:
    """Weights for which attention is far from uniform and every branch counts.

    As initialised, scores hardly differ and some gates are zero: wrong tokens would not show.
    """
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=make)
            if weight.dim() > 1:
                weight.copy_(noise / weight[0].numel() ** 0.5)
            else:  # biases are random as initialised, weights of norms are 1
                weight.copy_(0.1 * noise + (not name.endswith("bias")))
            if any(part in name for part in SHARP):
                weight.mul_(2.0)
    return model.eval()


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def text_mask() -> torch.Tensor:
    mask = torch.ones(B, TEXT, dtype=torch.bool)
    mask[1, -4:] = False
    return mask


def latents(grid: tuple[int, int, int], patch: int, channels: int = 4) -> torch.Tensor:
    """`[B, C, T, H, W]`, or `[B, C, H, W]` for a picture."""
    T, H, W = grid
    frames = () if grid is IMAGE else (T,)
    return randn(B, channels, *frames, H * patch, W * patch)


def positions(grid: tuple[int, int, int], axes: int, first: int = 0) -> torch.Tensor:
    """Rows of `(first, h, w, 0 …)`, as the pipelines of packed latents pass them."""
    _, H, W = grid
    ids = torch.zeros(H, W, axes)
    ids[..., 0] = first
    ids[..., 1] = torch.arange(H)[:, None]
    ids[..., 2] = torch.arange(W)
    return ids.reshape(H * W, axes)


def flux_inputs(axes: int, dim: int, references: int = 0) -> dict[str, Any]:
    ids = [positions(IMAGE, axes)]
    ids += [positions(REFERENCE, axes, first=i + 1) for i in range(references)]
    return {
        "hidden_states": randn(B, sum(map(len, ids)), 4),
        "encoder_hidden_states": randn(B, TEXT, dim),
        "timestep": torch.tensor([0.5, 0.5]),
        "img_ids": torch.cat(ids),
        "txt_ids": torch.zeros(TEXT, axes),
    }


def assert_same(out: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to the rounding of float32, through all layers and steps."""
    error = (out - want).norm() / want.norm()
    assert error < 2e-5, f"relative error {error:.1e}"


def ran_sparse(handle: Any) -> int:
    """The number of layers; every call of them ran in the sparse kernel."""
    layers = handle.report().layers
    for layer in layers:
        assert layer.calls == layer.sparse_calls > 0, (layer.name, layer.ran, layer.fallbacks)
    return len(layers)


def plans_of(tiny, recipe, **options):
    """The plan of every attention call of a pass, with its layer and number of tokens."""
    calls = []
    with sparge.accelerate(tiny.model, recipe, backend="cpu", **options) as handle:
        for layer in handle.report().layers:

            def tap(query, key, value, arguments, name=layer.name):
                calls.append((name, query, key, arguments))

            handle.tap(layer.name, tap)
        with sparge.record() as runs:
            tiny()
    assert len(runs) == len(calls) > 0
    for run, (name, query, key, arguments) in zip(runs, calls, strict=True):
        plan = sparge.make_plan(query, key, **arguments, recipe=run.recipe, backend="cpu")
        yield name, query.shape[2], plan
