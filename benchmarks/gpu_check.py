"""`python -m benchmarks.gpu_check`: the Triton backend on this machine's GPU, as one document.

Runs the conformance suite on the card, calibrates (`sparge doctor --calibrate`), and measures it
beside torch's SDPA, FlashAttention and FlexAttention (`sparge bench`). The document is written in
any case; it has no benchmark if the suite fails. `make gpu-check` makes an environment first.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from sparge.cli import BAD_RESULT, OK, Parser, exit_code
from sparge.cli import main as sparge
from sparge.cli.arguments import check_file
from sparge.errors import Unsupported
from sparge.report.machine import devices, where_it_runs
from sparge.report.table import to_json
from sparge.support.atomic_files import replace_file

FORMAT = "sparge.gpu-check/1"
ROOT = Path(__file__).parent.parent
OUTPUT = "build/gpu-check.json"
SUITE = ("-p", "on_gpu", "-k", "triton-gpu", "tests")
BENCH = ("--backends", "triton", "--heads", "16", "--lengths", "2048,8192,32768")
QUICK = ("--backends", "triton", "--heads", "16", "--lengths", "2048,8192", "--head-dims", "128")
MOST_FAILURES = 50
"""Failed tests that are listed; one fault often fails hundreds."""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    parser = Parser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--output", default=OUTPUT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a shorter benchmark")
    args = parser.parse_args(argv)
    device = accelerator()
    check_file(args.output)
    document = check(device, suite=SUITE, bench=QUICK if args.quick else BENCH)
    replace_file(args.output, f"{to_json(document)}\n".encode())
    verdict = "passed" if document["passed"] else "FAILED"
    print(f"gpu-check {verdict}; please share {args.output}", file=sys.stderr)
    return OK if document["passed"] else BAD_RESULT


def accelerator() -> str:
    """The type of the accelerator that torch sees. Raises Unsupported without one."""
    found = devices()[-1]
    if found == "cpu":
        way_out = "install a torch that was built for your card; scripts/gpu_check.sh says how"
        why = {f"torch {torch.__version__}": "sees no accelerator"}
        raise Unsupported("there is no GPU to check:", why, way_out)
    return found


def check(device: str, *, suite: Sequence[str], bench: Sequence[str]) -> dict[str, Any]:
    """suite: arguments of pytest. bench: arguments of `sparge bench`."""
    tested = run_suite(suite)
    doctor, measured = None, None
    if tested["passed"]:
        doctor = json_of(["doctor", "--calibrate", "--json"])
        measured = measure(["bench", "--device", device, *bench])
    return {
        "format": FORMAT,
        **where_it_runs(),
        "device": device,
        "driver": driver(device),
        "suite": tested,
        "doctor": doctor,
        "bench": measured,
        "passed": measured is not None,
    }


def run_suite(arguments: Sequence[str]) -> dict[str, Any]:
    """Counts of a pytest run, and what failed. Its output goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "suite.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--no-cov", f"--junitxml={report}"]
        paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, stdout=sys.stderr.fileno()
        )
        text = report.read_text(encoding="utf-8") if report.exists() else ""
    return {"arguments": list(arguments), "code": done.returncode, **suite_result(text)}


def suite_result(text: str) -> dict[str, Any]:
    """What a JUnit report of pytest says; "" if it wrote none."""
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    failed: list[dict[str, str]] = []
    seconds = 0.0
    for suite in ElementTree.fromstring(text).iter("testsuite") if text else ():
        counts = {name: int(suite.get(name, 0)) for name in counts}
        seconds = float(suite.get("time", 0.0))
        for case in suite.iter("testcase"):
            for fault in (*case.findall("failure"), *case.findall("error")):
                name = f"{case.get('classname')}::{case.get('name')}"
                failed.append({"test": name, "why": (fault.get("message") or "")[:500]})
    ran = counts["tests"] - counts["skipped"]
    return {
        **counts,
        "seconds": seconds,
        "failed": failed[:MOST_FAILURES],
        "passed": ran > 0 and not counts["failures"] and not counts["errors"],
    }


def measure(arguments: list[str]) -> dict[str, Any] | None:
    """The document of a benchmark, which prints its table; None if it refused to print numbers."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "bench.json")
        if sparge([*arguments, "--output", str(target)]) != OK:
            return None
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found


def json_of(arguments: list[str]) -> dict[str, Any] | None:
    """What a command prints; None if it prints nothing, and says why on stderr."""
    out = io.StringIO()
    with redirect_stdout(out):
        sparge(arguments)
    return json.loads(out.getvalue()) if out.getvalue() else None


def driver(device: str) -> dict[str, str | None]:
    """Versions of the driver, and of the platform that torch was built for."""
    built = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    found: str | None = None
    try:
        if built["hip"]:
            found = Path("/sys/module/amdgpu/version").read_text(encoding="utf-8").strip()
        elif device == "cuda":
            ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
        elif device == "xpu":
            found = str(torch.xpu.get_device_properties().driver_version)
    except OSError:
        pass
    return {"version": found or None, **built}


if __name__ == "__main__":
    sys.exit(main())
