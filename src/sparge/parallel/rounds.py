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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..api.merge import merge
from ..engine.execute import attend_prepared
from ..engine.recording import count_blocks
from ..values.backend import Backend
from ..values.blockplan import plan_from_mask, raised_heads
from ..values.call import BLOCK_K, Call, half_dtype, in_blocks, n_blocks, work_dtype
from ..values.stages import (
    Pooled,
    Prepared,
    PreparedKeys,
    PreparedQueries,
    QTensor,
    finite_rows,
    group_means,
    working,
)
from ..values.tokenmask import TokenMask
from .exchange import Exchange, Pending, pack_bits, to_bytes, unpack_bits
from .global_plan import GlobalPlan
from .layout import Held, Piece


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
        return in_blocks(rows, -1, BLOCK_K, fill=True).all(-1)


class Shipment:
    """How the keys of one call travel. call: of the whole sequence."""

    def __init__(self, held: Held, key_mean: Tensor | None, backend: Backend) -> None:
        self.stages, self.call, self.key_mean = backend.stages(), held.call, key_mean
        self.coded = backend.plain_operands and not held.call.measures_error
        # What is loaded and what is sent follow from backend and recipe; an empty block shows both.
        heads = (held.call.B, held.call.Hk, BLOCK_K)
        nothing = (x.new_zeros((*heads, x.shape[3])) for x in (held.key, held.value))
        self.loaded = self.load(*nothing)
        self.form = self.as_sent(self.loaded)

    def load(self, key: Tensor, value: Tensor) -> Cargo:
        """A piece of keys and values, ready to be attended here."""
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
        largest = None
        if made.entries is not None:
            finite = torch.where(value.isfinite(), value, 0.0)
            largest = finite.abs().amax((2, 3)).float()
        return Cargo(made.key, made.value, made.entries, largest)

    def as_sent(self, cargo: Cargo) -> Cargo:
        """A piece as it travels: `"int8"` needs values in 16 bits, and no more."""
        if not self.coded or self.call.recipe.precision != "int8":
            return cargo
        pooled = cargo.pooled and replace(cargo.pooled, value=_in_16_bits(cargo.pooled.value))
        return replace(cargo, value=_in_16_bits(cargo.value), pooled=pooled)

    def _as_loaded(self, cargo: Cargo) -> Cargo:
        """A piece that came, its values in the dtype in which the attend stage reads them."""
        pooled = cargo.pooled
        if pooled is not None and self.loaded.pooled is not None:
            pooled = replace(pooled, value=_cast_like(self.loaded.pooled.value, pooled.value))
        return replace(cargo, value=_cast_like(self.loaded.value, cargo.value), pooled=pooled)

    def tensors(self, cargo: Cargo, wanted: Tensor, knows: Sequence[int]) -> list[Tensor]:
        """What travels of a piece: the wanted key blocks, bool `[B, Hk, n]`, and what all need.
        knows: heads whose keys the receiver has, and needs the values of alone."""
        parts = zip((cargo.key, cargo.value), _blocks_sent(wanted, knows), strict=True)
        tensors = [_in_blocks(x, per)[which] for part, which in parts for x, per in _tensors(part)]
        if cargo.pooled is not None:
            tensors += [
                x for part in (cargo.pooled.key, cargo.pooled.value) for x, _ in _tensors(part)
            ]
        return tensors if cargo.largest is None else [*tensors, cargo.largest]

    def like(self, wanted: Tensor, knows: Sequence[int], length: int) -> list[Tensor]:
        """Tensors like those of `tensors`, of a piece of this length, without memory."""
        heads, pooled, found = wanted.shape[:2], self.form.pooled, []
        parts = zip((self.form.key, self.form.value), _blocks_sent(wanted, knows), strict=True)
        for part, which in parts:
            n = int(which.sum())
            found += [(x, (n, BLOCK_K // per)) for x, per in _tensors(part)]
        if pooled is not None:
            n = n_blocks(length, pooled.group)
            for part in (pooled.key, pooled.value):
                found += [(x, (*heads, n_blocks(n, per))) for x, per in _tensors(part)]
        made = [x.new_empty((*rows, *x.shape[3:]), device="meta") for x, rows in found]
        largest = self.form.largest
        return made if largest is None else [*made, largest.to("meta")]

    def unpack(
        self,
        tensors: Iterator[Tensor],
        wanted: Tensor,
        piece: Piece,
        known: Mapping[int, Tensor | QTensor],
    ) -> Cargo:
        """The piece again. Blocks that did not come are zero, or their groups' means. known: heads
        whose keys are here, all of the sequence."""
        form, parts = self.form, []
        sent = _blocks_sent(wanted, list(known))
        for part, which in zip((form.key, form.value), sent, strict=True):
            whole = []
            for like, per in _tensors(part):
                x = like.new_zeros((*wanted.shape, BLOCK_K // per, *like.shape[3:]))
                x[which] = next(tensors)
                whole.append(x.flatten(2, 3)[:, :, : n_blocks(len(piece), per)])
            if part is form.key:
                for head, keys in known.items():
                    for x, (own, per) in zip(whole, _tensors(keys), strict=True):
                        x[:, head] = own[:, 0, piece.start // per :][:, : x.shape[2]]
            parts.append(_build_like(part, whole))
        if form.pooled is None:
            return self._as_loaded(Cargo(parts[0], parts[1]))
        key, value = (
            _build_like(part, [next(tensors) for _ in _tensors(part)])
            for part in (form.pooled.key, form.pooled.value)
        )
        pooled = Pooled(key, value, form.pooled.group)
        if self.coded:
            largest = next(tensors)
            return self._as_loaded(Cargo(parts[0], _bounded(parts[1], wanted, largest), pooled))
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        keys = _filled(parts[0], key, wanted, pooled.group)
        return Cargo(keys, _filled(parts[1], value, wanted, pooled.group), pooled)

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


def _build_like(form: Tensor | QTensor, tensors: Sequence[Tensor]) -> Tensor | QTensor:
    """What `_tensors` took apart, of other rows."""
    if not isinstance(form, QTensor):
        return tensors[0].contiguous()
    return replace(form, codes=tensors[0].contiguous(), scale=tensors[1].contiguous())


def _in_16_bits(value: Tensor | QTensor) -> Tensor | QTensor:
    if isinstance(value, QTensor) or value.dtype != torch.float32:
        return value
    return working(value, "half").to(half_dtype(value.dtype))


def _cast_like(form: Tensor | QTensor, value: Tensor | QTensor) -> Tensor | QTensor:
    if isinstance(value, QTensor) or isinstance(form, QTensor):
        return value
    return value.to(form.dtype)


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


class Rounds:
    """The rounds of one rank."""

    def __init__(
        self, exchange: Exchange, held: Held, plan: GlobalPlan, backend: Backend, *, observed: bool
    ) -> None:
        self.exchange, self.held, self.plan, self.backend = exchange, held, plan, backend
        self.call, self.rank, self.observed = held.call, exchange.rank, observed
        raises = plan.measured is not None and bool(raised_heads(plan.measured).any())
        # Partial results are merged in fp32.
        wide = held.call.dtype == torch.bfloat16 and not raises
        self.piece_call = replace(
            held.call, dtype=torch.float32 if wide else held.call.dtype, return_lse=True
        )
        self.queries = held.q_rows.split(held.query, self.rank)
        self.kept = held.q_blocks.split(plan.kept, self.rank)
        self.prepared = [self._prepare_queries(query) for query in self.queries]
        self.results: list[tuple[Tensor, Tensor] | None] = [None] * len(self.queries)
        self.ship = Shipment(held, plan.key_mean, backend)
        keys, values = (held.k_rows.split(x, self.rank) for x in (held.key, held.value))
        self.own = [self.ship.load(k, v) for k, v in zip(keys, values, strict=True)]
        self.sent = [self.ship.as_sent(cargo) for cargo in self.own] if exchange.world > 1 else []
        # Summed over pieces, as `count_blocks` counts a call.
        self.counted = held.key.new_zeros((2, 3, held.call.Hq), dtype=torch.int64)

    def _prepare_queries(self, query: Tensor) -> PreparedQueries:
        call, mean = replace(self.piece_call, Lq=query.shape[2]), self.plan.key_mean
        return self.backend.stages().prepare_queries(
            call, query, mean=mean, to_plan=False, to_attend=True
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """Output and LSE of this rank's queries."""
        world, start = self.exchange.world, time.perf_counter()
        self._agree_on_blocks()
        under_way = self._post(1) if world > 1 else None
        self._attend(zip(self.held.k_rows.of(self.rank), self.own, strict=True))
        for step in range(1, world):
            assert under_way is not None
            source = (self.rank - step) % world
            came = iter(under_way.take(source))
            after = self._post(step + 1) if step + 1 < world else None
            self._attend(
                (piece, self.ship.unpack(came, wanted, piece, self.plan.known))
                for _, piece, wanted in self._travelling(source, self.rank)
            )
            under_way.finish()
            under_way = after
        self.seconds = time.perf_counter() - start
        return self._joined()

    def _agree_on_blocks(self) -> None:
        """Tell every rank which of its blocks are kept here, and hear what others keep.

        Where skipped blocks are pooled, one that is not finite is sent to all: whoever pools it
        must know.
        """
        ranks, device = range(self.exchange.world), self.exchange.device
        heads, blocks = (self.call.B, self.call.Hk), self.held.k_blocks
        # Key blocks that some query here keeps, by the rank that has them.
        kept = self.plan.kept.unflatten(1, (self.call.Hk, -1)).any(3).any(2)
        wanted = {of: blocks.take(kept, of) for of in ranks}
        n = {of: blocks.length(of) for of in ranks}
        broken = torch.zeros((*heads, n[self.rank]), dtype=torch.bool, device=device)
        if self.call.recipe.pools and self.own:
            broken = ~torch.cat([cargo.finite_blocks() for cargo in self.own], -1)
        bits = pack_bits(broken)
        send = {to: to_bytes([pack_bits(wanted[to]), bits], device) for to in ranks}
        into = {
            of: [bits.new_empty((*heads, n_blocks(n[x], 8))) for x in (self.rank, of)]
            for of in ranks
        }
        self.exchange.swap("plan", send, into)
        self.send, self.receive = {}, {}
        for of, (theirs, lost) in into.items():
            self.send[of] = unpack_bits(theirs, n[self.rank]) | broken
            self.receive[of] = unpack_bits(lost, n[of]) | wanted[of]

    def _post(self, step: int) -> Pending:
        """Send to the rank `step` places ahead; receive from the one as far behind."""
        exchange, plan = self.exchange, self.plan
        ahead, behind = (self.rank + step) % exchange.world, (self.rank - step) % exchange.world
        sent = [
            x
            for i, _, wanted in self._travelling(self.rank, ahead)
            for x in self.ship.tensors(self.sent[i], wanted, plan.knows.get(ahead, []))
        ]
        like = [
            x
            for _, piece, wanted in self._travelling(behind, self.rank)
            for x in self.ship.like(wanted, list(plan.known), len(piece))
        ]
        return exchange.post("blocks", {ahead: to_bytes(sent, exchange.device)}, {behind: like})

    def _travelling(self, of: int, to: int) -> list[tuple[int, Piece, Tensor]]:
        """The pieces of a rank that some query of another may attend: number, rows, the blocks
        that travel. One of the two is this rank."""
        wanted = self.send[to] if of == self.rank else self.receive[of]
        blocks = self.held.k_blocks.split(wanted, of)
        pieces = enumerate(zip(self.held.k_rows.of(of), blocks, strict=True))
        queries = self.held.q_rows.of(to)
        return [
            (i, piece, part)
            for i, (piece, part) in pieces
            if any(may_attend(self.call, each, piece) for each in queries)
        ]

    def _attend(self, cargos: Iterable[tuple[Piece, Cargo]]) -> None:
        for keys, cargo in cargos:
            columns = slice(keys.start // BLOCK_K, n_blocks(keys.stop, BLOCK_K))
            for i, queries in enumerate(self.held.q_rows.of(self.rank)):
                if may_attend(self.call, queries, keys):
                    self._attend_piece(i, queries, keys, self.kept[i][..., columns], cargo)

    def _attend_piece(
        self, i: int, queries: Piece, keys: Piece, kept: Tensor, cargo: Cargo
    ) -> None:
        tokens = piece_tokens(self.call, queries, keys)
        plan = plan_from_mask(kept, tokens, measured=self.plan.measured)
        call = replace(self.piece_call, Lq=len(queries), Lk=len(keys), offset=tokens.offset)
        prepared = Prepared(self.prepared[i], self.ship.prepare_keys(call, cargo))
        done = attend_prepared(self.backend, call, prepared, plan, tokens)
        if self.observed:
            counted = count_blocks(plan, done.pv_skips)["blocks"]
            if queries.stop < self.call.Lq:  # the last block of a piece inside is not short
                counted[1] = 0
            self.counted += counted
        before = self.results[i]
        part = (done.out, done.lse)
        self.results[i] = part if before is None else merge(*before, *part)

    def _joined(self) -> tuple[Tensor, Tensor]:
        call, work = self.call, work_dtype(self.call.dtype)
        shape = (call.B, call.Hq, 0)
        outs = [self.held.query.new_empty((*shape, call.Dv))]
        lses = [self.held.query.new_empty(shape, dtype=work)]
        for query, found in zip(self.queries, self.results, strict=True):
            if found is None:  # rows that may attend nothing
                lost = ~query.isfinite().all(-1)
                out = query.new_zeros((*query.shape[:3], call.Dv))
                lse = query.new_full(query.shape[:3], -torch.inf, dtype=work)
                found = (
                    out.masked_fill(lost.unsqueeze(-1), torch.nan),
                    lse.masked_fill(lost, torch.nan),
                )
            outs.append(found[0].to(call.dtype))
            lses.append(found[1])
        return torch.cat(outs, 2), torch.cat(lses, 2)


def may_attend(call: Call, queries: Piece, keys: Piece) -> bool:
    """Whether any of these queries may attend any of these keys."""
    return not call.is_causal or queries.stop - 1 + call.offset >= keys.start


def piece_tokens(call: Call, queries: Piece, keys: Piece) -> TokenMask:
    offset = queries.start + call.offset - keys.start
    return TokenMask(len(queries), len(keys), call.is_causal, offset)
