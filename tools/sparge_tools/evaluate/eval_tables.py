"""An evaluation as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparge.cli.screen import Column, Table, error, share, times

FOUND = {True: "found", False: "not found"}
PREFILL_COLUMNS = (
    Column("length", "tokens", "{}".format),
    Column("dense_seconds", "dense\ns", "{:.2f}".format),
    Column("sparge_seconds", "sparge\ns", "{:.2f}".format),
    Column("prefill_speedup", "prefill\ntimes dense", times),
    Column("spread", "+-", "{:.0%}".format),
    Column("dense_attention_seconds", "attention\ndense s", "{:.2f}".format),
    Column("sparge_attention_seconds", "attention\nsparge s", "{:.2f}".format),
    Column("attention_speedup", "attention\ntimes dense", times),
    Column("attention_share", "attention's\nshare", "{:.0%}".format),
    Column("limit", "limit\nof prefill", times),
    Column("density", "density", share),
    Column("rounds", "rounds", "{}".format),
)
PERPLEXITY_COLUMNS = (
    Column("length", "tokens", "{}".format),
    Column("where", "positions"),
    Column("dense_perplexity", "dense\nperplexity", "{:.3f}".format),
    Column("sparge_perplexity", "sparge\nperplexity", "{:.3f}".format),
    Column("relative", "change", "{:+.2%}".format),
    Column("relative_error", "+-", "{:.2%}".format),
    Column("agreement", "same\nnext token", "{:.1%}".format),
    Column("kl_mean", "KL\nmean", error),
    Column("kl_p99", "KL\np99", error),
    Column("density", "density", share),
)
NEEDLE_COLUMNS = (
    Column("length", "tokens", "{}".format),
    Column("depth", "depth", "{} %".format),
    Column("dense_loss", "dense\nloss", "{:.3f}".format),
    Column("sparge_loss", "sparge\nloss", "{:.3f}".format),
    Column("dense_found", "dense", FOUND.__getitem__),
    Column("sparge_found", "sparge", FOUND.__getitem__),
    Column("lost", "lost", {True: "LOST", False: ""}.__getitem__),
    Column("density", "density", share),
)
ERROR_COLUMNS = (
    Column("length", "tokens", "{}".format),
    Column("mean", "mean over\nlayers", error),
    Column("median", "median\nhead", error),
    Column("p95", "95th\npercentile", error),
    Column("worst_layer_mean", "worst\nlayer", error),
    Column("worst_layer", "which"),
    Column("heads", "heads", "{}".format),
)
TASK_COLUMNS = (
    Column("task", "task"),
    Column("length", "tokens", "{}".format),
    Column("metric", "metric"),
    Column("dense", "dense", "{:.4f}".format),
    Column("sparge", "sparge", "{:.4f}".format),
    Column("density", "density", share),
    Column("limit", "at most\ndocuments", "{}".format),
)


def eval_tables(document: dict[str, Any]) -> Iterator[Table]:
    """One table for each measure that has rows."""
    if rows := document["prefill"]:
        yield Table("Prefill", PREFILL_COLUMNS, rows, _prefill_notes(rows))
    if rows := document["perplexity"]:
        note = (
            "change: of perplexity against dense; +-: its standard error over tokens. KL: of "
            "dense from sparge; p99: of the worst window."
        )
        yield Table("Perplexity by position", PERPLEXITY_COLUMNS, _perplexity_lines(rows), [note])
    if rows := document["needle"]:
        yield Table("Needle in a haystack", NEEDLE_COLUMNS, rows, _needle_notes(rows))
    if rows := document["errors"]:
        note = "relative L1 against exact attention, on sampled rows of each head."
        yield Table("Error of attention", ERROR_COLUMNS, rows, [note, *_fallbacks(rows)])
    if rows := document["tasks"]:
        yield Table("lm-eval tasks", TASK_COLUMNS, rows)


def _prefill_notes(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "times dense: time with torch's SDPA in the same dtype / this time, within a round; "
        "median. +-: half its range.",
        "attention: summed over layers. limit of prefill: the speed-up if attention took no time.",
        "density: kept / allowed blocks over all attention calls; a dense call counts as 1.",
        *_fallbacks(rows),
    ]


def _fallbacks(rows: list[dict[str, Any]]) -> list[str]:
    """Reasons why calls did not run sparse, with the lengths."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for reason in row["fallbacks"]:
            found.setdefault(reason, []).append(str(row["length"]))
    return [f"not sparse at {', '.join(where)}: {reason}" for reason, where in found.items()]


def _perplexity_lines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for row in rows:
        for bucket in row["buckets"]:
            where = f"{bucket['start']} to {bucket['stop'] - 1}"
            lines.append({**bucket, "length": row["length"], "where": where})
        windows = "" if row["windows"] == 1 else f", {row['windows']} windows"
        lines.append({**row, "where": f"all{windows}"})
    return lines


def _needle_notes(rows: list[dict[str, Any]]) -> list[str]:
    names = ("dense_found", "sparge_found", "lost")
    dense, sparge, lost = (sum(row[name] for row in rows) for name in names)
    return [
        f"Of {len(rows)} answers, dense finds {dense} and sparge {sparge}; sparge loses {lost} "
        "that dense finds. loss: mean over the answer's tokens.",
        "found: greedy decoding writes the answer.",
    ]
