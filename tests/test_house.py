"""The house: what importing costs, which way imports point, and how long files are."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparge

SRC = Path(sparge.__file__).parent
ROOT = Path(__file__).parent.parent

# Every folder and root module is a floor, and imports from floors before it in this list only.
FLOORS = [
    "support",
    "reorder",
    "values",
    "rules",
    "backends",
    "routing",
    "engine",
    "interop",
    "api",
    "parallel",
    "models",
    "__init__",
    "synthetic",
    "serving",
    "compat",
    "cli",
    "__main__",
]
BACKWARDS = {
    ("backends", "routing"),
    ("engine", "routing"),
    ("routing", "engine"),
}
"""Pairs of floors that still import each other, or the wrong way; the list may only shrink."""


def floor_of(module: tuple[str, ...]) -> str:
    return module[0]


def imports_of(file: Path) -> set[str]:
    """Floors that a file imports, relative or absolute."""
    package = file.relative_to(SRC).parts[:-1]
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += tuple((node.module or "").split(".")) if node.module else ()
            found |= {(*base, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparge":
            base = tuple(node.module.split(".")[1:])
            found |= {(*base, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {tuple(name[1:]) or ("__init__",) for name in names if name[0] == "sparge"}
    floors = {floor_of(name) for name in found if name}
    return {name if name in FLOORS else "__init__" for name in floors}


def test_imports_point_one_way():
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        relative = file.relative_to(SRC)
        own = floor_of(relative.with_suffix("").parts)
        for name in imports_of(file) - {own}:
            if (own, name) not in BACKWARDS:
                low, high = FLOORS.index(name), FLOORS.index(own)
                assert low < high, f"{relative} imports {name} from above"


def test_every_floor_is_there():
    for name in FLOORS:
        place = SRC.joinpath(*name.split("."))
        assert place.is_dir() or place.with_suffix(".py").exists(), name


def test_no_optimized_backend_imports_the_reference():
    for backend in ("cpu", "triton"):
        for file in (SRC / "backends" / backend).glob("*.py"):
            assert "backends.reference" not in imports_of(file), f"{backend}/{file.name}"


def test_no_stage_calls_a_later_one():
    """prepare → predict → select → attend: a stage imports none that runs after it."""
    stages = ("prepare", "predict", "select", "attend")
    for backend in ("reference", "cpu", "triton"):
        for i, stage in enumerate(stages):
            tree = ast.parse((SRC / "backends" / backend / f"{stage}.py").read_text())
            modules = {
                node.module or alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.level == 1
                for alias in node.names
            }
            assert not modules & set(stages[i + 1 :]), f"{backend}/{stage}"


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
    order = sorted(sparge.__all__, key=lambda name: (not name.isupper(), name))  # as ruff sorts
    assert order == sparge.__all__
    for name in sparge.__all__:
        assert getattr(sparge, name).__doc__ or isinstance(getattr(sparge, name), int)


def test_the_suite_poisons_memory():
    assert torch.empty(1000).isnan().all()
    assert torch.ones(10).new_empty(1000).isnan().all()


def test_the_example_backend_passes_the_conformance_suite():
    """Registering is all that a backend from elsewhere does to be tested: every test that takes
    `backend` runs for it. The slowest of the reference's are left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "custom_backend", "--no-cov"]
    names = (
        "attend",
        "edges",
        "masks",
        "plan",
        "second_filter",
        "protect",
        "quantize",
        "nonfinite",
    )
    files = [str(ROOT / "tests/api" / f"test_{name}.py") for name in names]
    path = os.pathsep.join([str(ROOT / "examples"), *sys.path])
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-k", "headwise", *files],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    passed = re.search(r"^(\d+) passed, \d+ deselected", done.stdout, re.M)
    assert passed is not None, done.stdout[-3000:]
    assert int(passed[1]) > 150


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "examples"])
def test_files_are_short(folder):
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > 600} == {}
