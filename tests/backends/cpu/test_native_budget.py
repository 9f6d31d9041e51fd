"""What `KeepError` does natively, against its twins in `backends/budget.py` and the reference."""

from __future__ import annotations

import math

import pytest
import torch

from sparge import KeepError, Recipe
from sparge.backends.cpu import library as native
from sparge.backends.cpu import select as cpu
from sparge.backends.cpu.library import scored_parts, token_parts
from sparge.backends.reference import budget_rows
from sparge.backends.reference.select import first_steps
from sparge.engine.check import check_call
from sparge.routing import get_backend
from sparge.rules import error_budget as budget
from sparge.values.call import Inputs
from sparge.values.recipe import PRECISIONS
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
    """A call with its operands, and the first step that keeps each block, at random."""

    def __init__(
        self, *, Lq=300, Lk=330, D=40, Dv=24, Hq=4, Hk=2, dtype=torch.float32, precision="int8",
        is_causal=True, masked="", spoil=None, sample_rows=4,
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
        recipe = Recipe(KeepError(0.05), precision=precision, sample_rows=sample_rows)
        align = {"is_causal": is_causal, "causal_align": "bottom_right"} if is_causal else {}
        self.call = check_call(
            *tensors, attn_mask=mask, enable_gqa=Hq != Hk, recipe=recipe, **align
        )
        self.inputs = Inputs(*tensors)
        self.tokens = TokenMask(Lq, Lk, is_causal, self.call.offset, mask)
        stages = get_backend("cpu").stages()
        self.prepared = prepare(stages, self.call, self.inputs, to_plan=True, to_attend=True)
        may = self.tokens.block_kinds(torch.device("cpu")) != EXCLUDED
        shape = (2, Hq, self.call.n_q, self.call.n_k)
        may = may.expand(shape)
        self.first = first_steps(torch.rand(shape, generator=rng), may).masked_fill(~may, -1)
        self.rows = torch.arange(3, Lq, max(1, Lq // 20)).expand(2, Hq, -1).contiguous()
        self.scored = (
            *scored_parts(self.prepared),
            PRECISIONS.index(precision),
            self.call.scale,
        )

    def survey(self, rows, weights):
        dropped = torch.full((*rows.shape, budget.N_STEPS), 7.0)
        facts = torch.full((3, 2, *rows.shape[:2], budget.N_STEPS), 7.0, dtype=F64).unbind()
        native.ops().survey(
            *self.scored, self.first.int(), rows, weights, *token_parts(self.tokens), dropped,
            *facts, native.isa_number(),
        )  # fmt: skip
        return budget.Survey(dropped, *facts)

    def step_errors(self):
        args = (self.scored, self.first.int(), self.rows, self.tokens)
        return cpu._step_errors(self.call, self.prepared, *args)


CASES = {
    "causal": {},
    "open": {"is_causal": False, "Hk": 4},
    "words in place": {"D": 64, "Dv": 64, "Lq": 256, "Lk": 256},
    "two groups of keys": {"D": 128, "Dv": 128, "Lq": 140, "Lk": 129},
    "fast": {"precision": "int8-fast"},
    "half": {"precision": "half", "D": 64},
    "exact": {"precision": "exact", "D": 64, "Lk": 320},
    "bf16": {"dtype": torch.bfloat16, "D": 64, "Dv": 64},
    "bf16 half": {"dtype": torch.bfloat16, "precision": "half", "D": 128},
    "fp16": {"dtype": torch.float16, "precision": "half"},
    "mask": {"masked": "bool"},
    "bias": {"masked": "float", "precision": "exact"},
    "late rows": {"Lq": 200, "Lk": 700},
    "rows without keys": {"Lq": 400, "Lk": 150},
}


# -- rows and decision: the same rules, whatever the instruction set ---------------------------


def deviations_of(Lq, rng, kind):
    n_q = -(-Lq // 128)
    deviation = torch.rand((2, 3, Lq), generator=rng)
    if kind == "ties":
        deviation = (deviation * 3).round()
    if kind == "broken":
        deviation[0, 0, Lq // 2] = math.nan
        deviation[0, 1, Lq // 3] = math.inf
        deviation[1, 2] = math.nan
    energy = torch.rand((2, 3, n_q), generator=rng) * 256
    if kind == "broken":
        energy[0, 0] = math.nan
    return deviation, energy


@pytest.mark.parametrize("kind", ["plain", "ties", "broken"])
@pytest.mark.parametrize("Lq", [1, 5, 70, 128, 300, 2048, 4200, 20000])
def test_rows_are_those_of_the_reference(Lq, kind):
    deviation, energy = deviations_of(Lq, torch.Generator().manual_seed(Lq), kind)
    keep = KeepError((0.01, 0.05, 0.029))
    expected = budget.choose_rows(deviation, energy, keep, 4)
    n = expected.rows.shape[2]
    rows = torch.full((2, 3, n), 7)
    weights = torch.full((2, 2, 3, n), 7.0, dtype=F64)
    places = budget.checked_places(Lq, 4)
    native.ops().choose_rows(
        deviation, energy, torch.tensor(keep.max_error, dtype=F64), places.starts, places.may,
        places.n_far, places.n_near, places.far_ranks, places.near_places,
        *budget.rows_of_blocks(energy.shape[2]), budget.DISAGREES, budget.SMALL_BUDGET, rows,
        weights, native.isa_number(),
    )  # fmt: skip
    assert torch.equal(rows, expected.rows)
    torch.testing.assert_close(weights, expected.weights, rtol=1e-12, atol=0)
    for kind_of_weights in weights.flatten(0, 2):
        assert kind_of_weights.sum().item() == pytest.approx(1.0)


def survey_at_random(rng, kind, n=48):
    rows = torch.arange(n).expand(2, 4, n).contiguous()
    weights = torch.rand((2, 2, 4, n), generator=rng, dtype=F64)
    # What every budget surveys is part of what small budgets survey.
    weights[0, ..., 5:9] = 0.0
    if kind == "ties":
        weights = (weights > 0).double()
    weights /= weights.sum(-1, True)
    dropped = torch.tensor(budget.MISSING) * (0.5 + torch.rand((2, 4, n, 1), generator=rng))
    dropped *= torch.tensor([1.0, 0.5, 0.02, 0.0])[:, None, None]
    if kind == "ties":
        dropped = (dropped * 40).round() / 40
    if kind == "broken":
        dropped[0, 0, 11] = math.nan
        dropped[1, 1, 6] = math.nan  # a row that only small budgets look at
    surveyed = budget.SurveyedRows(rows, weights)
    return surveyed, budget.summarize(surveyed, dropped)


@pytest.mark.parametrize("kind", ["plain", "ties", "broken"])
@pytest.mark.parametrize("seed", range(5))
def test_measured_rows_are_those_of_the_reference(seed, kind):
    surveyed, survey = survey_at_random(torch.Generator().manual_seed(seed), kind)
    expected = budget.draw_measured(surveyed, survey)
    found = cpu._draw_measured(surveyed, survey)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=0)
    assert torch.equal(found[2].nan_to_num(7.0), expected[2].nan_to_num(7.0))


def test_rows_that_only_small_budgets_survey_change_no_draw():
    surveyed, survey = survey_at_random(torch.Generator().manual_seed(3), "plain")
    before = cpu._draw_measured(surveyed, survey)[0]
    survey.dropped[..., 5:9, :] = 0.25
    assert torch.equal(cpu._draw_measured(surveyed, survey)[0], before)
    assert not ((before >= 5) & (before < 9)).any()


def measured_at_random(rng, kind, m=16):
    n = len(budget.MEASURED_STEPS)
    missing = torch.tensor([budget.MISSING[step] for step in budget.MEASURED_STEPS], dtype=F64)
    skipping = missing * (0.5 + torch.rand((2, 4, m, 1), generator=rng, dtype=F64))
    size = torch.tensor([0.03, 0.02, 0.01, 0.002])[:, None, None]
    added = torch.rand((2, 4, m, n + 1), generator=rng, dtype=F64) * size
    total = torch.cat([skipping, torch.zeros(2, 4, m, 1)], -1) + added
    whole = torch.rand((2, 4, m), generator=rng, dtype=F64) + 0.5
    weights = torch.rand((2, 4, m), generator=rng, dtype=F64)
    dropped = skipping.float() * 1.4
    if kind == "broken":
        skipping[0, 0, 3, 2:] = math.nan
        total[0, 1, 2, -1] = math.inf
        whole[1, 0] = 0.0
        total[1, 2] = math.nan
    return budget.Measured(skipping, total, whole, weights / weights.sum(-1, True), dropped)


@pytest.mark.parametrize("kind", ["plain", "broken"])
@pytest.mark.parametrize("may_raise", [False, True])
@pytest.mark.parametrize("Hk", [1, 2, 4])
def test_the_decision_is_that_of_the_reference(Hk, may_raise, kind):
    steps = set()
    for seed in range(6):
        rng = torch.Generator().manual_seed(seed)
        _, survey = survey_at_random(rng, kind)
        measured = measured_at_random(rng, kind)
        keep = KeepError((0.01, 0.03, 0.05, 0.2))
        expected = budget.decide(survey, measured, keep, Hk, may_raise=may_raise)
        step = torch.full((2, 4), -7)
        out = torch.full((3, 2, 4), 7.0, dtype=F64)
        native.ops().decide(
            survey.mean, survey.deviation, survey.heaviest, measured.skipping, measured.total,
            measured.whole, measured.weights, measured.dropped, cpu._budgets(keep, 4), Hk,
            may_raise, *cpu._rules(), step, out, native.isa_number(),
        )  # fmt: skip
        assert torch.equal(step, expected.step)
        torch.testing.assert_close(out, expected.measured, rtol=1e-9, atol=1e-12)
        steps |= set(step.flatten().tolist())
    assert len(steps) > 3  # not only "everything"


def test_numbers_that_lead_nowhere_are_refused():
    keep = KeepError(0.05)
    deviation, energy = deviations_of(300, torch.Generator(), "plain")
    places = budget.checked_places(300, 4)
    good = {
        "deviation": deviation, "energy": energy, "budget": cpu._budgets(keep, 3),
        "starts": places.starts, "may": places.may, "n_far": places.n_far,
        "n_near": places.n_near, "far_ranks": places.far_ranks,
        "near_places": places.near_places, "rows_of_block": 4, "most_of_block": 8,
        "disagrees": 0.5, "small_budget": 0.03, "rows": torch.empty((2, 3, 24), dtype=torch.int64),
        "weights": torch.empty((2, 2, 3, 24), dtype=F64), "isa": native.isa_number(),
    }  # fmt: skip
    native.ops().choose_rows(**good)
    for name, bad, says in (
        ("starts", places.starts + 1, "first rows of query blocks"),
        ("starts", places.starts + 300, "starts must be in 0 … 299"),
        ("n_far", places.n_far + 200, "n_far must be in 1 … "),
        ("n_near", places.n_near + 200, "n_near must be in 0 … "),
        ("far_ranks", places.far_ranks + 100, "far_ranks must be in 0 … "),
        ("near_places", places.near_places * 0, "every place once"),
        ("near_places", places.near_places.flip(-1), "those that may be checked first"),
        ("most_of_block", 1, "most_of_block must be in 2 … "),
    ):
        with pytest.raises(RuntimeError, match=says):
            native.ops().choose_rows(**good | {name: bad})


# -- what is seen of rows ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("L", "D"), [(300, 40), (256, 64), (1, 128)])
def test_deviations(isa, dtype, L, D):
    query = torch.randn((2, L, 3, D), generator=torch.Generator().manual_seed(L)).to(dtype)
    query[1, L // 2, 1, 3] = math.nan
    query = query.transpose(1, 2)  # rows of all heads side by side
    n_q = -(-L // 128)
    deviation, energy = torch.full((2, 3, L), 7.0), torch.full((2, 3, n_q), 7.0)
    native.ops().deviations(query, deviation, energy, native.isa_number())
    expected = budget_rows.deviations(query)
    torch.testing.assert_close(deviation, expected[0], rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(energy, expected[1], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_surveyed_masses(isa, name):
    case = Case(**CASES[name])
    rows = case.rows.clone()
    rows[..., 4] = -1
    weights = torch.rand((2, *rows.shape), dtype=F64, generator=torch.Generator().manual_seed(1))
    weights[..., 4] = 0.0
    weights[0, ..., 7] = 0.0
    weights /= weights.sum(-1, True)
    found = case.survey(rows, weights)
    args = (case.call, case.prepared, case.first, case.tokens, rows)
    expected = budget_rows.dropped_masses(*args)
    near = 1e-4 if case.call.recipe.precision != "half" else 5e-3
    torch.testing.assert_close(found.dropped, expected, rtol=near, atol=near)
    summary = budget.summarize(budget.SurveyedRows(rows, weights), found.dropped)
    for what in ("mean", "deviation", "heaviest"):
        torch.testing.assert_close(
            getattr(found, what), getattr(summary, what), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("name", CASES)
def test_measured_errors(isa, name):
    """8-bit scores leave errors that pairs of bf16 may change by a tenth."""
    case = Case(**CASES[name])
    found = case.step_errors()
    args = (case.call, case.prepared, case.first, case.tokens, case.rows)
    skipping, total, whole = budget_rows.step_errors(*args)
    size = whole.mean()
    near = {"exact": 1e-5, "half": 0.01}.get(case.call.recipe.precision, 0.006)
    torch.testing.assert_close(found[2], whole, rtol=near, atol=near * float(size))
    torch.testing.assert_close(found[0], skipping, rtol=near, atol=near * float(size))
    torch.testing.assert_close(found[1], total, rtol=0.1, atol=near * float(size))
    assert (skipping[..., 0] > 0.01 * whole).any()  # there was something to see


def test_a_block_far_below_the_others_has_no_error_that_is_not_finite(isa):
    """2^-126 / 255 has no finite inverse, and 8-bit P is divided by it."""
    case = Case(precision="int8-fast", Lq=128, Lk=256, Hq=1, Hk=1, D=64, is_causal=False)
    query, key, value = case.inputs.query, case.inputs.key, case.inputs.value
    for exponent in range(120, 132):
        direction = torch.ones(64) / 8
        query = direction.expand_as(query).clone()
        key = torch.zeros_like(key)
        # Scores of -exponent · ln 2 in the second half.
        key[:, :, 128:] = -exponent * math.log(2) * 8 * direction
        case.inputs = Inputs(query, key, value)
        stages = get_backend("cpu").stages()
        case.prepared = prepare(stages, case.call, case.inputs, to_plan=True, to_attend=True)
        case.scored = (*scored_parts(case.prepared), 1, case.call.scale)
        assert all(x.isfinite().all() for x in case.step_errors())


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
            mass = torch.rand(
                (2, 4, case.call.n_q, case.call.n_k), generator=torch.Generator().manual_seed(0)
            )
            plan = cpu.select(case.call, case.prepared, mass, case.tokens)
        finally:
            torch.set_num_threads(before)
        found.append(plan.measured)
    assert torch.equal(*found)
    alone = [x[1:] for x in (case.inputs.query, case.inputs.key, case.inputs.value)]
    recipe = case.call.recipe
    call = check_call(
        *alone, enable_gqa=True, recipe=recipe, is_causal=True, causal_align="bottom_right"
    )
    stages = get_backend("cpu").stages()
    prepared = prepare(stages, call, Inputs(*alone), to_plan=True, to_attend=True)
    plan = cpu.select(call, prepared, mass[1:], case.tokens)
    # Precision is raised for a key head as a whole: only its bits may follow the batch.
    assert torch.equal(plan.measured[2, 0], found[0][2, 1])
    assert torch.equal(plan.measured[:2, 0], found[0][:2, 1])
