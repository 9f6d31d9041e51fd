"""The stages and whole calls. Each is a range of the stages of one native call (csrc/work.h): what
lies between the first and the last never leaves the native core, and the range is one parallel
region. Tensors are passed by name; a stage that is not told where to put a thing keeps it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...rules import error_budget as budget
from ...values.blockplan import BlockPlan, plan_from_lists
from ...values.call import BLOCK_K, BLOCK_Q, Call, Inputs, n_blocks
from ...values.recipe import (
    PRECISIONS,
    PREDICTORS,
    KeepAll,
    KeepError,
    KeepFraction,
    KeepMass,
    Recipe,
    heads_of,
)
from ...values.stages import (
    STAGES,
    WAITED,
    Attended,
    AttendedCall,
    Gradients,
    KeptLimit,
    Pooled,
    Prepared,
    PreparedKeys,
    PreparedQueries,
    QTensor,
    Saved,
    raised_key_heads,
    working,
)
from ...values.tokenmask import TokenMask
from . import library

MASK, PREPARE, PREDICT, SELECT, ATTEND = range(5)
"""The stages of csrc/work.h."""
TIMED = (*STAGES, WAITED)
FAR = 2**36
"""Larger than any length: a number of blocks or a place of a token beyond it says the same."""


def run_call(
    call: Call,
    inputs: Inputs,
    *,
    plan: BlockPlan | None = None,
    attends: bool = True,
    keeps_plan: bool = True,
    limit: KeptLimit | None = None,
    timed: bool = False,
) -> AttendedCall:
    fields = native_facts(call)
    fields |= native_recipe(call.recipe, call.Hq, call.is_causal)
    fields["query"], fields["key"], fields["value"] = inputs.query, inputs.key, inputs.value
    fields["mask"] = inputs.attn_mask
    fields["last"] = ATTEND if attends else SELECT
    measured = attended = None
    if plan is not None:
        fields |= _lists_of(plan) | _raised(call, plan)
        fields["planned"] = True
    elif keeps_plan:
        fields |= (lists := _empty_lists(call))
    if call.measures_error and plan is None:
        fields["measured"] = measured = torch.empty((3, call.B, call.Hq), dtype=torch.float64)
    if attends:
        attended = _empty_output(call)
        fields["out"], fields["lse"], fields["pv_skips"] = attended
    if limit is not None:  # above 0, which would be no limit
        fields["most_kept"], fields["pooled_cost"], fields["raised_cost"] = limit
    if timed:
        fields["seconds"] = torch.zeros(len(TIMED), dtype=torch.float64)
    ran = library.run(fields)
    seconds = dict(zip(TIMED, fields["seconds"].tolist(), strict=True)) if timed else {}

    def make_plan() -> BlockPlan:
        if plan is not None:
            return plan
        tokens = TokenMask(call.Lq, call.Lk, call.is_causal, call.offset, inputs.attn_mask)
        return plan_from_lists(**lists, tokens=tokens, measured=measured)

    return AttendedCall(make_plan, attended if ran else None, seconds)


def prepare_keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    *,
    mean: Tensor | None = None,
    to_plan: bool,
    to_attend: bool,
) -> PreparedKeys:
    recipe, (B, Hk, Lk, D) = call.recipe, key.shape
    k = _wanted(call, "k", key, to_plan=to_plan, to_attend=to_attend)
    made = dict(k)
    if not k:
        mean = None
    elif mean is None:
        made["mean"] = mean = key.new_empty((B, Hk, D), dtype=torch.float32)
    v: Tensor | QTensor = key if value is None else value
    entries, Dv = None, D if value is None else value.shape[3]
    if value is not None and (to_attend or call.measures_error):
        if recipe.precision == "int8-fast":
            v = _empty_channels(value.shape)
            made |= {"v_codes": v.codes, "v_scale": v.scale}
        if recipe.pools:
            entries = _empty_entries(call, value)
            made |= _entry_fields(entries)
    if made:
        given = {} if "mean" in made else {"key_mean": mean}
        _prepare(call, [B, Hk, Hk, 0, Lk, D, Dv], key=key, value=value, **made, **given)
    coded = QTensor(k["k_codes"], k["k_scale"]) if "k_codes" in k else key
    pooled, similarity = k.get("k_pooled"), k.get("k_similarity")
    return PreparedKeys(coded, v, key, value, mean, pooled, similarity, entries)


def prepare_queries(
    call: Call, query: Tensor, *, mean: Tensor | None, to_plan: bool, to_attend: bool
) -> PreparedQueries:
    B, Hq, Lq, D = query.shape
    q = _wanted(call, "q", query, to_plan=to_plan, to_attend=to_attend)
    made = dict(q)
    if "q_codes" in q and to_attend and mean is not None:
        made |= {"lse_shift": torch.empty((B, Hq, Lq)), "key_mean": mean}
    if made:
        Hk = Hq if mean is None else mean.shape[1]
        _prepare(call, [B, Hq, Hk, Lq, 0, D, D], query=query, **made)
    coded = QTensor(q["q_codes"], q["q_scale"]) if "q_codes" in q else query
    shift, pooled, similarity = (made.get(x) for x in ("lse_shift", "q_pooled", "q_similarity"))
    return PreparedQueries(coded, query, shift, pooled, similarity)


def sum_keys(key: Tensor) -> Tensor:
    """fp32 `[B, Hk, n_k, D]`, of rows scaled by 1 / 128, so that a sum of finite rows is finite."""
    B, Hk, Lk, D = key.shape
    sums = torch.empty((B, Hk, n_blocks(Lk, BLOCK_K), D), dtype=torch.float32)
    library.run(
        {
            "shape": [B, Hk, Hk, 0, Lk, D, D],
            "first": PREPARE,
            "last": PREPARE,
            "key": key,
            "sums": sums,
        }
    )
    return sums


def mean_of_sums(sums: Tensor, n_keys: int) -> Tensor:
    """Added in order, in fp64, as the native core adds them."""
    total = sums.double().cumsum(2)[:, :, -1]
    return (total * BLOCK_Q / n_keys).float()


def predict(call: Call, prepared: Prepared, tokens: TokenMask) -> Tensor:
    """0 where no pair may attend; NaN in every other block of a row that is not known."""
    mass = torch.empty((call.B, call.Hq, call.n_q, call.n_k), dtype=torch.float32)
    _stage(PREDICT, call, prepared, tokens, mass=mass)
    return mass


def select(call: Call, prepared: Prepared, mass: Tensor | None, tokens: TokenMask) -> BlockPlan:
    lists, measured = _empty_lists(call), None
    made: dict[str, Any] = dict(lists)
    if mass is not None:
        made["mass"] = mass.contiguous()
    if call.measures_error:
        made["measured"] = measured = torch.empty((3, call.B, call.Hq), dtype=torch.float64)
    _stage(SELECT, call, prepared, tokens, **made)
    return plan_from_lists(**lists, tokens=tokens, measured=measured)


def attend(call: Call, prepared: Prepared, plan: BlockPlan, tokens: TokenMask) -> Attended:
    lists = _lists_of(plan)
    done = _empty_output(call)
    _stage(ATTEND, call, prepared, tokens, **lists, **_raised(call, plan), **done._asdict())
    return done


def backward(call: Call, saved: Saved, plan: BlockPlan, tokens: TokenMask) -> Gradients:
    """Summed in fp32, returned in the caller's dtypes."""
    inputs = [saved.query, saved.key, saved.value]
    if call.recipe.precision == "half" and call.dtype == torch.float32:
        inputs = [working(x, "half") for x in inputs]
    delta = (saved.grad_out.float() * saved.out.float()).sum(-1) - saved.grad_lse.float()
    grads = [torch.empty(x.shape, dtype=torch.float32) for x in inputs]
    library.ops().backward(
        *inputs,
        saved.grad_out,
        delta.contiguous(),
        native_recipe(call.recipe, call.Hq, call.is_causal).get("pv_skip"),
        plan.counts.contiguous(),
        plan.indices.contiguous(),
        tokens.attn_mask,
        tokens.is_causal,
        tokens.offset,
        call.scale,
        *grads,
        library.isa_number(),
    )
    dq, dk, dv = (grad.to(call.dtype) for grad in grads)
    return dq, dk, dv


