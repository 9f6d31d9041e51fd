"""Dense compared with sparge: the rows of the table and the sentences of the page."""

from __future__ import annotations

from ..report.table import MISSING, Column, Table, error, percent, share, times
from .result import Showcase

COLUMNS = (
    Column("what", ""),
    Column("dense", "dense", lambda text: text),
    Column("sparge", "sparge", lambda text: text),
    Column("change", "change", lambda text: text),
)
FOUND = {True: "found", False: "not found"}
NEEDLE_VERDICTS = {  # by whether dense and sparge found it
    (True, True): "both found the needle",
    (True, False): "sparge lost the needle that dense found",
    (False, True): "sparge found the needle, dense did not",
    (False, False): "neither found the needle, so it says nothing about sparge",
}
NEEDLE_SHORT = {
    (True, True): ("found", "by both"),
    (True, False): ("lost", "by sparge"),
    (False, True): ("found", "by sparge"),
    (False, False): ("found", "by neither"),
}


def comparison_rows(show: Showcase) -> list[dict[str, str]]:
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
        ("density: kept / allowed blocks", share(1.0), share(show.density), MISSING),
        (
            f"perplexity over {show.tokens - 1:,} tokens",
            f"{dense.perplexity:.3f}",
            f"{sparge.perplexity:.3f}",
            signed_percent(show.perplexity_change),
        ),
        ("needle", FOUND[dense.found], FOUND[sparge.found], MISSING),
        ("error of attention (rel. L1)", MISSING, error_text(show), MISSING),
        ("same most likely next token as dense", MISSING, percent(show.agreement), MISSING),
    ]
    return [dict(zip(("what", "dense", "sparge", "change"), line, strict=True)) for line in lines]


def comparison_table(show: Showcase) -> Table:
    title = f"{show.model['name']}, {show.tokens:,} tokens, {show.dtype}"
    return Table(title, COLUMNS, comparison_rows(show), notes(show))


def notes(show: Showcase) -> list[str]:
    lines = [
        how_often(show),
        f"Attention took {percent(show.dense.attention_share)} of the dense time: the first token "
        f"could come at most {show.limit:.2f}x sooner.",
    ]
    if show.error_layers:
        layers = ", ".join(map(str, show.error_layers))
        lines.append(f"error: mean over the heads of layers {layers}, against exact attention.")
    return lines


def how_often(show: Showcase) -> str:
    order = ", ".join(show.order)
    times_each = "once each" if show.rounds == 1 else f"{show.rounds} times each, median"
    return (
        f"Timed {times_each}, in the order {order}, after a warm-up of {show.warmup_tokens} "
        "tokens. For careful measurements use sparge eval."
    )


def verdict(show: Showcase) -> str:
    """The gain, in one sentence."""
    sooner = "sooner" if show.speedup >= 1 else "later"
    ratio = show.speedup if show.speedup >= 1 else 1 / show.speedup
    return (
        f"The first token came {ratio:.2f}× {sooner} with sparge: after "
        f"{seconds(show.sparge.first_token)} instead of {seconds(show.dense.first_token)}."
    )


def cost(show: Showcase) -> str:
    """The cost, in one sentence."""
    return (
        f"It computed {percent(show.density)} of the attention blocks; perplexity changed by "
        f"{signed_percent(show.perplexity_change)}; {needle_verdict(show)}."
    )


def needle_verdict(show: Showcase) -> str:
    return NEEDLE_VERDICTS[show.dense.found, show.sparge.found]


def fallback_lines(show: Showcase) -> list[str]:
    """Reasons why calls were not sparse; the tokens of the answer always are among them."""
    return [f"{n}×: {reason}" for reason, n in show.sparge.fallbacks.items()]


def seconds(value: float) -> str:
    if value < 0.1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def signed_percent(value: float) -> str:
    return f"{100 * value:+.2f}%"


def faster(ratio: float) -> str:
    return f"{times(ratio)} the speed"


def error_text(show: Showcase) -> str:
    return MISSING if show.error is None else error(show.error)
