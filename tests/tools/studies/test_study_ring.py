"""`python -m sparge_tools.studies.ring`: its document and its verdict."""

from __future__ import annotations

import json

import pytest
import torch

from sparge_tools.studies import ring


def test_what_ranks_need_of_each_other():
    kept = torch.zeros(1, 2, 4, 8, dtype=torch.bool)
    kept[0, 1, 0, 7] = True  # of rank 1, by the second head of the only key head
    kept[0, 0, 3, 6] = True  # its own
    assert ring.needs(kept, 1, "contiguous", 2) == 1 / 8
    # Dealt there and back, rank 0 has query blocks 0 and 3, and key blocks 0, 1, 6 and 7.
    assert ring.needs(kept, 1, "zigzag", 2) == 0.0


def test_the_document_and_the_verdict(capsys):
    code = ring.main(["--ranks", "2", "--length", "1024", "--density", "0.6", "--json"])
    document = json.loads(capsys.readouterr().out)
    causal, full = document["rows"]
    assert causal["causal"]
    assert not full["causal"]
    for row in (causal, full):
        assert row["density"] == pytest.approx(0.6, abs=0.05)
        assert row["bytes_ratio"] == pytest.approx(sum(row["sent"].values()))
        assert 0 < row["needs"] <= 1
        assert row["error"] < 0.005
    assert code == (0 if causal["bytes_ratio"] <= ring.MOST else 1)
