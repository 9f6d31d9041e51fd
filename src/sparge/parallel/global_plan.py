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

import torch
from torch import Tensor

from ..values.backend import Backend
from ..values.call import Call, Inputs
from ..values.geometry import BLOCK_Q
from ..values.qtensor import Operands, QTensor
from ..values.recipe import KeepMass, Recipe
from ..values.stages import Prepared, Statistics
from ..values.tokenmask import TokenMask
from .exchange import Exchange
from .key_mean import global_key_mean
from .messages import from_bytes, pack_bits, size_of, to_bytes, unpack_bits
from .reshard import pieces_of, place_rows
from .units import (
    Held,
    Unit,
    answer_of,
    fields_of,
    make_units,
    own_blocks,
    places,
    sampled_of,
    units_of,
)


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


class _Planning:
    """The planning of one call on one rank."""

    def __init__(self, exchange: Exchange, held: Held, backend: Backend) -> None:
        self.exchange, self.held, self.backend = exchange, held, backend
        self.call, self.stages = held.call, backend.stages()
        self.units = make_units(held.call, exchange.world)
        self.key_mean: Tensor | None = None
        if held.call.recipe.quantized and backend.key_sums is not None:
            self.key_mean = global_key_mean(exchange, held, backend.key_sums())
        # With the mean known, keys need not travel in the caller's dtype.
        self.coded = self.key_mean is not None and not held.call.measures_error
        # What is planned with is what the kernel reads, if nobody prepares it again.
        as_read = self.coded or not held.call.recipe.quantized
        travel = held.call.samples_rows or not self.coded
        self.reuses = backend.plain_operands and as_read and travel and not held.call.measures_error
        self.known: dict[int, Tensor | QTensor] = {}

    def run(self) -> GlobalPlan:
        if not self.call.predicts and self.key_mean is not None:
            return self._told({})  # all is kept, and what smoothing takes is known
        ranks, rank, device = range(self.exchange.world), self.exchange.rank, self.exchange.device
        own = self._own_fields()
        sends = {
            to: to_bytes(
                [x for unit in units_of(self.units, to) for x in self._sent(unit, own)], device
            )
            for to in ranks
        }
        mine = units_of(self.units, rank)
        names = [
            {of: fields_of(self.held, of, unit, coded=self.coded) for of in ranks} for unit in mine
        ]
        specs = {of: [spec for each in names for spec in each[of].values()] for of in ranks}
        found = self.exchange.swap("plan", sends, {of: size_of(specs[of]) for of in ranks})
        parts = {of: iter(from_bytes(found[of], specs[of])) for of in ranks}
        answers: dict[int, list[Tensor]] = {to: [] for to in ranks}
        for unit, fields in zip(mine, names, strict=True):
            came = {of: {name: next(parts[of]) for name in fields[of]} for of in ranks}
            plan = self._plan(unit, came)
            for to in ranks:
                answers[to] += self._answer(unit, to, plan)
        wanted = {
            of: [
                spec
                for unit in units_of(self.units, of)
                for spec in answer_of(self.held, rank, unit).values()
            ]
            for of in ranks
        }
        found = self.exchange.swap(
            "plan",
            {to: to_bytes(answers[to], device) for to in ranks},
            {of: size_of(wanted[of]) for of in ranks},
        )
        return self._told({of: from_bytes(found[of], wanted[of]) for of in ranks})

    def _own_fields(self) -> dict[str, Tensor]:
        """What this rank's rows give, for all heads: keys as they travel, and statistics."""
        call, held, rank = self.call, self.held, self.exchange.rank
        fields = {"key": held.key, "value": held.value, "query": held.query}
        if call.measures_error:
            return fields
        keys = pieces_of(held.key, held.k_layout, rank) if self.coded else []
        if call.pools_blocks:
            judge = None if call.recipe.min_similarity is None else 0.0
            recipe = Recipe(KeepMass(1.0), "mean", min_similarity=judge)
            one_key = held.key.new_zeros((call.B, call.Hk, 1, call.D))
            one_query = held.key.new_zeros((call.B, call.Hq, 1, call.D))
            queries = pieces_of(held.query, held.q_layout, rank)
            found = [self._statistics(recipe, query, one_key) for query in queries]
            fields |= _joined(found, "q_pooled", "q_similarity")
            found = [self._statistics(recipe, one_query, key) for key in keys]
            fields |= _joined(found, "k_pooled", "k_similarity")
        if keys and call.samples_rows:
            codes = [self._codes(key) for key in keys]
            fields["key"] = torch.cat([x.codes for x in codes], 2)
            fields["k_scale"] = torch.cat([x.scale for x in codes], 2)
        return fields

    def _statistics(self, recipe: Recipe, query: Tensor, key: Tensor) -> Statistics:
        """Of one piece: what a block's statistics are does not depend on other blocks."""
        part = replace(
            self.call, Lq=query.shape[2], Lk=key.shape[2], recipe=recipe, is_causal=False, label=""
        )
        inputs = Inputs(query, key, None, key_mean=self.key_mean)
        return self.stages.prepare(part, inputs, to_plan=True, to_attend=False).statistics

    def _codes(self, key: Tensor) -> QTensor:
        call = self.call
        recipe = Recipe(precision=call.recipe.precision)
        part = replace(call, Lq=1, Lk=key.shape[2], Dv=1, recipe=recipe, is_causal=False, label="")
        inputs = Inputs(key.new_zeros((call.B, call.Hq, 1, call.D)), key, key[..., :1])
        inputs = inputs._replace(key_mean=self.key_mean)
        codes = self.stages.prepare(part, inputs, to_plan=False, to_attend=True).operands.key
        assert isinstance(codes, QTensor)
        return codes

    def _sent(self, unit: Unit, own: dict[str, Tensor]) -> list[Tensor]:
        """The fields of a unit, from this rank's rows."""
        held, rank, device = self.held, self.exchange.rank, self.exchange.device
        group = self.call.Hq // self.call.Hk
        heads = slice(unit.head * group, (unit.head + 1) * group)
        blocks, at = own_blocks(held, rank, unit), held.q_blocks(rank)
        rows = places([at.index(i) for i in blocks], device)
        parts = []
        for name, spec in fields_of(held, rank, unit, coded=self.coded).items():
            if name == "sampled":
                sampled = places([row for row, _ in sampled_of(held, rank, blocks)], device)
                parts.append(held.query[:, heads][:, :, sampled])
            elif name == "query":
                parts.append(held.query[:, heads])
            elif name not in own:  # this rank has no rows
                parts.append(torch.empty(spec.shape, dtype=spec.dtype, device=device))
            elif name.startswith("q_"):
                parts.append(own[name][:, heads][:, :, rows])
            else:
                parts.append(own[name][:, unit.head])
        return parts

    def _plan(self, unit: Unit, came: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """kept `[B, group, blocks of the unit, n_k]`, measured, key_mean: what there is of it."""
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
            return {"key_mean": self._mean_of(call, found["key"])}
        prepared = self._prepared(call, found)
        if self.reuses:
            self.known[unit.head] = prepared.operands.key
        tokens = TokenMask(call.Lq, call.Lk, call.is_causal, call.offset)
        mass = self.stages.predict(call, prepared, tokens)
        plan = self.stages.select(call, prepared, mass, tokens)
        done = {"kept": plan.to_mask()}
        mean = prepared.key_mean if self.key_mean is None else self.key_mean[:, unit.head, None]
        for name, x in (("measured", plan.measured), ("key_mean", mean)):
            if x is not None:
                done[name] = x
        return done

    def _assembled(
        self, call: Call, unit: Unit, came: dict[int, dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The fields of all ranks, where they stand in the sequence; `query` is zero in rows that
        nothing reads."""
        held, device, group = self.held, self.exchange.device, call.Hq
        q_shape, start = (call.B, group, call.Lq, call.D), unit.first * BLOCK_Q
        found = {"query": torch.zeros(q_shape, dtype=call.dtype, device=device)}
        rows = {"key": call.Lk, "value": call.Lk, "k_scale": call.Lk}
        rows |= {"k_pooled": call.n_k, "k_similarity": call.n_k}
        rows |= {"q_pooled": call.n_q, "q_similarity": call.n_q}
        for rank, fields in came.items():
            blocks = own_blocks(held, rank, unit)
            for name, x in fields.items():
                if name == "sampled":
                    at = [row - start for _, row in sampled_of(held, rank, blocks)]
                    found["query"][:, :, places(at, device)] = x
                    continue
                if name not in found:
                    dim = 2 if name.startswith("q_") else 1
                    shape = (*x.shape[:dim], rows[name], *x.shape[dim + 1 :])
                    found[name] = x.new_empty(shape)
                if name == "query":
                    place_rows(found[name], held.q_layout, rank, x, dim=2)
                elif name in ("key", "value", "k_scale"):
                    place_rows(found[name], held.k_layout, rank, x, dim=1)
                elif name.startswith("k_"):
                    found[name][:, places(held.k_blocks(rank), device)] = x
                else:
                    found[name][:, :, places([i - unit.first for i in blocks], device)] = x
        return found

    def _prepared(self, call: Call, found: dict[str, Tensor]) -> Prepared:
        """As `prepare` gives it over the whole sequence."""
        query = found["query"]
        if not self.coded:
            key = found["key"][:, None]
            value = found["value"][:, None] if "value" in found else None
            inputs = Inputs(query, key, value)
            prepared = self.stages.prepare(call, inputs, to_plan=True, to_attend=False)
            own = prepared.statistics
        else:
            # The keys are coded already: one of them stands in while the queries are.
            one = query.new_zeros((call.B, 1, 1, call.D))
            part = replace(call, Lk=1, is_causal=False)
            inputs = Inputs(query, one, None, key_mean=one[:, :, 0].float())
            prepared = self.stages.prepare(part, inputs, to_plan=True, to_attend=False)
            keys: Tensor | QTensor = query.new_zeros((call.B, 1, call.Lk, call.D))
            if call.samples_rows:
                keys = QTensor(found["key"][:, None], found["k_scale"][:, None])
            operands = Operands(prepared.operands.query, keys, keys)
            prepared = replace(prepared, operands=operands, key=None, value=None)
            own = Statistics(
                k_pooled=found["k_pooled"][:, None] if "k_pooled" in found else None,
                k_similarity=found["k_similarity"][:, None] if "k_similarity" in found else None,
            )
        if call.measures_error:
            return prepared
        return replace(
            prepared,
            statistics=replace(
                own,
                q_pooled=found.get("q_pooled"),
                q_similarity=found.get("q_similarity", own.q_similarity),
            ),
        )

    def _mean_of(self, call: Call, key: Tensor) -> Tensor:
        """The mean key, as preparing to attend computes it."""
        recipe = Recipe(precision=call.recipe.precision)
        one = replace(call, Hq=1, Lq=1, Dv=1, recipe=recipe, is_causal=False)
        key = key[:, None]
        inputs = Inputs(key[:, :, :1], key, key[..., :1])
        mean = self.stages.prepare(one, inputs, to_plan=False, to_attend=True).key_mean
        assert mean is not None
        return mean

    def _answer(self, unit: Unit, to: int, plan: dict[str, Tensor]) -> list[Tensor]:
        parts = []
        for name in answer_of(self.held, to, unit):
            x = plan[name]
            if name == "kept":
                blocks = [i - unit.first for i in own_blocks(self.held, to, unit)]
                x = pack_bits(x[:, :, places(blocks, x.device)])
            parts.append(x[:, 0] if name == "key_mean" else x)
        return parts

    def _told(self, told: dict[int, list[Tensor]]) -> GlobalPlan:
        """The plan of this rank's rows, from what those who planned it say."""
        call, held, rank, device = self.call, self.held, self.exchange.rank, self.exchange.device
        group, blocks = call.Hq // call.Hk, held.q_blocks(rank)
        shape = (call.B, call.Hq, len(blocks), call.n_k)
        kept = torch.ones(shape, dtype=torch.bool, device=device)
        mean = torch.empty((call.B, call.Hk, call.D), device=device)
        measured = torch.zeros((3, call.B, call.Hq), dtype=torch.float64, device=device)
        left = {of: iter(parts) for of, parts in told.items()}
        for unit in self.units if told else ():
            heads = slice(unit.head * group, (unit.head + 1) * group)
            for name in answer_of(held, rank, unit):
                x = next(left[unit.rank])
                if name == "kept":
                    at = places([blocks.index(i) for i in own_blocks(held, rank, unit)], device)
                    kept[:, heads, at] = unpack_bits(x, call.n_k)
                elif name == "measured":
                    measured[:, :, heads] = x
                else:
                    mean[:, unit.head] = x
        mean = mean if self.key_mean is None else self.key_mean
        return GlobalPlan(
            kept,
            mean if call.recipe.quantized else None,
            measured if call.measures_error else None,
            self.known,
            self._knows() if told and self.reuses else {},
        )

    def _knows(self) -> dict[int, list[int]]:
        heads: dict[int, set[int]] = {}
        for unit in self.units:
            heads.setdefault(unit.rank, set()).add(unit.head)
        return {rank: sorted(found) for rank, found in heads.items()}


def _joined(found: Sequence[Statistics], *names: str) -> dict[str, Tensor]:
    """Statistics of pieces, one after another, by name; what there is of them."""
    parts = {
        name: [x for each in found if (x := getattr(each, name)) is not None] for name in names
    }
    return {name: torch.cat(each, 2) for name, each in parts.items() if each}


__all__ = ["GlobalPlan", "make_global_plan"]
