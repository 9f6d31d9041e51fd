"""Orders of the tokens of a T×H×W grid, and tensors put into an order and back.

Attention is skipped in blocks of consecutive tokens. Models lay the tokens of a picture or a video
out row by row, so a block is a thin strip of it; along a Hilbert curve a block is a compact patch,
whose tokens are more alike.
"""

from __future__ import annotations

from .orders import ORDERS, check_grid, check_order, inverse_order, token_order
from .tokens import reorder_tokens, restore_tokens

__all__ = [
    "ORDERS",
    "check_grid",
    "check_order",
    "inverse_order",
    "reorder_tokens",
    "restore_tokens",
    "token_order",
]
