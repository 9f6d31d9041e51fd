"""The check that people run on their GPUs: what it refuses, and the document that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from gpus import pretend, properties
from sparge.cli.bench_command import FORMAT as BENCH_FORMAT

ROOT = Path(__file__).parent.parent
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


@pytest.mark.usefixtures("piped")
def test_the_document(monkeypatch, capfd, tmp_path):
    """The whole check on the processor: real tests, and a real benchmark of the reference."""
    monkeypatch.setattr(gpu_check, "accelerator", lambda: "cpu")
    monkeypatch.setattr(gpu_check, "SUITE", ("-k", "rounds_alternate", "tests/test_turns.py"))
    small = "--backends reference --lengths 256 --heads 1 --head-dims 16 --repeat 1 --causal"
    monkeypatch.setattr(gpu_check, "QUICK", (*small.split(), "--contenders", "reference 40%"))
    monkeypatch.setattr(gpu_check, "json_of", lambda argv: {"argv": argv})
    target = tmp_path / "gpu.json"
    assert gpu_check.main(["--quick", "--output", str(target)]) == 0
    assert f"gpu-check passed; please share {target}" in capfd.readouterr().err
    found = json.loads(target.read_text())
    assert (found["format"], found["device"], found["passed"]) == (gpu_check.FORMAT, "cpu", True)
    assert (found["suite"]["tests"], found["suite"]["passed"]) == (3, True)
    assert {"versions", "machine", "date", "driver", "doctor"} <= set(found)
    assert set(found["driver"]) == {"version", "cuda", "hip", "xpu"}
    assert found["bench"]["format"] == BENCH_FORMAT
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


def test_what_a_command_prints_is_read():
    assert gpu_check.json_of(["explain", "--shape", "1,1,1,8", "--json"])["return_lse"] is False
    assert gpu_check.json_of(["explain", "--shape", "none", "--json"]) is None
