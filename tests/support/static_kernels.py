"""Kernels of the tests of `sparge bench --static`, and what a process of its own makes of them.

Compiling needs a process without TRITON_INTERPRET: `tests/support/static_kernels.py` prints JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
import triton
import triton.language as tl

from sparge.backends.triton.launch import COMMON, Launch
from sparge_tools.static.checks import Intent, LoopIntent, check
from sparge_tools.static.compile import compile_launch, specialize
from sparge_tools.static.targets import TARGETS


@triton.jit(do_not_specialize=["n"])
def multiply(q, k, v, out, n, stride, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """`out = Σ over tiles of (q · kᵀ) · v`, in int8 and half."""
    rows, cols, d = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, D)
    own_q = tl.load(q + rows[:, None] * stride + d[None, :])
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in tl.range(0, n, COLS):
        own_k = tl.load(k + (first + cols)[None, :] * stride + d[:, None])
        own_v = tl.load(v + (first + cols)[:, None] * stride + d[None, :])
        x = tl.dot(own_q, own_k, out_dtype=tl.int32).to(tl.float32) * 1e-3
        acc = tl.dot(x.to(own_v.dtype), own_v, acc)
    tl.store(out + rows[:, None] * stride + d[None, :], acc.to(out.dtype.element_ty))


def launch_of(n=4096, D=64, rows=64, cols=64, stride=None, **options):
    def tensor(dtype, length):
        return torch.empty(length, D, dtype=dtype, device="meta")

    arguments = {
        "q": tensor(torch.int8, rows),
        "k": tensor(torch.int8, n),
        "v": tensor(torch.float16, n),
        "out": tensor(torch.float16, rows),
        "n": n,
        "stride": stride or D,
        "D": D,
        "ROWS": rows,
        "COLS": cols,
    }
    return Launch(multiply, (1,), arguments, {**COMMON, "num_warps": 4, "num_stages": 3, **options})


MEANT = Intent((LoopIntent("tiles", ("int8", "half"), ahead=2),))
PLANTED = {
    "good": ("sm_80", launch_of(), MEANT),
    "good on amd": ("gfx942", launch_of(), MEANT),
    "spills": ("sm_80", launch_of(D=128, rows=128, num_warps=1), MEANT),
    "shared": ("sm_86", launch_of(D=128, num_stages=7), MEANT),
    "depth": ("sm_80", launch_of(num_stages=1), MEANT),
    "matrix": ("sm_80", launch_of(), Intent((LoopIntent("tiles", ("int8", "fp8")),))),
    "loops": ("sm_80", launch_of(), Intent((LoopIntent("one"), LoopIntent("two")))),
    "loop length": ("sm_80", launch_of(), Intent((LoopIntent("tiles", most=10),))),
}


def judged(name):
    target, launch, intent = PLANTED[name]
    compiled = compile_launch(launch, TARGETS[target])
    recorded = {"loop 1": 10**6}
    red = [verdict.rule for verdict in check(compiled, intent, recorded) if not verdict.ok]
    return {"red": red, "compiled": asdict(compiled)}


def keys():
    """Keys of launches that differ in one argument."""
    made = {
        "n": [launch_of(n=n) for n in (64, 1000, 4096, 4097)],
        "stride": [launch_of(stride=stride) for stride in (64, 128, 65)],
        "num_warps": [launch_of(num_warps=n) for n in (4, 8)],
    }
    return {
        name: len({specialize(launch, TARGETS["sm_80"]).key for launch in each})
        for name, each in made.items()
    }


if __name__ == "__main__":
    wanted = sys.argv[1:]
    print(json.dumps({"keys": keys(), **{name: judged(name) for name in wanted}}))
