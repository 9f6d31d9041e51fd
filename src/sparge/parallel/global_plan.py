"""One plan for the whole sequence, though no rank holds it: bit for bit a single process's.

Every head is planned by one rank. The others send it that head's keys, and of their queries what
prediction reads: the pooled blocks and the sampled rows. It plans as a single process does, because
what a head keeps does not depend on the heads around it, and sends each rank the rows of the plan
that are its own. Where there are more ranks than key heads, several ranks plan a head, each some of
its query blocks. An error budget is measured with all queries and values of a head, so these
travel, too. Keys that were sent to be planned are not sent again to be attended (`known`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from fractions import Fraction

import torch
from torch import Tensor

from ..values.backend import Backend
from ..values.call import BLOCK_Q, Call, sampled_rows
from ..values.stages import KeySums, Prepared, PreparedKeys, PreparedQueries, QTensor
from ..values.tokenmask import TokenMask
from .exchange import Exchange, Spec, from_bytes, pack_bits, size_of, to_bytes, unpack_bits
from .layout import Held, Layout, pieces_of, place_rows, places


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
    call, rank = held.call, exchange.rank
    if not (call.predicts or call.recipe.quantized):
        shape = (call.B, call.Hq, len(held.q_blocks(rank)), call.n_k)
        return GlobalPlan(torch.ones(shape, dtype=torch.bool, device=exchange.device))
    return _Planning(exchange, held, backend).run()


# -- who plans what ------------------------------------------------------------------------------


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


def own_blocks(held: Held, rank: int, unit: Unit) -> list[int]:
    """Query blocks of a rank that a unit plans."""
    return [i for i in held.q_blocks(rank) if unit.first <= i < unit.stop]


# -- what travels to the rank that plans -----------------------------------------------------------


class Rows(Enum):
    """What one row of a tensor that travels stands for."""

    KEYS = auto()
    KEY_BLOCKS = auto()
    QUERIES = auto()
    SAMPLED_QUERIES = auto()
    QUERY_BLOCKS = auto()

    @property
    def of_keys(self) -> bool:
        return self in (Rows.KEYS, Rows.KEY_BLOCKS)


@dataclass(frozen=True)
class Field:
    """A tensor `[B, heads of the unit, rows, *tail]` that every rank sends of its own rows."""

    rows: Rows
    tail: tuple[int, ...]
    dtype: torch.dtype


def fields_of(call: Call, *, coded: bool) -> dict[str, Field]:
    """What travels, in this order. coded: keys travel as 8-bit codes, if at all, with the
    statistics of their blocks; else as the caller's."""
    rows, fp32 = (call.D,), torch.float32
    fields = {}
    if coded and call.samples_rows:
        fields["key"] = Field(Rows.KEYS, rows, torch.int8)
        fields["k_scale"] = Field(Rows.KEYS, (), fp32)
    elif not coded:
        fields["key"] = Field(Rows.KEYS, rows, call.dtype)
    if call.measures_error:
        fields["value"] = Field(Rows.KEYS, (call.Dv,), call.dtype)
        fields["query"] = Field(Rows.QUERIES, rows, call.dtype)
        return fields
    if call.samples_rows:
        fields["query"] = Field(Rows.SAMPLED_QUERIES, rows, call.dtype)
    if call.pools_blocks:
        fields["q_pooled"] = Field(Rows.QUERY_BLOCKS, rows, fp32)
        if coded:
            fields["k_pooled"] = Field(Rows.KEY_BLOCKS, rows, fp32)
    if call.recipe.min_similarity is not None:
        fields["q_similarity"] = Field(Rows.QUERY_BLOCKS, (), fp32)
        if coded:
            fields["k_similarity"] = Field(Rows.KEY_BLOCKS, (), fp32)
    return fields


