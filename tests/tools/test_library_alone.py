"""The library without the package sparge-tools: what works, and what says how to install it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparge.support.tools_package import need_tool

ROOT = Path(__file__).parent.parent.parent
PROFILE = ROOT / "tools/sparge_tools/zoo/profiles/smollm2-135m-instruct.json"
TOOLS = ("bench", "demo", "eval", "trace", "tune", "warm")

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sparge_tools":
            raise ModuleNotFoundError(f"No module named {name!r}", name="sparge_tools")

sys.meta_path.insert(0, Hidden())
"""


def run_alone(code, *argv):
    """A process in which `sparge_tools` cannot be imported."""
    command = [sys.executable, "-c", HIDE + code, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_command(*argv):
    return run_alone("from sparge.cli import main\nsys.exit(main(sys.argv[1:]))", *argv)


def test_no_file_of_the_library_names_the_tools():
    for file in sorted((ROOT / "src/sparge").rglob("*.py")):
        assert "sparge_tools" not in file.read_text(encoding="utf-8"), file


def test_attention_needs_no_tools():
    done = run_alone("""
import torch
import sparge

x = torch.randn(1, 2, 300, 64)
out = sparge.attention(x, x, x, recipe=sparge.Recipe(sparge.KeepAll(), precision="exact"))
truth = torch.nn.functional.scaled_dot_product_attention(x, x, x)
assert torch.allclose(out, truth, atol=1e-5)
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "argv, format",
    [
        (["doctor"], "sparge.doctor/1"),
        (["explain", "--shape", "1,8,1024,64"], "sparge.explain/1"),
        (["profile", "show", str(PROFILE)], "sparge.profile/"),
        (["profile", "check", str(PROFILE)], "sparge.profile.check/1"),
    ],
)
def test_commands_of_the_library(argv, format):
    done = run_command(*argv, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["format"].startswith(format)


@pytest.mark.parametrize("name", TOOLS)
def test_commands_of_the_tools_say_what_to_install(name):
    done = run_command(name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"sparge: error: sparge {name} needs the package sparge-tools, which is not installed; "
        'install it with: pip install "sparge[tools]" (in a clone: pip install . ./tools)\n'
    )


def test_a_profile_is_checked_against_a_model_with_the_tools_only():
    done = run_command("profile", "check", str(PROFILE), "--model", "smollm2-135m-instruct")
    assert done.returncode == 2
    assert "--model needs the package sparge-tools" in done.stderr


def test_nothing_registered():
    with pytest.raises(ValueError, match=re.escape("fly needs the package sparge-tools")):
        need_tool("sparge.no_such_group", "fly", what="fly")