def block_kinds(tokens: TokenMask) -> Tensor:
    """Kinds of blocks under the caller's mask. Without one, they follow from the diagonal."""
    mask = tokens.attn_mask
    assert mask is not None
    (B, H), n_q, n_k = mask.shape[:2], n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
    kinds = torch.empty((B, H, n_q, n_k), dtype=torch.int8)
    library.run(
        {
            "shape": [B, H, H, tokens.Lq, tokens.Lk, 1, 1],
            "last": MASK,
            "mask": mask,
            "kinds": kinds,
            "is_causal": tokens.is_causal,
            "offset": tokens.offset,
        }
    )
    return kinds


# -- fields of a native call -------------------------------------------------------------------


def native_facts(call: Call) -> dict[str, Any]:
    return {
        "shape": [call.B, call.Hq, call.Hk, call.Lq, call.Lk, call.D, call.Dv],
        "is_causal": call.is_causal,
        "offset": call.offset,
        "softmax_scale": call.scale,
    }


@lru_cache(maxsize=256)
def native_recipe(recipe: Recipe, Hq: int, is_causal: bool) -> dict[str, Any]:
    """What a call reads of a recipe; no call changes the tensors."""
    keep, rule, amounts = recipe.keep, 0, None
    if isinstance(keep, KeepMass):
        rule, amounts = 1, heads_of(keep.mass, Hq, none=1.0)
    elif isinstance(keep, KeepFraction):
        rule, amounts = 2, heads_of(keep.fraction, Hq, none=1.0)
    elif isinstance(keep, KeepError):
        rule, amounts = 3, heads_of(keep.max_error, Hq)
    fields: dict[str, Any] = {
        "precision": PRECISIONS.index(recipe.precision),
        "keep": rule,
        "predictor": PREDICTORS.index(recipe.predictor),
        "sample_rows": recipe.sample_rows,
        "sink_blocks": min(recipe.sink_blocks, FAR),
        "window": min(recipe.window(is_causal), FAR),
        "pool_group": recipe.pool_group if recipe.pools else 0,
    }
    if amounts is not None:
        fields["amount"] = torch.tensor(amounts, dtype=torch.float64)
    if recipe.min_similarity is not None and not isinstance(keep, KeepAll):
        least = heads_of(recipe.min_similarity, Hq, none=-1.0)
        fields["min_similarity"] = torch.tensor(least, dtype=torch.float32)
    if recipe.pv_skip is not None:
        skips = heads_of(recipe.pv_skip, Hq, none=math.inf)
        fields["pv_skip"] = torch.tensor(skips, dtype=torch.float32)
    if recipe.protect:
        ends = [(start, FAR if stop is None else stop) for start, stop in recipe.protect]
        fields["protect"] = torch.tensor([[max(-FAR, min(x, FAR)) for x in end] for end in ends])
    if isinstance(keep, KeepError):
        fields["budget"] = _budget_tables()
    return fields