@dataclass(frozen=True)
class Share:
    """The rows of one rank that one unit is planned with."""

    held: Held
    rank: int
    unit: Unit

    def heads(self, rows: Rows) -> slice:
        head, group = self.unit.head, self.held.call.Hq // self.held.call.Hk
        return slice(head, head + 1) if rows.of_keys else slice(head * group, (head + 1) * group)

    def spec(self, field: Field) -> Spec:
        heads = self.heads(field.rows)
        layout = self._layout(field.rows)
        n = len(self._places(field.rows)) if layout is None else layout.length(self.rank)
        shape = (self.held.call.B, heads.stop - heads.start, n)
        return Spec((*shape, *field.tail), field.dtype)

    def _layout(self, rows: Rows) -> Layout | None:
        """Of rows that are all sent, in the order of the sequence."""
        return {Rows.KEYS: self.held.k_layout, Rows.QUERIES: self.held.q_layout}.get(rows)

    def _places(self, rows: Rows) -> list[tuple[int, int]]:
        """Of other rows: their places in the rank's tensor and in the unit."""
        held, rank, first = self.held, self.rank, self.unit.first
        if rows is Rows.KEY_BLOCKS:
            return list(enumerate(held.k_blocks(rank)))
        at, blocks = held.q_blocks(rank), own_blocks(held, rank, self.unit)
        if rows is Rows.QUERY_BLOCKS:
            return [(at.index(i), i - first) for i in blocks]
        return [(own, row - first * BLOCK_Q) for own, row in sampled_of(held, rank, blocks)]

    def cut(self, x: Tensor, rows: Rows) -> Tensor:
        """What of a tensor of all heads of this rank travels."""
        x = x[:, self.heads(rows)]
        if self._layout(rows) is not None:
            return x
        return x[:, :, places([own for own, _ in self._places(rows)], x.device)]

    def place(self, whole: Tensor, x: Tensor, rows: Rows) -> None:
        """What came to where it stands in the unit."""
        if (layout := self._layout(rows)) is not None:
            place_rows(whole, layout, self.rank, x, dim=2)
        else:
            whole[:, :, places([at for _, at in self._places(rows)], x.device)] = x


