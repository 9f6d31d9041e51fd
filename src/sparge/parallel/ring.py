"""`ring_attention`: one sequence over several ranks, sparse by one plan of the whole sequence.

agree    every rank was given the same; who has which rows
move     rows change hands so that no block is cut and, under a causal mask, all have as much
plan     one plan of the whole sequence (global_plan.py)
attend   in world - 1 rounds: in round t a rank receives from the one t places before it the
         blocks that it keeps, while it attends those of the round before; partial results are
         merged by their LSE
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ..api.attention import PackedOptions
from ..engine.check import check_call
from ..engine.execute import make_run, without_grad_and_autocast
from ..engine.recording import Stopwatch, note, numbers_of, recording
from ..routing import Choice, choose, current_router, get_backend, host
from ..routing.choice import keep_everything
from ..support.autocast import as_autocast
from ..values.backend import AUTO, DENSE, Backend
from ..values.blockplan import BlockPlan, plan_from_mask
from ..values.call import BLOCK_K, BLOCK_Q, Call, diagonal_offset
from ..values.recipe import Recipe
from ..values.run import RingReport, RingShare, Run
from .exchange import Exchange, agree
from .global_plan import make_global_plan
from .layout import LAYOUTS, Held, Piece, Sharding, reshard, sharding_of, zigzag
from .rounds import Rounds, piece_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])
PURPOSES = ("agree", "move", "plan", "blocks")


def _outside_graphs(function: F) -> F:
    return cast(F, torch.compiler.disable(function))


class RingOptions(PackedOptions, total=False):
    """What `ring_attention` takes by name, besides `return_lse`."""

    group: Any
    layout: str
    balance: bool
    label: str


@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **rest: Unpack[RingOptions],
) -> Tensor: ...
@overload
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    **rest: Unpack[RingOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **rest: Unpack[RingOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@_outside_graphs
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_align: str = "top_left",
    layout: str = "contiguous",
    balance: bool = True,
    recipe: Recipe | None = None,
    backend: str = AUTO,
    return_lse: bool = False,
    label: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over a sequence of which each rank of a process group holds a part.

    query, key, value: this rank's rows `[B, H, L, D]`; lengths may differ between ranks. The result
    is this rank's rows, with the LSE `[B, Hq, L]` if asked for.
    group: a process group; None is the default one. Every rank of it makes the call.
    layout: which rows a rank has: `"contiguous"`, or `"zigzag"` as `shard` deals them.
    balance: under a causal mask, move contiguous queries to where all ranks have as much to do, and
    the results back; False leaves them, and the last rank has the most.

    The plan is that of `attention` over the whole sequence. There is no gradient and no mask. A
    rank that fails, dies or is given something else ends the call on every rank with an error that
    names it: ValueError for what differs, RankError for the rest.
    """
    out, lse, _ = ring_attention_and_run(
        query,
        key,
        value,
        group=group,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        causal_align=causal_align,
        layout=layout,
        balance=balance,
        recipe=recipe,
        backend=backend,
        return_lse=return_lse,
        label=label,
    )
    return (out, lse) if return_lse else out


@_outside_graphs
def ring_attention_and_run(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Run | None]:
    """`ring_attention` with its LSE and what ran. recorded: make a run, though nobody records."""
    work = _begin((query, key, value), **options)
    with work.exchange.guarded(), without_grad_and_autocast(query.device.type):
        return work.run()


