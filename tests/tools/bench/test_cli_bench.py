"""`sparge bench`: what it measures, what it refuses, what it prints. No test looks at a time."""

from __future__ import annotations

import argparse
import json
import re
import sys
from statistics import median
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from cli_runs import WHY, attend_wrongly, complaint
from sparge import DEFAULT, Recipe
from sparge.backends.cpu import library as native
from sparge.cli import main
from sparge_tools.bench import cases, contender
from sparge_tools.bench.bench_table import bench_table
from sparge_tools.bench.contender import RECIPES, lineup
from sparge_tools.commands import bench_command

pytestmark = [
    pytest.mark.usefixtures("piped"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
TINY = ["bench", "--lengths", "256", "--heads", "1", "--head-dims", "16", "--repeat", "2"]
OURS = [*TINY, "--backends", "reference"]


def run_text(argv, capsys):
    """What is printed; stderr names each case when it is done."""
    assert main(argv) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines
    for i, line in enumerate(lines, start=1):
        assert line.startswith(f"sparge: {i} of {len(lines)}: ")
    return out


def run_json(argv, capsys):
    return json.loads(run_text([*argv, "--json"], capsys))


@pytest.fixture
def green(monkeypatch):
    """The self-check and the peak have tests of their own."""
    monkeypatch.setattr(bench_command, "check_backends", lambda device: [])
    monkeypatch.setattr(bench_command, "check_sparse", lambda names, device: [])
    known = {"bf16": 2.0, "fp32": 4.0}
    monkeypatch.setattr(bench_command, "gemm_rates", lambda ns, device: dict.fromkeys(ns, known))


@pytest.fixture
def eager_flex(monkeypatch):
    """Compiling is tested where it belongs, and takes longer than all of this."""
    monkeypatch.setattr(contender, "_compiled", lambda: flex_attention)


def test_every_contender_in_every_case(green, eager_flex, capsys):
    found = run_json(OURS, capsys)
    assert found["format"] == "sparge.bench/3"
    threads = torch.get_num_threads()
    assert found["threads"] == [threads]
    wanted = [e.name for e in lineup(["reference"])]
    assert [row["contender"] for row in found["rows"]] == wanted * 2
    assert wanted[0] == "SDPA bf16"
    assert {f"reference {name}" for name in RECIPES} | {"SDPA fp32", "flex 20%"} <= set(wanted)
    assert [case["causal"] for case in found["cases"]] == [True, False]
    for row in found["rows"]:
        assert {key: row[key] for key in found["cases"][0]} in found["cases"]
        assert (row["recipe"] is None) == (row["kind"] == "sdpa")
        assert row["why_not"] is None
        peak = found["peaks"][str(row["threads"])]["peak"]
        assert row["share_of_peak"] == pytest.approx(row["gflops"] / peak)


def test_the_figures_of_a_row(green, eager_flex, capsys):
    rows = run_json([*OURS, "--lengths", "512", "--repeat", "3", "--causal"], capsys)["rows"]
    by_name = {row["contender"]: row for row in rows}
    for row in rows:
        dense = by_name[f"SDPA {row['dtype']}"]
        pairs = list(zip(dense["seconds_each"], row["seconds_each"], strict=True))
        assert row["rounds"] == len(pairs) == 3
        assert row["seconds"] == median(row["seconds_each"])
        assert row["ratio"] == pytest.approx(median(d / s for d, s in pairs))
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["loses"] == (row["kind"] == "sparse" and row["ratio"] < 1)
        assert row["scores"] == 512 * 513 // 2 >= row["kept_scores"]
        assert row["ns_per_score"] == pytest.approx(row["seconds"] * 1e9 / row["scores"])
        flops = 4 * 16 * row["kept_scores"] / row["seconds"]
        assert row["gflops"] == pytest.approx(flops / 1e9)
        assert 0 < row["error"] <= 1.1 * (row["quantization_error"] + row["sparsity_error"])
        assert ("stages" in row) == ("overhead" in row) == (row["kind"] == "sparse")
        if row["kind"] == "sparse":
            stages = row["stages"]
            assert "total" not in stages
            assert all(spent > 0 for spent in stages.values())
            assert row["overhead"] > 0
    everything, some = by_name["reference all"], by_name["reference 40%"]
    assert everything["density"] == 1 > some["density"]
    assert everything["kept_scores"] == everything["scores"] > some["kept_scores"]
    assert everything["sparsity_error"] < 1e-12 < some["sparsity_error"]
    assert Recipe.from_dict(by_name["reference default"]["recipe"]) == DEFAULT
    # The very same blocks, without our quantization.
    given = by_name["flex 40%"]
    assert (given["density"], given["kept_scores"]) == (some["density"], some["kept_scores"])
    assert given["sparsity_error"] == some["sparsity_error"]
    assert given["quantization_error"] < 0.01


def test_text_and_file_and_threads(green, eager_flex, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # the reference has a longer name than the table is for
    target = tmp_path / "bench.json"
    torch.set_num_threads(2)
    argv = [*OURS, "--no-causal", "--threads", "1,2", "--contenders", "40%,fp32"]
    text = run_text([*argv, "--output", str(target)], capsys)
    assert torch.get_num_threads() == 2
    found = json.loads(target.read_text())
    assert found["threads"] == [1, 2]
    assert {row["threads"] for row in found["rows"]} == {1, 2}
    names = {row["contender"] for row in found["rows"]}
    assert names == {
        *("SDPA bf16", "reference 40%", "reference 40% blend", "reference fast 40%"),
        *("flex 40%", "SDPA fp32", "reference fp32 all"),
    }
    assert f"machine: {found['machine_line']}" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for row in found["rows"]:
        start = f"256 d16 full {row['threads']}t {row['contender']} {row['density']:.3f}"
        (line,) = [line for line in lines if line.startswith(start)]
        assert ("LOSS" in line) == row["loses"]
    lost = sum(row["loses"] for row in found["rows"])
    assert f"sparge is slower than SDPA in {lost} of its 8 rows, marked LOSS." in text
    assert "targets" not in found  # those are the project's, not the user's
    stages = ", ".join(found["rows"][1]["stages"])
    assert f"ms: the whole call, then its stages ({stages})." in " ".join(text.split())


def test_rows_where_we_lose_are_marked(green, eager_flex, capsys):
    found = run_json([*OURS, "--contenders", "reference all"], capsys)
    for row in found["rows"]:
        row |= {"ratio": 0.5, "loses": True} if row["causal"] else {"ratio": 2, "loses": False}
    table = bench_table(found)
    texts = [cells[[c.key for c in table.columns].index("ratio_text")] for cells in table.cells()]
    assert texts == ["0.50x LOSS"] * 2 + ["2.00x"] * 2


def test_stages_are_in_the_order_they_run(green, eager_flex, capsys):
    """Also where the first recipe needs no prediction."""
    found = run_json([*OURS, "--contenders", "reference all,reference 40%", "--causal"], capsys)
    headings = [column.heading for column in bench_table(found).columns]
    stages = ["prepare", "predict", "select", "attend"]
    assert [heading for heading in headings if heading in stages] == stages


def test_what_cannot_run_is_a_row_with_its_reason(green, add_backend, capsys, monkeypatch):
    def fails():
        tried.append(1)
        raise RuntimeError("no C++ compiler\nand much more")

    tried = []
    monkeypatch.setattr(contender, "_compiled", fails)
    argv = [*OURS, "--causal"]
    rows = run_json(argv, capsys)["rows"]
    failed = {row["contender"]: row["why_not"] for row in rows if row["why_not"]}
    why = "does not compile here: RuntimeError: no C++ compiler"
    assert failed == dict.fromkeys(["flex all", "flex 40%", "flex 20%", "flex default"], why)
    assert len(tried) == 1  # not once more for each of them
    text = run_text(argv, capsys)
    assert f"not run: flex 40% (1 cases, first 256 d16 causal 1t): {why}" in text
    add_backend("picky", refusal=WHY)
    rows = run_json([*TINY, "--causal", "--backends", "picky"], capsys)["rows"]
    assert {row["why_not"] for row in rows if row["kind"] == "sparse"} == {WHY}
    assert {row["why_not"] for row in rows if row["kind"] == "flex"} == {
        f"no blocks to give it; picky says: {WHY}"
    }
    assert all(row["ratio"] == 1 for row in rows if row["kind"] == "sdpa")


@pytest.mark.skipif(native.why_missing() is not None, reason="no native core here")
def test_the_native_core(green, capsys):
    rows = run_json([*TINY, "--causal", "--contenders", "cpu"], capsys)
    assert rows["isa"] == native.chosen_isa(native.available())
    ours = [row for row in rows["rows"] if row["kind"] == "sparse"]
    assert len(ours) == len(RECIPES)
    assert {row["isa"] for row in ours} == {rows["isa"]}
    assert all(row["quantization_error"] < 0.02 for row in ours)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_no_numbers_of_wrong_results(flags, add_backend, capsys, tmp_path, monkeypatch):
    add_backend("wrong", attend=attend_wrongly)
    monkeypatch.setattr(bench_command, "measure", None)
    target = tmp_path / "bench.json"
    assert main([*OURS, *flags, "--output", str(target)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "wrong fails the self-check: the error must be below 1e-05" in err
    assert not target.exists()


def test_no_numbers_of_a_row_that_is_wrong(green, eager_flex, add_backend, capsys):
    """The self-check's cases are short; a fault may wait for a longer one."""

    def attend_worse(*args, **kwargs):
        done = attend_wrongly(*args, **kwargs)
        return done._replace(out=done.out * 1.2)

    add_backend("wrong", attend=attend_worse)
    assert main([*TINY, "--causal", "--backends", "wrong", "--contenders", "wrong 40%"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "wrong 40% at length 256, head dim 16: error 0.2" in err
    assert "no numbers are printed" in err


def test_the_defaults_and_the_full_set():
    def cases(*argv):
        parser = argparse.ArgumentParser()
        bench_command.add_arguments(parser)
        return bench_command.wanted_cases(parser.parse_args(argv))

    torch.set_num_threads(2)
    assert {case.length for case in cases()} == {1024, 4096, 8192}
    assert {(case.head_dim, case.causal, case.threads) for case in cases()} == {
        (dim, causal, 2) for dim in (64, 128) for causal in (True, False)
    }
    assert {case.length for case in cases("--full")} == {2**n for n in range(10, 16)}
    assert {case.threads for case in cases("--full")} == {1, 2}
    assert len(cases("--full")) == len(set(cases("--full"))) == 6 * 2 * 2 * 2
    assert {case.length for case in cases("--full", "--lengths", "300")} == {300}


def test_a_warm_up_is_not_in_the_record(green, eager_flex, monkeypatch):
    monkeypatch.setattr(cases, "WARM_UP", 1e9)
    case = cases.Case(256, 16, True, 1)
    made = cases.make_contenders(case, lineup(["reference"], ["40%"]), cases.make_inputs(case, 1))
    cases.measure_contenders(made, repeat=2)
    for each in made:
        assert len(each.seconds) == 2
        assert len(each.runs) == (2 if each.entry.kind == "sparse" else 0)


@pytest.fixture
def accelerator(monkeypatch):
    """The processor, timed and waited for as if it were an accelerator; counts the waiting."""
    waits = []
    monkeypatch.setattr(contender, "HOST", ())
    monkeypatch.setattr("sparge.support.turns.HOST", ())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waits.append(1))
    return waits


def test_an_accelerator_is_waited_for_and_recorded_apart(green, eager_flex, accelerator, capsys):
    argv = [*OURS, "--causal", "--contenders", "reference 40%"]
    dense, *ours = run_json(argv, capsys)["rows"]
    # Before and after each turn; two rounds, and one to warm up.
    assert len(accelerator) == 2 * 3 * (1 + len(ours))
    assert "stages" not in dense
    assert set(ours[0]["stages"]) == {"prepare", "predict", "select", "attend"}


def test_the_device(green, eager_flex, capsys, monkeypatch):
    monkeypatch.setattr(bench_command, "devices", lambda: ["cpu"])
    assert run_json([*OURS, "--causal", "--contenders", "40%"], capsys)["device"] == "cpu"
    assert bench_command.found_device("auto") == "cpu"
    for argv, why in [
        ([*TINY, "--device", "xpu"], "--device xpu: torch 2.* sees no such device, only cpu"),
        ([*TINY, "--device", "tpu"], "invalid choice: 'tpu'"),
        (["bench", "error", "--device", "auto"], "--device is for measuring speed"),
        (["bench", "--static", "--device", "cuda"], "--device is for measuring speed"),
    ]:
        assert re.search(why, complaint(argv, capsys)), argv


def test_on_a_gpu_triton_is_measured_and_threads_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(bench_command, "devices", lambda: ["cpu", "cuda"])
    on_gpu = [*TINY, "--device", "auto"]
    assert "--threads is for --device cpu" in complaint([*on_gpu, "--threads", "1"], capsys)
    seen = []
    monkeypatch.setattr(bench_command, "lineup", lambda *args: seen.append(args) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(on_gpu)
    assert seen == [(["triton"], [], "cuda")]


def test_flash_attention_is_measured_on_accelerators(monkeypatch):
    names = [entry.name for entry in lineup(["reference"], [], "cuda")]
    assert names[:3] == ["SDPA bf16", "torch flash", "flash_attn"]
    assert "torch flash" not in [entry.name for entry in lineup(["reference"])]
    case = cases.Case(256, 16, True, 1)
    entries = lineup(["reference"], ["flash"], "cuda")
    dense, torch_flash, package = cases.make_contenders(case, entries, cases.make_inputs(case, 1))
    assert torch_flash.why_not is None  # torch has one for the processor, too
    assert "No module named 'flash_attn'" in package.why_not
    torch.testing.assert_close(torch_flash.attend(), dense.attend())

    def flash_attn_func(q, k, v, causal):
        """Tokens before heads, as the package has them."""
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)

    module = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    made = cases.make_contenders(case, entries, cases.make_inputs(case, 1))
    torch.testing.assert_close(made[2].attend(), dense.attend())


def test_overhead_is_what_runs_before_attend():
    """Of each round's SDPA; then the median over the rounds."""
    spent = [(0.1, 0.3, 2.0), (0.2, 0.2, 1.0), (0.5, 0.5, 1.5)]
    runs = [
        SimpleNamespace(seconds={"one": a, "two": b, "attend": c, "total": a + b + c})
        for a, b, c in spent
    ]
    dense = SimpleNamespace(seconds=[4.0, 2.0, 20.0])
    found = cases._stages(SimpleNamespace(runs=runs), dense)
    assert found["stages"] == {"one": 0.2, "two": 0.3, "attend": 1.5}
    assert found["overhead"] == pytest.approx(0.1)  # of 0.1, 0.2 and 0.05
    assert cases._stages(SimpleNamespace(runs=[]), dense) == {}
