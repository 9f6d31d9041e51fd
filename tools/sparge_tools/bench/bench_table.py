"""The documents of `sparge bench`, with `--suite vision` and with `--busy`, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sparge.cli.screen import Column, Table, error, share

from ..machine import machine_text
from ..screen import milliseconds, three_digits, times
from .busy import LIMITS, BusyCase
from .cases import SAMPLED_ROWS, Case

LOSES = " LOSS"
Row = Mapping[str, Any]
COLUMNS = (
    Column("contender", "contender"),
    Column("density", "den-\nsity", share),
    Column("error", "error", error),
    Column("quantization_error", "quant", error),
    Column("seconds", "ms", milliseconds),
)
RATIO_COLUMNS = (
    Column("ratio_text", "times\nSDPA", "{}".format),
    Column("spread", "+-", "{:.0%}".format),
)
SPEED_COLUMNS = (
    Column("ns_per_score", "ns /\nscore", three_digits),
    Column("share_of_peak", "of\npeak", "{:.0%}".format),
)
VISION_COLUMNS = (
    Column("reorder_seconds", "re-\norder", milliseconds),
    Column("ratio_reordered", "times SDPA\nwith it", times),
)
BUSY_COLUMNS = (
    Column("others", "others", "{}".format),
    Column("case", "case"),
    Column("backend", "auto\nran"),
    Column("density", "den-\nsity", share),
    Column("error", "error", error),
    Column("calls", "calls", "{}".format),
    Column("sdpa_median_seconds", "SDPA ms,\nmedian", milliseconds),
    Column("sdpa_mean_seconds", "mean", milliseconds),
    Column("sdpa_p99_seconds", "99%", milliseconds),
    Column("auto_median_seconds", "auto ms,\nmedian", milliseconds),
    Column("auto_mean_seconds", "mean", milliseconds),
    Column("auto_p99_seconds", "99%", milliseconds),
    Column("median_ratio", "auto / SDPA,\nmedian", times),
    Column("mean_ratio", "mean", times),
    Column("p99_ratio", "99%", times),
)


def bench_table(document: dict[str, Any]) -> Table:
    rows, stages = rows_with_stages(document["rows"], _case_name)
    columns = staged_columns("case", stages, SPEED_COLUMNS)
    on = "" if document["device"] == "cpu" else f", on {document['device']}"
    title = f"{document['heads']} heads, structured inputs{on}"
    return Table(title, columns, rows, _notes(document, rows, stages))


def rows_with_stages(
    rows: Iterable[Row], case_name: Callable[[Row], str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows for a table, and the names of their stages."""
    made = [
        {**row, **row.get("stages", {}), "case": case_name(row), "ratio_text": _ratio_text(row)}
        for row in rows
    ]
    # In the order of the row with most stages: some recipes need no prediction.
    fullest = sorted((row.get("stages", {}) for row in made), key=len, reverse=True)
    return made, list(dict.fromkeys(name for each in fullest for name in each))


def staged_columns(case: str, stages: Sequence[str], last: Sequence[Column]) -> list[Column]:
    """What is compared, what it kept and how far off it is, its time by stages, and its ratio."""
    times_of_stages = (Column(name, name, milliseconds) for name in stages)
    return [Column("case", case), *COLUMNS, *times_of_stages, *RATIO_COLUMNS, *last]


def _notes(document: dict[str, Any], rows: list[dict[str, Any]], stages: list[str]) -> list[str]:
    lost = [row for row in rows if row.get("loses")]
    ours = [row for row in rows if row["kind"] == "sparse" and row["why_not"] is None]
    rounds = [row["rounds"] for row in rows if row["why_not"] is None]
    peaks = ", ".join(
        f"{peak['peak']:.0f} GFLOP/s ({peak['of']}) with {n} threads"
        for n, peak in document["peaks"].items()
    )
    return [
        f"machine: {machine_text(document)}.",
        f"sparge is slower than SDPA in {len(lost)} of its {len(ours)} rows, marked{LOSES}.",
        "case: tokens, head dim, diagonal, threads. contender: what is kept. Inputs are bf16 "
        "unless the name says fp32; sparge computes in int8 (fast: int8-fast) and predicts by mean "
        "(blend and default: by blend). flex: compiled FlexAttention with sparge's blocks.",
        f"ms: the whole call, then its stages ({', '.join(stages)}).",
        "times SDPA: time of torch's SDPA in the same dtype / this time, within a round; median of "
        f"{_from_to(rounds)} in turns. +-: half its range over the rounds (SDPA: of its "
        "time); a large value means that other programs ran.",
        f"error: relative L1 against dense fp64 of the same inputs, on {SAMPLED_ROWS} query rows "
        "of each head. quant: against fp64 over the same blocks, without the sparsity error.",
        "ns / score: time / query-key pairs of dense attention. of peak: 4 x head dim FLOP per "
        "query-key pair in kept blocks (QK and PV), per second, as a share of torch's fastest fp32 "
        f"or bf16 matrix product in this run: {peaks}. 8-bit products can exceed it.",
        *_reasons(rows),
    ]


