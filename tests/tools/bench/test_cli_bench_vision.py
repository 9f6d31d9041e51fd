"""`sparge bench --suite vision`: what it measures, refuses and prints. No test looks at a time."""

from __future__ import annotations

import json
from statistics import median

import pytest

from cli_runs import complaint
from sparge import KeepFraction, Recipe
from sparge.cli import main
from sparge_tools.bench import vision_suite
from sparge_tools.bench.vision_suite import RECIPES, SHAPES, VisionShape, named_shapes
from sparge_tools.commands import bench_command
from sparge_tools.studies.targets import MET, NO_TARGET, NOT_MET, VISION_TARGETS, judge_speed
from sparge_tools.studies.targets import main as judge_main

pytestmark = pytest.mark.usefixtures("piped")
TINY = VisionShape("tiny", "a test", (4, 8, 10), 9, 16, heads=2, model_heads=8)
SMALL = ["bench", "--suite", "vision", "--backends", "reference", "--repeat", "2"]


@pytest.fixture
def tiny(monkeypatch):
    """One small shape. The self-check has tests of its own."""
    monkeypatch.setattr(vision_suite, "SHAPES", (TINY,))
    monkeypatch.setattr(bench_command, "check_backends", lambda device: [])
    monkeypatch.setattr(bench_command, "check_sparse", lambda names, device: [])


def run_json(argv, capsys):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_shapes_are_those_of_the_models():
    found = {shape.name: (shape.tokens, shape.layout, shape.head_dim) for shape in SHAPES}
    assert found == {
        "flux": (4608, "512 + 64×64", 128),
        "cogvideox": (17776, "226 + 13×30×45", 64),
        "mochi": (22516, "256 + 14×30×53", 128),
        "wan": (75600, "21×45×80", 128),
    }
    assert all(shape.heads < shape.model_heads for shape in SHAPES)
    assert [shape.name for shape in named_shapes(["wan", "flux"])] == ["flux", "wan"]


def test_half_is_kept_and_the_text_is_protected():
    recipe = SHAPES[1].recipe("50%")
    assert recipe == Recipe(KeepFraction(0.5), protect=((0, 226),))
    assert SHAPES[3].recipe("default").protect == ()


def test_the_rows_of_a_shape(tiny, capsys):
    found = run_json(SMALL, capsys)
    assert found["format"] == "sparge.bench.vision/1"
    assert found["order"] == "hilbert"
    dense, *ours = found["rows"]
    assert dense["kind"] == "sdpa"
    assert dense["dtype"] == min(dense["probe_seconds"], key=dense["probe_seconds"].get)
    assert set(dense["probe_seconds"]) == {"bf16", "fp32"}
    assert [row["recipe_name"] for row in ours] == list(RECIPES)
    for row in found["rows"]:
        assert (row["shape"], row["heads"], row["model_heads"]) == ("tiny", 2, 8)
        assert (row["length"], row["grid"], row["text"]) == (329, [4, 8, 10], 9)
        assert not row["causal"]
        assert row["dtype"] == dense["dtype"]
    for row in ours:
        pairs = zip(dense["seconds_each"], row["seconds_each"], strict=True)
        assert row["ratio"] == pytest.approx(median(d / s for d, s in pairs))
        whole = row["seconds"] + row["reorder_seconds"]
        assert row["ratio_reordered"] == pytest.approx(row["ratio"] * row["seconds"] / whole)
        assert set(row["stages"]) >= {"prepare", "attend"}
        assert 0 < row["error"] <= 1.1 * (row["quantization_error"] + row["sparsity_error"])
    # Of three query blocks the text's keeps all six key blocks, the others three or four.
    assert 12 / 18 <= ours[0]["density"] <= 14 / 18


def test_the_order_of_the_tokens_changes_the_plan(tiny, capsys, monkeypatch):
    shape = VisionShape("tiny", "a test", (4, 16, 16), 0, 16, heads=1, model_heads=8)
    monkeypatch.setattr(vision_suite, "SHAPES", (shape,))
    errors = {}
    for order in ("hilbert", "random"):
        found = run_json([*SMALL, "--order", order, "--repeat", "1"], capsys)
        errors[order] = found["rows"][1]["error"]
    assert errors["hilbert"] < 0.6 * errors["random"]


def test_text_file_heads_and_threads(tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    target = tmp_path / "vision.json"
    argv = ["bench", "vision", *SMALL[3:], "--heads", "1", "--threads", "1"]
    assert main([*argv, "--output", str(target)]) == 0
    text = capsys.readouterr().out
    document = json.loads(target.read_text())
    assert {row["heads"] for row in document["rows"]} == {1}
    assert "synthetic tokens in hilbert order" in text
    assert "tiny 329 tokens (9 + 4×8×10: a test), 1 of 8 heads" in " ".join(text.split())
    assert text.count("tiny d16 1t") == 4
    assert judge_main([str(target)]) == 0
    assert "50 % kept, times SDPA in its faster dtype" in capsys.readouterr().out


def test_wrong_results_print_no_numbers(tiny, capsys, monkeypatch):
    monkeypatch.setattr(bench_command, "ROW_TOLERANCE", 1e-9)  # 8 bits are worse than that
    assert main(SMALL) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no numbers are printed for wrong results" in err


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--lengths", "1024"], "--lengths is not for --suite vision"),
        (["--head-dims", "64"], "--head-dims is not for --suite vision"),
        (["--no-causal"], "--causal is not for --suite vision"),
        (["--full"], "--full is not for --suite vision"),
        (["--contenders", "all"], "--contenders is not for --suite vision"),
        (["--shapes", "sora"], "unknown shape 'sora'; known: flux, cogvideox, mochi, wan"),
        (["--order", "zigzag"], "order must be one of 'hilbert'"),
        (["--backends", "gpu"], "unknown backend 'gpu'"),
        (["--output", "/nowhere/out.json"], "cannot be written"),
    ],
)
def test_mistakes_are_refused_before_measuring(more, why, capsys, monkeypatch):
    monkeypatch.setattr(bench_command, "check_backends", lambda device: pytest.fail("began"))
    assert why in complaint(["bench", "--suite", "vision", *more], capsys)


def test_two_suites_are_refused(capsys):
    assert "one at a time" in complaint(["bench", "error", "--suite", "vision"], capsys)


def test_options_of_the_vision_suite_are_refused_elsewhere(capsys):
    assert "--shapes is for --suite vision" in complaint(["bench", "--shapes", "flux"], capsys)
    assert "--order is for --suite vision" in complaint(["bench", "--order", "row"], capsys)


def test_targets_by_instruction_set():
    case = {"head_dim": 64, "causal": False, "threads": 2, "backend": "cpu", "kind": "sparse"}
    rows = [
        {**case, "length": 4608, "recipe_name": "50%", "ratio": 2.7},
        {**case, "length": 4608, "recipe_name": "fast 50%", "ratio": 3.0},
    ]
    (found,) = judge_speed(rows, "avx2", VISION_TARGETS)
    assert (found["verdict"], found["worst"]) == (MET, 3.0)
    assert judge_speed(rows[:1], "avx2", VISION_TARGETS)[0]["verdict"] == NOT_MET
    assert judge_speed(rows, "avx512", VISION_TARGETS)[0]["verdict"] == NO_TARGET
