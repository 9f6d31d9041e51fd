"""What the README shows runs, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    shown = capsys.readouterr().out
    assert names["out"].shape == names["query"].shape
    assert 0 < names["plan"].density < 1
    assert (tmp_path / "plan.safetensors").is_file()
    for word in ("BlockPlan", "density", "not reference:", "routed to dense"):
        assert word in shown


def test_commands_and_files_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE))
    assert {"demo", "test", "lint", "bench"} <= named <= targets
    for file in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / file).is_file(), file
