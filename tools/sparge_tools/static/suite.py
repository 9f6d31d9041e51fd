"""Compile every launch for every target, two at a time, and judge it."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import IO

from sparge.backends.triton.launch import Launch

from .checks import Intent, Verdict, check, ratchet_numbers
from .compile import Compiled, compile_launch, specialize
from .ratchet import Entry
from .targets import TARGETS, Target
from .variants import Variant, intent_of, launches_of

WORKERS = 2
Task = tuple[Variant, str]


@dataclass(frozen=True)
class Made:
    """One kernel of a variant for one target: compiled, or why not."""

    variant: str
    kernel: str
    target: str
    intent: Intent
    compiled: Compiled | None
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.variant}, {self.kernel} on {self.target}"


@dataclass(frozen=True)
class Result:
    made: Made
    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)


def failures(results: Iterable[Result]) -> list[str]:
    """Every broken rule; targets for which the reason is the same share a line."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        made = result.made
        for verdict in result.verdicts:
            if not verdict.ok:
                key = (f"{made.variant}, {made.kernel}", f"{verdict.rule}: {verdict.reason}")
                found.setdefault(key, []).append(made.target)
    return [f"{name} on {', '.join(targets)}: {why}" for (name, why), targets in found.items()]


def judge(made: Made, ratchet: Mapping[str, Entry]) -> Result:
    if made.compiled is None:
        return Result(made, (Verdict("compiles", False, made.error),))
    entry = ratchet.get(made.name)
    recorded = None if entry is None else entry.numbers
    return Result(made, tuple(check(made.compiled, made.intent, recorded)))


def recorded_by(made: Iterable[Made]) -> dict[str, dict[str, int]]:
    """What `update_ratchet` takes."""
    return {x.name: ratchet_numbers(x.compiled) for x in made if x.compiled is not None}


def compile_task(
    task: Task,
    *,
    seen: set[str] | None = None,
    compile: Callable[[Launch, Target], Compiled] = compile_launch,
) -> list[Made]:
    """Every distinct kernel of a variant's stages for one target; never raises.

    seen: keys of kernels that are left out; those that are compiled are added."""
    variant, target = task
    try:
        by_stage = launches_of(variant, target)
    except Exception as error:
        return [failed(task, "launching", reason_of(error))]
    made: list[Made] = []
    seen = set() if seen is None else seen
    names: Counter[str] = Counter()
    for stage in variant.stages:
        for launch in by_stage.get(stage, ()):
            intent = intent_of(variant, launch, stage, target)
            try:
                key = specialize(launch, TARGETS[target]).key
                if key in seen:
                    continue
                seen.add(key)
                compiled = compile(launch, TARGETS[target])
            except Exception as error:
                made.append(failed(task, launch.name, reason_of(error)))
            else:
                # A kernel that a call launches in several forms has a number for each.
                names[launch.name] += 1
                n = names[launch.name]
                name = launch.name if n == 1 else f"{launch.name} #{n}"
                made.append(Made(variant.name, name, target, intent, compiled))
    return made


def failed(task: Task, kernel: str, why: str) -> Made:
    return Made(task[0].name, kernel, task[1], Intent(), None, why)


def reason_of(error: BaseException) -> str:
    """The innermost cause, with what the compiler printed of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = getattr(error, "error_message", None) or str(error)
    parts = [f"{type(error).__name__}: {' '.join(said.split())[-300:]}", *_printed_errors()]
    return "; ".join(parts)


def tasks_of(variants: Iterable[Variant], targets: Iterable[str]) -> list[Task]:
    """The slowest compilers first, so that both workers end together."""
    wanted = list(targets)
    each = [(x, name) for name in reversed(wanted) for x in variants if name in x.targets]
    return sorted(each, key=lambda task: task[1] != "gfx1100")


def compile_all(
    tasks: Sequence[Task],
    *,
    step: Callable[[str], None] = lambda _: None,
    work: Callable[[Task], list[Made]] = compile_task,
) -> list[Made]:
    """In the order of the tasks. A compiler that takes its process along is a failure like any."""
    found: dict[int, list[Made]] = {}
    for i, made in _in_pool(dict(enumerate(tasks)), WORKERS, work):
        found[i] = made
        step(f"{tasks[i][0].name} on {tasks[i][1]}")
    for i, task in enumerate(tasks):
        if i not in found:  # its worker died, or another's did: alone, it is known whose
            alone = dict(_in_pool({i: task}, 1, work))
            found[i] = alone.get(i, [failed(task, "compiler", "the compiler crashed")])
            step(f"{task[0].name} on {task[1]}")
    return [made for i in range(len(tasks)) for made in found[i]]


def _in_pool(
    tasks: Mapping[int, Task], workers: int, work: Callable[[Task], list[Made]]
) -> Iterator[tuple[int, list[Made]]]:
    """What was done before a worker died, if one did."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_hush) as pool:
        futures = {pool.submit(work, task): i for i, task in tasks.items()}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                continue


_printed: IO[bytes] | None = None


def _hush() -> None:
    """What compilers print, thousands of lines for one error, goes to a file of the worker's."""
    global _printed
    _printed = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker
    os.dup2(_printed.fileno(), 1)
    os.dup2(_printed.fileno(), 2)


def _printed_errors() -> list[str]:
    """The first error that was printed since the last one."""
    if _printed is None:
        return []
    end = os.lseek(_printed.fileno(), 0, os.SEEK_CUR)
    text = os.pread(_printed.fileno(), end, 0).decode(errors="replace")
    os.ftruncate(_printed.fileno(), 0)
    os.lseek(_printed.fileno(), 0, os.SEEK_SET)
    found = re.search(r"^.*(?:Assertion|LLVM ERROR|error:).*$", text, re.M)
    return [] if found is None else [" ".join(found[0].split())[-300:]]