@lru_cache(maxsize=1)
def _budget_tables() -> list[Tensor]:
    """The numbers of rules/error_budget.py, in the order of csrc/read_work.h."""
    rows = [(FAR if up_to is None else up_to, *rows) for up_to, *rows in budget.ROWS_BY_BLOCKS]
    return [
        torch.tensor(budget.NUMBERS, dtype=torch.float64),
        torch.tensor(budget.step_masses(), dtype=torch.float64),
        torch.tensor(budget.MEASURED_STEPS, dtype=torch.int32),
        torch.tensor(budget.NEXT_MEASURED, dtype=torch.int32),
        torch.tensor(budget.SPARSER, dtype=torch.int32),
        torch.tensor(rows),
    ]


def _prepare(call: Call, shape: list[int], **fields: Any) -> None:
    recipe = call.recipe
    library.run(
        dict(
            shape=shape,
            first=PREPARE,
            last=PREPARE,
            precision=PRECISIONS.index(recipe.precision),
            pool_group=recipe.pool_group if recipe.pools else 0,
            softmax_scale=call.scale,
            **fields,
        )
    )


def _stage(number: int, call: Call, prepared: Prepared, tokens: TokenMask, **fields: Any) -> None:
    """One stage over what `prepare_keys` and `prepare_queries` left."""
    queries, keys = prepared.queries, prepared.keys
    q, k, v = queries.rows, keys.key, keys.value
    if isinstance(q, QTensor):
        fields |= {"q_codes": q.codes.contiguous(), "q_scale": q.scale.contiguous()}
    if isinstance(k, QTensor):
        fields |= {"k_codes": k.codes.contiguous(), "k_scale": k.scale.contiguous()}
    recipe = dict(native_recipe(call.recipe, call.Hq, call.is_causal))
    # Without a value, planning has the key in its place.
    reads_v = number == ATTEND or (number == SELECT and call.measures_error)
    if isinstance(v, QTensor) and reads_v:
        fields |= {"v_codes": v.codes.contiguous(), "v_scale": v.scale.contiguous()}
    if keys.entries is not None and reads_v:
        fields |= _entry_fields(keys.entries)
    else:
        recipe["pool_group"] = 0
    library.run(
        dict(
            first=number,
            last=number,
            query=queries.own if isinstance(q, QTensor) else q,
            key=keys.own_key if isinstance(k, QTensor) else k,
            value=keys.own_value if isinstance(v, QTensor) else v if reads_v else None,
            mask=tokens.attn_mask,
            kinds=tokens.kinds,
            q_pooled=queries.pooled,
            q_similarity=queries.similarity,
            lse_shift=queries.lse_shift,
            k_pooled=keys.pooled,
            k_similarity=keys.similarity,
            **native_facts(call),
            **recipe,
            **fields,
        )
    )


