"""Compiled kernels made up for tests, and scripts that run where kernels are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparge_tools.static import ir
from sparge_tools.static.checks import Intent, LoopIntent
from sparge_tools.static.compile import Compiled, Loop

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")


def a_loop(**more):
    made = Loop(
        instructions=500,
        mix={"FMUL": 90, "MUFU": 34},
        matrix={"IMMA.16832.S8.S8": 32, "HMMA.16816.F32": 64},
        tiles=1.0,
        products=(ir.Product("int8", 128, 64, 128), ir.Product("half", 128, 128, 64)),
        buffers=(ir.Buffer(2, (128, 64), "i8"), ir.Buffer(2, (64, 128), "bf16")),
    )
    return replace(made, **more)


def a_kernel(*loops, **more):
    made = Compiled(
        target="sm_80",
        kernel="attend",
        num_warps=8,
        num_stages=3,
        registers=200,
        spills=0,
        scalar_spills=0,
        stack=0,
        shared=65552,
        instructions=2000,
        matrix={"IMMA.16832.S8.S8": 64},
        loops=loops or (a_loop(),),
    )
    return replace(made, **more)


MEANT = Intent((LoopIntent("full", ("int8", "half"), ahead=2, most=530),))


def run_alone(script, *arguments, **environment):
    """Standard output of a script of the tests, where kernels are compiled, not interpreted."""
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        env={**env, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
