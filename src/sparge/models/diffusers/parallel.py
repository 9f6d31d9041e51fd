"""diffusers' context parallelism: the tokens of a model are split over processes.

  ulysses    every process gets the whole sequence and some heads, and runs the route of the layer
  ring       every process keeps its tokens; `sparge.parallel.ring_attention` selects blocks over
             the whole sequence once, and moves what was selected
  both       Ulysses within the processes of one place of the ring

Text and visual tokens are split apart, so the sequence that Ulysses collects has the text of the
first process, its part of the picture, the text of the second, and so on. It is put back in the
order of one process for the call, which makes plans those of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

from ..sdpa import Route
from ..ulysses import ULYSSES, share_heads, to_sequence
from .ring import attend_ring
from .split import UNKNOWN_SPLIT, heads_last, mask_of_heads, rows_of, split_of

GRADIENT = "a gradient is wanted: torch's own is faster; sparge runs under no_grad"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_parallel(
    route: Route,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: Any,
    return_lse: bool,
    **given: Any,
) -> Any:
    """Attention of this process' part of a sequence: tensors `[B, L, H, D]`.

    Returns the output, or `(out, lse)` with the LSE `[B, L, H]`. diffusers has neither causal calls
    nor shared key heads here, and they are refused.
    """
    for name in ("is_causal", "enable_gqa"):
        if given[name]:
            raise ValueError(f"{name} must be False under diffusers' context parallelism, got True")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return _own_parallel(route, query, key, value, config=config, **given)
    split = config.context_parallel_config
    if split.ring_degree > 1:
        return attend_ring(route, query, key, value, split=split, return_lse=return_lse, **given)
    call = _Ulysses(route, split, heads=query.shape[2], local=query.shape[1])
    result = dispatch._templated_context_parallel_attention(
        query,
        key,
        value,
        **given,
        return_lse=return_lse,
        forward_op=call.forward,
        backward_op=_no_backward,
        _parallel_config=config,
    )
    route.site.note_parallel(ULYSSES)
    return result


def _own_parallel(
    route: Route, query: Tensor, key: Tensor, value: Tensor, *, config: Any, **given: Any
) -> Any:
    """diffusers' own parallel attention, counted, which has a gradient for some backends."""
    own: Any = route.own
    backend = dispatch.AttentionBackendName.NATIVE if own is None else own.now()
    out = dispatch.dispatch_attention_fn(
        query, key, value, **given, backend=backend, parallel_config=config
    )
    route.site.note_own(GRADIENT, 0.0, 0)
    return out


def _no_backward(*_: Any, **__: Any) -> Any:
    raise AssertionError("calls that want a gradient take diffusers' own attention")


class _Ulysses:
    """The attention of one call between the two exchanges of Ulysses."""

    def __init__(self, route: Route, split: Any, *, heads: int, local: int) -> None:
        self.route, self.local = route, local
        self.world, self.rank = split.ulysses_degree, split._ulysses_local_rank
        self.share = share_heads(heads, self.rank, self.world)

    def forward(
        self,
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _save_ctx: bool = True,
        _parallel_config: Any = None,
    ) -> Any:
        """The whole sequence and this process' heads: tensors `[B, L, H, D]`."""
        Lq, Lk = query.shape[1], key.shape[1]
        mask = mask_of_heads(attn_mask, self.share, Lq, Lk)
        query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))
        given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        given |= {"enable_gqa": enable_gqa, "return_lse": return_lse}
        shards = split_of(self.route, Lq, self.world) if Lq == Lk else None
        if shards is not None and shards.tokens_of(self.rank, self.rank + 1) != self.local:
            reason = UNKNOWN_SPLIT
            result = self.route.run_own(reason, query, key, value, attn_mask=mask, **given)
        elif shards is None or shards.in_order:
            result = self.route(query, key, value, attn_mask=mask, **given, share=self.share)
        else:
            index = to_sequence(shards, query.device)
            query, key, value = (x.index_select(2, index) for x in (query, key, value))
            mask = _in_order(mask, index)
            result = self.route(query, key, value, attn_mask=mask, **given, share=self.share)
            back = to_sequence(shards, query.device, back=True)
            result = rows_of(result, back)
        return heads_last(result)


def _in_order(mask: Tensor | None, index: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask.index_select(-2, index)
    return mask.index_select(-1, index) if mask.shape[-1] > 1 else mask
