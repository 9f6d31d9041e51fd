"""An evaluation as tables, and as figures: needles by depth, errors by head, perplexity."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparge.cli.screen import Column, Table, error, share
from sparge.support.atomic_files import replace_file

from ..figure import new_figure, to_png
from ..screen import times

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
WORST_LOSS = 2.0  # losses above this have the same colour


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


def draw_figures(document: dict[str, Any], directory: Path) -> list[Path]:
    """Write the figures that have rows; none without matplotlib. Returns their paths."""
    if find_spec("matplotlib") is None:
        return []
    made = []
    for name, rows, figure in (
        ("needle.png", document["needle"], needle_figure),
        ("errors.png", document["errors"], errors_figure),
        ("perplexity.png", document["perplexity"], perplexity_figure),
    ):
        if rows:
            replace_file(directory / name, to_png(figure(rows), dpi=120))
            made.append(directory / name)
    return made


def needle_figure(rows: list[dict[str, Any]]) -> Any:
    """Dense beside sparge: the loss as colour, and whether the answer was found."""
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    figure = new_figure(3.5 + 2 * len(lengths), 2 + 0.6 * len(depths))
    panels = figure.subplots(1, 2, sharey=True, squeeze=False)[0]
    image = None
    for panel, variant in zip(panels, ("dense", "sparge"), strict=True):
        grid = torch.full((len(depths), len(lengths)), torch.nan)
        for row in rows:
            i, j = depths.index(row["depth"]), lengths.index(row["length"])
            grid[i, j] = row[f"{variant}_loss"]
            text = f"{grid[i, j]:.2f}\n{'found' if row[f'{variant}_found'] else 'not found'}"
            panel.text(j, i, text, ha="center", va="center", fontsize=8)
        image = panel.imshow(grid.numpy(), cmap="RdYlGn_r", vmin=0, vmax=WORST_LOSS, aspect="auto")
        found = sum(row[f"{variant}_found"] for row in rows)
        panel.set(title=f"{variant}: {found} of {len(rows)} found", xlabel="tokens")
        panel.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    panels[0].set_yticks(range(len(depths)), [f"{d} %" for d in depths])
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(panels), label="loss of the answer, nats per token")
    return figure


def errors_figure(rows: list[dict[str, Any]]) -> Any:
    """Error and density of each layer and head, at the greatest length."""
    row = max(rows, key=lambda row: row["length"])
    figure = new_figure(9, 1.5 + 0.16 * len(row["layer_names"]) + 1.5)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, name, label, most in (
        (panels[0], "error_by_head", "error (relative L1)", None),
        (panels[1], "density_by_head", "density", 1.0),
    ):
        image = panel.imshow(_grid(row[name]), cmap="viridis", vmin=0, vmax=most, aspect="auto")
        figure.colorbar(image, ax=panel, label=label)
        panel.set(xlabel="head", title=label)
    panels[0].set_ylabel("layer")
    figure.suptitle(f"{row['length']} tokens; blank: not measured, or not sparse")
    return figure


def _grid(layers: list[list[float] | None]) -> list[list[float]]:
    heads = max((len(layer) for layer in layers if layer), default=1)
    return [[*(layer or []), *[float("nan")] * (heads - len(layer or []))] for layer in layers]


def perplexity_figure(rows: list[dict[str, Any]]) -> Any:
    """Change of perplexity by position, one line for each length."""
    figure = new_figure(7, 4)
    panel = figure.subplots()
    for row in rows:
        ends = [bucket["stop"] for bucket in row["buckets"]]
        change = [100 * bucket["relative"] for bucket in row["buckets"]]
        bar = [100 * bucket["relative_error"] for bucket in row["buckets"]]
        label = f"{row['length']} tokens"
        panel.errorbar(ends, change, yerr=bar, marker="o", capsize=3, label=label)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    places = sorted({bucket["stop"] for row in rows for bucket in row["buckets"]})
    panel.set_xticks(places, [str(place) for place in places])
    panel.set(xlabel="position, up to", ylabel="change of perplexity, %")
    panel.legend()
    return figure
