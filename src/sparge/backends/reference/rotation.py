"""The rotation of q and k before they are coded: a Hadamard transform after a change of signs.

    y = H · diag(sign) · x,   sign of channel d = (-1)^(pairs of adjacent ones in the bits of d)

It is orthogonal, so `q · k` does not change, and it spreads one large channel over all of them. The
signs (the Rudin-Shapiro sequence) spread a row of equal numbers as well, which H alone would
collect in one channel. H takes the largest power of two n <= D channels; if there are more, the
same is done again to the last n.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor) -> Tensor:
    """The rows of `x [..., D]`, fp32, rotated."""
    D = x.shape[-1]
    n = 1 << (D.bit_length() - 1)
    x = torch.cat([_rotate_part(x[..., :n]), x[..., n:]], -1)
    return x if n == D else torch.cat([x[..., : D - n], _rotate_part(x[..., D - n :])], -1)


def _rotate_part(x: Tensor) -> Tensor:
    """Signs and the orthonormal Hadamard transform of a power of two of channels: sums and
    differences of numbers 1, 2, 4, … apart, elementwise, so that the bits depend on x alone."""
    n, half = x.shape[-1], 1
    x = x * (_signs(n).to(x.device) * n**-0.5)
    while half < n:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return x


def _signs(n: int) -> Tensor:
    odd = [(d & d >> 1).bit_count() % 2 for d in range(n)]
    return 1.0 - 2.0 * torch.tensor(odd, dtype=torch.float32)
