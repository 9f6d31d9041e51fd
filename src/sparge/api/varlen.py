"""Packed sequences of different lengths: `[T, H, D]` and the boundaries between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..engine.check import check_boundaries, check_packed, check_varlen
from ..engine.execute import Outcome
from ..engine.execute_varlen import run_together, run_varlen, sequence
from ..engine.recording import apart, note
from ..routing import current_router
from ..routing.router import Cuts
from ..support.autocast import as_autocast
from ..values.backend import AUTO
from ..values.call import Call
from ..values.recipe import Recipe
from ..values.run import Run
from .attention import PackedOptions, attention_and_run, wants_op

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **rest: Unpack[PackedOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: Literal[True],
    **rest: Unpack[PackedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_lse: bool,
    **rest: Unpack[PackedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_align: str = "top_left",
    recipe: Recipe | None = None,
    backend: str = AUTO,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` within each packed sequence.

    query `[Tq, Hq, D]`, key `[Tk, Hk, D]`, value `[Tk, Hk, Dv]`; sequence `i` has the rows
    `cu_seqlens_q[i] : cu_seqlens_q[i + 1]` and the keys `cu_seqlens_k[i] : cu_seqlens_k[i + 1]`.
    Each result is, bit for bit, that of its sequence alone on the same backend. `auto` chooses for
    each by its own lengths. Where it chooses dense attention and all such sequences of the pack
    together were measured to be faster in the native core than by torch's kernel, they run there:
    every block is kept, in the caller's own precision, and results differ from torch's by rounding.
    The lse is `[Hq, Tq]`.
    """
    query, key, value = as_autocast(query, key, value)
    packed = (query, key, value, cu_seqlens_q, cu_seqlens_k)
    call = check_varlen(
        *packed,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        causal_align=causal_align,
        recipe=recipe,
        backend=backend,
        return_lse=return_lse,
    )
    compiling = torch.compiler.is_compiling()
    if call.needs_grad and compiling:
        raise ValueError(
            "attention_varlen has no gradient inside a compiled graph, where the boundaries are "
            "not known; call it outside torch.compile, or under torch.no_grad()"
        )
    if not call.needs_grad and (compiling or wants_op(query)):
        facts = (call.is_causal, causal_align, call.scale, call.recipe.to_json())
        out, lse = torch.ops.sparge.attention_varlen(*packed, *facts, return_lse, backend)
    else:
        cuts = check_boundaries(query, key, cu_seqlens_q, cu_seqlens_k)
        run: Callable[..., Outcome] = _run_differentiable if call.needs_grad else run_varlen
        done = run(call, query, key, value, cuts, backend=backend, align=causal_align)
        note(done.run)
        out, lse = done.out, done.lse
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cuts: Cuts,
    *,
    causal_align: str,
    backend: str,
    recorded: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Run | None]:
    """`attention_varlen` for a caller that made the boundaries on the host: `(out, lse, run)`.

    cuts: where the sequences begin and end, of the queries and of the keys; they never leave the
    host. recorded: make a run, though nobody records. There is no gradient.
    """
    query, key, value = as_autocast(query, key, value)
    facts = {**options, "causal_align": causal_align, "backend": backend}
    call = check_packed(query, key, value, **facts)
    done = run_varlen(
        call, query, key, value, cuts, backend=backend, align=causal_align, recorded=recorded
    )
    note(done.run)
    return done.out, done.lse, done.run


def _run_differentiable(
    call: Call, query: Tensor, key: Tensor, value: Tensor, cuts: Cuts, *, backend: str, align: str
) -> Outcome:
    """`run_varlen`, sequence by sequence through `attention`: autograd combines their gradients."""
    current_router().choose_pack(call, cuts, backend, align)  # a refusal comes before any work
    outs, lses = [], []
    with apart() as runs:
        for i in range(len(cuts[0]) - 1):
            one = sequence(query, key, value, cuts, i)
            assert one.value is not None
            out, lse, _ = attention_and_run(
                one.query,
                one.key,
                one.value,
                is_causal=call.is_causal,
                scale=call.scale,
                enable_gqa=call.Hq != call.Hk,
                causal_align=align,
                recipe=call.recipe,
                backend=backend,
                return_lse=call.return_lse,
            )
            outs.append(out[0].transpose(0, 1))
            lses += [] if lse is None else [lse[0]]
    lse = torch.cat(lses, 1) if call.return_lse else None
    return Outcome(torch.cat(outs), lse, run=run_together(call, runs))
