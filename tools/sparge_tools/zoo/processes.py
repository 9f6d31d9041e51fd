"""Programs that do part of the work: pip, npm, and conversions."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

POLL_SECONDS = 0.1


def run_module(
    arguments: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Run `python -m arguments` with this interpreter; return its exit code and output."""
    return run_program([sys.executable, "-m", *arguments], log=log, env=env, poll=poll)


def run_program(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Run a command; return its exit code and output, of which `log` keeps a copy.

    poll: called several times per second. The process is killed if the caller is interrupted.
    """
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", **(env or {})}
    # To a file: a full pipe would block the process while we poll.
    with (
        open(log, "wb") as output,
        Popen(command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=env) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                poll()
        except BaseException:
            process.kill()
            raise
    said = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode < 0:
        signal = -process.returncode
        said += f"\nit was stopped by signal {signal}; perhaps the system is out of memory\n"
    return process.returncode, said


def last_line(output: str, start: str = "") -> str:
    """The last line that starts with `start`, or else the last line that is not empty."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line.removeprefix(start).strip() for line in lines if line.startswith(start)]
    return (found or lines or ["it gave no reason"])[-1]
