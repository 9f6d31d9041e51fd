"""The tiles that a call is attended in on its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ...values.call import Call
from .architectures import Architecture, Tiles, architecture_of
from .launch import DoesNotFit

T = TypeVar("T")
_smaller: dict[tuple[str, Tiles], Tiles] = {}
"""By architecture, what is launched in place of tiles that did not fit a card. The table was
compiled for, so only a card with less shared memory than its architecture gets here."""


def tiles_of(call: Call) -> Tiles:
    found = architecture_of(*call.where)
    assert isinstance(found, Architecture)
    recipe, D = call.recipe, max(call.D, call.Dv)
    filters, masked = recipe.pv_skip is not None, call.has_mask
    uneven = call.D % 16 != 0 or call.Dv % 16 != 0
    tiles = found.tiles_for(recipe.precision, D, filters=filters, masked=masked, uneven=uneven)
    return _smaller.get((found.name, tiles), tiles)


def in_tiles_that_fit(call: Call, attend: Callable[[], T]) -> T:
    """`attend()`, again with smaller tiles for as long as its kernel does not fit the card."""
    while True:
        try:
            return attend()
        except DoesNotFit:
            own = replace(call, recipe=replace(call.recipe, precision=call.own_precision))
            shrunk = [_shrink(each) for each in (call, own)]
            if not any(shrunk):
                raise


def _shrink(call: Call) -> bool:
    now = tiles_of(call)
    less = now.smaller()
    if less is None:
        return False
    found = architecture_of(*call.where)
    assert isinstance(found, Architecture)
    replaced = [key for key, tiles in _smaller.items() if tiles == now and key[0] == found.name]
    _smaller.update(dict.fromkeys([(found.name, now), *replaced], less))
    return True
