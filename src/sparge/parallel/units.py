"""NOUN who plans what, and what of it travels: `Held` rows, `Unit`s of planning, their fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..values.call import Call
from ..values.geometry import BLOCK_K, BLOCK_Q, n_blocks, sampled_rows
from .layout import Layout, Piece
from .messages import Spec


@dataclass(frozen=True)
class Held:
    """A rank's queries, keys and values, cut at blocks, and where all ranks' rows lie. call: of the
    whole sequence."""

    call: Call
    query: Tensor
    key: Tensor
    value: Tensor
    q_layout: Layout
    k_layout: Layout

    def q_blocks(self, rank: int) -> list[int]:
        """The query blocks that a rank has, ascending."""
        return [i for piece in self.q_layout.of(rank) for i in q_blocks_of(piece)]

    def k_blocks(self, rank: int) -> list[int]:
        """The key blocks that a rank has, ascending."""
        return [i for piece in self.k_layout.of(rank) for i in k_blocks_of(piece)]


def q_blocks_of(piece: Piece) -> range:
    return range(piece.start // BLOCK_Q, n_blocks(piece.stop, BLOCK_Q))


def k_blocks_of(piece: Piece) -> range:
    return range(piece.start // BLOCK_K, n_blocks(piece.stop, BLOCK_K))


@dataclass(frozen=True)
class Unit:
    """Query blocks `first … stop-1` of the heads that share a key head, and who plans them."""

    head: int
    first: int
    stop: int
    rank: int


def make_units(call: Call, world: int) -> list[Unit]:
    """Key heads, one after another to the ranks. Where ranks are more, several plan a head, if the
    busiest then has less to do: each of them needs all keys of the head."""
    most = min(-(-world // call.Hk), call.n_q)
    # A budget is one number for a head, measured on all of its rows.
    choices = range(1, 2 if call.measures_error else most + 1)
    ways = min(choices, key=lambda n: (Fraction(-(-call.Hk * n // world), n), n))
    cuts = [call.n_q * i // ways for i in range(ways + 1)]
    spans = [(head, cuts[i], cuts[i + 1]) for head in range(call.Hk) for i in range(ways)]
    return [Unit(*span, rank=i % world) for i, span in enumerate(spans)]


def units_of(units: Sequence[Unit], rank: int) -> list[Unit]:
    return [unit for unit in units if unit.rank == rank]


def own_blocks(held: Held, rank: int, unit: Unit) -> list[int]:
    """Query blocks of a rank that a unit plans."""
    return [i for i in held.q_blocks(rank) if unit.first <= i < unit.stop]


def places(blocks: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64).to(device)


def fields_of(held: Held, rank: int, unit: Unit, *, coded: bool) -> dict[str, Spec]:
    """What a rank sends to the one that plans a unit, by name, in this order.

    coded: keys travel as 8-bit codes, if at all, with the statistics of their blocks; else as the
    caller's.
    """
    call, group = held.call, held.call.Hq // held.call.Hk
    B, D, dtype = call.B, call.D, call.dtype
    keys, rows = held.k_layout.length(rank), held.q_layout.length(rank)
    n_k, n_q = len(held.k_blocks(rank)), len(own_blocks(held, rank, unit))
    fields = {}
    if coded and call.samples_rows:
        fields["key"] = Spec((B, keys, D), torch.int8)
        fields["k_scale"] = Spec((B, keys), torch.float32)
    elif not coded:
        fields["key"] = Spec((B, keys, D), dtype)
    if call.measures_error:
        fields["value"] = Spec((B, keys, call.Dv), dtype)
        fields["query"] = Spec((B, group, rows, D), dtype)
        return fields
    if call.samples_rows:
        sampled = len(list(sampled_of(held, rank, own_blocks(held, rank, unit))))
        fields["sampled"] = Spec((B, group, sampled, D), dtype)
    if call.pools_blocks:
        fields["q_pooled"] = Spec((B, group, n_q, D), torch.float32)
        if coded:
            fields["k_pooled"] = Spec((B, n_k, D), torch.float32)
    if call.recipe.min_similarity is not None:
        fields["q_similarity"] = Spec((B, group, n_q), torch.float32)
        if coded:
            fields["k_similarity"] = Spec((B, n_k), torch.float32)
    return fields


def answer_of(held: Held, rank: int, unit: Unit) -> dict[str, Spec]:
    """What the planning rank tells another of a unit, by name, in this order."""
    call, group = held.call, held.call.Hq // held.call.Hk
    fields = {}
    if call.predicts:
        n = len(own_blocks(held, rank, unit))
        fields["kept"] = Spec((call.B, group, n, -(-call.n_k // 8)), torch.uint8)
    if call.measures_error:
        fields["measured"] = Spec((3, call.B, group), torch.float64)
    if call.recipe.quantized:
        fields["key_mean"] = Spec((call.B, call.D), torch.float32)
    return fields


def sampled_of(held: Held, rank: int, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows that prediction scores: their places in the rank's tensor and in the sequence."""
    at = {i: place for place, i in enumerate(held.q_blocks(rank))}
    for i in blocks:
        start = i * BLOCK_Q
        # Only the last block of the sequence is short, and it is the last of its rank.
        valid = min(start + BLOCK_Q, held.call.Lq) - start
        for row in sampled_rows(valid, held.call.recipe.sample_rows):
            yield at[i] * BLOCK_Q + row, start + row
