"""csrc/tests, which need neither Python nor torch, under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_driver(tmp_path, sanitizers):
    program = tmp_path / "test_driver"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}"]
    source = ROOT / "csrc/tests/test_driver.cpp"
    subprocess.run([COMPILER, *flags, source, "-o", program], check=True)
    # One of its tests asks for more memory than there is.
    options = "allocator_may_return_null=1:halt_on_error=1"
    names = ("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS")
    done = subprocess.run(
        [program],
        env={**os.environ, **dict.fromkeys(names, options)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all tests passed" in done.stdout
