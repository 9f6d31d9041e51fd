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
from floors import FLOORS

SRC = Path(sparge.__file__).parent
ROOT = Path(__file__).parent.parent


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
            low, high = FLOORS.index(name), FLOORS.index(own)
            assert low < high, f"{relative} imports {name} from above"


DECLARATIONS = ("cpu", "reference", "triton", "dense")
INSIDE = {
    ("__init__", "triton.warm"),
    ("cli", "cpu.library"),
    ("cli", "triton.architectures"),
    ("cli", "triton.first_launch"),
    ("cli", "triton.packages"),
    ("cli", "triton.rates"),
}
"""Modules of backends that are imported from above besides their declarations: they show a
machine's details or compile ahead, and none of them chooses. The list may only shrink."""


def test_backends_are_known_by_their_declarations():
    """Choosing never imports a backend's internals."""
    found = set()
    for file in SRC.rglob("*.py"):
        parts = file.relative_to(SRC).with_suffix("").parts
        if parts[0] == "backends":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == len(parts):
                module = (node.module or "").split(".")
                names = [".".join((*module[1:], alias.name)) for alias in node.names]
                modules = [n for n in names if (SRC / "backends" / n.replace(".", "/")).is_dir()]
                inside = [
                    n for n in names if (SRC / "backends" / f"{n.replace('.', '/')}.py").exists()
                ]
                own = ".".join(module[1:])
                if module[0] == "backends":
                    found |= {(parts[0], n) for n in inside or ([] if modules else [own])}
    assert {(who, what) for who, what in found if what not in DECLARATIONS} == INSIDE
    assert not {who for who, _ in INSIDE} & {"routing", "engine", "models", "serving"}


def test_every_floor_is_there():
    for name in FLOORS:
        place = SRC.joinpath(*name.split("."))
        assert place.is_dir() or place.with_suffix(".py").exists(), name


def test_no_optimized_backend_imports_the_reference():
    for backend in ("cpu", "triton"):
        for file in (SRC / "backends" / backend).glob("*.py"):
            assert "backends.reference" not in imports_of(file), f"{backend}/{file.name}"


STAGES = ("prepare", "predict", "select", "attend")


def siblings_of(file: Path) -> set[str]:
    """Modules of its own folder that a file imports, at its top or inside of a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module.split(".")[0]] if node.module else [x.name for x in node.names]
            found |= {name for name in names if file.with_name(f"{name}.py").exists()}
    return found


def reached_from(file: Path) -> set[str]:
    """Modules of its own folder that a file imports, itself or through others of them."""
    reached: set[str] = set()
    left = siblings_of(file)
    while left:
        name = left.pop()
        reached.add(name)
        left |= siblings_of(file.with_name(f"{name}.py")) - reached
    return reached


def test_no_native_stage_calls_another():
    """The native core's are functions of one file; each is a range of one native call."""
    tree = ast.parse((SRC / "backends/cpu/stages.py").read_text())
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    stages = {"run_call", "prepare_keys", "prepare_queries", "sum_keys", "predict", "select"}
    stages |= {"attend", "backward", "block_kinds"}
    assert stages <= functions.keys()
    for name in stages:
        called = {x.id for x in ast.walk(functions[name]) if isinstance(x, ast.Name)}
        assert not called & stages, name


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_reaches_another(backend, stage):
    """prepare → predict → select → attend: the engine runs them; none imports an earlier or a later
    one, not even through a helper."""
    reached = reached_from(SRC / "backends" / backend / f"{stage}.py")
    assert reached.isdisjoint({*STAGES, "stages"}), reached


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_import_is_light_and_silent():
    """At most 0.3 of the processor time that importing torch takes in the same process, which is as
    fast or slow as the machine; the best of three, because others may be at work."""
    code = (
        "import sys, time; start = time.process_time(); import torch;"
        "before = set(sys.modules); middle = time.process_time();"
        "import sparge; spent = time.process_time() - middle;"
        "heavy = {'triton', 'transformers', 'diffusers', 'rich', 'matplotlib', 'safetensors'};"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new & heavy), spent / (middle - start))"
    )
    shares = []
    for _ in range(3):
        heavy, share = run(code).rsplit(" ", 1)
        assert heavy == "[]"
        shares.append(float(share))
    assert min(shares) < 0.3


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


# Tests of the example backend that take most of the suite's minutes: compiled graphs, numerical
# gradients, and error budgets over many calls, all slow by the reference's stages.
SLOW_TESTS = (
    "test_gradcheck_with_the_second_filter",
    "test_opcheck_of_every_stage",
    "compile",
    "graph",
    "test_threads",
    "test_the_number_of_threads",
    "test_every_head_keeps",
    "test_nothing_around_a_row",
    "test_a_larger_budget",
    "test_precision_is_raised",
    "test_raised_heads_are",
)


def test_the_example_backend_passes_the_conformance_suite():
    """Registering is all that a backend from elsewhere does to be tested: every test that takes
    `backend` runs for it, less the slowest. (It passes those, too: without `SLOW_TESTS`.)"""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "custom_backend", "--no-cov"]
    folders = [str(ROOT / "tests" / name) for name in ("api", "backends/cpu", "engine", "rules")]
    path = os.pathsep.join([str(ROOT / "examples"), *sys.path])
    chosen = " and not ".join(["blockwise", *SLOW_TESTS])
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-k", chosen, *folders],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    passed = re.search(r"^(\d+) passed, (?:\d+ skipped, )?\d+ deselected", done.stdout, re.M)
    assert passed is not None, done.stdout[-3000:]
    assert int(passed[1]) > 600


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "examples"])
def test_files_are_short(folder):
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > 600} == {}
