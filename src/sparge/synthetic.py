"""Synthetic query, key and value with the structure that attention in language models has.

    q_i · k_j / sqrt(D)  ≈  local_h · Σ_f cos(ω_f (i - j)) / F        nearby tokens
                          + topical_h · [topic of i == topic of j]    the same topic, near or far
                          + sink_h · [j is one of the first tokens]   the attention sink
                          + q_i · offset (the same for every j)       removed by smoothing
                          + noise

Topics are segments of the sequence that recur. Heads range from local (the first) to diffuse (the
last). Numbers are drawn on the CPU in fp64 without BLAS, so a seed gives the same numbers on every
device and with any number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .support.ordered_sums import fold_sum

MIN_HEAD_DIM = 8
SINK_TOKENS = 2
SEGMENT = (48, 320)  # shortest and longest segment of one topic, in tokens
WAVELENGTHS = (48.0, 4096.0)
TOKENS_PER_TOPIC = 256
OFFSET = 3.0
NOISE = 0.8
LOCAL_HEAD, DIFFUSE_HEAD = (9.0, 4.0, 6.0), (2.5, 6.0, 3.0)
"""Logits of the first and the last head for near tokens, for a shared topic and for the sink."""


def structured_qkv(
    *,
    B: int = 1,
    Hq: int = 4,
    Hk: int = 2,
    L: int = 2048,
    D: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """query `[B, Hq, L, D]`, key and value `[B, Hk, L, D]`; deterministic for a seed."""
    _check_sizes(B, Hq, Hk, L, D)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2**63 - 1, got {seed}")
    generator = torch.Generator().manual_seed(seed)
    query = torch.empty(B, Hq, L, D, dtype=dtype)
    key, value = torch.empty(B, Hk, L, D, dtype=dtype), torch.empty(B, Hk, L, D, dtype=dtype)
    is_sink = (torch.arange(L) < SINK_TOKENS).double()[:, None]
    group = Hq // Hk
    for b in range(B):
        topics = _topics(L, generator)
        for h_k in range(Hk):
            position, topic, sink = _components(L, D, topics, generator)
            offset = OFFSET * _unit(_normal((1, D), generator))
            held = position + topic + is_sink * sink + offset
            key[b, h_k] = held + NOISE / math.sqrt(D) * _normal((L, D), generator)
            # Tokens of a topic have similar values; the sink's value is near zero.
            values = topic * math.sqrt(D) + _normal((L, D), generator)
            value[b, h_k] = torch.where(is_sink.bool(), 0.05 * values, values)
            for h in range(h_k * group, (h_k + 1) * group):
                near, shared, first = head_strengths(h, Hq)
                wanted = near * position + shared * topic + first * sink
                # Keys hold unit vectors: the query carries the logit and cancels the 1/sqrt(D).
                query[b, h] = wanted * math.sqrt(D) + NOISE * _normal((L, D), generator)
    return query.to(device), key.to(device), value.to(device)


def head_strengths(h: int, Hq: int) -> list[float]:
    """Equal steps from the local head to the diffuse one."""
    t = h / max(Hq - 1, 1)
    return [a + t * (b - a) for a, b in zip(LOCAL_HEAD, DIFFUSE_HEAD, strict=True)]


def _components(
    L: int, D: int, topics: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one key head's tokens, in orthogonal subspaces: position and topic, unit rows `[L, D]`,
    and the unit vector `[D]` of the sink."""
    axes = _axes(D, generator)
    n_waves = D // 8
    angles = torch.arange(L)[:, None] * _frequencies(n_waves)
    waves = torch.cat([angles.cos(), angles.sin()], 1) / n_waves**0.5
    topical_axes = axes[1 + 2 * n_waves :]
    directions = _normal((int(topics.max()) + 1, topical_axes.shape[0]), generator)
    position = _along(waves, axes[1 : 1 + 2 * n_waves])
    return position, _along(_unit(directions), topical_axes)[topics], axes[0]


def _topics(L: int, generator: torch.Generator) -> Tensor:
    """The topic of every token, `[L]`: segments of random length, topics that recur."""
    n_topics = max(4, L // TOKENS_PER_TOPIC)
    topics: list[int] = []
    while len(topics) < L:
        length = int(torch.randint(SEGMENT[0], SEGMENT[1] + 1, (1,), generator=generator))
        topic = int(torch.randint(n_topics, (1,), generator=generator))
        topics += [topic] * length
    return torch.tensor(topics[:L])


def _frequencies(n_waves: int) -> Tensor:
    """Geometric, as in rotary embeddings."""
    shortest, longest = WAVELENGTHS
    step = (longest / shortest) ** (1 / max(n_waves - 1, 1))
    waves = [shortest * step**f for f in range(n_waves)]
    return torch.tensor([2 * math.pi / wave for wave in waves], dtype=torch.float64)


def _axes(D: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal vectors, `[D, D]`, by Gram-Schmidt."""
    axes = _normal((D, D), generator)
    for i in range(D):
        axes[i] = _unit(axes[i])
        later = axes[i + 1 :]
        later -= fold_sum(later * axes[i], dim=1)[:, None] * axes[i]
    return axes


def _along(coordinates: Tensor, axes: Tensor) -> Tensor:
    """`coordinates @ axes`, one axis at a time."""
    out = torch.zeros(coordinates.shape[0], axes.shape[1], dtype=axes.dtype)
    for i, axis in enumerate(axes):
        out += coordinates[:, i, None] * axis
    return out


def _unit(x: Tensor) -> Tensor:
    return x / fold_sum(x * x, dim=-1).sqrt()[..., None]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _check_sizes(B: int, Hq: int, Hk: int, L: int, D: int) -> None:
    for name, size in (("B", B), ("Hq", Hq), ("Hk", Hk), ("L", L)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if Hq % Hk:
        raise ValueError(f"query heads must be a multiple of key heads, got {Hq} and {Hk}")
    if D < MIN_HEAD_DIM:
        raise ValueError(
            f"D must be at least {MIN_HEAD_DIM}, got {D}: position, topic and sink each need their "
            "own dimensions"
        )
