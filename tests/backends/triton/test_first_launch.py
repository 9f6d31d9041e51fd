"""What Triton needs on a machine: its packages by name, and what a first launch looks for."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from sparge.backends.triton import first_launch, packages
from sparge.backends.triton.first_launch import Machine, explained, missing, needs
from sparge.backends.triton.packages import Installation, clash, way_to_install, why_unusable

LINUX = Installation(True, {"triton": "3.7.1"}, "Linux", "cuda", "triton==3.7.1")


def executable(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def full(tmp_path):
    """A machine that has everything, and nothing outside of a directory."""
    for name in ("gcc", "clang"):
        executable(tmp_path / "bin" / name)
    for name in ("ptxas", "ptxas-blackwell"):
        executable(tmp_path / "triton" / "backends" / "nvidia" / "bin" / name)
    for name in ("include/Python.h", "lib/libcuda.so.1", "lib/libze_loader.so.1"):
        executable(tmp_path / name)
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    libraries = tuple(map(str, (tmp_path / "lib").iterdir()))
    include, triton = tmp_path / "include", tmp_path / "triton"
    return Machine("cuda", environment, include, triton, libraries=libraries)


def found_by_name(machine):
    return {need.name: need.found for need in needs(machine)}


def lacking(machine):
    return {need.name: need.way_out for need in missing(machine)}


def test_a_machine_that_has_everything(full, tmp_path):
    assert missing(full) == ()
    found = found_by_name(full)
    assert found["C compiler"] == str(tmp_path / "bin" / "gcc")
    assert found["cache directory"] == str(tmp_path / ".triton" / "cache")
    assert needs(replace(full, platform="")) == ()


def test_the_compiler_is_searched_as_triton_does(full, tmp_path):
    (tmp_path / "bin" / "gcc").unlink()
    assert found_by_name(full)["C compiler"] == str(tmp_path / "bin" / "clang")
    (tmp_path / "bin" / "clang").unlink()
    assert lacking(full) == {"C compiler": "apt-get install gcc, or set CC"}
    mine = executable(tmp_path / "mine")
    chosen = replace(full, environment={**full.environment, "CC": str(mine)})
    assert found_by_name(chosen)["C compiler"] == str(mine)
    lost = replace(full, environment={**full.environment, "CC": "no-such-cc"})
    assert "CC=no-such-cc is not a program" in lacking(lost)["C compiler"]


def test_headers_and_ptxas(full, tmp_path):
    (tmp_path / "include" / "Python.h").unlink()
    tool = tmp_path / "triton" / "backends" / "nvidia" / "bin" / "ptxas"
    tool.chmod(0o644)
    assert set(lacking(full)) == {"Python headers", "ptxas"}
    assert "python3-dev" in lacking(full)["Python headers"]
    mine = executable(tmp_path / "mine")
    chosen = {**full.environment, "TRITON_PTXAS_PATH": str(mine)}
    assert found_by_name(replace(full, environment=chosen))["ptxas"] == str(mine)
    assert "ptxas" in lacking(replace(full, triton=None))


def test_the_driver(full, tmp_path):
    none = replace(full, libraries=())
    assert "--gpus all" in lacking(none)["driver (libcuda.so.1)"]
    listed = {**full.environment, "LD_LIBRARY_PATH": f"/nowhere:{tmp_path / 'lib'}"}
    assert missing(replace(none, environment=listed)) == ()
    given = {**full.environment, "TRITON_LIBCUDA_PATH": str(tmp_path / "lib")}
    assert missing(replace(full, environment=given, libraries=None)) == ()
    wrong = {**full.environment, "TRITON_LIBCUDA_PATH": "/nowhere"}
    why = lacking(replace(full, environment=wrong))["driver (libcuda.so.1)"]
    assert why.startswith("TRITON_LIBCUDA_PATH=/nowhere does not hold it")
    why = lacking(replace(full, libraries=None))["driver (libcuda.so.1)"]
    assert "/sbin/ldconfig, which Triton asks, is missing" in why


def test_an_error_of_a_first_launch_is_explained_by_what_is_missing(full, tmp_path):
    error = RuntimeError("Failed to find C compiler.\nmore")
    assert explained(error, full) is None
    for name in ("gcc", "clang"):
        (tmp_path / "bin" / name).unlink()
    made = explained(error, full)
    assert made.reasons == {"C compiler": "not found; apt-get install gcc, or set CC"}
    assert "(RuntimeError: Failed to find C compiler.); it lacks:" in str(made)
    assert "`sparge doctor`" in made.way_out


def test_other_platforms(full, tmp_path):
    amd = replace(full, platform="hip", torch=tmp_path / "torch")
    assert set(lacking(amd)) <= {"driver (libamdhip64.so)"}  # unless this machine has ROCm
    executable(tmp_path / "torch" / "lib" / "libamdhip64.so")
    assert missing(amd) == ()
    assert not {"ptxas", "ptxas-blackwell"} & set(found_by_name(amd))
    other = {**full.environment, "ROCM_PATH": str(tmp_path / "rocm")}
    executable(tmp_path / "rocm" / "lib" / "libamdhip64.so")
    assert missing(replace(amd, torch=None, environment=other)) == ()
    intel = replace(full, platform="xpu")
    assert set(lacking(intel)) == {"C++ compiler", "SYCL headers"}
    executable(tmp_path / "bin" / "g++")
    assert set(lacking(intel)) == {"SYCL headers"}
    assert missing(replace(intel, sycl="intel-sycl-rt 2025.3")) == ()


def test_a_library_of_another_name_is_not_the_driver(full, tmp_path):
    """Triton takes libamdhip64.so as the loader lists it, and not libamdhip64.so.6."""
    versioned = executable(tmp_path / "lib" / "libamdhip64.so.6")
    amd = replace(full, platform="hip", libraries=(str(versioned),))
    assert found_by_name(amd)["driver (libamdhip64.so)"] != str(versioned)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written(full, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    given = {**full.environment, "TRITON_CACHE_DIR": str(tmp_path / "locked" / "cache")}
    assert "TRITON_CACHE_DIR" in lacking(replace(full, environment=given))["cache directory"]


def test_a_cache_under_a_file_is_missing(full, tmp_path):
    given = {**full.environment, "TRITON_CACHE_DIR": str(executable(tmp_path / "file") / "cache")}
    assert set(lacking(replace(full, environment=given))) == {"cache directory"}


def test_this_machine_is_read():
    machine = first_launch.this_machine()
    assert machine.include == Path(sysconfig.get_paths()["include"])
    assert machine.environment["PATH"] == os.environ["PATH"]
    assert machine.torch == Path(torch.__file__).parent


# --- packages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "torch requires triton==3.7.1: pip install 'triton==3.7.1'"),
        ({"system": "Windows", "required": ""}, "pip install 'triton-windows>=3.6'"),
        (
            {"built_for": "hip", "required": "triton-rocm==3.7.1"},
            "torch's build for ROCm brings triton-rocm==3.7.1; install torch again from its index",
        ),
        ({"built_for": "xpu", "required": ""}, "torch's build for XPU brings triton-xpu"),
        ({"built_for": "", "required": ""}, "it comes with torch's builds for GPUs"),
    ],
)
def test_the_way_to_install_depends_on_the_platform(changes, words):
    there = replace(LINUX, importable=False, found={}, **changes)
    assert words in way_to_install(there)
    assert why_unusable(there) == f"triton is not installed; {way_to_install(there)}"


@pytest.mark.parametrize("name", packages.NAMES)
def test_versions_are_read_under_every_name(name, monkeypatch):
    def version(asked):
        if asked != name:
            raise metadata.PackageNotFoundError(asked)
        return "3.5.1"

    monkeypatch.setattr(packages.metadata, "version", version)
    there = packages.installation()
    assert (there.version, there.found, packages.triton_version()) == (
        "3.5.1",
        {name: "3.5.1"},
        "3.5.1",
    )
    assert f"{name} 3.5.1 is too old" in why_unusable(replace(there, importable=True))


def test_a_build_of_unknown_name_is_used():
    assert why_unusable(replace(LINUX, found={})) is None
    assert why_unusable(replace(LINUX, found={"triton": "3.8.0+git1234"})) is None


def test_what_torch_requires(monkeypatch):
    for lines, wanted in (
        (["sympy>=1.13", 'triton==3.7.1; platform_system == "Linux"'], "triton==3.7.1"),
        (["pytorch-triton-rocm (==3.6.0) ; python_version < '3.15'"], "pytorch-triton-rocm==3.6.0"),
        (['triton>=3; extra == "opt"', "tritonclient"], ""),
        (None, ""),
    ):
        monkeypatch.setattr(packages.metadata, "requires", lambda name, lines=lines: lines)
        assert packages.installation().required == wanted


def test_two_packages_clash():
    assert clash(LINUX) is None
    both = replace(LINUX, found={"triton": "3.9.0", "triton-rocm": "3.7.1"})
    why = clash(both)
    assert why.startswith(
        "triton 3.9.0 and triton-rocm 3.7.1 are installed, whose files are the same"
    )
    assert way_to_install(both) in why