def _wanted(
    call: Call, side: str, x: Tensor, *, to_plan: bool, to_attend: bool
) -> dict[str, Tensor]:
    """Places for what later stages need of a pass over `x`, queries (`q`) or keys (`k`)."""
    recipe, (B, H, L, D) = call.recipe, x.shape
    n, made = n_blocks(L, BLOCK_Q if side == "q" else BLOCK_K), {}
    if recipe.quantized and (to_attend or call.samples_rows):
        made["codes"] = torch.empty((B, H, L, D), dtype=torch.int8)
        made["scale"] = torch.empty((B, H, L))
    if to_plan and call.pools_blocks:
        made["pooled"] = torch.empty((B, H, n, D))
    if to_plan and call.predicts and recipe.min_similarity is not None:
        made["similarity"] = torch.empty((B, H, n))
    return {f"{side}_{name}": place for name, place in made.items()}


def _empty_channels(shape: tuple[int, ...]) -> QTensor:
    """8-bit values: a scale for each key block and channel."""
    B, H, L, D = shape
    codes, scale = (
        torch.empty(shape, dtype=torch.int8),
        torch.empty((B, H, n_blocks(L, BLOCK_K), D)),
    )
    return QTensor(codes, scale, BLOCK_K, per_channel=True)


def _empty_entries(call: Call, value: Tensor) -> Pooled:
    """As the precision holds keys and values."""
    (B, Hk, Lk, Dv), group, precision = value.shape, call.recipe.pool_group, call.recipe.precision
    n, dtype = n_blocks(Lk, group), torch.float32 if precision == "exact" else value.dtype
    key = torch.empty((B, Hk, n, call.D), dtype=torch.int8 if call.recipe.quantized else dtype)
    coded = QTensor(key, torch.empty((B, Hk, n))) if call.recipe.quantized else key
    if precision == "int8-fast":
        return Pooled(coded, _empty_channels((B, Hk, n, Dv)), group)
    return Pooled(coded, torch.empty((B, Hk, n, Dv), dtype=dtype), group)


def _entry_fields(entries: Pooled) -> dict[str, Tensor]:
    fields = dict[str, Tensor]()
    for name, scale, x in (
        ("entry_key", "entry_k_scale", entries.key),
        ("entry_value", "entry_v_scale", entries.value),
    ):
        if isinstance(x, QTensor):
            fields |= {name: x.codes.contiguous(), scale: x.scale.contiguous()}
        else:
            fields[name] = x.contiguous()
    return fields


def _empty_lists(call: Call) -> dict[str, Tensor]:
    counts = torch.empty((call.B, call.Hq, call.n_q), dtype=torch.int32)
    indices = torch.empty((call.B, call.Hq, call.n_q, call.n_k), dtype=torch.int32)
    return {"counts": counts, "indices": indices, "allowed": torch.empty_like(counts)}


def _lists_of(plan: BlockPlan) -> dict[str, Tensor]:
    return {"counts": plan.counts.contiguous(), "indices": plan.indices.contiguous()}


def _empty_output(call: Call) -> Attended:
    B, Hq, Lq = call.B, call.Hq, call.Lq
    return Attended(
        torch.empty((B, Hq, Lq, call.Dv), dtype=call.dtype),
        torch.empty((B, Hq, Lq), dtype=torch.float32),
        torch.empty((B, Hq, call.n_q), dtype=torch.int32),
    )


def _raised(call: Call, plan: BlockPlan) -> dict[str, Tensor]:
    """Key heads that an error budget runs in the caller's own precision."""
    if not call.recipe.quantized or not any(raised := raised_key_heads(plan, call.Hk)):
        return {}
    return {"raised": torch.tensor(raised)}
