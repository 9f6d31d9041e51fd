"""What a type checker sees: a backend has all of its stages, and calls return what they say."""

from __future__ import annotations

import subprocess
import sys

import pytest

STAGES = ("prepare_keys", "prepare_queries", "predict", "select", "attend", "backward")
CODE = """
from typing import Any
import torch
import sparge

class Mine:
{stages}

sparge.Backend("mine", "", Mine)
x = torch.zeros(1, 1, 1, 1)
out: torch.Tensor = sparge.attention(x, x, x, is_causal=True)
lse: torch.Tensor = sparge.attention(x, x, x, return_lse=True)[1]
{more}
"""


def mypy(tmp_path, *, without="", more=""):
    given = "\n".join(f"    {name}: Any = None" for name in STAGES if name != without)
    (tmp_path / "mine.py").write_text(CODE.format(stages=given, more=more))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir"]
    done = subprocess.run(
        [*command, str(tmp_path / "cache"), "--python-version", "3.12", "mine.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("stage", ["select"])
def test_a_backend_that_lacks_a_stage_is_no_backend(tmp_path, stage):
    assert mypy(tmp_path)[0] == 0
    code, said = mypy(tmp_path, without=stage)
    assert code == 1
    assert "Stages" in said


def test_a_mistyped_option_is_seen(tmp_path):
    code, said = mypy(tmp_path, more="sparge.attention(x, x, x, is_casual=True)")
    assert code == 1
    assert "No overload variant" in said


def test_the_backends_have_all_of_their_stages(tmp_path):
    """They are imported by name, at first use."""
    more = "\n".join(
        f"import sparge.backends.{name}.stages as {name}\n{name}_stages: Stages = {name}"
        for name in ("reference", "cpu", "triton")
    )
    packed = "\n".join(
        f"import sparge.backends.{name}.varlen as {name}_packed\n"
        f"{name}_pack: PackedStages = {name}_packed"
        for name in ("cpu", "triton")
    )
    start = "from sparge.values.stages import PackedStages, Stages\n"
    code, said = mypy(tmp_path, more=start + more + "\n" + packed)
    assert code == 0, said
