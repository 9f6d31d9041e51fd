"""The rounds of a ring: blocks travel while others are attended; partial results are merged.

Keys and values travel to another rank as the blocks that it keeps, and nothing else:
codes   as the kernel reads them: 8-bit keys with their scales, 16-bit or 8-bit values; skipped
        blocks as their pooled entries. For backends whose operands are plain tensors.
rows    the caller's own rows, prepared again by whoever receives them; of a skipped block that
        is pooled, every row is its group's mean. For every backend, and for error budgets,
        which may raise the precision of a head.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..api.merge import merge
from ..engine.execute import attend_heads
from ..engine.recording import count_blocks
from ..values.backend import Backend
from ..values.blockplan import plan_from_mask, raised_heads
from ..values.call import BLOCK_K, BLOCK_Q, Call, half_dtype, n_blocks, work_dtype
from ..values.stages import (
    Pooled,
    Prepared,
    PreparedKeys,
    PreparedQueries,
    QTensor,
    Stages,
    finite_rows,
    group_means,
    working,
)
from ..values.tokenmask import TokenMask
from .exchange import Exchange, Pending, Spec, from_bytes, pack_bits, size_of, to_bytes, unpack_bits
from .global_plan import GlobalPlan
from .layout import Held, Piece, pieces_of, places


@dataclass(frozen=True)
class Cargo:
    """One piece of keys and values as it travels. largest: the largest |v| of each head, which
    bounds what pooled entries can add up to."""

    key: Tensor | QTensor
    value: Tensor | QTensor
    pooled: Pooled | None = None
    largest: Tensor | None = None

    def finite_blocks(self) -> Tensor:
        """Which key blocks hold only finite keys and values, bool `[B, Hk, n]`."""
        rows = finite_rows(self.key) & finite_rows(self.value)
        n = n_blocks(rows.shape[2], BLOCK_K)
        padded = torch.nn.functional.pad(rows, (0, n * BLOCK_K - rows.shape[2]), value=True)
        return padded.unflatten(2, (n, BLOCK_K)).all(-1)


class Shipment:
    """How the keys of one call travel. call: of the whole sequence."""

    def __init__(self, stages: Stages, call: Call, key_mean: Tensor | None, *, plain: bool) -> None:
        self.stages, self.call, self.key_mean = stages, call, key_mean
        self.coded = plain and not call.measures_error
        device = torch.device(*call.where) if key_mean is None else key_mean.device
        nothing = [
            torch.zeros((call.B, call.Hk, BLOCK_K, d), dtype=call.dtype, device=device)
            for d in (call.D, call.Dv)
        ]
        # The forms follow from backend and recipe; an empty piece shows them to every rank.
        sample = self.load(nothing[0], nothing[1])
        self._forms = [sample.key, sample.value]
        pooled = sample.pooled
        self._pooled_forms = [] if pooled is None else [pooled.key, pooled.value]

    def load(self, key: Tensor, value: Tensor) -> Cargo:
        """A piece of keys and values, ready to travel or to be attended here."""
        call, recipe = self.call, self.call.recipe
        if not self.coded:
            pooled = None
            if recipe.pools:
                k, v = (group_means(x, recipe.pool_group).to(x.dtype) for x in (key, value))
                pooled = Pooled(k, v, recipe.pool_group)
            return Cargo(key, value, pooled)
        part = replace(call, Lk=key.shape[2], is_causal=False, label="")
        made = self.stages.prepare_keys(
            part, key, value, mean=self.key_mean, to_plan=False, to_attend=True
        )
        held, pooled, largest = made.value, made.entries, None
        if recipe.precision == "int8":
            held = _in_16_bits(held)
            pooled = pooled and replace(pooled, value=_in_16_bits(pooled.value))
        if pooled is not None:
            finite = torch.where(value.isfinite(), value, 0.0)
            largest = finite.abs().amax((2, 3)).float()
        return Cargo(made.key, held, pooled, largest)

    def pack(self, cargo: Cargo, wanted: Tensor, knows: Sequence[int]) -> Tensor:
        """The bytes of the wanted key blocks, bool `[B, Hk, n]`, and of what all need. knows: heads
        whose keys the receiver has, and needs the values of alone."""
        parts = zip((cargo.key, cargo.value), _blocks_sent(wanted, knows), strict=True)
        tensors = [_in_blocks(x, per)[which] for part, which in parts for x, per in _tensors(part)]
        if cargo.pooled is not None:
            pooled = (cargo.pooled.key, cargo.pooled.value)
            tensors += [x for part in pooled for x, _ in _tensors(part)]
        if cargo.largest is not None:
            tensors.append(cargo.largest)
        return to_bytes(tensors, wanted.device)

    def n_bytes(self, wanted: Tensor, knows: Sequence[int], length: int) -> int:
        """Of the message that `pack` makes of a piece of this length."""
        return size_of(self._specs(wanted, knows, length))

    def _specs(self, wanted: Tensor, knows: Sequence[int], length: int) -> list[Spec]:
        specs = [
            Spec((int(which.sum()), BLOCK_K // per, *spec.shape[3:]), spec.dtype)
            for form, which in zip(self._forms, _blocks_sent(wanted, knows), strict=True)
            for spec, per in _specs_like(form, length)
        ]
        if self._pooled_forms:
            n = n_blocks(length, self.call.recipe.pool_group)
            specs += [spec for form in self._pooled_forms for spec, _ in _specs_like(form, n)]
            if self.coded:
                specs.append(Spec((self.call.B, self.call.Hk), torch.float32))
        return specs

    def unpack(
        self, message: Tensor, wanted: Tensor, piece: Piece, known: Mapping[int, Tensor | QTensor]
    ) -> Cargo:
        """The piece again. Blocks that did not come are zero, or their groups' means. known: heads
        whose keys are here, all of the sequence."""
        length = len(piece)
        tensors = iter(from_bytes(message, self._specs(wanted, list(known), length)))
        B, Hk, n = wanted.shape
        parts = []
        for form, which in zip(self._forms, _blocks_sent(wanted, list(known)), strict=True):
            whole = []
            for spec, per in _specs_like(form, length):
                rows = BLOCK_K // per
                x = torch.zeros((B, Hk, n, rows, *spec.shape[3:]), dtype=spec.dtype)
                x = x.to(wanted.device)
                x[which] = next(tensors)
                whole.append(x.flatten(2, 3)[:, :, : spec.shape[2]])
            if form is self._forms[0]:
                for head, keys in known.items():
                    for x, (own, per) in zip(whole, _tensors(keys), strict=True):
                        x[:, head] = own[:, 0, piece.start // per :][:, : x.shape[2]]
            parts.append(_build_like(form, whole))
        if not self._pooled_forms:
            return Cargo(parts[0], parts[1])
        group = self.call.recipe.pool_group
        key, value = (
            _build_like(form, [next(tensors) for _ in _tensors(form)])
            for form in self._pooled_forms
        )
        pooled = Pooled(key, value, group)
        if self.coded:
            largest = next(tensors)
            return Cargo(parts[0], _bounded(parts[1], wanted, largest), pooled, largest)
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        keys = _filled(parts[0], key, wanted, group)
        return Cargo(keys, _filled(parts[1], value, wanted, group), pooled)

    def prepare_keys(self, call: Call, cargo: Cargo) -> PreparedKeys:
        """A piece as the attend stage reads it."""
        if self.coded:
            return PreparedKeys(cargo.key, cargo.value, entries=cargo.pooled)
        assert isinstance(cargo.key, Tensor)
        assert isinstance(cargo.value, Tensor)
        return self.stages.prepare_keys(
            call, cargo.key, cargo.value, mean=self.key_mean, to_plan=False, to_attend=True
        )


def _tensors(x: Tensor | QTensor) -> list[tuple[Tensor, int]]:
    """Its tensors, each with the rows of a key block that one of its rows stands for."""
    return [(x.codes, 1), (x.scale, x.rows_per_scale)] if isinstance(x, QTensor) else [(x, 1)]


def _specs_like(form: Tensor | QTensor, length: int) -> list[tuple[Spec, int]]:
    """Those of `_tensors`, if `form` had this many rows."""
    return [
        (Spec((*x.shape[:2], n_blocks(length, per), *x.shape[3:]), x.dtype), per)
        for x, per in _tensors(form)
    ]


def _build_like(form: Tensor | QTensor, tensors: Sequence[Tensor]) -> Tensor | QTensor:
    """What `_tensors` took apart, of other rows."""
    if not isinstance(form, QTensor):
        return tensors[0].contiguous()
    return replace(form, codes=tensors[0].contiguous(), scale=tensors[1].contiguous())


def _in_16_bits(value: Tensor | QTensor) -> Tensor | QTensor:
    """Values as the `"int8"` kernel reads them: it rounds those of 32 bits itself."""
    if isinstance(value, QTensor) or value.dtype != torch.float32:
        return value
    return working(value, "half").to(half_dtype(value.dtype))


def _blocks_sent(wanted: Tensor, knows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The blocks whose keys travel, and those whose values do."""
    keys = wanted.clone()
    keys[:, list(knows)] = False
    return keys, wanted


