"""Dense beside sparge in words: the rows of the table and the sentences of the page."""

from __future__ import annotations

from .showcase import Showcase
from .tables import MISSING, Column, Table, error, percent, share, times

COLUMNS = (
    Column("what", ""),
    Column("dense", "dense", lambda text: text),
    Column("sparge", "sparge", lambda text: text),
    Column("change", "change", lambda text: text),
)
FOUND = {True: "found", False: "not found"}


def rows_of(show: Showcase) -> list[dict[str, str]]:
    dense, sparge = show.dense, show.sparge
    lines = [
        (
            "seconds to the first token",
            seconds(dense.first_token),
            seconds(sparge.first_token),
            faster(show.speedup),
        ),
        (
            "of these in attention",
            seconds(dense.attention_seconds),
            seconds(sparge.attention_seconds),
            faster(show.attention_speedup),
        ),
        (
            "attention's share of the time",
            percent(dense.attention_share),
            percent(sparge.attention_share),
            MISSING,
        ),
        ("density: blocks of attention computed", share(1.0), share(show.density), MISSING),
        (
            f"perplexity over {show.tokens - 1:,} tokens",
            f"{dense.perplexity:.3f}",
            f"{sparge.perplexity:.3f}",
            signed_percent(show.perplexity_change),
        ),
        ("needle", FOUND[dense.found], FOUND[sparge.found], MISSING),
        ("error of attention (rel. L1)", MISSING, error_text(show), MISSING),
        ("same favourite next token as dense", MISSING, percent(show.agreement), MISSING),
    ]
    return [dict(zip(("what", "dense", "sparge", "change"), line, strict=True)) for line in lines]


def table_of(show: Showcase) -> Table:
    title = f"{show.model['name']}, {show.tokens:,} tokens, {show.dtype}"
    return Table(title, COLUMNS, rows_of(show), notes_of(show))


def notes_of(show: Showcase) -> list[str]:
    notes = [
        how_often(show),
        f"Attention took {percent(show.dense.attention_share)} of dense's time: without any "
        f"attention the first token would come {show.limit:.2f}x sooner, and no more.",
    ]
    if show.error_layers:
        layers = ", ".join(map(str, show.error_layers))
        notes.append(f"error: mean over the heads of layers {layers}, against exact attention.")
    return notes


def how_often(show: Showcase) -> str:
    order = ", ".join(show.order)
    times_each = "once each" if show.rounds == 1 else f"{show.rounds} times each, median"
    return (
        f"Timed {times_each}, in the order {order}, after a warm-up of {show.warmup_tokens} tokens "
        "each: a show. To measure: sparge eval."
    )


def verdict(show: Showcase) -> str:
    """What was gained, in one sentence."""
    sooner = "sooner" if show.speedup >= 1 else "later"
    ratio = show.speedup if show.speedup >= 1 else 1 / show.speedup
    return (
        f"The first token came {ratio:.2f}× {sooner} with sparge: after "
        f"{seconds(show.sparge.first_token)} instead of {seconds(show.dense.first_token)}."
    )


def cost(show: Showcase) -> str:
    """What it cost, in one sentence."""
    return (
        f"It computed {percent(show.density)} of the attention blocks; perplexity changed by "
        f"{signed_percent(show.perplexity_change)}; {needle_verdict(show)}."
    )


def needle_verdict(show: Showcase) -> str:
    match show.dense.found, show.sparge.found:
        case True, True:
            return "both found the needle"
        case True, False:
            return "sparge lost the needle that dense found"
        case False, True:
            return "sparge found the needle, dense did not"
    return "neither found the needle, so it tells nothing about sparge"


def needle_short(show: Showcase) -> str:
    match show.dense.found, show.sparge.found:
        case True, True:
            return "found by both"
        case True, False:
            return "lost by sparge"
        case False, True:
            return "found by sparge"
    return "found by neither"


def fallbacks_of(show: Showcase) -> list[str]:
    """Why calls were not sparse; the answer's tokens come one by one and are always among them."""
    return [f"{n}×: {reason}" for reason, n in show.sparge.fallbacks.items()]


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else _ms(value)


def signed_percent(value: float) -> str:
    return f"{100 * value:+.2f}%"


def faster(ratio: float) -> str:
    return f"{times(ratio)} the speed"


def error_text(show: Showcase) -> str:
    return MISSING if show.error is None else error(show.error)


def _ms(value: float) -> str:
    return f"{value * 1e3:.1f} ms"
