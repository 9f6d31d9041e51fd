"""`python -m sparge_tools.studies.synthetic_errors`: its figures, block maps and files."""

from __future__ import annotations

import json

import pytest

import sparge
from sparge import DEFAULT, Recipe
from sparge.cli.screen import error
from sparge.synthetic import structured_qkv
from sparge_tools.studies import synthetic_errors
from sparge_tools.studies.synthetic_errors import BACKEND, main

pytestmark = pytest.mark.usefixtures("piped")
SMALL = ["--length", "384", "--heads", "2"]


def run_text(argv, capsys, code=0):
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert (err == "") == (code == 0)
    return out or err


def run_json(argv, capsys):
    return json.loads(run_text([*argv, "--json"], capsys))


@pytest.mark.parametrize("fault, code", [(ValueError("no luck"), 2), (KeyboardInterrupt(), 130)])
def test_a_run_that_ends_early_leaves_the_output_alone(fault, code, capsys, monkeypatch, tmp_path):
    def fails(*_):
        raise fault

    target = tmp_path / "out.json"
    target.write_text("old")
    monkeypatch.setattr(synthetic_errors, "measure_recipe", fails)
    message = run_text([*SMALL, "--output", str(target)], capsys, code)
    assert message == f"sparge: error: {str(fault) or 'interrupted'}\n"
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_it_measures(capsys):
    rows = {row["recipe_name"]: row for row in run_json(SMALL, capsys)["rows"]}
    assert list(rows) == list(synthetic_errors.RECIPES)
    for row in rows.values():
        assert 0 < row["density"] <= 1
        assert 0 <= row["sparsity"] < 1
        assert 0.9 < row["cosine"] <= 1 + 1e-9
        assert row["error"] <= 1.1 * (row["quantization_error"] + row["sparsity_error"])
        assert row["seconds"] == pytest.approx(sum(row["stages"].values()))
    exact, int8, default = rows["keep all, exact"], rows["keep all, int8"], rows["default"]
    assert exact["density"] == int8["density"] == 1
    assert exact["quantization_error"] == 0 < exact["error"] < 1e-5
    assert 1e-4 < int8["error"] == pytest.approx(int8["quantization_error"], rel=1e-2)
    assert int8["sparsity_error"] < 1e-5 < default["sparsity_error"]
    assert rows["fraction 0.3"]["density"] < default["density"] < 1
    assert default["pv_skipped"] == 0 < rows["default, pv_skip 5"]["pv_skipped"]
    assert Recipe.from_dict(default["recipe"]) == DEFAULT


def test_it_repeats_a_seed_and_draws_heads_from_first_to_last(capsys):
    def numbers(seed):
        found = run_json(["--length", "128", "--heads", "9", "--seed", seed], capsys)
        assert [drawn["head"] for drawn in found["plans"]] == [0, 3, 5, 8]
        return [(row["density"], row["error"]) for row in found["rows"]]

    assert numbers("3") == numbers("3") != numbers("4")


def test_it_in_text_and_to_a_file(capsys, tmp_path):
    target = tmp_path / "out.json"
    target.write_text("old")
    text = run_text([*SMALL, "--output", str(target)], capsys)
    found = json.loads(target.read_text())
    assert list(tmp_path.iterdir()) == [target]
    for row in found["rows"]:
        name = f"  {row['recipe_name']}   "
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        assert f" {row['density']:.3f} " in line
        assert f" {error(row['error'])} " in line
    query, key, value = structured_qkv(Hq=2, Hk=1, L=384)
    facts = {"is_causal": True, "enable_gqa": True}
    plan = sparge.make_plan(query, key, **facts, backend=BACKEND)
    for drawn in found["plans"]:
        assert "\n".join(drawn["map"]) == plan.picture(h=drawn["head"])
        assert drawn["density"] == float(plan.head_density()[0, drawn["head"]])
        assert f"head {drawn['head']}, density {drawn['density']:.3f}" in text
        assert all(line.rstrip() in text for line in drawn["map"])
    auto = sparge.explain(query, key, value, **facts)
    assert found["auto"] == auto.to_dict()
    dense = f"dense SDPA {found['dense_seconds'] * 1e3:.1f} ms"
    for words in (f"backend {BACKEND}", found["machine_line"], auto.reason, "x the speed", dense):
        assert words in text


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--length", "0"], "whole number of at least 1, got '0'"),
        (["--seed", "-1"], "seed must be from 0"),
        (["--output", "no/such/place"], "--output 'no/such/place' cannot be written"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    assert message in run_text(argv, capsys, 2)
