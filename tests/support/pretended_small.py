"""A card with less shared memory than its architecture: `tests/support/pretended_small.py`."""

from __future__ import annotations

import json
from dataclasses import replace

from pretended_calls import CALLS, attend, on_card
from pretended_card import CARDS
from pretended_driver import pretended
from pretended_faults import raised
from sparge.backends.triton.attend import _smaller

KB = 1024
SIZES = (99, 48, 16, 4)


def attended(size: int) -> dict[str, object]:
    """Rows, stages and shared memory of the attention kernel where it was launched, by a first and
    a second call; or why not."""
    _smaller.clear()
    found: dict[str, object] = {}
    with pretended(replace(CARDS["sm_89"], shared=size * KB)) as traffic:
        inputs = on_card(CALLS[0])
        found["why"] = raised(lambda: attend(CALLS[0], inputs))
        for name in ("first", "second"):
            done = [x for x in traffic.launches if x.kernel == "attend_blocks"]
            found[name] = [
                [int(x.arguments["HOW"].BLOCK_M), int(x.options["num_stages"]), x.shared]
                for x in done
            ]
            traffic.clear()
            if found["why"]:
                break
            attend(CALLS[0], inputs)
    return found


if __name__ == "__main__":
    print(json.dumps({size: attended(size) for size in SIZES}))
