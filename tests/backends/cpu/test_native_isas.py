"""The instruction sets that the native library lists (csrc/isa.h)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparge.backends.cpu import library as native

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="no native core")
ROOT = Path(__file__).parents[3]
ISAS_CMAKE = (ROOT / "csrc/isas.cmake").read_text()
NAMES = list(native.isas())
CMAKE = shutil.which("cmake") or shutil.which("cmake", path=Path(sys.executable).parent)
OBJDUMP = shutil.which("objdump")


def test_some_run_everywhere():
    assert {"portable", "tiles"} <= set(native.available())
    assert all(isa.description for isa in native.isas().values())


def test_the_best_is_chosen_and_never_one_for_tests():
    assert [name for name, isa in native.isas().items() if isa.for_tests] == NAMES[-1:] == ["tiles"]
    assert native.chosen_isa(native.available()) == native.available()[0] != "tiles"


@pytest.mark.parametrize("name", native.available())
def test_one_is_forced_by_its_name(monkeypatch, name):
    monkeypatch.setenv(native.ENV_ISA, name)
    assert NAMES[native.isa_number()] == name


def test_bf16_instructions_are_a_set_of_their_own():
    """`avx512` used them where there are some, and records did not say so."""
    assert NAMES.index("avx512_bf16") < NAMES.index("avx512")
    if "avx512_bf16" in native.available():
        assert "avx512" in native.available()


def test_each_is_compiled_and_documented():
    compiled = re.findall(r"^ *instruction_set\((\w+)", ISAS_CMAKE, re.M)
    assert sorted(compiled) == sorted(NAMES)
    (row,) = re.findall(r"^\| `SPARGE_ISA` \|.*", (ROOT / "docs/backends.md").read_text(), re.M)
    assert set(NAMES) <= set(re.findall(r"`(\w+)`", row))


# --- static constructors ----------------------------------------------------------------------


def has_constructor(objects):
    command = [CMAKE, f"-DOBJDUMP={OBJDUMP}", "-P", ROOT / "csrc/no_constructors.cmake", *objects]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert done.returncode == 0 or "has a static constructor" in said, said
    return done.returncode != 0


@pytest.mark.skipif(not (CMAKE and OBJDUMP), reason="no CMake or no objdump")
def test_a_static_constructor_is_refused(tmp_path):
    """One in the code of an instruction set would end an import on machines that lack it."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    objects = []
    for name, code in {
        "table": "extern const int table = 3;",
        "run": "int f(); int x = f();",
    }.items():
        (tmp_path / f"{name}.cpp").write_text(code)
        objects.append(tmp_path / f"{name}.o")
        command = [compiler, "-O1", "-c", tmp_path / f"{name}.cpp", "-o", objects[-1]]
        subprocess.run(command, check=True)
    assert not has_constructor(objects[:1])
    assert has_constructor(objects)


@pytest.mark.skipif(not (CMAKE and OBJDUMP), reason="no CMake or no objdump")
def test_no_instruction_set_has_a_static_constructor():
    """The build checks it; here the objects that `make setup` left."""
    objects = sorted(ROOT.glob("build/py3-*/CMakeFiles/isa_*.dir/csrc/*.o"))
    if not objects:
        pytest.skip("the library was not built here")
    assert not has_constructor(objects)


def test_a_library_of_another_version_is_named(tmp_path):
    """An editable install whose library was not built again: said, instead of a missing op."""
    source = tmp_path / "other.py"
    source.write_text(
        "import torch\n"
        "torch.ops.load_library = lambda path: None\n"
        "from sparge.backends.cpu import library\n"
        "print(library.why_missing())\n"
    )
    environment = {**os.environ, "SPARGE_LIBRARY": "elsewhere.so"}
    command = [sys.executable, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "elsewhere.so is of another version; install sparge again" in done.stdout
