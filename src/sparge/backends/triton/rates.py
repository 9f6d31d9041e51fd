"""What the Triton backend costs on a card before it was measured there, and how it is measured.

The first call that might profit measures what its kind needs (dtype, precision, head dim): seconds,
mostly compilation. `sparge doctor --calibrate` measures everything: a minute or more. No call waits
for a number of a tensor: what layers keep is learnt afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...values.backend import Measuring, Place, Rates, UnitCosts
from .architectures import KINDS
from .packages import triton_version
from .roofline import card_of, roofline


def key_of(place: Place) -> dict[str, str]:
    card = card_of(*place)
    return {
        "device": card.name,
        "architecture": card.architecture,
        "triton": triton_version() or "none",
    }


def _estimate(place: Place) -> Mapping[str, UnitCosts] | str:
    return roofline(card_of(*place), triton_version() or "")


def _measuring(place: Place) -> Measuring:
    """With 16 heads, 256 and 1024 programs of 128 queries: as many as a card has multiprocessors.
    Inside a call two ways are measured instead of 36."""
    return Measuring(
        str(torch.device(*place)),
        heads=16,
        lengths=(2048, 8192),
        lse_lengths=(2048,),
        seconds=5.0,
        seconds_in_call=0.5,
        fewest_rounds=5,
        warms_up=True,
    )


RATES = Rates(
    KINDS,
    place=lambda kind, index: (kind, index),
    key=key_of,
    estimate=_estimate,
    estimated_by="roofline estimate, nothing was measured on this card",
    measuring=_measuring,
    # With what `expected_density` adds for short rows, that is a little more than was measured:
    # 0.70 at 2048 causal tokens (measured: 0.62), 0.55 at 4096 (0.50), 0.48 at 8192 (0.31 to 0.35),
    # 0.42 at 32,768 (0.36); images of 4096 tokens 0.48 (0.28 to 0.35). A cautious number would
    # never be corrected: a layer that runs sparse is learnt from, one that runs dense is not.
    unseen_density=0.4,
    elsewhere="Triton's interpreter runs it on the cpu: for tests only",
    by_kind=True,
)