@_outside_graphs
def ring_plan(
    query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> list[tuple[int, BlockPlan]]:
    """The plan that `ring_attention` would attend by, for the query blocks that this rank attends.

    options: as in `ring_attention`. A list of `(first, plan)`: `plan` is for the query blocks from
    `first` on and all keys.
    """
    work = _begin((query, key, value), **options)
    with work.exchange.guarded(), without_grad_and_autocast(query.device.type):
        held, rank = work.moved(), work.exchange.rank
        plan = make_global_plan(work.exchange, held, work.backend)
        pieces, kept = held.q_rows.of(rank), held.q_blocks.split(plan.kept, rank)
        found, all_keys = [], Piece(0, held.call.Lk, rank)
        for piece, blocks in zip(pieces, kept, strict=True):
            tokens = piece_tokens(held.call, piece, all_keys)
            made = plan_from_mask(blocks, tokens, measured=plan.measured)
            found.append((piece.start // BLOCK_Q, made))
        return found


def _begin(
    tensors: tuple[Tensor, Tensor, Tensor],
    *,
    group: Any = None,
    layout: str = "contiguous",
    balance: bool = True,
    causal_align: str = "top_left",
    backend: str = AUTO,
    recorded: bool = False,
    **rest: Any,
) -> _Work:
    """Check the call here, then with all ranks; no rank begins unless all may."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "ring_attention needs a process group; call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in the group that ring_attention was given")
    device = tensors[0].device if isinstance(tensors[0], Tensor) else torch.device("cpu")
    exchange = Exchange(group, device)
    refused: Exception | None = None
    facts: dict[str, Any] = {}
    numbers = [0, 0, 0, 0]
    try:
        query, key, value = as_autocast(*tensors)
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
        if not isinstance(balance, bool):
            raise TypeError(f"balance must be True or False, got {balance!r}")
        call = check_call(query, key, value, causal_align=causal_align, backend=backend, **rest)
        if call.needs_grad:
            raise ValueError(
                "ring_attention has no gradient; call it under torch.no_grad(), or use Ulysses"
            )
        whole = replace(call, Lq=call.Lq * exchange.world, Lk=call.Lk * exchange.world)
        dense = choose(whole, backend).backend == DENSE
        facts = _facts(call, layout, balance, causal_align, backend)
        numbers = [call.Lq, call.Lk, int(recorded or recording()), int(dense)]
    except Exception as error:
        refused, facts = error, {"refused": f"{type(error).__name__}: {error}"}
    with exchange.guarded():
        agreed = agree(exchange, facts, numbers)
    if refused is not None:
        raise refused
    if isinstance(agreed, str):
        raise ValueError(agreed)
    q_lengths, k_lengths = [own[0] for own in agreed], [own[1] for own in agreed]
    shardings = sharding_of(layout, q_lengths, "query"), sharding_of(layout, k_lengths, "key")
    call = replace(call, Lq=sum(q_lengths), Lk=sum(k_lengths))
    call = replace(call, offset=diagonal_offset(call.Lq, call.Lk, causal_align))
    # Machines may differ; the first rank decides for all.
    choice, call = _choose(call, backend, dense=bool(agreed[0][3]))
    observed = any(own[2] for own in agreed)
    return _Work(exchange, call, choice, (query, key, value), shardings, balance, observed)


def _facts(
    call: Call, layout: str, balance: bool, causal_align: str, backend: str
) -> dict[str, Any]:
    names = ("B", "Hq", "Hk", "D", "Dv", "device", "scale", "is_causal")
    return {
        **{name: getattr(call, name) for name in names},
        "dtype": str(call.dtype),
        **{f"recipe's {name}": value for name, value in call.recipe.to_dict().items()},
        "layout": layout,
        "balance": balance,
        "causal_align": causal_align,
        "backend": current_router().requested(backend)[0],
    }


def _choose(call: Call, backend: str, *, dense: bool) -> tuple[Choice, Call]:
    """The sparse backend, or one that keeps everything where dense attention is faster."""
    if not dense:
        return choose(call, backend, dense_ok=False), call
    router = current_router()
    name, asked_by = router.requested(backend)
    why = "dense attention is faster, by the first rank's numbers"
    if name == DENSE:
        why = f"asked for by {asked_by}"
    call = keep_everything(call)
    choice = choose(call, router.first_able(call).name, dense_ok=False)
    return replace(choice, reason=f"{why}; everything is kept", routed_to_dense=True), call


@dataclass
class _Work:
    """A call that all ranks agreed on. call: of the whole sequence; tensors: this rank's rows."""

    exchange: Exchange
    call: Call
    choice: Choice
    tensors: tuple[Tensor, Tensor, Tensor]
    shardings: tuple[Sharding, Sharding]
    balance: bool
    observed: bool

    def __post_init__(self) -> None:
        self.backend: Backend = get_backend(self.choice.backend)
        device = self.exchange.device
        self.watch = Stopwatch(self.call, self.choice, device, recorded=self.observed)

    def moved(self) -> Held:
        """The rows on whole blocks, and causal queries where every rank has as much to do."""
        q_rows, k_rows = self.shardings
        query, key, value = self.tensors
        world, call = self.exchange.world, self.call
        to_q, to_k = q_rows.on_blocks(BLOCK_Q), k_rows.on_blocks(BLOCK_K)
        if world > 1 and call.is_causal and self.balance and q_rows.of(0) == q_rows.pieces[:1]:
            to_q = zigzag(call.Lq, world, BLOCK_Q)
        (query,) = reshard(self.exchange, [query], q_rows, to_q)
        key, value = reshard(self.exchange, [key, value], k_rows, to_k)
        return Held(call, query, key, value, to_q, to_k)

    def run(self) -> tuple[Tensor, Tensor, Run | None]:
        exchange, watch = self.exchange, self.watch
        with watch.stage("move"):
            held = self.moved()
        with watch.stage("plan"):
            plan = make_global_plan(exchange, held, self.backend)
        with watch.stage("attend"):
            rounds = Rounds(exchange, held, plan, self.backend, observed=self.observed)
            out, lse = rounds.run()
        with watch.stage("move"):
            out, lse = reshard(exchange, [out, lse], held.q_rows, self.shardings[0])
        run = self._run_of(rounds, plan.measured) if self.observed else None
        note(run)
        return out, lse, run

    def _run_of(self, rounds: Rounds, measured: Tensor | None) -> Run:
        """This rank's run, with the shares of all. measured: by an error budget, `[3, B, Hq]`."""
        exchange, call, backend = self.exchange, self.call, self.backend
        sent = [exchange.sent[name] for name in PURPOSES]
        own = torch.tensor([rounds.seconds, exchange.waited, *sent], dtype=torch.float64)
        # Counts go to the other ranks as they are; they are read once a report asks.
        kept_allowed = rounds.counted[0, :2].sum(-1).double()
        share = torch.cat([kept_allowed, own.to(exchange.device)])
        counted = {"blocks": rounds.counted, "shares": exchange.gather_rows("report", share)}
        if measured is not None:
            counted["measured"] = measured

        def numbers(found: Mapping[str, Tensor]) -> dict[str, Any]:
            of_call = numbers_of(call, found, row_group=backend.row_group)
            return {**of_call, "ring": self._report(found["shares"].tolist())}

        facts = {
            "call": f"{exchange.world} ranks, {call}",
            "isa": backend.isa(host(*call.where), call),
            "row_group": backend.row_group,
        }
        later = self.watch.to_host(counted)
        return make_run("ring_attention", self.watch, facts, later, numbers)

    def _report(self, shares: list[list[float]]) -> RingReport:
        call, world, made = self.call, self.exchange.world, []
        for rank, (kept, allowed, seconds, waited, *sent) in enumerate(shares):
            by_purpose = dict(zip(PURPOSES, map(int, sent), strict=True))
            made.append(RingShare(rank, int(kept), int(allowed), by_purpose, seconds, waited))
        # Every rank receives the keys and values of all others, in the caller's dtype.
        dense = call.B * call.Hk * call.Lk * (call.D + call.Dv) * call.dtype.itemsize
        return RingReport(tuple(made), (world - 1) * dense)
