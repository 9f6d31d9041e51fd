"""What the README shows runs, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    names: dict[str, object] = {}
    exec(code, names)
    assert names["out"].shape == names["query"].shape
    assert 0 < names["runs"][0].density <= 1
    assert "density" in capsys.readouterr().out


def test_commands_and_files_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test", "lint", "bench", "docs"} <= named <= targets
    for file in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / file).exists(), file


def test_one_screen_comes_before_the_numbers():
    lines = README.splitlines()
    first_table = next(i for i, line in enumerate(lines) if line.startswith("|"))
    assert first_table <= 55
    assert len(lines) <= 90
