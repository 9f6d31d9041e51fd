"""Kernels compiled ahead: all that a call launches, none of it launched, and stored."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

import sparge
from cli_runs import complaint
from sparge import DEFAULT, VISION, Unsupported
from sparge.backends.triton.warm import COMPILED, LOADED, STORED, Warmed, WarmKernel
from sparge_tools.commands.warm_command import Layer, layer_from
from static_runs import needs_triton, run_alone

LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
FLUX = {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 24}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_alone("warm_runs.py", str(tmp_path_factory.mktemp("cache")))


@needs_triton
def test_a_vision_call_compiles_13_kernels_and_launches_none(found):
    first = found["process"]["first"]
    assert (first["launches"], len(first["names"])) == (13, 13)
    assert set(first["hows"]) == {COMPILED}
    assert found["process"]["launched"] == 0
    assert found["process"]["files"] == 13
    assert first["text"].startswith("13 kernels in ")
    assert first["text"].endswith(" s: 13 compiled")


@needs_triton
def test_a_call_after_it_compiles_nothing(found):
    assert found["process"]["called"] == {"launches": 13, "compiled": []}
    assert found["process"]["again"]["hows"] == [LOADED] * 13
    assert found["process"]["stored"]["hows"] == [STORED] * 13


@needs_triton
def test_the_command(found):
    document = found["command"]
    assert document["format"] == "sparge.warm/1"
    plain, lse, packed = document["calls"]
    assert plain["call"] == "4/2 heads of 64, bf16, causal"
    assert (lse["call"], packed["call"]) == (
        "4/2 heads of 64, bf16, causal, with LSE",
        "4/2 heads of 64, bf16, causal, packed",
    )
    for call in (plain, lse, packed):
        assert call["launches"] == len(call["kernels"]) == 7
    assert document["seconds"] > 0
    assert Counter(kernel["how"] for kernel in packed["kernels"])[COMPILED] > 0


def test_what_is_told():
    kernels = (WarmKernel("a", COMPILED, 1.0), WarmKernel("b", STORED, 0.5))
    assert str(Warmed(3, kernels)) == "2 kernels in 1.5 s: 1 compiled, 1 stored"


def test_work_that_launches_nothing_is_refused():
    x = torch.zeros(1, 1, 8, 8)
    with pytest.raises(Unsupported, match=r"nothing to compile ahead:[\s\S]*SPARGE_BACKEND=triton"):
        sparge.warm(sparge.attention, x, x, x)


@pytest.mark.parametrize(
    "config, layer",
    [
        (LLAMA, Layer(32, 8, 128, True, DEFAULT, "bf16")),
        ({"text_config": {**LLAMA, "head_dim": 64}}, Layer(32, 8, 64, True, DEFAULT, "bf16")),
        (
            {**FLUX, "attention_head_dim": 128},
            Layer(24, 24, 128, False, VISION),
        ),
        (FLUX, None),
        ({"num_attention_heads": [1, 2]}, None),
        ({}, None),
    ],
)
def test_heads_are_read_from_a_configuration(config, layer):
    assert layer_from(config) == layer


def test_mistakes_of_the_command(capsys, tmp_path):
    assert "--model, or --heads and --head-dim" in complaint(["warm"], capsys)
    assert "has no config.json" in complaint(["warm", "--model", str(tmp_path)], capsys)
    (tmp_path / "config.json").write_text(json.dumps(FLUX))
    assert "does not tell heads" in complaint(["warm", "--model", str(tmp_path)], capsys)
    assert "must divide" in complaint(["warm", "--heads", "4/3", "--head-dim", "64"], capsys)


def test_without_a_card_the_command_is_refused(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    argv = ["warm", "--heads", "2", "--head-dim", "64", "--device", "cpu"]
    assert "it runs on GPUs" in complaint(argv, capsys, code=3)
