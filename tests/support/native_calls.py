"""Valid arguments of every op of `torch.ops.sparge_cpu`, and others in their place."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from sparge.backends.cpu import library as native

B, HQ, HK, LQ, LK, D, DV = 2, 4, 2, 300, 200, 24, 40
N_Q, N_K = 3, 4
INT8, INT8_FAST, HALF, EXACT = range(4)
MEAN, ROWS, BLEND = range(3)
ALL, MASS, FRACTION, ERROR = range(4)
I8, I32, I64, F64 = torch.int8, torch.int32, torch.int64, torch.float64
STEPS = 3
MEASURED = (0, 2)
SURVEYED, DRAWN = 5, 4
MOST = 16
GROUP = 16


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def codes(*shape):
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0)).to(I8)


def tokens(*, masked):
    return {
        "mask": numbers(B, 1, LQ, LK) > -1 if masked else None,
        "kinds": torch.ones(B, 1, N_Q, N_K, dtype=I8) if masked else None,
        "is_causal": True,
        "offset": LK - LQ,
    }


def scored(precision):
    quantized = precision in (INT8, INT8_FAST)
    make = codes if quantized else numbers
    return {
        "query": make(B, HQ, LQ, D),
        "key": make(B, HK, LK, D),
        "q_scale": numbers(B, HQ, LQ).abs() if quantized else None,
        "q_rows_per_scale": 1,
        "k_scale": numbers(B, HK, LK // 4).abs() if quantized else None,
        "k_rows_per_scale": 4 if quantized else 1,
        "precision": precision,
        "softmax_scale": 0.2,
    }


def lists():
    return {
        "counts": torch.full((B, HQ, N_Q), 2, dtype=I32),
        "indices": torch.tensor([1, 3, -1, -1], dtype=I32).expand(B, HQ, N_Q, N_K).contiguous(),
    }


def pooled(precision):
    quantized, fast = precision in (INT8, INT8_FAST), precision == INT8_FAST
    n = -(-LK // GROUP)
    return {
        "pooled_key": (codes if quantized else numbers)(B, HK, n, D),
        "pooled_value": (codes if fast else numbers)(B, HK, n, DV),
        "pooled_k_scale": numbers(B, HK, n).abs() if quantized else None,
        "pooled_v_scale": numbers(B, HK, 1, DV).abs() if fast else None,
        "pool_group": GROUP,
    }


def attend(precision, *, masked=False):
    fast = precision == INT8_FAST
    return scored(precision) | tokens(masked=masked) | lists() | {
        "value": codes(B, HK, LK, DV) if fast else numbers(B, HK, LK, DV),
        "v_scale": numbers(B, HK, N_K, DV).abs() if fast else None,
        **pooled(precision),
        "lse_shift": numbers(B, HQ, LQ),
        "pv_skip": torch.full((HQ,), 4.0),
        "out": torch.empty(B, HQ, LQ, DV),
        "lse": torch.empty(B, HQ, LQ),
        "pv_skips": torch.empty(B, HQ, N_Q, dtype=I32),
    }  # fmt: skip


def backward():
    both = scored(EXACT)
    return {name: both[name] for name in ("query", "key", "softmax_scale")} | {
        "value": numbers(B, HK, LK, DV),
        "grad_out": numbers(B, HQ, LQ, DV),
        "delta": numbers(B, HQ, LQ),
        "pv_skip": None,
        "grad_query": torch.empty(B, HQ, LQ, D),
        "grad_key": torch.empty(B, HK, LK, D),
        "grad_value": torch.empty(B, HK, LK, DV),
    } | tokens(masked=True) | lists()  # fmt: skip


def predict(predictor, precision):
    return scored(precision) | tokens(masked=True) | {
        "q_pooled": numbers(B, HQ, N_Q, D),
        "k_pooled": numbers(B, HK, N_K, D),
        "k_similarity": numbers(B, HK, N_K).abs(),
        "min_similarity": torch.full((HQ,), 0.1),
        "predictor": predictor,
        "sample_rows": 4,
        "mass": torch.empty(B, HQ, N_Q, N_K),
    }  # fmt: skip


def select(keep=MASS):
    return tokens(masked=True) | {
        "mass": numbers(B, HQ, N_Q, N_K).abs(),
        "keep": keep,
        "amount": torch.full((HQ,), 0.7, dtype=F64),
        "q_similarity": numbers(B, HQ, N_Q).abs(),
        "k_similarity": numbers(B, HK, N_K).abs(),
        "min_similarity": torch.full((HQ,), 0.1),
        "forced": torch.zeros(N_Q, N_K, dtype=torch.bool),
        "Lq": LQ,
        "Lk": LK,
        "counts": torch.empty(B, HQ, N_Q, dtype=I32),
        "indices": torch.empty(B, HQ, N_Q, N_K, dtype=I32),
        "allowed": torch.empty(B, HQ, N_Q, dtype=I32),
    }  # fmt: skip


def first_steps():
    return tokens(masked=True) | {
        "mass": numbers(B, HQ, N_Q, N_K).abs(),
        "masses": torch.tensor([0.2, 0.5, 0.9], dtype=F64),
        "forced": torch.zeros(N_Q, N_K, dtype=torch.bool),
        "Lq": LQ,
        "Lk": LK,
        "indices": torch.empty(B, HQ, N_Q, N_K, dtype=I32),
        "allowed": torch.empty(B, HQ, N_Q, dtype=I32),
    }  # fmt: skip


def deviations():
    made = {"deviation": torch.empty(B, HQ, LQ), "energy": torch.empty(B, HQ, N_Q)}
    return {"query": numbers(B, HQ, LQ, D)} | made


def choose_rows():
    starts, place, n = torch.arange(N_Q) * 128, torch.arange(128), N_Q * MOST
    may = (place % 11 > 0) & (starts[:, None] + place < LQ)
    return {
        "deviation": numbers(B, HQ, LQ).square(),
        "energy": numbers(B, HQ, N_Q).square() * 200,
        "budget": torch.linspace(0.01, 0.1, HQ, dtype=F64),
        "starts": starts,
        "may": may,
        "n_far": torch.full((N_Q,), 2),
        "n_near": may.sum(1) - 2,
        "far_ranks": torch.tensor([0, 1, 0, 1]).expand(N_Q, MOST // 4).contiguous(),
        "near_places": (~may).byte().argsort(dim=1, stable=True),
        "rows_of_block": 4,
        "most_of_block": MOST,
        "disagrees": 0.5,
        "small_budget": 0.03,
        "rows": torch.empty(B, HQ, n, dtype=I64),
        "weights": torch.empty(2, B, HQ, n, dtype=F64),
    }


def first():
    """The first step that keeps each block, whether or not it may be attended."""
    rng = torch.Generator().manual_seed(0)
    return torch.randint(-1, STEPS + 1, (B, HQ, N_Q, N_K), dtype=I32, generator=rng)


def checked(*rows):
    return torch.tensor(rows).expand(B, HQ, len(rows)).contiguous()


def survey(precision, *, masked):
    made = {name: torch.empty(2, B, HQ, STEPS, dtype=F64) for name in SUMMARY}
    return scored(precision) | tokens(masked=masked) | {
        "first_steps": first(),
        "rows": checked(3, 140, -1, LQ - 1, 0),
        "weights": torch.full((2, B, HQ, SURVEYED), 0.2, dtype=F64),
        "dropped": torch.empty(B, HQ, SURVEYED, STEPS),
    } | made  # fmt: skip


def draw_measured():
    return {
        "rows": checked(3, 140, -1, LQ - 1, 0),
        "weights": numbers(2, B, HQ, SURVEYED).double().abs(),
        "dropped": numbers(B, HQ, SURVEYED, STEPS).abs(),
        "mean": numbers(2, B, HQ, STEPS).double().abs(),
        "steps": torch.tensor(MEASURED, dtype=I32),
        "reference": 0.03,
        "phase": 0.5,
        "strata": 2,
        "to_rows": torch.empty(B, HQ, DRAWN, dtype=I64),
        "to_weights": torch.empty(B, HQ, DRAWN, dtype=F64),
        "to_dropped": torch.empty(B, HQ, DRAWN, len(MEASURED)),
    }


def step_errors(precision, *, masked=False):
    fast, n = precision == INT8_FAST, len(MEASURED)
    exact = {"exact_query": numbers(B, HQ, LQ, D), "exact_key": numbers(B, HK, LK, D)}
    entries = pooled(precision) | {"pooled_value": numbers(B, HK, -(-LK // GROUP), DV)}
    del entries["pooled_v_scale"]
    return scored(precision) | tokens(masked=masked) | exact | entries | {
        "value": numbers(B, HK, LK, DV),
        "codes": codes(B, HK, LK, DV) if fast else None,
        "v_scale": numbers(B, HK, N_K, DV).abs() if fast else None,
        "first_steps": first(),
        "n_steps": STEPS,
        "steps": torch.tensor(MEASURED, dtype=I32),
        "rows": checked(3, 140, -1, LQ - 1),
        "skipping": torch.empty(B, HQ, DRAWN, n, dtype=F64),
        "total": torch.empty(B, HQ, DRAWN, n + 1, dtype=F64),
        "whole": torch.empty(B, HQ, DRAWN, dtype=F64),
    }  # fmt: skip


def own_step_errors():
    """As for a precision without errors of its own, and skipped blocks that are dropped."""
    none = dict.fromkeys(("exact_query", "exact_key", *ENTRIES))
    return step_errors(EXACT) | none | {"pool_group": 1}


def decide():
    n = len(MEASURED)
    return {name: numbers(2, B, HQ, STEPS).double().abs() for name in SUMMARY} | {
        "skipping": numbers(B, HQ, DRAWN, n).double().abs(),
        "total": numbers(B, HQ, DRAWN, n + 1).double().abs(),
        "whole": numbers(B, HQ, DRAWN).double().abs(),
        "weights": torch.full((B, HQ, DRAWN), 1 / DRAWN, dtype=F64),
        "dropped": numbers(B, HQ, DRAWN, n).abs(),
        "budget": torch.linspace(0.01, 0.5, HQ, dtype=F64),
        "Hk": HK,
        "may_raise": True,
        "next_measured": torch.tensor([0, 0, 1], dtype=I32),
        "sparser": torch.tensor([0, 0, 1], dtype=I32),
        "sparse_steps": 1,
        **dict.fromkeys(RULES, 0.5),
        "step": torch.empty(B, HQ, dtype=I64),
        "measured": torch.empty(3, B, HQ, dtype=F64),
    }  # fmt: skip


def statistics():
    return {
        "x": numbers(B, HQ, LQ, D),
        "block": 128,
        "mean": numbers(B, HQ, D),
        "codes": torch.empty(B, HQ, LQ, D, dtype=I8),
        "scale": torch.empty(B, HQ, LQ),
        "pooled": torch.empty(B, HQ, N_Q, D),
        "similarity": torch.empty(B, HQ, N_Q),
        "key_mean": numbers(B, HK, D),
        "softmax_scale": 0.2,
        "lse_shift": torch.empty(B, HQ, LQ),
    }


def channels():
    made = {"codes": torch.empty(B, HK, LK, DV, dtype=I8), "scale": torch.empty(B, HK, N_K, DV)}
    return {"value": numbers(B, HK, LK, DV)} | made


def block_kinds():
    made = tokens(masked=True)
    return made | {"Lq": LQ, "Lk": LK, "kinds": torch.empty(B, 1, N_Q, N_K, dtype=I8)}


def take_steps():
    counts = torch.empty(B, HQ, N_Q, dtype=I32)
    return {"step": torch.ones(B, HQ, dtype=I64), "counts": counts, "indices": first()}


SUMMARY = ("mean", "deviation", "heaviest")
ENTRIES = ("pooled_key", "pooled_value", "pooled_k_scale")
RULES = (
    "z", "tail", "lean", "resolved", "least_error", "raise_from", "small_budget", "prior",
    "least_rate", "sparse_rate", "most_rate",
)  # fmt: skip
LENGTHS = ("Lq", "Lk")
SCORED = ("attend", "predict", "survey", "step_errors")
MASKED = (*SCORED, "select", "first_steps", "backward")

# Valid arguments of every op, in every variant that reads others.
VALID = {
    "key_mean": lambda: {"key": numbers(B, HK, LK, D), "mean": torch.empty(B, HK, D)},
    "statistics": statistics,
    "channels": channels,
    "block_kinds": block_kinds,
    "predict": lambda: predict(BLEND, INT8),
    "predict mean": lambda: predict(MEAN, INT8) | {"mask": None, "kinds": None},
    "predict rows": lambda: predict(ROWS, EXACT),
    "select": select,
    "select fraction": lambda: select(FRACTION),
    "select all": lambda: select(ALL) | {"mass": None},
    "first_steps": first_steps,
    "deviations": deviations,
    "choose_rows": choose_rows,
    "survey": lambda: survey(INT8, masked=True),
    "survey half": lambda: survey(HALF, masked=False),
    "draw_measured": draw_measured,
    "step_errors": lambda: step_errors(INT8, masked=True),
    "step_errors fast": lambda: step_errors(INT8_FAST),
    "step_errors half": lambda: step_errors(HALF),
    "step_errors own": own_step_errors,
    "decide": decide,
    "take_steps": take_steps,
    "attend": lambda: attend(INT8, masked=True),
    "attend fast": lambda: attend(INT8_FAST),
    "attend half": lambda: attend(HALF, masked=True),
    "attend exact": lambda: attend(EXACT),
    "attend dropped": lambda: attend(INT8) | dict.fromkeys(pooled(INT8)) | {"pool_group": 1},
    "backward": backward,
}

LENGTH, OFFSET = 2**36, 2**40
# Integers, and the least and the largest that an op takes.
RANGES = [
    *((case, "precision", 0, 3) for case in SCORED),
    *((case, n, 1, LENGTH) for case in ("block_kinds", "select", "first_steps") for n in LENGTHS),
    *((case, "k_rows_per_scale", 1, LENGTH) for case in SCORED),
    *((case, "q_rows_per_scale", 1, LENGTH) for case in SCORED),
    *((case, "offset", -OFFSET, OFFSET) for case in (*MASKED, "block_kinds")),
    *((case, "pool_group", 1, 64) for case in ("attend", "step_errors")),
    ("predict", "predictor", 0, 2),
    ("predict", "sample_rows", 1, 128),
    ("select", "keep", 0, 2),
    ("choose_rows", "most_of_block", 2, 128),
    ("choose_rows", "rows_of_block", 1, MOST),
    ("draw_measured", "strata", 1, 128),
    ("step_errors", "n_steps", 1, 64),
    ("decide", "Hk", 1, HQ),
    ("decide", "sparse_steps", 0, len(MEASURED)),
]
FINITE = [
    *((case, "softmax_scale") for case in (*SCORED, "backward", "statistics")),
    *(("choose_rows", name) for name in ("disagrees", "small_budget")),
    *(("draw_measured", name) for name in ("reference", "phase")),
    *(("decide", name) for name in RULES),
]


def call(case, arguments):
    arguments = {"isa": native.isa_number()} | arguments
    getattr(torch.ops.sparge_cpu, case.split()[0])(**arguments)


INTEGERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**31, 2**36, 2**40, 2**63 - 1, -(2**31), -(2**63)])
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.half, F64, I8, I32, I64, torch.bool])


@st.composite
def mutated(draw, value):
    """Another tensor or number in the place of `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(INTEGERS)
    if isinstance(value, float):
        return draw(st.floats())
    shape = list((numbers(2, 2) if value is None else value).shape)
    how = draw(st.sampled_from(["none", "size", "rank", "dtype", "strides", "numbers"]))
    if how == "none":
        return None
    if how == "size":
        d = draw(st.integers(0, len(shape) - 1))
        shape[d] = draw(st.sampled_from([0, 1, 2, 3, 63, 65, 320, shape[d] + 1]))
    elif how == "rank":
        shape = draw(st.lists(st.integers(0, 5), max_size=5))
    dtype = draw(DTYPES) if how == "dtype" or value is None else value.dtype
    x = torch.zeros(shape, dtype=dtype)
    if how == "strides" and shape:
        return torch.zeros((), dtype=dtype).expand(shape)
    if how == "numbers" and value is not None:
        x = value.clone()
        wild = [0, 1, 2, -1, 127, 2**30, -(2**31), float("nan"), float("inf"), -1e30]
        fits = [n for n in wild if dtype.is_floating_point or isinstance(n, int)]
        fits = [n for n in fits if dtype not in (I8, torch.bool) or -128 <= n < 128]
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from(fits))
    return x
