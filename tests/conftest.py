"""Every backend runs the same suite: a test that takes `backend` runs once for each of them.

A backend registered before collection (`pytest -p your_plugin`) is in the suite by that alone.
With TRITON_INTERPRET=1 the suite is for the Triton backend alone, in its repaired interpreter, less
what interpreted.py leaves out; on a GPU it runs with `-p on_gpu`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch

import sparge
from accelerators import gpu_backend
from calls import FIXED, SLOW, a_call, fake
from interpreted import INTERPRETED, runs_interpreted
from sparge.backends.cpu import library as native
from sparge.backends.reference import stages as reference_stages
from sparge.routing import (
    Backend,
    Router,
    backends,
    get_backend,
    register_backend,
    use_router,
)
from sparge.values.backend import Host

if INTERPRETED:
    import interpreter

    interpreter.install()

# The native core once for each instruction set of this machine, by name: `cpu-avx2`. Triton's
# kernels serve the tensors of these tests, which are on the processor, in the interpreter only.
BACKENDS = [
    f"{b.name}-{isa}" if b.name == "cpu" else b.name
    for b in backends()
    if (b.name == "triton") == INTERPRETED
    for isa in (native.available() if b.name == "cpu" else [""])
]

# Inductor imports setuptools, which insists on coming before distutils; some library that lm-eval
# brings imports that one first.
with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401

# Backends whose stages can be imported; those of Triton only where it is installed.
STAGED = ["reference", "cpu"]
if importlib.util.find_spec("triton") and importlib.util.find_spec("sparge.backends.triton.stages"):
    STAGED.append("triton")


def pytest_collection_modifyitems(config, items):
    if INTERPRETED:
        left_out = [item for item in items if not runs_interpreted(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs_interpreted(item)]


@pytest.fixture
def interpreted():
    """For tests of Triton's kernels that do not take `backend`."""
    if not INTERPRETED:
        pytest.skip("run in Triton's interpreter alone: TRITON_INTERPRET=1")


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request):
    """The name of a backend; `fixed_crossover` holds the native core to one instruction set."""
    return "cpu" if request.param.startswith("cpu-") else request.param


def serves_fp64(name):
    backend = get_backend("cpu" if name.startswith("cpu-") else name)
    return backend.refusal(Host(), a_call(1, dtype=torch.float64)) is None


@pytest.fixture(params=[name for name in BACKENDS if serves_fp64(name)])
def fp64_backend(request):
    """The name of a backend that computes float64 in float64."""
    return request.param


@pytest.fixture
def widest(backend):
    """The widest dtype of a backend: float64 where it serves it."""
    return torch.float64 if serves_fp64(backend) else torch.float32


@pytest.fixture(autouse=True)
def fixed_crossover(request, monkeypatch, tmp_path):
    """Routing by fixed numbers: no test measures unless it asks to, or sees the user's cache."""
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "cache"))
    # For this test alone: fixtures of a module, made between two tests, must not see it.
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    name, _, isa = str(parameters.get("backend", "")).partition("-")
    monkeypatch.delenv(native.ENV_ISA, raising=False)
    if name == "cpu" and isa:
        monkeypatch.setenv(native.ENV_ISA, isa)
    with use_router(Router(backends(), costs={"cpu": FIXED})):
        yield


@pytest.fixture
def new_router(fixed_crossover):
    """Makes a router that is used for the rest of the test."""
    with contextlib.ExitStack() as stack:

        def make(of=None, costs=None, **options):
            fixed = {"cpu": FIXED} if costs is None else costs
            made = Router(backends() if of is None else of, costs=fixed, **options)
            return stack.enter_context(use_router(made))

        yield make


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that a kernel allocates and forgets to write reads as NaN, never as luck."""
    monkeypatch.delenv("SPARGE_BACKEND", raising=False)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def one_thread():
    """Workers share the cores; the tests of threads set their own number."""
    torch.set_num_threads(1)


@pytest.fixture
def no_work(monkeypatch):
    """Everything that computes fails when it is reached."""

    def refuse(*args, **kwargs):
        raise AssertionError("work was begun before the mistake was found")

    for backend in STAGED:
        for stage in ("prepare_keys", "prepare_queries", "predict", "select", "attend"):
            monkeypatch.setattr(f"sparge.backends.{backend}.stages.{stage}", refuse)
    monkeypatch.setattr("sparge.backends.cpu.stages.run_call", refuse)
    for place in ("api.attention", "engine.execute"):
        monkeypatch.setattr(f"sparge.{place}.attend_dense", refuse)
    for place in ("engine.execute", "interop", "values.blockplan"):
        monkeypatch.setattr(f"sparge.{place}.plan_from_mask", refuse)
    # Ours alone: an accelerated model calls torch's own, and is seen there.
    ours = SimpleNamespace(scaled_dot_product_attention=refuse)
    monkeypatch.setattr("sparge.api.attention.F", ours)
    monkeypatch.setattr(torch, "logaddexp", refuse)


@pytest.fixture
def register():
    """Registers backends for one test: with its own router."""

    def register(*args, **kwargs):
        sparge.register_backend(fake(*args, **kwargs))

    return register


@pytest.fixture
def piped(monkeypatch):
    """Test runners may set a width of their own."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def add_backend():
    """Register a backend for one test: the reference but for what is given."""

    def add(name, *, refusal=None, cost=SLOW, **stages):
        module = SimpleNamespace(**{**vars(reference_stages), **stages})
        register_backend(Backend(name, "of a test", lambda: module, lambda h, c: refusal, cost))

    return add


@pytest.fixture
def gpu():
    """The name of a backend that reads nothing back (accelerators.py)."""
    register_backend(gpu_backend())
    return "gpu"
