"""One plan for the whole sequence, though no rank holds it: bit for bit a single process's.

Every head is planned by one rank. The others send it that head's keys, and of their queries what
prediction reads: the pooled blocks and the sampled rows. It plans as a single process does, because
what a head keeps does not depend on the heads around it, and sends each rank the rows of the plan
that are its own. Where there are more ranks than key heads, several ranks plan a head, each some of
its query blocks. An error budget is measured with all queries and values of a head, so these
travel, too. Keys that were sent to be planned are not sent again to be attended (`known`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from ..values.backend import Backend
from ..values.call import BLOCK_Q, Call, n_blocks, sampled_rows, slices_of
from ..values.stages import KeySums, Prepared, PreparedKeys, QTensor
from ..values.tokenmask import TokenMask
from .exchange import Exchange, pack_bits, to_bytes, unpack_bits
from .layout import Held, Piece, Sharding, overlap


@dataclass(frozen=True)
class GlobalPlan:
    """kept: of this rank's query blocks, bool `[B, Hq, blocks, n_k]`. key_mean: fp32 `[B, Hk, D]`,
    where keys are smoothed. measured: by an error budget, as in `BlockPlan`. known: by key head,
    all keys of the heads that were planned here, as the kernel reads them, `[B, 1, Lk, D]`.
    knows: the heads of which each rank has all keys so."""

    kept: Tensor
    key_mean: Tensor | None = None
    measured: Tensor | None = None
    known: dict[int, Tensor | QTensor] = field(default_factory=dict)
    knows: dict[int, list[int]] = field(default_factory=dict)


def make_global_plan(exchange: Exchange, held: Held, backend: Backend) -> GlobalPlan:
    return _Planning(exchange, held, backend).run()


# -- who plans what ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Query blocks `first … stop-1` of the heads that share a key head, and who plans them."""

    head: int
    first: int
    stop: int
    rank: int

    @property
    def blocks(self) -> Piece:
        return Piece(self.first, self.stop, self.rank)

    def heads(self, call: Call) -> slice:
        """Its query heads."""
        group = call.Hq // call.Hk
        return slice(self.head * group, (self.head + 1) * group)


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


# -- what travels to the rank that plans -----------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """A tensor `[B, heads, rows, *tail]` that travels to the ranks that plan. sharding: which rank
    has which rows. per_block: rows of a query block; 0 for rows of keys, which a unit needs all."""

    sharding: Sharding
    per_block: int
    tail: tuple[int, ...]
    dtype: torch.dtype

    def span(self, unit: Unit) -> Piece:
        """The rows that a unit is planned with."""
        if not self.per_block:
            return Piece(0, self.sharding.total, unit.rank)
        stop = min(unit.stop * self.per_block, self.sharding.total)
        return Piece(unit.first * self.per_block, stop, unit.rank)

    def heads(self, x: Tensor, unit: Unit, call: Call) -> Tensor:
        """Those of a unit, of a tensor of all heads."""
        return x[:, unit.heads(call)] if self.per_block else x[:, unit.head, None]


def fields_of(held: Held, *, coded: bool) -> dict[str, Field]:
    """What travels, in this order. coded: keys travel as 8-bit codes, if at all, with the
    statistics of their blocks; else as the caller's."""
    call, fp32 = held.call, torch.float32
    fields = {}
    if coded and call.samples_rows:
        fields["key"] = Field(held.k_rows, 0, (call.D,), torch.int8)
        fields["k_scale"] = Field(held.k_rows, 0, (), fp32)
    elif not coded:
        fields["key"] = Field(held.k_rows, 0, (call.D,), call.dtype)
    if call.measures_error:
        fields["value"] = Field(held.k_rows, 0, (call.Dv,), call.dtype)
        fields["query"] = Field(held.q_rows, BLOCK_Q, (call.D,), call.dtype)
        return fields
    if call.samples_rows:
        samples = call.recipe.sample_rows
        per_block, total = (len(sampled_places(n, samples)) for n in (BLOCK_Q, call.Lq))
        sharding = held.q_blocks.recut(lambda cut: min(cut * per_block, total))
        fields["sampled"] = Field(sharding, per_block, (call.D,), call.dtype)
    if call.pools_blocks:
        fields["q_pooled"] = Field(held.q_blocks, 1, (call.D,), fp32)
        if coded:
            fields["k_pooled"] = Field(held.k_blocks, 0, (call.D,), fp32)
    if call.recipe.min_similarity is not None:
        fields["q_similarity"] = Field(held.q_blocks, 1, (), fp32)
        if coded:
            fields["k_similarity"] = Field(held.k_blocks, 0, (), fp32)
    return fields


