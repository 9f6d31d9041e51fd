"""Valid arguments of every op of `torch.ops.sparge_cpu`."""

from __future__ import annotations

import torch

from sparge.backends.cpu import library as native

B, HQ, HK, LQ, LK, D, DV = 2, 4, 2, 300, 200, 24, 40
N_Q, N_K = 3, 4
INT8, INT8_FAST, HALF, EXACT = range(4)
MEAN, ROWS, BLEND = range(3)
ALL, MASS, FRACTION, ERROR = range(4)
I8, I32, I64, F64 = torch.int8, torch.int32, torch.int64, torch.float64
STEPS = 3
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


def select_steps():
    return scored(INT8) | tokens(masked=True) | {
        "mass": numbers(B, HQ, N_Q, N_K).abs(),
        "masses": torch.tensor([0.2, 0.5, 0.9], dtype=F64).expand(HQ, STEPS).contiguous(),
        "value": numbers(B, HK, LK, DV),
        "checked": torch.tensor([3, 140, LQ - 1]),
        "forced": torch.zeros(N_Q, N_K, dtype=torch.bool),
        "wrong": torch.empty(B, HQ, STEPS, dtype=F64),
        "whole": torch.empty(B, HQ, dtype=F64),
        "indices": torch.empty(B, HQ, N_Q, N_K, dtype=I32),
        "allowed": torch.empty(B, HQ, N_Q, dtype=I32),
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
    first = torch.randint(-1, STEPS, (B, HQ, N_Q, N_K), dtype=I32)
    counts = torch.empty(B, HQ, N_Q, dtype=I32)
    return {"step": torch.ones(B, HQ, dtype=I64), "counts": counts, "indices": first}


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
    "select_steps": select_steps,
    "take_steps": take_steps,
    "attend": lambda: attend(INT8, masked=True),
    "attend fast": lambda: attend(INT8_FAST),
    "attend half": lambda: attend(HALF, masked=True),
    "attend exact": lambda: attend(EXACT),
    "attend dropped": lambda: attend(INT8) | dict.fromkeys(pooled(INT8)) | {"pool_group": 1},
    "backward": backward,
}


def call(case, arguments):
    arguments = {"isa": native.isa_number()} | arguments
    getattr(torch.ops.sparge_cpu, case.split()[0])(**arguments)
