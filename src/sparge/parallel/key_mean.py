"""The mean key over the whole sequence, bit for bit a single process's, from sums of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..values.stages import KeySums
from .exchange import Exchange
from .messages import Spec, from_bytes, size_of, to_bytes
from .reshard import pieces_of
from .units import Held


def global_key_mean(exchange: Exchange, held: Held, stages: KeySums) -> Tensor:
    """fp32 `[B, Hk, D]`. Each head is added up by one rank, which tells the others."""
    call, ranks, device = held.call, range(exchange.world), exchange.device
    pieces = pieces_of(held.key, held.k_layout, exchange.rank)
    sums = [stages.sum_keys(key) for key in pieces]
    own = torch.cat(sums, 2) if sums else held.key.new_empty((call.B, call.Hk, 0, call.D)).float()
    heads = {rank: list(range(rank, call.Hk, exchange.world)) for rank in ranks}
    mine = len(heads[exchange.rank])
    shapes = {of: (call.B, mine, len(held.k_blocks(of)), call.D) for of in ranks}
    specs = {of: [Spec(shapes[of], own.dtype)] for of in ranks}
    found = exchange.swap(
        "plan",
        {to: to_bytes([own[:, heads[to]]], device) for to in ranks},
        {of: size_of(specs[of]) for of in ranks},
    )
    whole = torch.empty((call.B, mine, call.n_k, call.D), dtype=own.dtype, device=device)
    for of in ranks:
        (part,) = from_bytes(found[of], specs[of])
        whole[:, :, torch.tensor(held.k_blocks(of), dtype=torch.int64).to(device)] = part
    means = stages.mean_of_sums(whole, call.Lk)
    specs = {of: [Spec((call.B, len(heads[of]), call.D), torch.float32)] for of in ranks}
    sizes = [size_of(specs[of]) for of in ranks]
    told = exchange.gather("plan", to_bytes([means], device), sizes)
    mean = torch.empty((call.B, call.Hk, call.D), device=device)
    for of in ranks:
        mean[:, heads[of]] = from_bytes(told[of], specs[of])[0]
    return mean
