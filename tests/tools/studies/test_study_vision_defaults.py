"""`python -m sparge_tools.studies.vision_defaults`: cases on a small module with a task."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparge_tools.studies import vision_defaults
from sparge_tools.zoo.vision.task import ZooModule, relative_l2

pytestmark = pytest.mark.usefixtures("piped")
SIDE = 32


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(4 * x, 4 * x, x)


class Task:
    metric = "relative_l2"

    def inputs(self, n, seed=0):
        """Smooth over the grid, so that near tokens attend to each other."""
        at = torch.stack(torch.meshgrid(*[torch.linspace(0, 6, SIDE)] * 2, indexing="ij"), -1)
        waves = [torch.cat([(at + i).sin(), (at + i).cos()], -1) for i in range(n)]
        return [wave.flatten(0, 1).repeat(1, 4)[None, None] for wave in waves]

    def run(self, model, given):
        return model(given)

    def compare(self, dense, sparse):
        return {self.metric: relative_l2(dense, sparse)}


@pytest.fixture
def small(monkeypatch):
    made = ZooModule("small", Attends(), {SIDE * SIDE: (1, SIDE, SIDE)}.get, Task())
    monkeypatch.setattr(vision_defaults.zoo, "load_module", lambda name: made)
    monkeypatch.setattr(vision_defaults, "LEAST_TOKENS", SIDE * SIDE)


def test_the_default_keeps_less_at_the_same_budget(small, capsys):
    assert vision_defaults.main(["--module", "small", "--inputs", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["case"]: row for row in document["rows"]}
    assert list(rows) == list(vision_defaults.CASES)
    first, default = rows["row, dropped, 4 rows"], rows["default: hilbert, pooled by 8, 8 rows"]
    assert first["of_first"] == 1.0
    assert default["density"] < first["density"]
    assert default["of_first"] == pytest.approx(default["density"] / first["density"])
    for row in rows.values():
        assert 0 < row["density"] <= 1
        assert row["error"] < 0.06
        assert row["metric"] <= row["worst"] < 0.1


def test_a_table(small, capsys):
    assert vision_defaults.main(["--module", "small", "--inputs", "1"]) == 0
    assert "hilbert, pooled by 4" in capsys.readouterr().out


def test_a_module_without_large_layers_is_refused(small, monkeypatch, capsys):
    monkeypatch.setattr(vision_defaults, "LEAST_TOKENS", 4096)
    assert vision_defaults.main(["--module", "small", "--inputs", "1"]) == 2
    assert "no layer has 4096 tokens" in capsys.readouterr().err