def _case_name(row: Mapping[str, Any]) -> str:
    return str(Case(row["length"], row["head_dim"], row["causal"], row["threads"]))


def _ratio_text(row: Mapping[str, Any]) -> str:
    if row["why_not"] is not None:
        return "not run"
    return times(row["ratio"]) + (LOSES if row["loses"] else "")


def _from_to(rounds: list[int]) -> str:
    low, high = min(rounds, default=0), max(rounds, default=0)
    return f"{low} to {high} rounds" if low < high else f"{high} round{'' if high == 1 else 's'}"


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Why contenders did not run, one line per contender and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["why_not"] is not None:
            found.setdefault((row["contender"], row["why_not"]), []).append(row["case"])
    return [
        f"not run: {name} ({len(where)} cases, first {where[0]}): {why}"
        for (name, why), where in found.items()
    ]


def vision_table(document: dict[str, Any]) -> Table:
    rows, stages = rows_with_stages(document["rows"], _shape_name)
    columns = staged_columns("shape", stages, VISION_COLUMNS)
    title = f"Shapes of picture and video models, synthetic tokens in {document['order']} order"
    return Table(title, columns, rows, _vision_notes(document, stages))


def _vision_notes(document: dict[str, Any], stages: list[str]) -> list[str]:
    seen = {row["shape"]: row for row in document["rows"]}
    layouts = "; ".join(
        f"{name} {row['length']} tokens ({row['layout']}: {row['source']}), {row['heads']} of "
        f"{row['model_heads']} heads"
        for name, row in seen.items()
    )
    refused = {
        f"not run: {row['contender']}: {row['why_not']}"
        for row in document["rows"]
        if row["why_not"] is not None
    }
    return [
        f"machine: {machine_text(document)}.",
        f"shape: {layouts}. Heads are reduced; every head costs the same. Last: threads.",
        "contender: 50% keeps half of the key blocks (int8; fast: int8-fast), and default is "
        "sparge.VISION; text is protected. SDPA: torch's, in its faster dtype here, which all of "
        "the shape's rows have.",
        f"ms: the whole call, then its stages ({', '.join(stages)}). times SDPA: time of SDPA / "
        "this time, within a round; median. +-: half its range over the rounds.",
        "re-order: ms to permute query, key and value, and the output back. A model that permutes "
        "its tokens once pays less than that once; with it: if every call did.",
        f"error: relative L1 against dense fp64, on {SAMPLED_ROWS} query rows of each head. quant: "
        "against fp64 over the same blocks.",
        *sorted(refused),
    ]


def _shape_name(row: Row) -> str:
    return f"{row['shape']} d{row['head_dim']} {row['threads']}t"


def busy_table(document: dict[str, Any]) -> Table:
    rows = [{**row, "case": _busy_name(row)} for row in document["rows"]]
    title = "SDPA and sparge's auto while other processes are at work, structured inputs in bf16"
    return Table(title, BUSY_COLUMNS, rows, _busy_notes(document))


def _busy_notes(document: dict[str, Any]) -> list[str]:
    return [
        *(_busy_summary(each) for each in document["summary"]),
        f"machine: {machine_text(document)}.",
        "others: processes that run an empty loop meanwhile. case: tokens, head dim, diagonal, "
        "heads, threads. auto ran: the backend that backend='auto' chose, in a call before timing.",
        "ms: wall time of the whole call: median, mean and 99th percentile (nearest rank) of calls "
        "in turns. auto / SDPA: the ratio of these; below 1 sparge is faster.",
        f"error: relative L1 against dense fp64, on {SAMPLED_ROWS} query rows of each head.",
    ]


def _busy_summary(each: Row) -> str:
    n = each["others"]
    return (
        f"{n} other process{'' if n == 1 else 'es'}: of {each['rows']} rows, the median is at most "
        f"{LIMITS['median']:g}x SDPA's in {each['median']:.0%}, the mean at most "
        f"{LIMITS['mean']:g}x in {each['mean']:.0%}, the 99th percentile at most "
        f"{LIMITS['p99']:g}x in {each['p99']:.0%}; all three in {each['all']:.0%}."
    )


def _busy_name(row: Row) -> str:
    keys = ("length", "head_dim", "causal", "heads", "threads")
    return str(BusyCase(**{key: row[key] for key in keys}))
