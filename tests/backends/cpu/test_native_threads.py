"""The core among threads: many callers at once, thread counts that change, a fork, tile state.

Every result is compared bit for bit with the same call alone. `make sanitize` repeats this file
over an instrumented build.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import sparge
from oracle import clustered_qkv, make_qkv, same_bits
from sparge import KeepAll, KeepMass, Recipe
from sparge.backends.cpu import library as native

CALLERS = 6
RECIPES = [
    Recipe(KeepMass(0.8), predictor=predictor, precision=precision, pv_skip=4.0)
    for precision, predictor in (
        ("int8", "blend"), ("int8-fast", "mean"), ("half", "rows"), ("exact", "blend"),
    )
]  # fmt: skip


def some_calls():
    """Calls that differ in shape, mask and recipe, so that callers do not walk in step."""
    made = []
    for i, recipe in enumerate(RECIPES):
        q, k, v = clustered_qkv(Hq=2, Hk=1, L=150 + 70 * i, D=16 + 8 * i, noise=0.8, seed=i)
        mask = torch.rand(q.shape[2], k.shape[2], generator=torch.Generator().manual_seed(i)) < 0.8
        made.append(((q, k, v), {"recipe": recipe, "attn_mask": mask if i % 2 else None}))
    return made


def run(tensors, options, backend):
    return sparge.attention(
        *tensors, is_causal=True, enable_gqa=True, return_lse=True, backend=backend, **options
    )


def assert_same(results, expected):
    for result, alone in zip(results, expected, strict=True):
        assert same_bits(result[0], alone[0])
        assert same_bits(result[1], alone[1])


@pytest.mark.rule("5.12")
@pytest.mark.parametrize("threads", [1, 2], ids=["one thread each", "two threads each"])
def test_many_callers_at_once(backend, threads):
    """The GIL is let go inside the core, so that these calls do overlap."""
    calls = some_calls()
    alone = [run(*call, backend) for call in calls]
    together = Barrier(CALLERS)

    def caller(number):
        torch.set_num_threads(threads)  # each thread has its own
        together.wait()
        order = [(number + i) % len(calls) for i in range(len(calls))]
        return order, [run(*calls[i], backend) for i in order]

    with ThreadPoolExecutor(CALLERS) as pool:
        for order, results in pool.map(caller, range(CALLERS)):
            assert_same(results, [alone[i] for i in order])


@pytest.mark.rule("5.12")
def test_the_number_of_threads_changes_between_and_during_calls(backend):
    calls = some_calls()
    alone = [run(*call, backend) for call in calls]
    for threads in (3, 1, 2):
        torch.set_num_threads(threads)
        assert_same([run(*call, backend) for call in calls], alone)

    def caller(number):
        results = []
        for i, call in enumerate(calls):
            torch.set_num_threads(1 + (number + i) % 3)
            results.append(run(*call, backend))
        return results

    with ThreadPoolExecutor(3) as pool:
        for results in pool.map(caller, range(3)):
            assert_same(results, alone)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.precision)
def test_inside_inference_mode(backend, recipe):
    """Tensors from outside and from inside; what comes out can be used afterwards."""
    q, k, v = make_qkv(Hq=2, Lq=150, D=24)
    mask = torch.ones(150, 150, dtype=torch.bool).tril()
    options = {"attn_mask": mask, "recipe": recipe, "backend": backend}
    expected = sparge.attention(q, k, v, **options)
    with torch.inference_mode():
        outside = sparge.attention(q, k, v, **options)
        made_inside = [x.clone() for x in (q, k, v)]
        inside = sparge.attention(*made_inside, **options)
        plan = sparge.make_plan(*made_inside[:2], **options)
        staged, _ = sparge.attend(*made_inside, plan, **options)
    for out in (outside, inside, staged):
        assert same_bits(out.clone(), expected)


# Torch's threads are libgomp's, which do not survive a fork: a child of a parent that has used
# them hangs in its first parallel region, a plain `a + b` of torch as much as our kernels
# (measured: torch 2.13, gcc 12). So what can hold is tested: the parent worked with several
# threads and the child keeps to one, which starts no region; or the parent had only one, and the
# child may use several. A process of its own, because this one has used threads already.
FORK = """
import os, sys, torch, sparge
backend, before, after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
g = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 2, 300, 32, generator=g) for _ in range(3))
def work():
    return b"".join(
        sparge.attention(
            q, k, v, is_causal=True, backend=backend, recipe=sparge.Recipe(precision=precision)
        ).numpy().tobytes()
        for precision in ("int8", "int8-fast", "half", "exact")
    )
torch.set_num_threads(before)
expected = work()
child = os.fork()
if child == 0:
    torch.set_num_threads(after)
    os._exit(0 if work() == expected else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert work() == expected  # and the parent goes on
"""


@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), (1, 2)], ids=["then one thread", "then two threads"]
)
def test_after_a_fork(backend, before, after):
    if backend not in ("cpu", "reference"):
        pytest.skip("registered in this process only")
    command = [sys.executable, "-c", FORK, backend, str(before), str(after)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(before)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


# Which parts of its state the processor holds for this thread: bits 17 and 18 are the tiles.
IN_USE = """
#include <immintrin.h>
#include <stdint.h>
extern "C" uint64_t in_use() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return uint64_t(high) << 32 | low;
}
extern "C" uint64_t in_use_with_tiles() {
  alignas(64) uint8_t config[64] = {1};
  config[16] = 64, config[48] = 16;
  _tile_loadconfig(config);
  _tile_zero(0);
  const uint64_t found = in_use();
  _tile_release();
  return found;
}
"""
TILES = 0b11 << 17


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile a look at the processor's state with")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text(IN_USE)
    command = ["g++", "-shared", "-fPIC", "-mamx-tile", "-o", "probe.so", "probe.cpp"]
    # A preloaded sanitizer is not for the compiler.
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(command, cwd=folder, env=clean, check=True)
    library = ctypes.CDLL(str(folder / "probe.so"))
    library.in_use.restype = library.in_use_with_tiles.restype = ctypes.c_uint64
    return library


@pytest.mark.skipif("amx" not in native.available(), reason="this machine has no tile unit")
@pytest.mark.parametrize("precision", ["int8", "int8-fast", "half", "exact"])
def test_the_tile_unit_is_released(probe, monkeypatch, precision):
    """A thread that keeps tiles pays for 8 KB more at every switch, and sleeps less deeply."""
    monkeypatch.setenv(native.ENV_ISA, "amx")
    q, k, v = make_qkv(Hq=2, Lq=150, D=64, dtype=torch.bfloat16)

    def call():
        torch.set_num_threads(1)  # the work is done in this very thread
        sparge.attention(q, k, v, backend="cpu", recipe=Recipe(KeepAll(), precision=precision))
        return probe.in_use()

    assert probe.in_use_with_tiles() & TILES, "the probe does not see tiles"
    assert not call() & TILES
    with ThreadPoolExecutor(2) as pool:
        assert not any(state & TILES for state in pool.map(lambda _: call(), range(2)))
