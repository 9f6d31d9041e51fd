"""The Triton backend on this machine's GPU, as one document.

    python -m sparge_tools.studies.gpu_check

Runs the conformance suite on the card, calibrates (`sparge doctor --calibrate`), measures it beside
torch's SDPA, FlashAttention and FlexAttention (`sparge bench`), and measures what replaces each
estimate of the documentation (gpu_estimates.py). The document is written in any case; it has no
numbers if the suite fails. `make gpu-check` makes an environment first. Its fields:

    format, dry_run    what the document is
    machine, versions  where it ran; device, driver: of the GPU
    suite              counts of the conformance suite, and what failed
    doctor             what `sparge doctor --calibrate --json` prints
    bench              the document of `sparge bench`
    replaces           by page, heading and name: what the page says, and what was measured
    passed             the suite is green, and everything was measured

`--dry-run` needs no GPU: a few tests in Triton's interpreter, a tiny benchmark of the reference,
and every measurement on a pretended card, where kernels are compiled and nothing is timed.
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
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from sparge import Unsupported
from sparge.backends.triton import NAME
from sparge.backends.triton.packages import triton_version
from sparge.backends.triton.rates import card_of, roofline
from sparge.cli import BAD_RESULT, OK, Parser
from sparge.cli import main as sparge
from sparge.cli.machine import devices
from sparge.cli.screen import to_json
from sparge.routing import current_router
from sparge.routing.crossover import Crossover
from sparge.support.atomic_files import replace_file

from ..commands.arguments import check_file
from ..machine import where_it_runs
from . import study
from .gpu_estimates import Rig, replacements

FORMAT = "sparge.gpu-check/2"
ROOT = Path(__file__).parents[3]
OUTPUT = "build/gpu-check.json"
SUITE = ("-p", "on_gpu", "-k", "triton-gpu", "tests")
BENCH = ("--backends", "triton", "--heads", "16", "--lengths", "2048,8192,32768")
QUICK = ("--backends", "triton", "--heads", "16", "--lengths", "2048,8192", "--head-dims", "128")
LENGTH, HEADS = 32768, 16
"""Of the calls that replace estimates."""
DRY_SUITE = ("-k", "test_a_row_of_no_blocks_attends_nothing", "tests/api/test_attend.py")
DRY_BENCH = (
    *("--backends", "reference", "--lengths", "256", "--heads", "1", "--head-dims", "16"),
    *("--repeat", "1", "--causal", "--contenders", "reference 40%"),
)
DRY_CARD = "sm_89"
MOST_FAILURES = 50
"""Failed tests that are listed; one fault often fails hundreds."""


@study
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m sparge_tools.studies.gpu_check", description=__doc__)
    parser.add_argument("--output", default=OUTPUT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a shorter benchmark")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, all but the numbers")
    args = parser.parse_args(argv)
    device = "cpu" if args.dry_run else accelerator()
    check_file(args.output)
    if args.dry_run:
        document = dry_check()
    else:
        document = check(device, suite=SUITE, bench=QUICK if args.quick else BENCH)
    replace_file(args.output, f"{to_json(document)}\n".encode())
    verdict = "passed" if document["passed"] else "FAILED"
    share = "its numbers are pretended, in" if args.dry_run else "please share"
    print(f"gpu-check {verdict}; {share} {args.output}", file=sys.stderr)
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
    doctor, measured, replaced = None, None, None
    if tested["passed"]:
        doctor = json_of(["doctor", "--calibrate", "--json"])
        measured = measure(["bench", "--device", device, *bench])
    if measured is not None:
        replaced = replacements(rig_on(device, tested, measured))
    return document_of(device, tested, doctor, measured, replaced)


def dry_check() -> dict[str, Any]:
    """The same steps without a card: what each of them finds is pretended, and says so."""
    tested = run_suite(DRY_SUITE, TRITON_INTERPRET="1")
    doctor = json_of(["doctor", "--json"])
    measured = measure(["bench", "--device", "cpu", *DRY_BENCH])
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    cards, driver = map(import_module, ("pretended_card", "pretended_driver"))
    with driver.pretended(cards.CARDS[DRY_CARD], refuses=False):
        rig = replace(rig_on("cuda", tested, measured or {"rows": []}), length=512, heads=2)
        replaced = replacements(replace(rig, measured=None, dry=True))
    return document_of("cpu", tested, doctor, measured, replaced) | {"dry_run": True}


def rig_on(device: str, suite: dict[str, Any], bench: dict[str, Any]) -> Rig:
    index = torch.get_device_module(device).current_device()
    card = card_of(device, index)
    guess = roofline(card, triton_version() or "")
    found = current_router().crossover(NAME, device, index)
    estimated = None if isinstance(guess, str) else Crossover(guess)
    measured = found if isinstance(found, Crossover) and found.measured else None
    known = measured, estimated, suite, bench["rows"]
    return Rig(f"{device}:{index}", card, LENGTH, HEADS, *known)


def document_of(
    device: str,
    suite: dict[str, Any],
    doctor: dict[str, Any] | None,
    bench: dict[str, Any] | None,
    replaced: dict[str, dict[str, Any]] | None,
) -> dict[str, Any]:
    whole = replaced is not None and not any("failure" in entry for entry in replaced.values())
    return {
        "format": FORMAT,
        "dry_run": False,
        **where_it_runs(),
        "device": device,
        "driver": driver(device),
        "suite": suite,
        "doctor": doctor,
        "bench": bench,
        "replaces": replaced,
        "passed": suite["passed"] and bench is not None and whole,
    }


def run_suite(arguments: Sequence[str], **variables: str) -> dict[str, Any]:
    """Counts of a pytest run, and what failed. Its output goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "suite.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--no-cov", f"--junitxml={report}"]
        paths = [str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= variables
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
