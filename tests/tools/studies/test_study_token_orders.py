"""`python -m sparge_tools.studies.token_orders`: its figures, its search, files and mistakes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from sparge_tools.studies import token_orders
from sparge_tools.studies.token_orders import (
    LEAST_MASS,
    SKIPPED,
    Tokens,
    compare_orders,
    density_at_error,
    main,
    mean_rows,
    self_similarity,
)
from sparge_tools.synthetic_video import video_qkv
from sparge_tools.zoo.vision.task import ZooModule

pytestmark = pytest.mark.usefixtures("piped")
GRID, TEXT = (4, 12, 16), 64
SMALL = ["--grid", "4x12x16", "--text", "0", "--heads", "1", "--orders", "row,hilbert"]


def complaint(argv, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_hilbert_needs_fewer_blocks_than_rows_on_video():
    inputs = video_qkv(GRID, text=TEXT, heads=2, D=32, locality=3.0)
    rows = compare_orders(
        Tokens("video", *inputs, GRID, TEXT), orders=("row", "hilbert"), skipped=("drop", "pool 16")
    )
    assert [(row["order"], row["skipped"]) for row in rows] == [
        (order, way) for order in ("row", "hilbert") for way in ("drop", "pool 16")
    ]
    found = {(row["order"], row["skipped"]): row for row in rows}
    for way in ("drop", "pool 16"):
        by_row, curve = found["row", way], found["hilbert", way]
        assert curve["k_similarity"] > 1.3 * by_row["k_similarity"]
        assert curve["equal_density"] < by_row["equal_density"]
        assert 0 < curve["equal_mass"] < 1
        assert curve["budget_error"] < 0.06
    assert found["hilbert", "pool 16"]["equal_density"] < found["hilbert", "drop"]["equal_density"]


def test_the_search_finds_the_mass_of_an_error():
    """Error 1 - mass and density mass² are known."""
    mass, density = density_at_error(lambda mass: (mass**2, 1 - mass), 0.1)
    assert mass == pytest.approx(0.9, abs=1e-3)
    assert density == pytest.approx(0.81, abs=2e-3)


def test_the_search_at_its_ends():
    assert density_at_error(lambda mass: (mass, 0.0), 0.1) == (LEAST_MASS, LEAST_MASS)
    assert density_at_error(lambda mass: (mass, 1.0), 0.1)[1] is None


def test_self_similarity_by_hand():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [9.0, 9.0]])[None, None]
    # Blocks of two: alike, and at right angles (two of four pairs are a row with itself).
    assert self_similarity(x, 2) == pytest.approx((1.0 + 0.5) / 2)


def test_tables_and_document(capsys, tmp_path):
    target = tmp_path / "orders.json"
    assert main([*SMALL, "--errors", "0.1", "--output", str(target)]) == 0
    text = capsys.readouterr().out
    assert "moving: density at error 0.1000" in text
    assert "fast, noisy: motion 3.0, noise 0.5." in text
    rows = json.loads(target.read_text())["rows"]
    assert len(rows) == 3 * 2 * len(SKIPPED)
    assert {row["error"] for row in rows} == {0.1}


def test_captured_tensors(capsys, tmp_path):
    query, key, value = video_qkv((8, 16), heads=1, D=16)
    save_file({"query": query, "key": key, "value": value}, tmp_path / "layer-3.safetensors")
    argv = ["--tensors", str(tmp_path), "--grid", "8x16", "--text", "0", "--orders", "row"]
    assert main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["name"], row["order"]) for row in rows} == {("layer-3", "row")}
    assert "does not match the tokens" in complaint([*argv[:3], "8x17", "--text", "0"], capsys)
    save_file({"query": query}, tmp_path / "other.safetensors")
    assert "other.safetensors has no key, value" in complaint(argv, capsys)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--grid", "8"], "two or three sizes"),
        (["--grid", "8xa"], "--grid"),
        (["--errors", "2"], "max_error must be greater than 0"),
        (["--orders", "zigzag"], "order must be one of"),
        (["--tensors", "nowhere"], "nowhere"),
        (["--text", "-1"], "text must be at least 0"),
    ],
)
def test_mistakes(argv, why, capsys):
    assert why in complaint(argv, capsys)


def test_rows_of_one_name_are_averaged():
    row = {"name": "a", "order": "row", "error": 0.05, "skipped": "drop", "equal_density": 0.2}
    (mean,) = mean_rows([row, {**row, "equal_density": None}])
    assert mean["equal_density"] == pytest.approx(0.6)  # without a mass, everything is kept
    assert mean["tensors"] == 2


class AttendsGrid(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class RunsIt:
    def inputs(self, n, seed=0):
        return [torch.randn(1, 1, 48 * 48, 8) + i for i in range(n)]

    def run(self, model, given):
        with torch.no_grad():
            model(given[:, :, :64])  # too small to be of interest
            return model(given)


def test_layers_of_a_module_are_captured(monkeypatch):
    grids = {48 * 48: (1, 48, 48)}.get
    made = ZooModule("tiny", AttendsGrid(), grids, RunsIt())
    monkeypatch.setattr(token_orders.zoo, "load_module", lambda name: made)
    found = list(token_orders.captured_layers("tiny", 2))
    assert [(each.name, each.grid) for each in found] == [("tiny", (1, 48, 48))] * 2
    assert torch.equal(found[1].query, found[1].value)
    assert found[0].query.shape == (1, 1, 48 * 48, 8)
    assert "forward" not in vars(made.model)


def test_tensors_and_a_module_are_not_given_together(capsys):
    assert "--module" in complaint(["--module", "x", "--tensors", "y"], capsys)
