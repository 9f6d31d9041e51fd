"""Run a Python module in a child process, which is killed if the caller is interrupted."""

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
    """Run `python -m arguments` with this interpreter; return its exit code and output."""
    # To a file: a full pipe would block the process while we poll.
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
        said += f"\nit was stopped by signal {-code}; perhaps the system is out of memory\n"
    return code, said


def last_line(output: str, start: str = "") -> str:
    """The last line that starts with `start`, or else the last line that is not empty."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line.removeprefix(start).strip() for line in lines if line.startswith(start)]
    return (found or lines or ["it gave no reason"])[-1]
