"""Another Python at work for us: waited for, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_SECONDS = 0.2


def run_module(
    arguments: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """`python -m arguments` with this interpreter: its exit code, and what it wrote."""
    # To a file: a pipe that nobody empties while we poll would stop the process when it is full.
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **(env or {})},
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    said = log.read_text(encoding="utf-8", errors="replace")
    if code < 0:
        said += f"\nit was stopped by signal {-code}, as a system does that is out of memory\n"
    return code, said


def last_line(output: str, start: str = "") -> str:
    """The last line that says something, best one that starts with `start`."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line.removeprefix(start).strip() for line in lines if line.startswith(start)]
    return (found or lines or ["it gave no reason"])[-1]
