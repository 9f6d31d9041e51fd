"""csrc/tests, which need neither Python nor torch, under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparge.backends.cpu import library as native

ROOT = Path(__file__).parents[3]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
CMAKE = shutil.which("cmake", path=PATH)
pytestmark = pytest.mark.skipif(not (COMPILER and CMAKE), reason="no C++ compiler or no CMake")


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined,float-cast-overflow"])
def test_programs(tmp_path, sanitizers):
    flags = [f"-DCMAKE_CXX_COMPILER={COMPILER}", f"-DSPARGE_SANITIZE={sanitizers}"]
    flags += ["-G", "Ninja"] if shutil.which("ninja", path=PATH) else []
    env = {**os.environ, "PATH": PATH}
    subprocess.run([CMAKE, "-S", ROOT / "csrc/tests", "-B", tmp_path, *flags], env=env, check=True)
    subprocess.run([CMAKE, "--build", tmp_path], env=env, check=True)
    # The driver's test asks for more memory than there is.
    options = "allocator_may_return_null=1:halt_on_error=1"
    env |= dict.fromkeys(("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS"), options)
    for program in ("test_driver", "test_operations"):
        done = subprocess.run(
            [tmp_path / program], env=env, capture_output=True, text=True, timeout=280, check=False
        )
        print(done.stdout)  # which instruction sets were skipped
        assert done.returncode == 0, done.stdout + done.stderr
        assert "all tests passed" in done.stdout
    for name, isa in native.isas().items():
        said = "all operations are right" if isa.available else "skipped, "
        assert f"{name}: {said}" in done.stdout
