"""The document of `sparge bench --suite vision` as a table."""

from __future__ import annotations

from typing import Any

from sparge.cli.machine import machine_text
from sparge.cli.screen import Column, Table, milliseconds, times

from .bench_table import Row, rows_with_stages, staged_columns
from .cases import SAMPLED_ROWS

CASE = Column("case", "shape")
LAST_COLUMNS = (
    Column("reorder_seconds", "re-\norder", milliseconds),
    Column("ratio_reordered", "times SDPA\nwith it", times),
)


def vision_table(document: dict[str, Any]) -> Table:
    rows, stages = rows_with_stages(document["rows"], _case)
    columns = staged_columns(CASE, stages, LAST_COLUMNS)
    title = f"Shapes of picture and video models, synthetic tokens in {document['order']} order"
    return Table(title, columns, rows, _notes(document, stages))


def _notes(document: dict[str, Any], stages: list[str]) -> list[str]:
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


def _case(row: Row) -> str:
    return f"{row['shape']} d{row['head_dim']} {row['threads']}t"
