"""Turn the output of `sparge bench` into the Markdown table of docs/benchmarks.md.

    sparge bench > bench.txt
    python docs/tools/bench_table.py bench.txt

Rows whose speed-up varied by more than 50 % within the run are marked with `*`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

COLUMNS = {
    "cpu all": "all kept",
    "cpu 40%": "40 %",
    "cpu 20%": "20 %",
    "cpu default": "default recipe",
    "cpu fast all": "all, `int8-fast`",
    "cpu fast 40%": "40 %, `int8-fast`",
    "flex 40%": "FlexAttention, the same 40 %",
}
ROW = re.compile(
    r"^ +(?P<L>\d+) d(?P<D>\d+) (?P<mask>causal|full) \d+t +(?P<contender>\S.*?)  +"
    r"(?P<density>[\d.]+) +(?P<error>[\d.e-]+) +[\d.e-]+ +(?P<ms>[\d.]+) .*? "
    r"(?P<speedup>[\d.]+)x +(?P<spread>\d+)%"
)


def table(text: str) -> str:
    """One line per case: milliseconds of SDPA, then `speed-up (density, error)` per contender."""
    rows = [match for line in text.splitlines() if (match := ROW.match(line))]
    if not rows:
        raise ValueError("text holds no rows of `sparge bench`; give its plain output, not --json")
    heads = ["tokens, head dim", "SDPA ms", *COLUMNS.values()]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in dict.fromkeys((row["L"], row["D"], row["mask"]) for row in rows):
        own = {row["contender"]: row for row in rows if row.group("L", "D", "mask") == case}
        cells = [", ".join(case), f"{float(own['SDPA bf16']['ms']):.0f}"]
        cells += [_cell(own.get(name)) for name in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: re.Match[str] | None) -> str:
    if row is None:
        return "–"
    mark = "*" if int(row["spread"]) > 50 else ""
    return f"{row['speedup']}x{mark} ({float(row['density']):.2f}, {float(row['error']):.3f})"


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text()))
