"""How a drawn call is judged: each stage on the reference's inputs, then the whole call.

    quantize, statistics   against the reference's, up to rounding
    plan                   of the reference's statistics: the same blocks, up to near-ties
    attend                 of the reference's operands and plan: numbers, NaN rows, skips
    attention              the same bits as its stages; rows without keys; rules 5.9 – 5.11

`drift` bounds how far rounding may move the scores of a row (natural log). Rows with more
drift than PRECISE are only checked for NaN and for empty rows.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

import sparge
from sparge import BlockPlan
from sparge.backends.cpu import library as native
from sparge.values.call import BLOCK_K, BLOCK_Q, half_dtype, in_blocks
from sparge.values.stages import finite_rows

from .case import EPS, PRECISE, Case, WrongError, largest_of, need
from .draws import Drawn
from .stages import judge_plan, judge_statistics

# Relative to the largest value of the head: 16-bit P and V round to 2⁻⁹ each, and an 8-bit P
# between two codes may round to either.
OUT = {"exact": 2e-5, "half": 2.0**-7, "int8": 2.0**-7, "int8-fast": 2.0**-6}
LSE = {"exact": 2e-5, "half": 1e-3, "int8": 1e-3, "int8-fast": 1e-3}


def judge(drawn: Drawn) -> int:
    """Judge one call on every instruction set of this machine; returns the number of runs."""
    torch.set_num_threads(1)
    case = Case(drawn)
    isas = [os.environ["FUZZ_ISA"]] if os.environ.get("FUZZ_ISA") else native.available()
    for isa in isas:
        os.environ[native.ENV_ISA] = isa
        torch.set_num_threads(drawn.threads)
        try:
            judge_statistics(case)
            judge_plan(case)
            judge_attend(case)
            judge_attention(case)
            judge_gradient(case)
        except WrongError as wrong:
            raise WrongError(f"{isa}: {wrong}") from None
        finally:
            del os.environ[native.ENV_ISA]
    return len(isas)


# ---- attention over the reference's plan


def judge_attend(case: Case) -> None:
    out, lse, skips = case.attend("cpu", case.plan)
    precise = (case.drift < PRECISE) & case.settled & ~tied(case, skips)
    judge_numbers(case, out, lse, precise)


def judge_numbers(case: Case, out: Tensor, lse: Tensor, precise: Tensor) -> None:
    precision, dtype = case.recipe.precision, case.q.dtype
    nan = out.isnan()
    need(torch.equal(nan.any(-1), nan.all(-1)), "a row is NaN in part")
    settled = case.settled
    wrong = settled & (nan.any(-1) != lse.isnan())
    need(not wrong.any(), "out and lse disagree about NaN", wrong)
    wrong = settled & (nan.any(-1) != case.out.isnan().any(-1))
    need(not wrong.any(), "NaN rows differ", wrong)
    # Bad keys make the reference's lse of a row without keys NaN, in int8; ours is -inf.
    said = settled & ~case.lse.isnan()
    wrong = said & ((lse == -math.inf) != (case.lse == -math.inf))
    need(not wrong.any(), "rows without keys differ", wrong)
    largest = case.heads(largest_of(case.v))
    facts = torch.finfo(dtype)
    wrong = (out.double().abs() > largest * (1 + 2 * facts.eps) * 1.01).any(-1)
    need(not wrong.any(), "an average is larger than its values", wrong)
    drift = case.drift[..., None]
    room = largest * (OUT[precision] + 4 * drift + 2 * facts.eps)
    # The core scales tiny V up before it rounds it to 16 bits; the reference does not.
    held = facts if precision == "exact" else torch.finfo(half_dtype(dtype))
    room = room + 2 * held.smallest_normal * held.eps
    fine = precise & ~nan.any(-1) & ~case.out.isnan().any(-1)
    wrong = fine & ((out.double() - case.out.double()).abs() > room).any(-1)
    need(not wrong.any(), f"outputs differ, by {worst(out, case.out, largest, wrong):.2g}", wrong)
    off = (lse.double() - case.lse.double()).abs().nan_to_num(0.0)
    wrong = fine & (off > LSE[precision] + 4 * case.drift + 4 * EPS * case.lse.double().abs())
    need(not wrong.any(), f"lse differ, by {off[wrong].max() if wrong.any() else 0:.2g}", wrong)


def worst(out: Tensor, theirs: Tensor, largest: Tensor, wrong: Tensor) -> float:
    """The largest difference of the wrong rows, relative to the largest value of their head."""
    off = (out.double() - theirs.double()).abs() / largest
    return float(off[wrong].max()) if wrong.any() else 0.0


def tied(case: Case, skips: Tensor) -> Tensor:
    """Rows near the threshold of the second filter; all others must skip the same blocks."""
    recipe = case.recipe
    if recipe.pv_skip is None:
        need(not skips.any(), "blocks are skipped by a filter that is off")
        return torch.zeros(case.lse.shape, dtype=torch.bool)
    least, most = case.skip_bounds
    # With a query or a key that is not finite, rows are NaN and may or may not be skipped.
    precise = (case.drift < PRECISE) & case.settled & finite_rows(case.q)
    precise = in_blocks(precise, -1, BLOCK_Q, fill=True).all(-1) & ~bad_blocks(case, case.plan)
    outside = ((skips < least) | (skips > most)) & precise
    need(not outside.any(), "other row groups are skipped", outside)
    near = (least != most) | ~precise
    return near.repeat_interleave(BLOCK_Q, -1)[..., : case.drawn.Lq]


def bad_blocks(case: Case, plan: BlockPlan) -> Tensor:
    """Query blocks that keep or pool a key or a value that is not finite."""
    finite = in_blocks(finite_rows(case.k) & finite_rows(case.v), -1, BLOCK_K, fill=True).all(-1)
    read = plan.to_mask() | case.pools(plan)
    return (read & ~case.heads(finite)[:, :, None]).any(-1)


# ---- the whole call


def judge_attention(case: Case) -> None:
    """The same bits as its stages, and the rules that need no reference."""
    options = {**case.options, "backend": "cpu"}
    out, lse = sparge.attention(case.q, case.k, case.v, return_lse=True, **options)
    plan = sparge.make_plan(case.q, case.k, value=case.v, **options)
    for name in ("block_mask", "is_causal", "causal_align"):
        options.pop(name)
    again, lse_again = sparge.attend(case.q, case.k, case.v, plan, **options)
    same = torch.equal(out.nan_to_num(7.0), again.nan_to_num(7.0))
    need(same and torch.equal(lse.nan_to_num(7.0), lse_again.nan_to_num(7.0)),
         "attention differs from its stages")  # fmt: skip
    judge_rules(case, out, lse, plan)


def judge_rules(case: Case, out: Tensor, lse: Tensor, plan: BlockPlan) -> None:
    """Which rows are NaN (5.9, 5.10, 5.11), and which attend nothing (4.2)."""
    bad = bad_blocks(case, plan).repeat_interleave(BLOCK_Q, -1)[..., : case.drawn.Lq]
    bad = bad | ~finite_rows(case.q)
    nan = out.isnan().any(-1)
    need(not (bad & ~nan).any(), "a number where NaN is expected", bad & ~nan)
    settled = case.settled
    if case.mask is not None and case.mask.dtype != torch.bool:
        settled = settled & ~(case.mask.isnan() | (case.mask == math.inf)).any()
    if case.recipe.quantized:  # spreads within the head
        finite = (finite_rows(case.k) & finite_rows(case.v)).all(-1, keepdim=True)
        fine = finite_rows(case.q) & case.heads(finite)
        settled = settled & case.heads(largest_of(case.k)[..., 0] < 1e38)
        settled = settled & (largest_of(case.q)[..., 0] < 1e38)
        need(not (nan & fine & settled).any(), "an unexpected NaN", nan & fine & settled)
    else:
        need(not (nan & ~bad & settled).any(), "an unexpected NaN", nan & ~bad & settled)
    pairs = torch.stack([case.tokens.region(
        b, h, slice(0, case.drawn.Lq), slice(0, case.drawn.Lk), case.q.device,
    )[0] for b in range(case.drawn.B) for h in range(case.drawn.Hq)]
    ) if case.mask is not None or case.drawn.is_causal else None  # fmt: skip
    if pairs is None:
        return
    read = plan.to_mask() | case.pools(plan)
    rows = read.repeat_interleave(BLOCK_Q, -2)[..., : case.drawn.Lq, :]
    tokens = rows.repeat_interleave(BLOCK_K, -1)[..., : case.drawn.Lk]
    may = pairs.expand(-1, case.drawn.Lq, case.drawn.Lk).reshape(tokens.shape) & tokens
    empty = ~may.any(-1) & ~bad & ~nan
    need((out[empty] == 0).all() and (lse[empty] == -math.inf).all(), "rows without keys are not 0")
    need(
        (lse[may.any(-1) & ~nan & case.settled] > -math.inf).all(),
        "a row with keys has an lse of -inf",
    )


def judge_gradient(case: Case) -> None:
    """Gradients of the unquantized precisions, if no group is near the filter's threshold."""
    drawn, recipe = case.drawn, case.recipe
    if recipe.quantized or recipe.pools or not drawn.plain or drawn.blocks is not None:
        return
    if case.out.isnan().any():
        return
    if drawn.seed % 4 or tied(case, case.skips).any() or (case.drift >= 1e-4).any():
        return
    g = torch.Generator().manual_seed(drawn.seed)
    weight = torch.randn(case.out.shape, generator=g).to(case.q.dtype)
    grads = []
    for backend in ("reference", "cpu"):
        leaves = [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]
        options = {k: case.options[k] for k in ("attn_mask", "scale", "enable_gqa", "recipe")}
        out, _ = sparge.attend(*leaves, case.plan, backend=backend, **options)
        grads.append(torch.autograd.grad((out * weight).float().sum(), leaves))
    # dq and dk are differences: rounding is relative to their terms, not to the result.
    terms = float(weight.double().abs().sum(-1).max() * largest_of(case.v).max()) * abs(case.scale)
    sizes = {"q": terms * largest_of(case.k).max(), "k": terms * largest_of(case.q).max(), "v": 0.0}
    limit = 1e-4 if recipe.precision == "exact" else 2e-2
    limit += 2 * torch.finfo(case.q.dtype).eps
    for name, theirs, ours in zip("qkv", *grads, strict=True):
        most = max(float(theirs.double().abs().max()), float(sizes[name]), 1e-3)
        off = float((ours.double() - theirs.double()).abs().max()) / most
        need(off <= limit, f"gradient of {name} differs by {off:.2g} of its terms")
