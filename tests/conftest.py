"""Every backend runs the same suite: a test that takes `backend` runs once for each of them.

A backend registered before collection (`pytest -p your_plugin`) is in the suite by that alone.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import sparge
from calls import fake
from sparge.attend import reference as reference_attend
from sparge.backends import STAGES, Backend, backends, register_backend, unregister_backend

BACKENDS = [b.name for b in backends()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS)


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

    for stage in ("make_plan", "quantize", "attend", "attend_dense"):
        monkeypatch.setattr(f"sparge.run.{stage}", refuse)
    monkeypatch.setattr("sparge.api.attend_dense", refuse)
    monkeypatch.setattr("sparge.plan.rows.operands_of", refuse)
    monkeypatch.setattr("sparge.blockplan.plan_of", refuse)
    monkeypatch.setattr(torch, "logaddexp", refuse)


@pytest.fixture
def register():
    """Registers backends for one test."""
    made = []

    def register(*args, **kwargs):
        sparge.register_backend(fake(*args, **kwargs))
        made.append(backends()[0].name)

    before = backends()
    yield register
    for name in made:
        unregister_backend(name)
    assert backends() == before


@pytest.fixture
def piped(monkeypatch):
    """Test runners may set a width of their own."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def add_backend(monkeypatch):
    """Register a backend for one test, the reference but for what is given."""
    names = []

    def add(name, *, refusal=None, attend=reference_attend.attend):
        monkeypatch.setitem(sys.modules, f"attend_of_{name}", SimpleNamespace(attend=attend))
        modules = {stage: f"sparge.{stage}.reference" for stage in STAGES}
        modules["attend"] = f"attend_of_{name}"
        register_backend(
            Backend(name, "of a test", lambda h, c: refusal, lambda h, c: "slow", modules)
        )
        names.append(name)

    yield add
    for name in names:
        unregister_backend(name)
