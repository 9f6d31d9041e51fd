"""Packed sequences: what each of them gets, all at once where a backend can, and one record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from torch import Tensor

from ..routing import current_router, get_backend
from ..routing.choice import Chosen
from ..routing.router import Cuts
from ..values.backend import DENSE
from ..values.call import Call, Inputs, work_dtype
from ..values.recipe import Recipe
from ..values.run import Run, when_read
from ..values.stages import AttendedPack, ChosenSequences, PackedStages
from .execute import (
    Outcome,
    run_attention,
    run_dense,
    run_of_counted,
    without_grad_and_autocast,
)
from .recording import Stopwatch, count_blocks, recording


def run_varlen(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cuts: Cuts,
    *,
    backend: str,
    align: str,
    recorded: bool = False,
) -> Outcome:
    """All sequences that one backend serves at once, and the others one after another. `call` is
    the whole pack as one call. The run is returned, not noted; recorded: make one in any case."""
    each = current_router().calibrate_pack(call, cuts, backend, align)
    out = query.new_empty((call.Lq, call.Hq, call.Dv))
    lse = query.new_empty((call.Hq, call.Lq), dtype=work_dtype(call.dtype))
    rest = dict(enumerate(each))
    work = _Work((query, key, value), cuts, align, rest, out, lse, recorded or recording())
    for team in _teams(call, each):
        work.run_at_once(team)
    work.run_rest()
    runs = [run for i in range(len(each)) if (run := work.runs.get(i)) is not None]
    run = run_together(call, runs)
    return Outcome(work.out, work.lse if call.return_lse else None, run=run)


@dataclass(frozen=True)
class _Team:
    """Sequences that run at once. call: the whole pack with their recipe. whole: the stages take
    all sequences or none."""

    call: Call
    stages: PackedStages
    each: dict[int, Chosen]
    whole: bool = False


def _teams(call: Call, each: list[Chosen]) -> Iterator[_Team]:
    """Sequences of one backend and recipe, where it has packed stages that take them."""
    groups: dict[tuple[str, Recipe], dict[int, Chosen]] = {}
    for i, (one, choice) in enumerate(each):
        groups.setdefault((choice.backend, one.recipe), {})[i] = one, choice
    for (name, recipe), own in groups.items():
        packed = None if name == DENSE else get_backend(name).packed
        if packed is None:
            continue
        stages, pack = packed(), replace(call, recipe=recipe)
        if stages.why_not_packed(pack, whole=False) is None:
            yield _Team(pack, stages, own)
        elif len(own) == len(each) and stages.why_not_packed(pack, whole=True) is None:
            yield _Team(pack, stages, own, whole=True)


@dataclass
class _Work:
    """Sequences that are still to run, and what has been made of the others. recorded: make runs.
    runs: they, by number. planned: watches of those that were planned in a pack."""

    pack: tuple[Tensor, Tensor, Tensor]
    cuts: Cuts
    align: str
    rest: dict[int, Chosen]
    out: Tensor
    lse: Tensor
    recorded: bool
    runs: dict[int, Run | None] = field(default_factory=dict)
    planned: dict[int, Stopwatch] = field(default_factory=dict)

    def run_at_once(self, team: _Team) -> None:
        inputs = Inputs(*(x.transpose(0, 1).unsqueeze(0) for x in self.pack))
        first = next(iter(team.each.values()))
        watch = Stopwatch(team.call, first[1], inputs.query.device, recorded=self.recorded)
        some = None
        if not team.whole:
            router = current_router()
            limits = {i: router.kept_limit(*own) for i, own in team.each.items()}
            some = ChosenSequences(list(team.each), limits, (self.out, self.lse))
        start = time.perf_counter()
        with without_grad_and_autocast(team.call.device):
            given = (team.call, inputs, self.cuts, self.align, watch.stage, some)
            done = team.stages.attend_packed(*given)
        if watch.active and done.seconds:
            watch.whole(time.perf_counter() - start, done.seconds)
        self.out, self.lse = done.out, done.lse
        if watch.active:
            self._record(watch, team, done)
        for i, (one, choice) in team.each.items():
            if i in done.left:
                self.rest[i] = one, replace(choice, backend=DENSE)
            else:
                del self.rest[i]

    def _record(self, watch: Stopwatch, team: _Team, done: AttendedPack) -> None:
        """One run for each sequence. They ran together: each has its share of the time, by blocks.
        Those that were planned and then left have a watch with their share of planning."""
        attended = [i for i in team.each if i not in done.left]
        if watch.captured:
            for i in attended:
                own = Stopwatch(*team.each[i], watch.device, recorded=True)
                self.runs[i] = run_of_counted("attention", own, None)
            return
        plans = dict(zip(team.each, done.plans(), strict=True))
        each = {i: count_blocks(plan, skips) for i, (plan, skips) in plans.items()}
        flat = {(i, name): x for i, found in each.items() for name, x in found.items()}
        counted = watch.to_host(flat).then(_by_sequence)
        seconds = counted.then(lambda found: _shares(found, watch.seconds(), attended))
        for i, (one, choice) in team.each.items():
            shared = seconds.then(itemgetter(i))
            own = Stopwatch(one, choice, watch.device, recorded=True, shared=shared.value)
            own.waited = watch.waited / len(team.each)
            if i in done.left:
                own.choice = current_router().choose_after_plan(plans[i][0], one, choice)
                self.planned[i] = own
            else:
                self.runs[i] = run_of_counted("attention", own, counted.then(itemgetter(i)))

    def run_rest(self) -> None:
        """One sequence after another."""
        for i, (call, choice) in self.rest.items():
            inputs = sequence(*self.pack, self.cuts, i)
            if choice.backend == DENSE:
                watch = self.planned.get(i) or Stopwatch(
                    call, choice, inputs.query.device, recorded=self.recorded
                )
                done = run_dense(call, inputs, watch)
            else:
                done = run_attention(call, choice, inputs, recorded=self.recorded)
            rows = slice(self.cuts[0][i], self.cuts[0][i + 1])
            self.out[rows] = done.out[0].transpose(0, 1)
            if call.return_lse and done.lse is not None:
                self.lse[:, rows] = done.lse[0]
            self.runs[i] = done.run


def _by_sequence(counted: Mapping[tuple[int, str], Tensor]) -> dict[int, dict[str, Tensor]]:
    each: dict[int, dict[str, Tensor]] = {}
    for (i, name), x in counted.items():
        each.setdefault(i, {})[name] = x
    return each


def _shares(
    counted: Mapping[int, Mapping[str, Tensor]], seconds: dict[str, float], attended: list[int]
) -> dict[int, dict[str, float]]:
    """The seconds of each packed sequence, by its allowed blocks; of the attend stage, among those
    that were attended."""
    blocks = {i: sum(found["blocks"][0, 1].tolist()) for i, found in counted.items()}
    ran = set(attended)
    of_all, of_attended = sum(blocks.values()), sum(blocks[i] for i in ran)
    return {
        i: {
            name: spent * n / max(of_attended if name == "attend" else of_all, 1)
            for name, spent in seconds.items()
            if name != "total" and (name != "attend" or i in ran)
        }
        for i, n in blocks.items()
    }


def sequence(query: Tensor, key: Tensor, value: Tensor, cuts: Cuts, i: int) -> Inputs:
    """Views `[1, H, L, D]` of packed sequence `i`."""
    (q_start, q_stop), (k_start, k_stop) = (each[i : i + 2] for each in cuts)
    parts = (query[q_start:q_stop], key[k_start:k_stop], value[k_start:k_stop])
    return Inputs(*(x.transpose(0, 1).unsqueeze(0) for x in parts))


def run_together(call: Call, runs: list[Run]) -> Run | None:
    """One record of a varlen call: blocks add up, and each sequence keeps its own in `parts`."""
    if not runs:
        return None
    # Sequences may go to different backends, short ones to dense for example.
    names = list(dict.fromkeys(run.backend for run in runs))
    alike = len({(run.backend, run.routed_to_dense) for run in runs}) == 1
    known = {
        "what": "attention_varlen",
        "call": f"{len(runs)} sequences, {call}",
        "label": runs[0].label,
        "backend": "+".join(names),
        "isa": "+".join(dict.fromkeys(run.isa for run in runs)),
        "recipe": call.recipe,
        "reason": runs[0].reason if alike else "each sequence by its own length; see parts",
        "rejected": runs[0].rejected if alike else {},
        "routed_to_dense": all(run.routed_to_dense for run in runs),
        "row_group": runs[0].row_group,
        "cost_source": runs[0].cost_source,
        "parts": tuple(runs),
    }
    if any(run.captured for run in runs):
        return Run.of_captured(known)
    return Run.of(known, when_read(runs).then(_added_up))


def _added_up(runs: Sequence[Run]) -> dict[str, Any]:
    """The numbers of runs that are one call."""
    allowed = sum(run.allowed for run in runs)
    stages = dict.fromkeys(name for run in runs for name in run.seconds)
    errors, bounds = (
        [x for run in runs if (x := getattr(run, name)) is not None]
        for name in ("error_by_head", "bound_by_head")
    )
    return {
        "sparsity": sum(run.sparsity * run.allowed for run in runs) / max(allowed, 1),
        "kept": sum(run.kept for run in runs),
        "allowed": allowed,
        "pv_skips": sum(run.pv_skips for run in runs),
        "pv_groups": sum(run.pv_groups for run in runs),
        "waited": sum(run.waited for run in runs),
        "error_by_head": tuple(map(max, zip(*errors, strict=True))) if errors else None,
        "bound_by_head": tuple(map(max, zip(*bounds, strict=True))) if bounds else None,
        "seconds": {name: sum(run.seconds.get(name, 0.0) for run in runs) for name in stages},
    }
