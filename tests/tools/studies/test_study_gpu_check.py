"""The check that people run on their GPUs: what it refuses, and the document that it writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpus import pretend, properties
from sparge.backends.triton.rates import DENSE_SHARE, OUR_SHARE, Card, roofline
from sparge.routing.crossover import Crossover
from sparge.values.recipe import PRECISIONS
from sparge_tools.commands.bench_command import FORMAT as BENCH_FORMAT
from sparge_tools.studies import gpu_check, gpu_estimates
from sparge_tools.studies.gpu_estimates import ESTIMATES, Rig, ratio
from static_runs import needs_triton

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
GREEN = """<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1" time="1.5">
<testcase classname="tests.a" name="b"/></testsuite></testsuites>"""
RED = """<testsuites><testsuite tests="2" failures="1" errors="0" skipped="0" time="1">
<testcase classname="tests.a" name="b"><failure message="off by one">long</failure></testcase>
</testsuite></testsuites>"""
NOTHING = """<testsuites><testsuite tests="2" failures="0" errors="0" skipped="2"/></testsuites>"""
VENDORS = Path("/sys/class/drm").glob("renderD*/device/vendor")
CARDS = Path("/dev/kfd").exists() or any("0x8086" in file.read_text() for file in VENDORS)


@pytest.fixture
def no_work(monkeypatch):
    for name in ("run_suite", "measure", "json_of"):
        monkeypatch.setattr(gpu_check, name, None)


@pytest.mark.skipif(sys.platform != "linux", reason="a script for Linux")
@pytest.mark.skipif(CARDS, reason="there is a card")
def test_without_a_gpu_the_script_stops_before_any_work(tmp_path):
    """Its path has no nvidia-smi, and no make, python or pip that it could begin to work with."""
    for name in ("bash", "dirname", "grep"):
        found = next(p for p in ("/bin", "/usr/bin") if Path(p, name).exists())
        (tmp_path / name).symlink_to(Path(found, name))
    done = subprocess.run(
        [tmp_path / "bash", SCRIPT], capture_output=True, text=True, env={"PATH": str(tmp_path)}
    )
    assert done.returncode == 3
    assert done.stderr.startswith("gpu-check: no GPU found: nvidia-smi lists none")
    assert "Nothing was installed or run" in done.stderr


def test_make_has_the_target():
    text = (ROOT / "Makefile").read_text()
    assert "gpu-check:\n\tscripts/gpu_check.sh\n" in text
    assert os.access(SCRIPT, os.X_OK)


def test_a_torch_that_sees_no_gpu_is_refused(no_work, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "devices", lambda: ["cpu"])
    assert gpu_check.main([]) == 3
    err = capsys.readouterr().err
    assert "there is no GPU to check" in err
    assert "sees no accelerator" in err


def test_mistakes_are_found_before_the_work(no_work, monkeypatch, capsys, tmp_path):
    pretend(monkeypatch, properties())
    assert gpu_check.main(["--output", str(tmp_path)]) == 2
    assert "--output must name a file" in capsys.readouterr().err
    assert gpu_check.main(["--fast"]) == 2


@pytest.mark.parametrize(
    "text, passed, failed",
    [
        (GREEN, True, []),
        (RED, False, [{"test": "tests.a::b", "why": "off by one"}]),
        (NOTHING, False, []),
        ("", False, []),
    ],
)
def test_what_the_suite_reports(text, passed, failed):
    found = gpu_check.suite_result(text)
    assert (found["passed"], found["failed"]) == (passed, failed)


@needs_triton
def test_a_dry_run_goes_through_every_step_without_a_gpu(tmp_path):
    target = tmp_path / "dry.json"
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [SCRIPT, "--dry-run", "--output", target],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**env, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"its numbers are pretended, in {target}" in done.stderr
    found = json.loads(target.read_text())
    assert (found["format"], found["dry_run"], found["passed"]) == (gpu_check.FORMAT, True, True)
    assert (found["suite"]["tests"], found["suite"]["passed"]) == (1, True)
    assert list(found["replaces"]) == [estimate.key for estimate in ESTIMATES]
    measured = {key.partition(": ")[2]: x["measured"] for key, x in found["replaces"].items()}
    assert measured["launches"] == {"ours": None, "dense": None}
    assert measured["call"]["launches"] == 7
    assert measured["machine code"]["128"]["shared_bytes"] > 0
    assert measured["not run yet"]["architecture"] == gpu_check.DRY_CARD
    assert not any("failure" in entry for entry in found["replaces"].values())


@pytest.mark.usefixtures("piped")
def test_the_document(monkeypatch, capfd, tmp_path):
    """The whole check on the processor: real tests, and a real benchmark of the reference."""
    monkeypatch.setattr(gpu_check, "accelerator", lambda: "cpu")
    monkeypatch.setattr(gpu_check, "SUITE", ("-k", "rounds_alternate", "tests/test_turns.py"))
    small = "--backends reference --lengths 256 --heads 1 --head-dims 16 --repeat 1 --causal"
    monkeypatch.setattr(gpu_check, "QUICK", (*small.split(), "--contenders", "reference 40%"))
    monkeypatch.setattr(gpu_check, "json_of", lambda argv: {"argv": argv})
    monkeypatch.setattr(gpu_check, "rig_on", lambda *facts: facts)
    monkeypatch.setattr(gpu_check, "replacements", lambda rig: {"docs: one": {"measured": 1}})
    target = tmp_path / "gpu.json"
    assert gpu_check.main(["--quick", "--output", str(target)]) == 0
    assert f"gpu-check passed; please share {target}" in capfd.readouterr().err
    found = json.loads(target.read_text())
    assert (found["format"], found["device"], found["passed"]) == (gpu_check.FORMAT, "cpu", True)
    assert (found["suite"]["tests"], found["suite"]["passed"]) == (3, True)
    assert {"versions", "machine", "date", "driver", "doctor"} <= set(found)
    assert set(found["driver"]) == {"version", "cuda", "hip", "xpu"}
    assert found["bench"]["format"] == BENCH_FORMAT
    assert (found["dry_run"], found["replaces"]) == (False, {"docs: one": {"measured": 1}})
    for row in found["bench"]["rows"]:
        assert {"density", "error", "ratio", "seconds"} <= set(row)


def test_no_numbers_if_the_suite_is_red(monkeypatch, capsys, tmp_path):
    pretend(monkeypatch, properties())
    red = {"code": 1, **gpu_check.suite_result(RED)}
    monkeypatch.setattr(gpu_check, "run_suite", lambda arguments: red)
    monkeypatch.setattr(gpu_check, "measure", None)
    target = tmp_path / "gpu.json"
    assert gpu_check.main(["--output", str(target)]) == 1
    found = json.loads(target.read_text())
    assert (found["passed"], found["bench"], found["suite"]) == (False, None, red)
    assert "gpu-check FAILED" in capsys.readouterr().err


@pytest.mark.parametrize("estimate", ESTIMATES, ids=lambda estimate: estimate.name)
def test_each_estimate_is_in_the_documentation(estimate):
    """A page that no longer says it needs no number to replace it."""
    file, _, anchor = estimate.where.partition("#")
    parts = re.split(r"^#+ (.*)$", (ROOT / file).read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    named = [text for heading, text in sections.items() if slug(heading) == anchor]
    assert len(named) == 1
    assert estimate.says in " ".join(named[0].split())


def slug(heading):
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def a_rig(**facts):
    known = {"measured": None, "estimated": None, "suite": {}, "bench": [], **facts}
    return Rig("cuda:0", Card("A card", "sm_89", 100, 2e9, 1e12), 1024, 2, **known)


def test_shares_explain_what_was_measured():
    """Twice the estimated seconds for a pair are half of the assumed share."""
    card = Card("A card", "sm_89", 100, 2e9, 1e12)
    estimated = Crossover(roofline(card))
    twice = {
        name: replace(cost, element=2 * cost.element) for name, cost in estimated.costs.items()
    }
    measured = replace(estimated, costs=twice, measured=True, took=70.0)
    rig = a_rig(estimated=estimated, measured=measured)
    assert gpu_estimates.dense_share(rig) == {D: pytest.approx(DENSE_SHARE / 2) for D in (64, 128)}
    found = gpu_estimates.our_share(rig)
    assert found == {way: pytest.approx(OUR_SHARE / 2) for way in PRECISIONS}
    assert gpu_estimates.calibration(rig) == 70.0
    assert len(gpu_estimates.break_even(rig)) == 6
    assert gpu_estimates.our_share(a_rig()) == dict.fromkeys(PRECISIONS)


def test_where_sparse_attention_begins_to_be_faster(monkeypatch):
    card = Card("A card", "sm_89", 100, 2e9, 1e12)
    cheap = Crossover(roofline(card), measured=True)
    element = torch.empty((), dtype=torch.bfloat16)
    monkeypatch.setattr(gpu_estimates.torch, "empty", lambda *shape, **named: element)
    fewest = gpu_estimates.sparse_from(a_rig(measured=cheap))
    assert fewest in gpu_estimates.LENGTHS
    dear = {name: replace(x, element=1.0) for name, x in cheap.costs.items() if "int8" in name}
    never = replace(cheap, costs={**cheap.costs, **dear})
    assert gpu_estimates.sparse_from(a_rig(measured=never)) is None


def test_seconds_are_the_median_of_several_runs():
    runs = []
    rig = replace(a_rig(), device="cpu")
    assert rig.seconds(lambda: runs.append(1)) > 0
    assert len(runs) == 1 + gpu_estimates.REPEAT
    assert replace(rig, dry=True).seconds(lambda: runs.append(1)) is None
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is ratio(1.0, None) is ratio(1.0, 0.0) is None


def test_a_measurement_that_fails_leaves_the_others(monkeypatch):
    def fail(rig):
        raise RuntimeError("no such card")

    one, other = ESTIMATES[0], ESTIMATES[-1]
    monkeypatch.setattr(gpu_estimates, "ESTIMATES", (replace(one, measure=fail), other))
    suite = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0) | {"passed": True}
    found = gpu_estimates.replacements(a_rig(suite=suite))
    assert found[one.key]["failure"] == "RuntimeError: no such card"
    assert found[other.key]["measured"]["card"] == "A card"
    document = gpu_check.document_of("cpu", suite, None, {}, found)
    assert not document["passed"]


def test_what_a_command_prints_is_read():
    assert gpu_check.json_of(["explain", "--shape", "1,1,1,8", "--json"])["return_lse"] is False
    assert gpu_check.json_of(["explain", "--shape", "none", "--json"]) is None