def sampled_places(length: int, sample_rows: int) -> list[int]:
    """The rows that prediction scores, of so many from the start of a block on."""
    blocks = slices_of(length, BLOCK_Q)
    return [b.start + i for b in blocks for i in sampled_rows(b.stop - b.start, sample_rows)]


# -- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What is planned, of some heads and query blocks. kept: uint8 `[B, heads, blocks, n_k / 8]`,
    bits; measured: fp64 `[3, B, heads]`; key_mean: fp32 `[B, key heads, D]`. None where the call
    needs none."""

    kept: Tensor | None
    measured: Tensor | None
    key_mean: Tensor | None

    def of(self, unit: Unit, call: Call) -> Answer:
        """Views of the heads of a unit."""
        heads, mean = unit.heads(call), self.key_mean
        return Answer(
            None if self.kept is None else self.kept[:, heads],
            None if self.measured is None else self.measured[:, :, heads],
            None if mean is None else mean[:, unit.head, None],
        )

    def parts(self, own: Sequence[Piece], other: Sequence[Piece]) -> list[Tensor]:
        """What travels of it: the blocks that are in both, and the rest. own: its blocks."""
        rows = [] if self.kept is None else overlap(self.kept, own, other)
        return rows + [x for x in (self.measured, self.key_mean) if x is not None]


class _Planning:
    """The planning of one call on one rank."""

    def __init__(self, exchange: Exchange, held: Held, backend: Backend) -> None:
        self.exchange, self.held = exchange, held
        self.call, self.stages = held.call, backend.stages()
        ranks, units = range(exchange.world), make_units(held.call, exchange.world)
        self.units_of = {rank: [unit for unit in units if unit.rank == rank] for rank in ranks}
        self.key_mean: Tensor | None = None
        if held.call.recipe.quantized and backend.sums_keys:
            assert isinstance(self.stages, KeySums)
            self.key_mean = global_key_mean(exchange, held, self.stages)
        # With the mean known, keys need not travel in the caller's dtype.
        self.coded = self.key_mean is not None and not held.call.measures_error
        self.fields = fields_of(held, coded=self.coded)
        # What is planned with is what the kernel reads, if nobody prepares it again.
        as_read = self.coded or not held.call.recipe.quantized
        reuses = backend.plain_operands and as_read and not held.call.measures_error
        self.reuses = reuses and "key" in self.fields
        self.known: dict[int, Tensor | QTensor] = {}

    def run(self) -> GlobalPlan:
        call, answer, knows = self.call, Answer(None, None, self.key_mean), {}
        if call.predicts or (call.recipe.quantized and self.key_mean is None):
            plans = {unit: self._plan(unit, rows) for unit, rows in self._gather_rows().items()}
            answer = self._exchange_answers(plans)
            if self.reuses:
                knows = {of: sorted({x.head for x in self.units_of[of]}) for of in self.units_of}
        n = self.held.q_blocks.length(self.exchange.rank)
        shape = (call.B, call.Hq, n, call.n_k)
        kept = torch.ones(shape, dtype=torch.bool, device=self.exchange.device)
        if answer.kept is not None:
            kept = unpack_bits(answer.kept, call.n_k)
        return GlobalPlan(kept, answer.key_mean, answer.measured, self.known, knows)

    def _gather_rows(self) -> dict[Unit, dict[str, Tensor]]:
        """The fields of the units that are planned here, of all ranks."""
        call, rank, device = self.call, self.exchange.rank, self.exchange.device
        own, send = self._own_rows(), {}
        into: dict[int, list[Tensor]] = {}
        found: dict[Unit, dict[str, Tensor]] = {unit: {} for unit in self.units_of[rank]}
        for unit, rows in found.items():
            for name, x in self.fields.items():
                heads = call.Hq // call.Hk if x.per_block else 1
                shape = (call.B, heads, len(x.span(unit)), *x.tail)
                rows[name] = torch.empty(shape, dtype=x.dtype, device=device)
        for other, units in self.units_of.items():
            sent: list[Tensor] = []
            for unit in units:
                for name, x in self.fields.items():
                    if name in own:
                        heads_of_unit = x.heads(own[name], unit, call)
                        sent += overlap(heads_of_unit, x.sharding.of(rank), [x.span(unit)])
            send[other], into[other] = to_bytes(sent, device), []
            for unit, rows in found.items():
                for name, x in self.fields.items():
                    into[other] += overlap(rows[name], [x.span(unit)], x.sharding.of(other))
        self.exchange.swap("plan", send, into)
        return found

    def _exchange_answers(self, plans: dict[Unit, Answer]) -> Answer:
        """What all units say of this rank's rows."""
        call, rank, device = self.call, self.exchange.rank, self.exchange.device
        blocks, send = self.held.q_blocks, {}
        into: dict[int, list[Tensor]] = {}
        kept = measured = mean = None
        if call.predicts:
            shape = (call.B, call.Hq, blocks.length(rank), n_blocks(call.n_k, 8))
            kept = torch.empty(shape, dtype=torch.uint8, device=device)
        if call.measures_error:
            measured = torch.empty((3, call.B, call.Hq), dtype=torch.float64, device=device)
        if call.recipe.quantized and self.key_mean is None:
            mean = torch.empty((call.B, call.Hk, call.D), device=device)
        whole = Answer(kept, measured, mean)
        for other, units in self.units_of.items():
            told: list[Tensor] = []
            for unit, plan in plans.items():
                told += plan.parts([unit.blocks], blocks.of(other))
            send[other], into[other] = to_bytes(told, device), []
            for unit in units:
                into[other] += whole.of(unit, call).parts(blocks.of(rank), [unit.blocks])
        self.exchange.swap("plan", send, into)
        return whole if mean is not None else replace(whole, key_mean=self.key_mean)

    def _own_rows(self) -> dict[str, Tensor]:
        """The fields of this rank's rows, of all heads; none that it has no rows for."""
        call, held, rank = self.call, self.held, self.exchange.rank
        tensors = {"key": held.key, "value": held.value, "query": held.query}
        if call.measures_error:
            return tensors
        if call.samples_rows:
            at = sampled_places(held.query.shape[2], call.recipe.sample_rows)
            tensors["sampled"] = held.query[:, :, torch.tensor(at, dtype=torch.int64)]
        pieces: dict[str, list[Tensor | None]] = {}
        if call.pools_blocks:
            # Statistics of a block do not depend on others. Sampled rows travel as they are, so
            # none is coded here.
            own = replace(call, recipe=replace(call.recipe, precision=call.own_precision), label="")
            made = [
                self.stages.prepare_queries(
                    replace(own, Lq=x.shape[2]), x, mean=None, to_plan=True, to_attend=False
                )
                for x in held.q_rows.split(held.query, rank)
            ]
            pieces["q_pooled"] = [x.pooled for x in made]
            pieces["q_similarity"] = [x.similarity for x in made]
        if self.coded:
            keys = [
                self.stages.prepare_keys(
                    replace(call, Lk=x.shape[2], label=""),
                    x,
                    None,
                    mean=self.key_mean,
                    to_plan=True,
                    to_attend=False,
                )
                for x in held.k_rows.split(held.key, rank)
            ]
            pieces["k_pooled"] = [x.pooled for x in keys]
            pieces["k_similarity"] = [x.similarity for x in keys]
            codes = [x.key for x in keys if isinstance(x.key, QTensor)]
            pieces["key"] = [x.codes for x in codes]
            pieces["k_scale"] = [x.scale for x in codes]
        for name, parts in pieces.items():
            if rows := [x for x in parts if x is not None]:
                tensors[name] = torch.cat(rows, 2)
        return tensors

    def _plan(self, unit: Unit, rows: dict[str, Tensor]) -> Answer:
        whole, heads = self.call, unit.heads(self.call)
        first, stop = unit.first * BLOCK_Q, min(unit.stop * BLOCK_Q, whole.Lq)
        call = replace(
            whole,
            Hq=heads.stop - heads.start,
            Hk=1,
            Lq=stop - first,
            offset=whole.offset + first,
            recipe=whole.recipe.heads(heads.start, heads.stop),
            label="",
        )
        if not call.predicts:
            # As preparing to attend computes it.
            keys = self.stages.prepare_keys(call, rows["key"], None, to_plan=False, to_attend=True)
            return Answer(None, None, keys.mean)
        prepared = self._prepared(call, rows)
        if self.reuses:
            self.known[unit.head] = prepared.keys.key
        tokens = TokenMask(call.Lq, call.Lk, call.is_causal, call.offset)
        mass = self.stages.predict(call, prepared, tokens)
        plan = self.stages.select(call, prepared, mass, tokens)
        sends_mean = call.recipe.quantized and self.key_mean is None
        mean = prepared.keys.mean if sends_mean else None
        return Answer(pack_bits(plan.to_mask()), plan.measured, mean)

    def _prepared(self, call: Call, rows: dict[str, Tensor]) -> Prepared:
        """As the stages prepare the whole sequence."""
        if self.coded:
            # Without sampled rows, nothing reads a key.
            shape, device = (call.B, 1, call.Lk, call.D), self.exchange.device
            key: Tensor | QTensor = torch.zeros(shape, dtype=call.dtype, device=device)
            if call.samples_rows:
                key = QTensor(rows["key"], rows["k_scale"])
            keys = PreparedKeys(
                key, key, pooled=rows.get("k_pooled"), similarity=rows.get("k_similarity")
            )
        else:
            keys = self.stages.prepare_keys(
                call, rows["key"], rows.get("value"), to_plan=True, to_attend=False
            )
        query = rows.get("query")
        if query is None:  # rows that did not travel, which nothing reads, are zero
            shape, device = (call.B, call.Hq, call.Lq, call.D), self.exchange.device
            query = torch.zeros(shape, dtype=call.dtype, device=device)
            if call.samples_rows:
                at = sampled_places(call.Lq, call.recipe.sample_rows)
                query[:, :, torch.tensor(at)] = rows["sampled"]
        queries = self.stages.prepare_queries(
            call, query, mean=keys.mean, to_plan=True, to_attend=False
        )
        if call.measures_error:
            return Prepared(queries, keys)
        # Statistics are those of all rows, which did not travel.
        pooled, similarity = rows.get("q_pooled"), rows.get("q_similarity")
        return Prepared(replace(queries, pooled=pooled, similarity=similarity), keys)


