"""The document of a benchmark as its two tables: what was measured, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cases import SAMPLED_ROWS, Case
from .machine import load_text
from .tables import Column, Table, error, milliseconds, percent, share, three_digits, times

LOSES = " LOSS"
ROW_COLUMNS = (
    Column("case", "case"),
    Column("contender", "contender"),
    Column("density", "den-\nsity", share),
    Column("error", "error", error),
    Column("quantization_error", "quant", error),
    Column("seconds", "ms", milliseconds),
    Column("statistics", "stats", milliseconds),
    Column("selection", "sele-\nction", milliseconds),
    Column("attention", "attn", milliseconds),
    Column("ratio_text", "times\nSDPA", "{}".format),
    Column("spread", "+-", "{:.0%}".format),
    Column("ns_per_score", "ns /\nscore", three_digits),
    Column("share_of_peak", "of\npeak", "{:.0%}".format),
)
TARGET_COLUMNS = (
    Column("target", "target"),
    Column("needed", "needed", "{}".format),
    Column("worst", "worst", "{}".format),
    Column("at", "at"),
    Column("best", "best", "{}".format),
    Column("met", "cases\nthat meet it", "{}".format),
    Column("verdict", "verdict"),
)


def table_of_rows(document: dict[str, Any]) -> Table:
    rows = [
        {**row, "case": str(_case_of(row)), "ratio_text": _ratio_text(row)}
        for row in document["rows"]
    ]
    lost = [row for row in rows if row.get("loses")]
    ours = [row for row in rows if row["kind"] == "sparse" and row["why_not"] is None]
    rounds = sorted({row["rounds"] for row in rows if row["why_not"] is None})
    peaks = ", ".join(
        f"{peak['peak']:.0f} GFLOP/s ({peak['of']}) with {n} threads"
        for n, peak in document["peaks"].items()
    )
    notes = [
        f"machine: {document['machine_line']}; our instruction set: {document['isa'] or 'none'}; "
        f"load average at the start: {load_text(document)}.",
        f"We lose {len(lost)} of our {len(ours)} rows; they are marked{LOSES}.",
        "case: tokens, head dim, diagonal, threads. contender: what is kept, of bf16 inputs unless "
        "it says fp32; ours in int8 (fast: int8-fast), chosen by mean (blend and default: by "
        "blend). flex: FlexAttention, compiled, given our blocks.",
        "ms: the whole call; then its stages: stats (means, pooled tokens, codes), selection "
        "(prediction and plan), attn (attention).",
        "times SDPA: time of torch's SDPA of the same dtype / this time, in the same round; median "
        f"of {_from_to(rounds)} rounds, contenders in turn. +-: half the range of it over the "
        "rounds (SDPA: of its time); far from 0, other work disturbed them.",
        f"error: relative L1 against dense fp64 of the same inputs, on {SAMPLED_ROWS} query rows "
        "of each head. quant: against fp64 of the same blocks, so without what sparsity costs.",
        "ns / score: time / query-key pairs of dense attention. of peak: 4 x head dim FLOP for "
        "each query-key pair in the blocks kept (QK and PV), per second, as a share of the fastest "
        f"fp32 or bf16 matrix product of torch in this run: {peaks}. 8-bit products may exceed it.",
        *_reasons(rows),
    ]
    title = f"{document['heads']} heads, structured inputs"
    return Table(title, ROW_COLUMNS, rows, notes)


def table_of_targets(document: dict[str, Any]) -> Table:
    rows = []
    for target in document["targets"]:
        form = times if target["figure"] == "ratio" else percent
        sign = ">=" if target["figure"] == "ratio" else "<="
        where = target["worst_case"]
        rows.append(
            {
                "target": target["target"],
                "needed": None if target["needed"] is None else f"{sign} {form(target['needed'])}",
                "worst": None if target["worst"] is None else form(target["worst"]),
                "at": None if where is None else str(Case(**where)),
                "best": None if target["best"] is None else form(target["best"]),
                "met": f"{target['cases_met']} of {target['cases']}" if target["cases"] else None,
                "verdict": target["verdict"],
            }
        )
    notes = [
        "A target is met if every case that it is judged at meets it. Speed-ups and the exact "
        "rows of blend are judged from 8192 tokens on."
    ]
    title = f"Targets for the instruction set {document['isa'] or 'none'}"
    return Table(title, TARGET_COLUMNS, rows, notes)


def _case_of(row: Mapping[str, Any]) -> Case:
    return Case(row["length"], row["head_dim"], row["causal"], row["threads"])


def _ratio_text(row: Mapping[str, Any]) -> str:
    if row["why_not"] is not None:
        return "not run"
    return times(row["ratio"]) + (LOSES if row["loses"] else "")


def _from_to(numbers: list[int]) -> str:
    if not numbers:
        return "0"
    low, high = numbers[0], numbers[-1]
    return str(low) if low == high else f"{low} to {high}"


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Why a contender did not run, once for all the cases with that reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["why_not"] is not None:
            found.setdefault((row["contender"], row["why_not"]), []).append(row["case"])
    return [
        f"not run: {name} ({len(where)} cases, first {where[0]}): {why}"
        for (name, why), where in found.items()
    ]