def sampled_of(held: Held, rank: int, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows that prediction scores: their places in the rank's tensor and in the sequence."""
    at = {i: place for place, i in enumerate(held.q_blocks(rank))}
    for i in blocks:
        start = i * BLOCK_Q
        # Only the last block of the sequence is short, and it is the last of its rank.
        valid = min(start + BLOCK_Q, held.call.Lq) - start
        for row in sampled_rows(valid, held.call.recipe.sample_rows):
            yield at[i] * BLOCK_Q + row, start + row


# -- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitPlan:
    """What is planned of a unit, or told of it to a rank. kept: bool `[B, group, blocks, n_k]`;
    measured: fp64 `[3, B, group]`; key_mean: fp32 `[B, 1, D]`. None where the call needs none."""

    kept: Tensor | None = None
    measured: Tensor | None = None
    key_mean: Tensor | None = None

    def to_tensors(self, share: Share) -> list[Tensor]:
        """What a rank is told, in the order of `specs`."""
        blocks = own_blocks(share.held, share.rank, share.unit)
        kept = self.kept
        if kept is not None:
            at = places([i - share.unit.first for i in blocks], kept.device)
            kept = pack_bits(kept[:, :, at])
        return [x for x in (kept, self.measured, self.key_mean) if x is not None]

    @staticmethod
    def specs(share: Share) -> list[Spec]:
        call, group = share.held.call, share.held.call.Hq // share.held.call.Hk
        n = len(own_blocks(share.held, share.rank, share.unit))
        specs = []
        if call.predicts:
            specs.append(Spec((call.B, group, n, -(-call.n_k // 8)), torch.uint8))
        if call.measures_error:
            specs.append(Spec((3, call.B, group), torch.float64))
        if call.recipe.quantized:
            specs.append(Spec((call.B, 1, call.D), torch.float32))
        return specs

    @classmethod
    def from_tensors(cls, call: Call, tensors: Iterator[Tensor]) -> UnitPlan:
        return cls(
            kept=unpack_bits(next(tensors), call.n_k) if call.predicts else None,
            measured=next(tensors) if call.measures_error else None,
            key_mean=next(tensors) if call.recipe.quantized else None,
        )


class _Planning:
    """The planning of one call on one rank."""

    def __init__(self, exchange: Exchange, held: Held, backend: Backend) -> None:
        self.exchange, self.held, self.backend = exchange, held, backend
        self.call, self.stages = held.call, backend.stages()
        self.units = make_units(held.call, exchange.world)
        self.units_of = {
            rank: [unit for unit in self.units if unit.rank == rank]
            for rank in range(exchange.world)
        }
        self.key_mean: Tensor | None = None
        if held.call.recipe.quantized and backend.sums_keys:
            assert isinstance(self.stages, KeySums)
            self.key_mean = global_key_mean(exchange, held, self.stages)
        # With the mean known, keys need not travel in the caller's dtype.
        self.coded = self.key_mean is not None and not held.call.measures_error
        self.fields = fields_of(held.call, coded=self.coded)
        # What is planned with is what the kernel reads, if nobody prepares it again.
        as_read = self.coded or not held.call.recipe.quantized
        reuses = backend.plain_operands and as_read and not held.call.measures_error
        self.reuses = reuses and "key" in self.fields
        self.known: dict[int, Tensor | QTensor] = {}

    def run(self) -> GlobalPlan:
        if not self.call.predicts and self.key_mean is not None:
            return self._assemble_plan({})  # all is kept, and what smoothing takes is known
        answers = self._exchange_answers(self._exchange_rows())
        return self._assemble_plan(answers)

    def _exchange_rows(self) -> dict[Unit, dict[int, dict[str, Tensor]]]:
        """What every rank sent of the units that are planned here, by the rank it came from."""
        ranks, rank = range(self.exchange.world), self.exchange.rank
        own, mine = self._own_tensors(), self.units_of[rank]
        sends = {
            to: [x for unit in self.units_of[to] for x in self._sent(unit, own)] for to in ranks
        }
        specs = {
            of: [Share(self.held, of, unit).spec(x) for unit in mine for x in self.fields.values()]
            for of in ranks
        }
        found = self.exchange.swap_tensors("plan", sends, specs)
        return {
            unit: {of: {name: next(found[of]) for name in self.fields} for of in ranks}
            for unit in mine
        }

    def _exchange_answers(
        self, came: dict[Unit, dict[int, dict[str, Tensor]]]
    ) -> dict[Unit, UnitPlan]:
        """Plan the units of this rank; what all units say of this rank's rows."""
        ranks, rank, held = range(self.exchange.world), self.exchange.rank, self.held
        plans = {unit: self._plan(unit, found) for unit, found in came.items()}
        answers = {
            to: [x for unit, plan in plans.items() for x in plan.to_tensors(Share(held, to, unit))]
            for to in ranks
        }
        specs = {
            of: [x for unit in self.units_of[of] for x in UnitPlan.specs(Share(held, rank, unit))]
            for of in ranks
        }
        found = self.exchange.swap_tensors("plan", answers, specs)
        return {unit: UnitPlan.from_tensors(self.call, found[unit.rank]) for unit in self.units}

    def _own_tensors(self) -> dict[str, Tensor]:
        """What this rank's rows give, for all heads, by field; nothing if it has no such rows."""
        call, held, rank = self.call, self.held, self.exchange.rank
        tensors = {"key": held.key, "value": held.value, "query": held.query}
        if call.measures_error:
            return tensors
        if call.pools_blocks:
            made = [
                self._queries_to_plan(query) for query in pieces_of(held.query, held.q_layout, rank)
            ]
            tensors |= _joined("q_pooled", [x.pooled for x in made])
            tensors |= _joined("q_similarity", [x.similarity for x in made])
        if self.coded:
            keys = [self._keys_to_plan(x) for x in pieces_of(held.key, held.k_layout, rank)]
            tensors |= _joined("k_pooled", [x.pooled for x in keys])
            tensors |= _joined("k_similarity", [x.similarity for x in keys])
            codes = [x.key for x in keys if isinstance(x.key, QTensor)]
            if codes:
                tensors |= _joined("key", [x.codes for x in codes])
                tensors |= _joined("k_scale", [x.scale for x in codes])
        return tensors

    def _queries_to_plan(self, query: Tensor) -> PreparedQueries:
        """Statistics of one piece: those of a block do not depend on other blocks. Sampled rows
        travel as they are, so none is coded here."""
        recipe = replace(self.call.recipe, precision=self.call.own_precision)
        part = replace(self.call, Lq=query.shape[2], recipe=recipe, label="")
        return self.stages.prepare_queries(part, query, mean=None, to_plan=True, to_attend=False)

    def _keys_to_plan(self, key: Tensor) -> PreparedKeys:
        """Statistics and codes of one piece, smoothed by the mean of all keys."""
        part = replace(self.call, Lk=key.shape[2], label="")
        return self.stages.prepare_keys(
            part, key, None, mean=self.key_mean, to_plan=True, to_attend=False
        )

    def _sent(self, unit: Unit, own: Mapping[str, Tensor]) -> list[Tensor]:
        """The fields of a unit, from this rank's rows."""
        share = Share(self.held, self.exchange.rank, unit)
        parts = []
        for name, x in self.fields.items():
            if name in own:
                parts.append(share.cut(own[name], x.rows))
            else:  # this rank has no rows
                spec = share.spec(x)
                parts.append(torch.empty(spec.shape, dtype=spec.dtype, device=self.exchange.device))
        return parts

    def _plan(self, unit: Unit, came: dict[int, dict[str, Tensor]]) -> UnitPlan:
        whole, group = self.call, self.call.Hq // self.call.Hk
        rows = range(unit.first * BLOCK_Q, min(unit.stop * BLOCK_Q, whole.Lq))
        call = replace(
            whole,
            Hq=group,
            Hk=1,
            Lq=len(rows),
            offset=whole.offset + rows.start,
            recipe=whole.recipe.heads(unit.head * group, (unit.head + 1) * group),
            label="",
        )
        found = self._assembled(call, unit, came)
        if not call.predicts:
            # As preparing to attend computes it.
            keys = self.stages.prepare_keys(call, found["key"], None, to_plan=False, to_attend=True)
            return UnitPlan(key_mean=keys.mean)
        prepared = self._prepared(call, found)
        if self.reuses:
            self.known[unit.head] = prepared.keys.key
        tokens = TokenMask(call.Lq, call.Lk, call.is_causal, call.offset)
        mass = self.stages.predict(call, prepared, tokens)
        plan = self.stages.select(call, prepared, mass, tokens)
        mean = prepared.keys.mean
        if self.key_mean is not None:
            mean = self.key_mean[:, unit.head, None]
        return UnitPlan(plan.to_mask(), plan.measured, mean if call.recipe.quantized else None)

    def _assembled(
        self, call: Call, unit: Unit, came: dict[int, dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The fields of all ranks, where they stand in the unit. Queries that did not travel, which
        nothing reads, are zero."""
        device = self.exchange.device
        query = torch.zeros((call.B, call.Hq, call.Lq, call.D), dtype=call.dtype, device=device)
        found = {"query": query}
        lengths = {
            Rows.KEYS: call.Lk,
            Rows.KEY_BLOCKS: call.n_k,
            Rows.QUERY_BLOCKS: call.n_q,
        }
        for name, x in self.fields.items():
            if name not in found:
                heads = call.Hk if x.rows.of_keys else call.Hq
                shape = (call.B, heads, lengths[x.rows], *x.tail)
                found[name] = torch.empty(shape, dtype=x.dtype, device=device)
            for rank, tensors in came.items():
                Share(self.held, rank, unit).place(found[name], tensors[name], x.rows)
        return found

    def _prepared(self, call: Call, found: dict[str, Tensor]) -> Prepared:
        """As the stages prepare the whole sequence."""
        if self.coded:
            # Without sampled rows, nothing reads a key.
            key: Tensor | QTensor = found["query"].new_zeros((call.B, 1, call.Lk, call.D))
            if call.samples_rows:
                key = QTensor(found["key"], found["k_scale"])
            keys = PreparedKeys(
                key, key, pooled=found.get("k_pooled"), similarity=found.get("k_similarity")
            )
        else:
            keys = self.stages.prepare_keys(
                call, found["key"], found.get("value"), to_plan=True, to_attend=False
            )
        queries = self.stages.prepare_queries(
            call, found["query"], mean=keys.mean, to_plan=True, to_attend=False
        )
        if call.measures_error:
            return Prepared(queries, keys)
        # Statistics are those of all rows, which did not travel.
        pooled, similarity = found.get("q_pooled"), found.get("q_similarity")
        return Prepared(replace(queries, pooled=pooled, similarity=similarity), keys)

    def _assemble_plan(self, answers: Mapping[Unit, UnitPlan]) -> GlobalPlan:
        """The plan of this rank's rows, from the answers of the ranks that planned it."""
        call, held, rank, device = self.call, self.held, self.exchange.rank, self.exchange.device
        group, blocks = call.Hq // call.Hk, held.q_blocks(rank)
        shape = (call.B, call.Hq, len(blocks), call.n_k)
        kept = torch.ones(shape, dtype=torch.bool, device=device)
        mean = torch.empty((call.B, call.Hk, call.D), device=device)
        measured = torch.zeros((3, call.B, call.Hq), dtype=torch.float64, device=device)
        for unit, answer in answers.items():
            heads = slice(unit.head * group, (unit.head + 1) * group)
            if answer.kept is not None:
                at = places([blocks.index(i) for i in own_blocks(held, rank, unit)], device)
                kept[:, heads, at] = answer.kept
            if answer.measured is not None:
                measured[:, :, heads] = answer.measured
            if answer.key_mean is not None:
                mean[:, unit.head] = answer.key_mean[:, 0]
        mean = mean if self.key_mean is None else self.key_mean
        knows = {of: sorted({unit.head for unit in self.units_of[of]}) for of in self.units_of}
        return GlobalPlan(
            kept,
            mean if call.recipe.quantized else None,
            measured if call.measures_error else None,
            self.known,
            knows if answers and self.reuses else {},
        )


def _joined(name: str, pieces: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Rows of pieces, one after another, under a name; nothing where there are none."""
    found = [x for x in pieces if x is not None]
    return {name: torch.cat(found, 2)} if found else {}


def global_key_mean(exchange: Exchange, held: Held, stages: KeySums) -> Tensor:
    """fp32 `[B, Hk, D]`, bit for bit a single process's, from sums of blocks. Each head is added up
    by one rank, which sends the mean to the others."""
    call, ranks, device = held.call, range(exchange.world), exchange.device
    pieces = pieces_of(held.key, held.k_layout, exchange.rank)
    sums = [stages.sum_keys(key) for key in pieces]
    own = torch.cat(sums, 2) if sums else held.key.new_empty((call.B, call.Hk, 0, call.D)).float()
    heads = {rank: list(range(rank, call.Hk, exchange.world)) for rank in ranks}
    mine = len(heads[exchange.rank])
    shapes = {of: (call.B, mine, len(held.k_blocks(of)), call.D) for of in ranks}
    specs = {of: [Spec(shapes[of], own.dtype)] for of in ranks}
    found = exchange.swap_tensors("plan", {to: [own[:, heads[to]]] for to in ranks}, specs)
    whole = torch.empty((call.B, mine, call.n_k, call.D), dtype=own.dtype, device=device)
    for of in ranks:
        whole[:, :, places(held.k_blocks(of), device)] = next(found[of])
    means = stages.mean_of_sums(whole, call.Lk)
    specs = {of: [Spec((call.B, len(heads[of]), call.D), torch.float32)] for of in ranks}
    sizes = [size_of(specs[of]) for of in ranks]
    found_means = exchange.gather("plan", to_bytes([means], device), sizes)
    mean = torch.empty((call.B, call.Hk, call.D), device=device)
    for of in ranks:
        mean[:, heads[of]] = from_bytes(found_means[of], specs[of])[0]
    return mean