def global_key_mean(exchange: Exchange, held: Held, stages: KeySums) -> Tensor:
    """fp32 `[B, Hk, D]`, bit for bit a single process's, from sums of blocks. Each head is added up
    by one rank, which sends the mean to the others."""
    call, rank, world, device = held.call, exchange.rank, exchange.world, exchange.device
    sums = [stages.sum_keys(key) for key in held.k_rows.split(held.key, rank)]
    own = torch.cat(sums, 2) if sums else held.key.new_empty((call.B, call.Hk, 0, call.D)).float()
    heads = [slice(of, None, world) for of in range(world)]
    mine = len(range(rank, call.Hk, world))
    whole = torch.empty((call.B, mine, call.n_k, call.D), dtype=own.dtype, device=device)
    send = {
        to: to_bytes(held.k_blocks.split(own[:, heads[to]], rank), device) for to in range(world)
    }
    into = {of: held.k_blocks.views(whole, of) for of in range(world)}
    exchange.swap("plan", send, into)
    message = to_bytes([stages.mean_of_sums(whole, call.Lk)], device)
    mean = torch.empty((call.B, call.Hk, call.D), device=device)
    found = {of: [mean[:, heads[of]]] for of in range(world)}
    exchange.swap("plan", dict.fromkeys(range(world), message), found)
    return mean