def _in_blocks(x: Tensor, per: int) -> Tensor:
    """Rows `[B, H, L / per, …]` as `[B, H, n, rows of a block, …]`, padded with zeros."""
    rows = BLOCK_K // per
    n = n_blocks(x.shape[2], rows)
    if missing := n * rows - x.shape[2]:
        x = torch.cat([x, x.new_zeros((*x.shape[:2], missing, *x.shape[3:]))], 2)
    return x.unflatten(2, (n, rows))


def _bounded(value: Tensor | QTensor, wanted: Tensor, largest: Tensor) -> Tensor | QTensor:
    """Values with the piece's largest |v| in a block that did not come.

    A kernel bounds its output by the largest value that it sees, and means of values that stayed
    behind may be larger than those that came.
    """
    missing = (~wanted).any(-1)
    block = (~wanted).to(torch.int8).argmax(-1)
    b, h = missing.nonzero(as_tuple=True)
    row, most = block[b, h] * BLOCK_K, largest[b, h]
    if isinstance(value, QTensor):
        value.codes[b, h, row, 0] = 127
        place = (b, h, row // value.rows_per_scale)
        value.scale[(*place, 0) if value.per_channel else place] = most / 127
    else:
        value[b, h, row, 0] = most.to(value.dtype)
    return value


def _filled(rows: Tensor | QTensor, means: Tensor, wanted: Tensor, group: int) -> Tensor:
    """Rows, with those of blocks that did not come replaced by the means of their groups."""
    assert isinstance(rows, Tensor)
    length = rows.shape[2]
    mean_of_row = means.repeat_interleave(group, dim=2)[:, :, :length]
    came = wanted.repeat_interleave(BLOCK_K, dim=2)[:, :, :length, None]
    return torch.where(came, rows, mean_of_row)


def bytes_of_dense_ring(call: Call, world: int) -> int:
    """Every rank receives the keys and values of all others, in the caller's dtype."""
    rows = call.B * call.Hk * call.Lk
    return (world - 1) * rows * (call.D + call.Dv) * call.dtype.itemsize


class Rounds:
    """The rounds of one rank."""

    def __init__(
        self, exchange: Exchange, held: Held, plan: GlobalPlan, backend: Backend, *, observed: bool
    ) -> None:
        self.exchange, self.held, self.plan, self.backend = exchange, held, plan, backend
        self.call = held.call
        stages = backend.stages()
        self.ship = Shipment(stages, held.call, plan.key_mean, plain=backend.plain_operands)
        self.queries = pieces_of(held.query, held.q_layout, exchange.rank)
        self.raised = plan.measured is not None and bool(raised_heads(plan.measured).any())
        # Partial results are merged in fp32.
        wide = held.call.dtype == torch.bfloat16 and not self.raised
        self.piece_call = replace(
            held.call, dtype=torch.float32 if wide else held.call.dtype, return_lse=True
        )
        self.prepared = [self._prepare_queries(query) for query in self.queries]
        keys, values = (pieces_of(x, held.k_layout, exchange.rank) for x in (held.key, held.value))
        self.own = [self.ship.load(k, v) for k, v in zip(keys, values, strict=True)]
        self.results: list[tuple[Tensor, Tensor] | None] = [None] * len(self.queries)
        # Summed over pieces, as `count_blocks` counts a call.
        self.counted = held.key.new_zeros((2, 3, held.call.Hq), dtype=torch.int64)
        self.observed = observed

    def _prepare_queries(self, query: Tensor) -> PreparedQueries:
        call, mean = replace(self.piece_call, Lq=query.shape[2]), self.plan.key_mean
        return self.backend.stages().prepare_queries(
            call, query, mean=mean, to_plan=False, to_attend=True
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """Output and LSE of this rank's queries."""
        exchange, world, start = self.exchange, self.exchange.world, time.perf_counter()
        self._agree_on_blocks()
        under_way = self._post(1) if world > 1 else None
        self._attend(exchange.rank, self.own)
        for step in range(1, world):
            assert under_way is not None
            source = (exchange.rank - step) % world
            message = under_way.take(source)
            after = self._post(step + 1) if step + 1 < world else None
            self._attend(source, self._unpack(source, message))
            under_way.finish()
            under_way = after
        self.seconds = time.perf_counter() - start
        return self._joined()

    def _agree_on_blocks(self) -> None:
        """Tell every rank which of its blocks are kept here, and hear what others keep.

        Where skipped blocks are pooled, one that is not finite is sent to all: whoever pools it
        must know.
        """
        exchange, rank = self.exchange, self.exchange.rank
        ranks = range(exchange.world)
        # Key blocks that some query here keeps, by the rank that has them.
        kept = self.plan.kept.unflatten(1, (self.call.Hk, -1)).any(3).any(2)
        wanted = {of: kept[..., places(self.held.k_blocks(of), kept.device)] for of in ranks}
        broken = self._broken()
        bits = pack_bits(broken)
        sends = {to: torch.cat([pack_bits(wanted[to]), bits], -1).flatten() for to in ranks}
        heads = self.call.B * self.call.Hk
        width = {r: -(-self._n_blocks(r) // 8) for r in ranks}
        sizes = {of: heads * (width[rank] + width[of]) for of in ranks}
        found = exchange.swap("plan", sends, sizes)
        self.send, self.receive = {}, {}
        for of in ranks:
            bits = found[of].view(self.call.B, self.call.Hk, -1)
            theirs = unpack_bits(bits[..., : width[rank]], self._n_blocks(rank))
            lost = unpack_bits(bits[..., width[rank] :], self._n_blocks(of))
            self.send[of], self.receive[of] = theirs | broken, wanted[of] | lost

    def _n_blocks(self, rank: int) -> int:
        return len(self.held.k_blocks(rank))

    def _broken(self) -> Tensor:
        n = self._n_blocks(self.exchange.rank)
        broken = torch.zeros((self.call.B, self.call.Hk, n), dtype=torch.bool)
        broken = broken.to(self.exchange.device)
        if self.call.recipe.pools and n:
            broken = ~torch.cat([cargo.finite_blocks() for cargo in self.own], -1)
        return broken

    def _post(self, step: int) -> Pending:
        """Send to the rank `step` places ahead; receive from the one as far behind."""
        exchange, world = self.exchange, self.exchange.world
        ahead, behind = (exchange.rank + step) % world, (exchange.rank - step) % world
        knows = self.plan.knows.get(ahead, [])
        ours = zip(self.own, self._split(exchange.rank, self.send[ahead]), strict=True)
        messages = [
            self.ship.pack(cargo, wanted, knows)
            for cargo, (piece, wanted) in ours
            if self._reaches(ahead, piece)
        ]
        message = torch.cat(messages) if messages else exchange.nothing()
        n_bytes = sum(
            self.ship.n_bytes(wanted, list(self.plan.known), len(piece))
            for piece, wanted in self._split(behind, self.receive[behind])
            if self._reaches(exchange.rank, piece)
        )
        return exchange.post("blocks", {ahead: message}, {behind: n_bytes})

    def _reaches(self, rank: int, keys: Piece) -> bool:
        """Whether any query of a rank may attend any of these keys."""
        last = max((piece.stop for piece in self.held.q_layout.of(rank)), default=0)
        return not self.call.is_causal or (last > 0 and last - 1 + self.call.offset >= keys.start)

    def _split(self, rank: int, blocks: Tensor) -> list[tuple[Piece, Tensor]]:
        """A rank's blocks by its pieces."""
        pieces = self.held.k_layout.of(rank)
        sizes = [len(piece.blocks(BLOCK_K)) for piece in pieces]
        return list(zip(pieces, torch.split(blocks, sizes, -1) if sizes else (), strict=True))

    def _unpack(self, source: int, message: Tensor) -> list[Cargo | None]:
        """A rank's pieces; None for those that no query here may attend."""
        found: list[Cargo | None] = []
        at = 0
        for piece, wanted in self._split(source, self.receive[source]):
            if not self._reaches(self.exchange.rank, piece):
                found.append(None)
                continue
            n = self.ship.n_bytes(wanted, list(self.plan.known), len(piece))
            found.append(self.ship.unpack(message[at : at + n], wanted, piece, self.plan.known))
            at += n
        return found

    def _attend(self, source: int, cargos: Sequence[Cargo | None]) -> None:
        for keys, cargo in zip(self.held.k_layout.of(source), cargos, strict=True):
            if cargo is None:
                continue
            columns = keys.blocks(BLOCK_K)
            at = 0
            for i, queries in enumerate(self.held.q_layout.of(self.exchange.rank)):
                n = len(queries.blocks(BLOCK_Q))
                kept = self.plan.kept[:, :, at : at + n, columns.start : columns.stop]
                at += n
                self._attend_piece(i, queries, keys, kept, cargo)

    def _attend_piece(
        self, i: int, queries: Piece, keys: Piece, kept: Tensor, cargo: Cargo
    ) -> None:
        tokens = piece_tokens(self.call, queries, keys)
        if tokens.Lq - 1 + tokens.offset < 0 and tokens.is_causal:
            return  # no query of the piece may attend any of these keys
        plan = plan_from_mask(kept, tokens, measured=self.plan.measured)
        call = replace(self.piece_call, Lq=len(queries), Lk=len(keys), offset=tokens.offset)
        prepared = Prepared(self.prepared[i], self.ship.prepare_keys(call, cargo))
        stages = self.backend.stages()
        if self.backend.raises_heads or not self.raised:
            done = stages.attend(call, prepared, plan, tokens)
        else:
            done = attend_heads(stages, call, prepared, plan, tokens)
        if self.observed:
            counted = count_blocks(plan, done.pv_skips)["blocks"]
            if queries.stop < self.call.Lq:  # the last block of a piece inside is not short
                counted[1] = 0
            self.counted += counted
        before = self.results[i]
        part = (done.out, done.lse)
        self.results[i] = part if before is None else merge(*before, *part)

    def _joined(self) -> tuple[Tensor, Tensor]:
        call = self.call
        work = work_dtype(call.dtype)
        shape = (call.B, call.Hq, 0)
        outs = [self.held.query.new_empty((*shape, call.Dv))]
        lses = [self.held.query.new_empty(shape, dtype=work)]
        for query, found in zip(self.queries, self.results, strict=True):
            if found is None:  # rows that may attend nothing
                lost = ~query.isfinite().all(-1)
                lse = torch.full(query.shape[:3], -torch.inf, dtype=work, device=query.device)
                out = query.new_zeros((*query.shape[:3], call.Dv))
                found = (
                    out.masked_fill(lost.unsqueeze(-1), torch.nan),
                    lse.masked_fill(lost, torch.nan),
                )
            outs.append(found[0].to(call.dtype))
            lses.append(found[1])
        return torch.cat(outs, 2), torch.cat(lses, 2)


def piece_tokens(call: Call, queries: Piece, keys: Piece) -> TokenMask:
    offset = queries.start + call.offset - keys.start
    return TokenMask(len(queries), len(keys), call.is_causal, offset)
