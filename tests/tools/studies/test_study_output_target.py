"""`python -m sparge_tools.studies.output_target` on a tiny model."""

from __future__ import annotations

import json

import pytest

from sparge_tools import zoo
from sparge_tools.studies import output_target
from sparge_tools.studies.output_target import Row, density_at, main, verdicts
from tiny_llama import Letters, sharp_llama

pytest.importorskip("transformers")


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "load", lambda name, dtype=None: (sharp_llama().to(dtype), Letters()))
    monkeypatch.setattr(output_target, "MASSES", (0.98, 0.9))
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + (i * i * 7 + i // 3) % 90) for i in range(20000)))
    sizes = {"length": 640, "inputs": 1, "windows": 2, "max-kl": 0.01}
    given = [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
    return ["--model", "tiny", "--text", str(text), *given]


def test_the_table_has_the_recipe_the_profile_and_its_parts(arguments, tmp_path, capsys):
    state = tmp_path / "s.json"
    assert main([*arguments, "--parts", "--state", str(state), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["what"]: row for row in document["rows"]}
    assert {"mass 0.98", "mass 0.9", "profile, KL 0.01"} <= set(rows)
    assert {"one mass per layer, KL 0.01", "every layer counts alike, KL 0.01"} <= set(rows)
    assert all(row["kl"] <= 0.01 for what, row in rows.items() if "KL" in what)
    assert rows["mass 0.9"]["density"] < rows["mass 0.98"]["density"]
    assert main([*arguments, "--state", str(state)]) == 0
    shown = capsys.readouterr().out
    assert "profile, KL 0.01" in shown
    assert "needed 8%, aim 20%" in shown


def test_the_density_of_one_recipe_between_its_masses():
    curve = [Row("a", 0.5, 0.001, 0, 0, 0), Row("b", 0.3, 0.1, 0, 0, 0)]
    assert density_at(curve, 0.01) == pytest.approx(0.4)
    assert density_at(curve, 0.2) is None


def test_verdicts():
    saved = {"profile, KL 1": 0.25, "profile, KL 2": 0.1, "profile, KL 3": 0.05, "mass 0.9": 0.5}
    told = verdicts([{"what": what, "saved": share} for what, share in saved.items()])
    assert [line.rsplit(": ", 1)[1] for line in told] == ["aim met", "met", "not reached"]


def test_mistakes_are_found_before_the_work(arguments, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(zoo, "load", lambda *a, **k: pytest.fail("work was begun"))
    assert main([*arguments, "--output", str(tmp_path / "no" / "p.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
