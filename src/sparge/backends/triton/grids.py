"""What a card allows of the grid of a launch, and the calls that would need more.

Grids are `(blocks, heads, batch)`; that of `classify_blocks`, which reads a mask of the caller's,
is `(key blocks, query blocks, batch and heads of the mask)`. A query block is up to eight programs.
"""

from __future__ import annotations

from ...values.call import Call

MOST_OF_AXIS = 65_535
"""Programs along the second and third axis, of CUDA. Taken for other platforms, too: their own
limits were not looked up, and are checked by no card yet."""
MOST_OF_FIRST = 2**31 - 1
"""Along the first axis, of CUDA."""
MOST_OF_FIRST_AMD = 2**32 // (8 * 64) - 1
"""Assumed for AMD: fewer than 2^32 threads, eight wavefronts of 64 in a program."""
PROGRAMS_PER_BLOCK = 8
"""Most programs that share a query block: 128 rows, 16 each."""


def why_too_large(call: Call, architecture: str) -> str | None:
    """Why no grid holds the call, and the way out; None if one does."""
    first = MOST_OF_FIRST_AMD if architecture.startswith("gfx") else MOST_OF_FIRST
    axes = [
        ("batch entries", call.B, MOST_OF_AXIS, "split the batch into several calls"),
        ("query heads", call.Hq, MOST_OF_AXIS, "split the heads into several calls"),
        (
            "programs for the query blocks",
            call.n_q * PROGRAMS_PER_BLOCK,
            first,
            "split the queries into several calls",
        ),
        ("key blocks", call.n_k, first, "split the keys, and merge the results by their LSE"),
    ]
    if call.has_mask:
        # Of the mask's own batch and heads a call does not tell which are expanded.
        axes += [
            ("query blocks under a mask", call.n_q, MOST_OF_AXIS, "split the queries"),
            ("heads of a mask in all batch entries", call.B * call.Hq, MOST_OF_AXIS, "split it"),
        ]
    for what, n, most, way_out in axes:
        if n > most:
            return f"a launch takes at most {most:,} {what}, and the call has {n:,}; {way_out}"
    return None


def why_too_many(sequences: int) -> str | None:
    """The same of a pack, whose sequences take the place of the batch."""
    if sequences <= MOST_OF_AXIS:
        return None
    return (
        f"a launch takes at most {MOST_OF_AXIS:,} packed sequences, got {sequences:,}; "
        "split the pack into several calls"
    )
