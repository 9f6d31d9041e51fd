"""Every script of examples/ runs on small inputs and prints what it claims."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
TOKENS = "1024"


def run(name, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SPARGE_CALIBRATE": "0"}
    env["SPARGE_CACHE"] = str(tmp_path)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), TOKENS]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]


def drop_in_sdpa(out):
    (error,) = numbers(r"relative L1 error ([\d.]+)", out)
    assert error < 0.05
    assert "not reference:" in out
    assert "all blocks in fp32 equal SDPA: True" in out


def transformers_model(out):
    (density,) = numbers(r"^density ([\d.]+)", re.sub(r"(?s).*\n(?=density)", "", out))
    assert 0.5 < density < 0.9
    assert "model.layers.1.self_attn" in out
    assert "restored: True" in out


def tuning(out):
    default, tuned = numbers(r"density ([\d.]+)", out)
    assert tuned < default
    assert max(numbers(r"error of a head ([\d.]+)", out)) < 0.06


def plans_and_pictures(out):
    more, less = numbers(r"mass [\d.]+: density ([\d.]+)", out)
    assert less < more < 1
    assert "██" in out
    assert "loaded plan equals the saved one: True" in out
    assert "window: density 0.4" in out


def error_budget(out):
    budgets = numbers(r"max_error ([\d.]+)", out)
    measured = numbers(r"measured ([\d.]+)", out)
    densities = numbers(r": density ([\d.]+)", out)
    assert len(budgets) == 3
    assert all(error <= budget for error, budget in zip(measured, budgets, strict=True))
    assert densities == sorted(densities, reverse=True)


def varlen(out):
    assert out.count("as if alone: True") == 3
    assert "merged equals whole: True" in out


def diffusers_pipeline(out):
    assert "own attention 1x" in out
    steps = numbers(r"(\d\.\d\d)", re.search(r"density by step: (.*)", out)[1])
    assert len(steps) == 5
    assert steps[0] == 1.0
    assert max(steps[1:]) < 1.0
    assert "grids of visual tokens: 4×16×16" in out


def ring(out):
    assert "ring of 2: one plan of the whole sequence" in out
    assert out.count("kept") == 2
    (distance,) = numbers(r"from one process ([\d.]+)", out)
    assert distance < 0.005


CHECKS = [
    drop_in_sdpa,
    transformers_model,
    tuning,
    plans_and_pictures,
    error_budget,
    varlen,
    ring,
    diffusers_pipeline,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_example(check, tmp_path):
    check(run(check.__name__, tmp_path))


def test_no_example_is_left_out():
    checked = {check.__name__ for check in CHECKS} | {"custom_backend"}
    assert {script.stem for script in EXAMPLES.glob("*.py")} <= checked
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text().splitlines()) <= 60, script.name
