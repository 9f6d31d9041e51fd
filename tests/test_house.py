"""The house: what importing costs, which way imports point, and how long files are."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparge
from conftest import BACKENDS

SRC = Path(sparge.__file__).parent
ROOT = Path(__file__).parent.parent

# A module may import from its own floor or below, never from above.
FLOORS = [
    {"errors", "geometry", "support", "recipe"},
    {"tokenmask", "qtensor", "call", "blockplan", "exact"},
    {"check", "dispatch", "record", "fingerprint", "profile", "backends", "plan", "quantize"}
    | {"attend"},
    {"execute"},
    {"ops", "merge"},
    {"api", "varlen"},
    {"accuracy"},
    {"integrations"},
    {"__init__", "synthetic", "zoo", "compat"},
    {"report", "evaluate", "lm_eval", "tune"},
    {"cli", "__main__"},
]


def floor_of(module: str) -> int:
    (floor,) = [i for i, names in enumerate(FLOORS) if module in names]
    return floor


def imports_of(file: Path) -> set[str]:
    """Top-level sparge modules that a file imports, relative or absolute."""
    depth = len(file.relative_to(SRC).parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == depth:
                found |= (
                    {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
                )
            elif node.level == 0 and (node.module or "").split(".")[0] == "sparge":
                rest = node.module.split(".")[1:]
                found |= {rest[0]} if rest else {"__init__"}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("sparge.")}
            found |= {"__init__" for a in node.names if a.name == "sparge"}
    return found


def test_imports_point_one_way():
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        relative = file.relative_to(SRC)
        own = relative.parts[0].removesuffix(".py")
        for name in imports_of(file) - {own}:
            name = name if any(name in floor for floor in FLOORS) else "__init__"
            assert floor_of(name) <= floor_of(own), f"{relative} imports {name} from above"


def test_no_stage_calls_an_earlier_one():
    for verb, forbidden in (("attend", {"plan", "quantize"}), ("quantize", {"plan", "attend"})):
        for file in (SRC / verb).glob("*.py"):
            assert not imports_of(file) & forbidden, file.name
    assert not any("attend" in imports_of(file) for file in (SRC / "plan").glob("*.py"))


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_import_is_light_and_silent():
    """At most 0.3 s beyond torch. Processor time, and the best of three: others may be at work."""
    code = (
        "import sys, time, torch; before = set(sys.modules); start = time.process_time();"
        "import sparge; spent = time.process_time() - start;"
        "heavy = {'triton', 'transformers', 'diffusers', 'rich', 'matplotlib', 'safetensors'};"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new & heavy), spent)"
    )
    seconds = []
    for _ in range(3):
        heavy, spent = run(code).rsplit(" ", 1)
        assert heavy == "[]"
        seconds.append(float(spent))
    assert min(seconds) < 0.3


def test_import_changes_nothing_global():
    out = run(
        "import torch, random;"
        "state = lambda: (torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),"
        " torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),"
        " hash(random.getstate()), torch.nn.functional.scaled_dot_product_attention);"
        "before = state(); import sparge; print(before == state())"
    )
    assert out.strip() == "True"


def test_the_public_names_are_all_there():
    assert sorted(sparge.__all__) == sparge.__all__
    for name in sparge.__all__:
        assert getattr(sparge, name).__doc__ or isinstance(getattr(sparge, name), int)


def test_the_suite_poisons_memory():
    assert torch.empty(1000).isnan().all()
    assert torch.ones(10).new_empty(1000).isnan().all()


def test_a_registered_backend_is_in_the_suite(tmp_path):
    """Registering is all that a backend from elsewhere does to be tested."""
    (tmp_path / "mine.py").write_text(
        "from sparge.dispatch.choose import *\n"
        "modules = modules_of('reference')\n"
        "register_backend(Backend('mine', '', lambda h, c: None, lambda h, c: None, modules))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mine", "-p", "no:cacheprovider"]
    test = str(ROOT / "tests" / "test_attend.py")
    chosen = ["-k", "test_kernel_error and exact", test]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [*command, "--no-cov", *chosen],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    # One more than here, causal and not.
    assert f"{2 * len(BACKENDS) + 2} passed" in done.stdout, done.stdout


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_files_are_short(folder):
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > 400} == {}
