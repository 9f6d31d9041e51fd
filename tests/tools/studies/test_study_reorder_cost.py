"""`python -m sparge_tools.studies.reorder_cost`: its document and its verdict."""

from __future__ import annotations

import json

import pytest
import torch

from sparge_tools.studies import reorder_cost

SMALL = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 32}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(reorder_cost, "WAN", SMALL)
    monkeypatch.setattr(reorder_cost, "best_dtype", lambda: torch.float32)


def test_the_share_is_of_the_time_measured(small, capsys):
    code = reorder_cost.main(["--tokens", "256", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == 256
    assert document["transformer_seconds"] > document["reorder_seconds"] > 0
    share = document["reorder_seconds"] / document["transformer_seconds"]
    assert document["share"] == pytest.approx(share)
    assert code == (0 if share < reorder_cost.MOST else 1)


def test_a_bad_number_of_tokens_is_a_mistake(capsys):
    assert reorder_cost.main(["--tokens", "0"]) == 2
    assert "--tokens" in capsys.readouterr().err
