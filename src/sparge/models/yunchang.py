"""yunchang (USP): sparse attention in `LongContextAttention` and `UlyssesAttention`.

    processor = AttentionProcessor(recipe)
    register()
    LongContextAttention(ring_impl_type="sparge", attn_type="sparge", attn_processor=processor)

runs Ulysses as yunchang does, and the ring by `sparge.parallel.ring_attention`: blocks are selected
once, over the whole sequence. With yunchang's own ring (`ring_impl_type="basic"`) the processor is
called for every chunk of keys, and selects in each; `report()` says which it was. yunchang's other
rings take no processor.
`UlyssesAttention(...).attn_fn = processor` takes it, too.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..routing import AUTO
from ..values.recipe import DEFAULT, Recipe
from .report import Report
from .site import Site, check_backend
from .ulysses import PER_CHUNK, ULYSSES, share_heads

CONTIGUOUS, ZIGZAG = "sparge", "sparge_zigzag"
"""The names of our rings among yunchang's, by how a sequence is dealt out."""


class AttentionProcessor:
    """Attention by one recipe, for one layer: yunchang's `attn_processor`.

    recipe: for all heads of the layer; a process takes its own of numbers per head. None is
    `sparge.DEFAULT`. ulysses_group: the group that shares the heads; None is yunchang's own, or all
    processes where that was not set. There is no gradient.
    """

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        backend: str = AUTO,
        name: str = "yunchang",
        ulysses_group: Any = None,
    ) -> None:
        check_backend(backend)
        recipe = DEFAULT if recipe is None else recipe
        if type(recipe) is not Recipe:
            raise TypeError(f"recipe must be a sparge.Recipe, got {type(recipe).__name__}")
        self.recipe, self.ulysses_group = recipe, ulysses_group
        self._site = Site(name, recipe, backend)
        self._site.open(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._site.open(self)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float | None = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        return_softmax: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q `[B, Lq, Hq, D]` with all keys, or those of one chunk of a ring of yunchang's.

        Returns the output and its LSE `[B, Hq, Lq]`. A causal call has its last query at the last
        key. Results never depend on threads or time, so `deterministic` is always kept.
        """
        _check((q, k, v), dropout_p, window_size, softcap, alibi_slopes, return_attn_probs)
        # Of all callers, yunchang's rings alone say whether they want the softmax.
        ring = None if return_softmax is None else _groups().RING_PG
        in_ring = ring is not None and dist.get_world_size(ring) > 1
        if in_ring and self.recipe.protect:
            raise ValueError(
                f"recipe must protect no ranges in a ring that selects per chunk, got "
                f"{self.recipe.protect}; use ring_impl_type={CONTIGUOUS!r}"
            )
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        arguments = {"is_causal": causal, "causal_align": "bottom_right", "scale": softmax_scale}
        arguments["enable_gqa"] = query.shape[1] != key.shape[1]
        recipe = self._recipe_of(query.shape[1])
        out, lse = self._site.attend(query, key, value, arguments, recipe=recipe, return_lse=True)
        self._site.tally.add_parallel(PER_CHUNK if in_ring else ULYSSES)
        return out.transpose(1, 2).contiguous(), lse.float()

    def ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        group: Any,
        layout: str = "contiguous",
        softmax_scale: float | None = None,
        causal: bool = False,
        **refused: Any,
    ) -> Tensor:
        """This process' part of the sequence, `[B, L, H, D]`; one selection over all parts.

        refused: other arguments of a call, which must have their defaults.
        """
        _check((q, k, v), **refused)
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        given = {"group": group, "layout": layout, "is_causal": causal, "scale": softmax_scale}
        given |= {"enable_gqa": query.shape[1] != key.shape[1]}
        recipe = self._recipe_of(query.shape[1])
        out, _ = self._site.attend_ring(query, key, value, recipe=recipe, **given)
        return out.transpose(1, 2).contiguous()

    def report(self) -> Report:
        """What ran in this process since the start."""
        return Report((self._site.report(),), self.recipe, {})

    def _recipe_of(self, heads: int) -> Recipe:
        group = self.ulysses_group if self.ulysses_group is not None else _groups().ULYSSES_PG
        world = dist.get_world_size(group)
        return share_heads(heads * world, dist.get_rank(group), world).recipe_of(self.recipe)


def register() -> None:
    """Add our rings to those that `LongContextAttention` knows by name; harmless to repeat.

    "sparge" takes sequences cut into as many parts as there are processes, "sparge_zigzag" those
    dealt out by yunchang's "zigzag", which balances causal attention.
    """
    from yunchang.hybrid.utils import RING_IMPL_DICT

    RING_IMPL_DICT[CONTIGUOUS] = partial(_ring, layout="contiguous")
    RING_IMPL_DICT[ZIGZAG] = partial(_ring, layout="zigzag")


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    attn_processor: Any = None,
    attn_type: Any = None,
    deterministic: bool = False,
    **given: Any,
) -> Tensor:
    if not isinstance(attn_processor, AttentionProcessor):
        raise TypeError(
            "attn_processor must be a sparge.models.yunchang.AttentionProcessor for the ring "
            f"{CONTIGUOUS!r}, got {type(attn_processor).__name__}"
        )
    return attn_processor.ring(q, k, v, layout=layout, **given)


def _check(
    qkv: tuple[Tensor, Tensor, Tensor],
    dropout_p: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    return_attn_probs: bool = False,
) -> None:
    """Refuse what sparge does not compute, before any work."""
    for name, given, needed in (
        ("dropout_p", dropout_p, dropout_p == 0),
        ("window_size", window_size, all(size == -1 for size in window_size)),
        ("softcap", softcap, not softcap or math.isinf(softcap)),
        ("alibi_slopes", "a tensor", alibi_slopes is None),
        ("return_attn_probs", return_attn_probs, not return_attn_probs),
    ):
        if not needed:
            raise ValueError(f"{name} must be left at its default: sparge has none; got {given}")
    if any(x.requires_grad for x in qkv):
        raise ValueError(
            "q, k and v must not require a gradient: this attention has none in a ring; call it "
            "under torch.no_grad()"
        )


def _groups() -> Any:
    from yunchang.globals import PROCESS_GROUP

    return PROCESS_GROUP


__all__ = ["CONTIGUOUS", "ZIGZAG", "AttentionProcessor", "register"]
