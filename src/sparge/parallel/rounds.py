"""The rounds of a ring: blocks travel while others are attended; partial results are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..api.merge import merge
from ..engine.attend_heads import attend_heads
from ..values.backend import Backend
from ..values.blockplan import plan_from_mask, raised_heads
from ..values.call import Call, work_dtype
from ..values.stages import Prepared, PreparedQueries
from ..values.tokenmask import TokenMask
from .exchange import Exchange, Pending
from .global_plan import GlobalPlan
from .layout import Held, Piece, k_blocks_of, places, q_blocks_of
from .messages import pack_bits, unpack_bits
from .reshard import pieces_of
from .ring_report import Tally
from .shipment import Cargo, Shipment


class Rounds:
    """The rounds of one rank."""

    def __init__(
        self,
        exchange: Exchange,
        held: Held,
        plan: GlobalPlan,
        backend: Backend,
        *,
        observed: bool,
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
        self.tally, self.observed = Tally(), observed

    def _prepare_queries(self, query: Tensor) -> PreparedQueries:
        call, mean = replace(self.piece_call, Lq=query.shape[2]), self.plan.key_mean
        return self.backend.stages().prepare_queries(
            call, query, mean=mean, to_plan=False, to_attend=True
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """Output and LSE of this rank's queries."""
        exchange, world = self.exchange, self.exchange.world
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
        sizes = [len(k_blocks_of(piece)) for piece in pieces]
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
            columns = k_blocks_of(keys)
            at = 0
            for i, queries in enumerate(self.held.q_layout.of(self.exchange.rank)):
                n = len(q_blocks_of(queries))
                kept = self.plan.kept[:, :, at : at + n, columns.start : columns.stop]
                at += n
                self._attend_piece(i, queries, keys, kept, cargo)

    def _attend_piece(
        self, i: int, queries: Piece, keys: Piece, kept: Tensor, cargo: Cargo
    ) -> None:
        tokens = piece_tokens(self.call, queries, keys)
        plan = plan_from_mask(kept, tokens, measured=self.plan.measured)
        if not plan.allowed.any():
            return
        call = replace(self.piece_call, Lq=len(queries), Lk=len(keys), offset=tokens.offset)
        prepared = Prepared(self.prepared[i], self.ship.prepare_keys(call, cargo))
        stages = self.backend.stages()
        if self.backend.raises_heads or not self.raised:
            done = stages.attend(call, prepared, plan, tokens)
        else:
            done = attend_heads(stages, call, prepared, plan, tokens)
        if self.observed:
            self.tally.add(plan, done.pv_skips, self.backend.row_group)
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
