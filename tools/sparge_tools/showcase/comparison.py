"""Dense compared with sparge: the rows of the table and the sentences of the page."""

from __future__ import annotations

from sparge.cli.screen import MISSING, Column, Table, error, percent, share, times

from .result import Showcase

COLUMNS = (
    Column("what", ""),
    *(Column(name, name, "{}".format) for name in ("dense", "sparge", "change")),
)
FOUND = {True: "found", False: "not found"}
NEEDLE = {  # by whether dense and sparge found it: a sentence, and a word with its agent
    (True, True): ("both found the needle", "found", "by both"),
    (True, False): ("sparge lost the needle that dense found", "lost", "by sparge"),
    (False, True): ("sparge found the needle, dense did not", "found", "by sparge"),
    (False, False): (
        "neither found the needle, so it says nothing about sparge",
        "found",
        "by neither",
    ),
}


def comparison_rows(show: Showcase) -> list[dict[str, str]]:
    dense, sparge = show.dense, show.sparge

    def row(what: str, *cells: str) -> dict[str, str]:
        return {column.key: cell for column, cell in zip(COLUMNS, (what, *cells), strict=True)}

    first = seconds(dense.first_token), seconds(sparge.first_token)
    inside = seconds(dense.attention_seconds), seconds(sparge.attention_seconds)
    shares = percent(dense.attention_share), percent(sparge.attention_share)
    perplexities = f"{dense.perplexity:.3f}", f"{sparge.perplexity:.3f}"
    change = signed_percent(show.perplexity_change)
    measured = MISSING if show.error is None else error(show.error)
    return [
        row("seconds to the first token", *first, f"{times(show.speedup)} the speed"),
        row("of these in attention", *inside, f"{times(show.attention_speedup)} the speed"),
        row("attention's share of the time", *shares, MISSING),
        row("density: kept / allowed blocks", share(1.0), share(show.density), MISSING),
        row(f"perplexity over {show.tokens - 1:,} tokens", *perplexities, change),
        row("needle", FOUND[dense.found], FOUND[sparge.found], MISSING),
        row("error of attention (rel. L1)", MISSING, measured, MISSING),
        row("same most likely next token as dense", MISSING, percent(show.agreement), MISSING),
    ]


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
    times_each = "once each" if show.rounds == 1 else f"{show.rounds} times each, median"
    return (
        f"Timed {times_each}, in the order {', '.join(show.order)}, after a warm-up of "
        f"{show.warmup_tokens} tokens. For careful measurements use sparge eval."
    )


def verdict(show: Showcase) -> str:
    """The gain, in one sentence."""
    sooner = "sooner" if show.speedup >= 1 else "later"
    return (
        f"The first token came {max(show.speedup, 1 / show.speedup):.2f}× {sooner} with sparge: "
        f"after {seconds(show.sparge.first_token)} instead of {seconds(show.dense.first_token)}."
    )


def cost(show: Showcase) -> str:
    """The cost, in one sentence."""
    return (
        f"It computed {percent(show.density)} of the attention blocks; perplexity changed by "
        f"{signed_percent(show.perplexity_change)}; "
        f"{NEEDLE[show.dense.found, show.sparge.found][0]}."
    )


def fallback_lines(show: Showcase) -> list[str]:
    """Reasons why calls were not sparse; the tokens of the answer always are among them."""
    return [f"{n}×: {reason}" for reason, n in show.sparge.fallbacks.items()]


def seconds(value: float) -> str:
    if value < 0.1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def signed_percent(value: float) -> str:
    return f"{100 * value:+.2f}%"
