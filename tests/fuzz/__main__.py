"""`python -m fuzz`: draw calls until the time is up; exit 1 with the smallest call that fails.

    FUZZ_SECONDS=120  duration; FUZZ_SEED=… seed (printed); FUZZ_ISA=avx2 one instruction set
    python -m fuzz "Drawn(Lq=3)"   run one printed call again

The calls run in a child process; if it crashes, the parent prints the call.
"""

from __future__ import annotations

import faulthandler
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

import sparge

from . import draws
from .case import WrongError
from .draws import Drawn
from .judge import judge

ROUND = 50  # calls between checks of the time
SHRINK = 60  # seconds to shrink a failing call
KEEPS = ("KeepAll", "KeepError", "KeepFraction", "KeepMass")
NAMES = {name: getattr(sparge, name) for name in (*KEEPS, "Recipe")}
# Waiting threads must not spin.
QUIET = {"OMP_WAIT_POLICY": "passive"}
QUICK = settings(
    max_examples=ROUND, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
)  # fmt: skip


def main() -> int:
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(sys.argv) > 1 and sys.argv[1] != "--child":
        names = {"Drawn": Drawn, "nan": float("nan"), "inf": float("inf"), **NAMES}
        judge(eval(sys.argv[1], names))
        print("fuzz: this call passes")
        return 0
    seconds = float(os.environ.get("FUZZ_SECONDS") or 120)
    first = int(os.environ.get("FUZZ_SEED") or time.time_ns() % 10**9)
    if len(sys.argv) > 1:
        return draw_until(time.monotonic() + seconds, first, Path(sys.argv[2]))
    print(f"fuzz: {seconds:.0f} s, FUZZ_SEED={first}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "call"
        command = [sys.executable, "-m", "fuzz", "--child", str(note)]
        done = subprocess.run(command, env={**os.environ, **QUIET, "FUZZ_SEED": str(first)})
        if done.returncode not in (0, 1):
            print(f"fuzz: the process exited with {done.returncode} in\n{note.read_text()}")
    return int(done.returncode != 0)


def draw_until(end: float, first: int, note: Path) -> int:
    faulthandler.enable()
    start, done, runs = time.monotonic(), 0, 0
    failing: tuple[Drawn, Exception] | None = None
    shrunk = math.inf

    def one(drawn: Drawn) -> None:
        nonlocal done, runs, failing, shrunk
        if time.monotonic() > shrunk:
            raise KeyboardInterrupt  # Hypothesis catches everything else
        note.write_text(repr(drawn))
        try:
            runs += judge(drawn)
        except Exception as error:
            failing, shrunk = (drawn, error), min(shrunk, time.monotonic() + SHRINK)
            raise
        done += 1

    number = first
    while time.monotonic() < end:
        try:
            seed(number)(QUICK(given(drawn=draws.calls())(one)))()
        except BaseException:
            if failing is None:
                raise
            drawn, error = failing
            what = "" if isinstance(error, WrongError) else f"{type(error).__name__}: "
            print(f"fuzz: wrong after {done} calls, in the round of FUZZ_SEED={number}")
            print(f'{what}{error}\n\npython -m fuzz "{drawn!r}"')
            return 1
        number += 1
    minutes = (time.monotonic() - start) / 60
    print(f"fuzz: {done} calls, {runs} runs of the core, {done / minutes:.0f} calls a minute")
    return 0


sys.exit(main())
