"""Every backend runs the same suite: a test that takes `backend` runs once for each of them.

A backend registered before collection (`pytest -p your_plugin`) is in the suite by that alone.
"""

from __future__ import annotations

import pytest
import torch

import sparge
from calls import fake
from sparge.backends import backends, unregister_backend

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
