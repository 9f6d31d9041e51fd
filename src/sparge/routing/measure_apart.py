"""Measure inside a user's call, once: whether it is allowed, and in a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from .crossover import Crossover

ENV_CALIBRATE = "SPARGE_CALIBRATE"


def calibration_allowed() -> bool:
    """Whether a call may measure. Raises ValueError for another value of the variable."""
    asked = os.environ.get(ENV_CALIBRATE) or "1"
    if asked not in ("0", "1"):
        raise ValueError(
            f"{ENV_CALIBRATE} must be 0 (never measure inside a call) or 1, got {asked}"
        )
    return asked == "1"


class _StoppedError(Exception):
    """The caller was interrupted; the measurement ends at its next turn."""


def measure_apart(measure: Callable[[Callable[[], None]], Crossover]) -> Crossover:
    """`measure(proceed)` in a thread of its own, where no mode, autocast or record of the caller's
    applies. If the caller is interrupted, the thread is stopped and waited for: one that is left
    running native code at the end of the process would abort it."""
    found: list[Crossover] = []
    failed: list[Exception] = []
    stop, ended = threading.Event(), threading.Event()

    def proceed() -> None:
        if stop.is_set():
            raise _StoppedError

    def work() -> None:
        try:
            found.append(measure(proceed))
        except Exception as error:
            failed.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, name="sparge-calibrate")
    try:
        thread.start()
        thread.join()
    except BaseException:
        stop.set()
        if thread.ident is not None:  # it runs, even if start() was interrupted
            ended.wait()
        raise
    if failed:
        raise failed[0]
    return found[0]
