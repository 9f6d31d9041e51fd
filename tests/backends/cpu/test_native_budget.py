"""What `KeepError` does natively, step by step, against `rules/error_budget.py` and the reference.

The native core keeps what an error budget finds on its way; `budget_places` shows it.
"""

from __future__ import annotations

import math
from functools import cached_property
from types import SimpleNamespace

import pytest
import torch

from sparge import KeepError, Recipe
from sparge.backends.cpu import library as native
from sparge.backends.cpu import stages as cpu
from sparge.backends.reference import budget_rows
from sparge.backends.reference.select import first_steps
from sparge.engine.check import check_call
from sparge.routing import get_backend
from sparge.rules import error_budget as budget
from sparge.rules.forced_blocks import forced_blocks
from sparge.values.call import Inputs
from sparge.values.stages import prepare
from sparge.values.tokenmask import EXCLUDED, TokenMask

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")

F64 = torch.float64
ISAS = native.available() or ("none",)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("SPARGE_ISA", request.param)
    return request.param


class Case:
    """A call with its operands, and a mass map at random."""

    def __init__(
        self, *, Lq=300, Lk=330, D=40, Dv=24, Hq=4, Hk=2, dtype=torch.float32, precision="int8",
        is_causal=True, masked="", spoil=None, sample_rows=4, errors=0.05, pools=False,
    ):  # fmt: skip
        rng = torch.Generator().manual_seed(Lq + D)
        shapes = ((2, Hq, Lq, D), (2, Hk, Lk, D), (2, Hk, Lk, Dv))
        tensors = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]
        for which, where in (spoil or {}).items():
            tensors[which][where] = math.nan
        mask = None
        if masked:
            mask = torch.randn((2, 1, Lq, Lk), generator=rng)
            mask = mask > -1 if masked == "bool" else mask
        # A causal call with a mask hands both on as they are; here the mask comes alone.
        is_causal = is_causal and not masked
        skipped = {"skipped": "pool", "pool_group": 16} if pools else {"skipped": "drop"}
        recipe = Recipe(KeepError(errors), precision=precision, sample_rows=sample_rows, **skipped)
        align = {"is_causal": is_causal, "causal_align": "bottom_right"} if is_causal else {}
        self.call = check_call(
            *tensors, attn_mask=mask, enable_gqa=Hq != Hk, recipe=recipe, **align
        )
        self.inputs = Inputs(*tensors)
        self.tokens = TokenMask(Lq, Lk, is_causal, self.call.offset, mask)
        self.mass = torch.rand((2, Hq, self.call.n_q, self.call.n_k), generator=rng)

    @cached_property
    def prepared(self):
        stages = get_backend("cpu").stages()
        return prepare(stages, self.call, self.inputs, to_plan=True, to_attend=True)

    @cached_property
    def first(self):
        """The first step that keeps each block."""
        may = self.tokens.block_kinds(torch.device("cpu")) != EXCLUDED
        may = may.expand_as(self.mass)
        first = first_steps(self.mass.masked_fill(~may, 0.0), may)
        forced = forced_blocks(self.tokens.diagonal, self.call.recipe, torch.device("cpu"))
        return first.masked_fill(forced, 0).masked_fill(~may, -1)

    def select(self):
        """Everything that the native core finds, by name, and the plan."""
        call, n = self.call, budget.surveyed_rows(self.call.n_q)
        B, Hq, m = call.B, call.Hq, budget.MEASURED_ROWS
        S, C = budget.N_STEPS, len(budget.MEASURED_STEPS)
        found = {
            "deviation": torch.full((B, Hq, call.Lq), 7.0),
            "energy": torch.full((B, Hq, call.n_q), 7.0),
            "surveyed": torch.full((B, Hq, n), 7),
            "survey_weights": torch.full((2, B, Hq, n), 7.0, dtype=F64),
            "dropped": torch.full((B, Hq, n, S), 7.0),
            "survey": torch.full((3, 2, B, Hq, S), 7.0, dtype=F64),
            "drawn": torch.full((B, Hq, m), 7),
            "drawn_weights": torch.full((B, Hq, m), 7.0, dtype=F64),
            "drawn_dropped": torch.full((B, Hq, m, C), 7.0),
            "skipping": torch.full((B, Hq, m, C), 7.0, dtype=F64),
            "total": torch.full((B, Hq, m, C + 1), 7.0, dtype=F64),
            "whole": torch.full((B, Hq, m), 7.0, dtype=F64),
            "step": torch.full((B, Hq), 7),
        }
        may = self.tokens.block_kinds(torch.device("cpu")) != EXCLUDED
        mass = self.mass.masked_fill(~may, 0.0)
        counts = torch.empty((B, Hq, call.n_q), dtype=torch.int32)
        lists = {
            "counts": counts,
            "indices": counts.new_empty((*counts.shape, call.n_k)),
            "allowed": torch.empty_like(counts),
        }
        measured = torch.full((3, B, Hq), 7.0, dtype=F64)
        cpu._stage(
            cpu.SELECT, call, self.prepared, self.tokens, mass=mass, measured=measured, **lists,
            budget_places=list(found.values()),
        )  # fmt: skip
        surveyed = budget.SurveyedRows(found["surveyed"], found["survey_weights"])
        return SimpleNamespace(
            **found,
            counts=counts,
            measured=measured,
            rows=surveyed,
            facts=budget.Survey(found["dropped"], *found["survey"]),
        )


