"""The plugin that runs the suite on a GPU, as far as it can be tested without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import on_gpu
import sparge
from calls import call_of, tensors
from on_gpu import StagesOn, as_strided_on, backend_on, moved
from sparge import KeepFraction, Recipe
from sparge.backends.reference import REFERENCE
from sparge.routing import register_backend, unregister_backend
from sparge.values.call import Inputs
from sparge.values.stages import QTensor, Saved, prepare
from sparge.values.tokenmask import TokenMask

TESTS = Path(__file__).parents[2]
RECIPE = Recipe(keep=KeepFraction(0.5), precision="int8", skipped="pool")


def tensors_in(x):
    """Every tensor of a value, found by its attributes and not by the mover."""
    if isinstance(x, torch.Tensor):
        return [x]
    parts = list(x) if isinstance(x, tuple | list) else list(getattr(x, "__dict__", {}).values())
    return [t for part in parts for t in tensors_in(part)]


def passed_between_stages():
    """One value of every kind that holds tensors."""
    q, k, v = tensors()
    call = call_of(q, k, v, recipe=RECIPE)
    stages = REFERENCE.stages()
    tokens = TokenMask(140, 200, attn_mask=torch.ones(1, 1, 140, 200, dtype=torch.bool))
    inputs = Inputs(q, k, v, tokens.attn_mask)
    prepared = prepare(stages, call, inputs, to_plan=True, to_attend=True)
    plan = stages.select(call, prepared, stages.predict(call, prepared, tokens), tokens)
    attended = stages.attend(call, prepared, plan, tokens)
    saved = Saved(q, k, v, attended.out, attended.out, attended.lse)
    return [inputs, prepared, plan, tokens, attended, saved, (q, [k, v], None)]


def test_every_tensor_is_moved_once():
    for value in passed_between_stages():
        seen = []

        def move(x, seen=seen):
            seen.append(x)
            return x.clone()

        there = moved(value, move)
        assert len(tensors_in(value)) > 0
        assert [id(x) for x in seen] == [id(x) for x in tensors_in(value)]
        assert type(there) is type(value)
        for old, new in zip(tensors_in(value), tensors_in(there), strict=True):
            assert new is not old
            assert torch.equal(new, old)


def test_codes_and_pooled_entries_are_among_them():
    prepared = passed_between_stages()[1]
    assert isinstance(prepared.queries.rows, QTensor)
    assert prepared.keys.entries is not None
    there = moved(prepared, lambda x: x.to("meta"))
    assert {x.device.type for x in tensors_in(there)} == {"meta"}
    assert there.queries.rows.rows_per_scale == prepared.queries.rows.rows_per_scale


def test_what_holds_no_tensors_is_itself():
    call = call_of(*tensors(), recipe=RECIPE)
    for value in (call, RECIPE, TokenMask(5, 7), (1, "a"), None, Inputs):
        assert moved(value, pytest.fail) is value


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_strides_come_along(device):
    x = torch.randn(4, 6, 8)
    for view in (x, x[1:, ::2, 3:], x.transpose(0, 2), x[:1].expand(5, 6, 8), x[:0], x[0, 0, 0]):
        there = as_strided_on(view, device)
        assert (there.shape, there.dtype, there.device.type) == (view.shape, view.dtype, device)
        if view.numel():
            assert there.stride() == view.stride()
        if device == "cpu":
            assert torch.equal(there, view)


def test_stages_see_the_device_and_callers_get_their_own_back():
    q, k, v = tensors()
    call = call_of(q, k, v)

    class Echo:
        def prepare_keys(self, call, key, value, *, mean, to_plan):
            assert call.device == "meta"
            assert {x.device.type for x in (key, value, mean)} == {"meta"}
            assert to_plan
            return key, value, mean

    back = StagesOn(Echo(), "meta").prepare_keys(call, k, v, mean=q, to_plan=True)
    assert [a is b for a, b in zip(back, (k, v, q), strict=True)] == [True] * 3


def test_a_call_is_refused_as_it_would_be_there():
    seen = []
    picky = replace(REFERENCE, refusal=lambda h, c: seen.append((h, c)) or "no fp8 there")
    refusal = backend_on("meta", picky).refusal
    call = call_of(*tensors())
    assert refusal(None, call) == "no fp8 there"
    assert seen[0][1] == replace(call, device="meta")


def test_the_plugin_says_that_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(pytest.UsageError, match="needs an accelerator"):
        on_gpu.pytest_load_initial_conftests()


def test_gradients_pass_through():
    register_backend(backend_on("cpu", REFERENCE))
    try:
        grads = []
        for name in (on_gpu.NAME, "reference"):
            q, k, v = (x.requires_grad_() for x in tensors())
            recipe = Recipe(keep=KeepFraction(0.5), precision="exact")
            sparge.attention(q, k, v, recipe=recipe, backend=name).square().sum().backward()
            grads.append((q.grad, k.grad, v.grad))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    finally:
        unregister_backend(on_gpu.NAME)


def test_the_suite_passes_through_the_mover():
    """With the reference's stages on the processor: what is wrong then is the plugin's."""
    code = (
        "import sys, pytest, on_gpu; from sparge.backends.reference import REFERENCE;"
        "on_gpu.register_backend(on_gpu.backend_on('cpu', REFERENCE));"
        "sys.exit(pytest.main(['-q', '--no-cov', '-p', 'no:cacheprovider', '-k', 'triton-gpu', "
        "*sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, str(TESTS / "api/test_attend.py")]
    env = {**os.environ, "PYTHONPATH": str(TESTS / "support")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, env=env)
    passed = re.search(r"^(\d+) passed, \d+ deselected", done.stdout, re.M)
    assert passed is not None, done.stdout[-3000:] + done.stderr
    assert int(passed[1]) > 30