CASES = {
    "causal": {},
    "open": {"is_causal": False, "Hk": 4},
    "words in place": {"D": 64, "Dv": 64, "Lq": 256, "Lk": 256},
    "two groups of keys": {"D": 128, "Dv": 128, "Lq": 140, "Lk": 129},
    "fast": {"precision": "int8-fast"},
    "fast, pooled": {"precision": "int8-fast", "pools": True, "Lk": 700},
    "pooled": {"pools": True, "Lk": 700, "D": 64},
    "half": {"precision": "half", "D": 64},
    "exact": {"precision": "exact", "D": 64, "Lk": 320},
    "exact, pooled": {"precision": "exact", "pools": True, "is_causal": False},
    "bf16": {"dtype": torch.bfloat16, "D": 64, "Dv": 64},
    "bf16 half": {"dtype": torch.bfloat16, "precision": "half", "D": 128},
    "fp16": {"dtype": torch.float16, "precision": "half"},
    "mask": {"masked": "bool"},
    "bias": {"masked": "float", "precision": "exact"},
    "late rows": {"Lq": 200, "Lk": 700},
    "rows without keys": {"Lq": 400, "Lk": 150},
    "one row": {"Lq": 1},
    "many blocks": {"Lq": 9000, "Lk": 100, "Hq": 2, "D": 16, "Dv": 16, "precision": "exact"},
    "budgets of heads": {"errors": (0.01, 0.05, 0.029, 0.2), "sample_rows": 1},
    "all rows sampled": {"Lq": 70, "sample_rows": 128},
    "a broken query": {"spoil": {0: (0, 0, 5)}},
    "a broken key": {"spoil": {1: (1, 1, 5)}, "precision": "exact"},
    "a broken value": {"spoil": {2: (0, 0, 9)}},
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_a_budget(isa, name):
    case = Case(**CASES[name])
    call, prepared, tokens, first = case.call, case.prepared, case.tokens, case.first
    found, keep = case.select(), call.recipe.keep

    def close(ours, theirs, near, size=1.0):
        options = {"rtol": near, "atol": near * size, "equal_nan": True}
        torch.testing.assert_close(ours, theirs, **options)

    # How far queries are from the mean of their block.
    for ours, theirs in zip(
        (found.deviation, found.energy), budget_rows.deviations(case.inputs.query), strict=True
    ):
        close(ours, theirs, 1e-4)
    # The rows to survey.
    rows = budget.choose_rows(found.deviation, found.energy, keep, call.recipe.sample_rows)
    assert torch.equal(found.surveyed, rows.rows)
    close(found.survey_weights, rows.weights, 1e-12)
    # The mass that each step drops from them.
    near = 1e-4 if call.recipe.precision != "half" else 5e-3
    dropped = budget_rows.dropped_masses(call, prepared, first, tokens, found.surveyed)
    unused = (found.surveyed < 0)[..., None]
    close(found.dropped, dropped.masked_fill(unused, 0.0), near)
    summary = budget.summarize(found.rows, found.dropped)
    for what in ("mean", "deviation", "heaviest"):
        close(getattr(found.facts, what), getattr(summary, what), 1e-9)
    # The rows to measure.
    drawn, weights, of_rows = budget.draw_measured(found.rows, found.facts)
    assert torch.equal(found.drawn, drawn)
    close(found.drawn_weights, weights, 1e-12)
    close(found.drawn_dropped, of_rows, 0.0)
    # The errors of steps on them. 8-bit scores leave errors that pairs of bf16 may change by a
    # tenth.
    skipping, total, whole = budget_rows.step_errors(call, prepared, first, tokens, found.drawn)
    # A row that is not finite has no error that is.
    known = whole.isfinite()
    assert torch.equal(known, found.whole.isfinite())
    size = float(whole[known].mean())
    near = {"exact": 1e-5, "half": 0.01}.get(call.recipe.precision, 0.006)
    close(found.whole[known], whole[known], near, size)
    close(found.skipping[known], skipping[known], near, size)
    torch.testing.assert_close(found.total[known], total[known], rtol=0.1, atol=2 * near * size)
    # The step.
    measured = budget.Measured(
        found.skipping, found.total, found.whole, found.drawn_weights, found.drawn_dropped
    )
    expected = budget.decide(found.facts, measured, keep, call.Hk, may_raise=call.recipe.quantized)
    assert torch.equal(found.step, expected.step)
    close(found.measured, expected.measured, 1e-9)
    taken = (first >= 0) & (first <= found.step[..., None, None])
    assert torch.equal(found.counts.long(), taken.sum(-1))


def test_the_cases_take_different_steps_and_have_errors_to_see():
    steps, seen = set(), 0
    for name in CASES:
        found = Case(**CASES[name]).select()
        steps |= set(found.step.flatten().tolist())
        seen += int((found.skipping[..., 0] > 0.01 * found.whole).any())
    assert len(steps) > 6  # not only "everything"
    assert seen > len(CASES) // 2


def test_a_block_far_below_the_others_has_no_error_that_is_not_finite(isa):
    """2^-126 / 255 has no finite inverse, and 8-bit P is divided by it."""
    for exponent in range(120, 132):
        case = Case(precision="int8-fast", Lq=128, Lk=256, Hq=1, Hk=1, D=64, is_causal=False)
        direction = torch.ones(64) / 8
        case.inputs.query[:] = direction
        case.inputs.key[:] = 0.0
        # Scores of -exponent · ln 2 in the second half.
        case.inputs.key[:, :, 128:] = -exponent * math.log(2) * 8 * direction
        found = case.select()
        assert all(x.isfinite().all() for x in (found.skipping, found.total, found.whole))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("precision", ["int8", "exact"])
def test_what_is_not_finite_keeps_everything_of_its_head(isa, which, precision):
    """A NaN in query, key or value is met by the rows that see it; other heads are not touched."""
    where = (0, 0, slice(None)) if which == 0 else (0, 0, 5)
    keep = {}
    for backend in ("cpu", "reference"):
        case = Case(precision=precision, spoil={which: where}, Lq=256, Lk=256)
        stages = get_backend(backend).stages()
        prepared = prepare(stages, case.call, case.inputs, to_plan=True, to_attend=True)
        mass = stages.predict(case.call, prepared, case.tokens)
        keep[backend] = stages.select(case.call, prepared, mass, case.tokens)
    counts = [plan.counts for plan in keep.values()]
    assert torch.equal(counts[0][0, 0], counts[1][0, 0])
    everything = (case.tokens.block_kinds(torch.device("cpu")) != EXCLUDED).sum(-1).flatten()
    assert torch.equal(counts[0][0, 0].long(), everything[-case.call.n_q :].long())


def test_bits_depend_on_neither_threads_nor_batch(isa):
    case = Case(Lq=600, Lk=600, D=64, Dv=64)
    found = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            plan = cpu.select(case.call, case.prepared, case.mass, case.tokens)
        finally:
            torch.set_num_threads(before)
        found.append(plan.measured)
    assert torch.equal(*found)
    alone = [x[1:] for x in case.inputs[:3]]
    recipe = case.call.recipe
    call = check_call(
        *alone, enable_gqa=True, recipe=recipe, is_causal=True, causal_align="bottom_right"
    )
    stages = get_backend("cpu").stages()
    prepared = prepare(stages, call, Inputs(*alone), to_plan=True, to_attend=True)
    plan = cpu.select(call, prepared, case.mass[1:], case.tokens)
    # Precision is raised for a key head as a whole: only its bits may follow the batch.
    assert torch.equal(plan.measured[2, 0], found[0][2, 1])
    assert torch.equal(plan.measured[:2, 0], found[0][:2, 1])
