"""What Triton needs on a machine beside itself the first time that it launches a kernel.

It compiles a small launcher in C, assembles the kernel, and loads the driver; slim containers lack
some of this. Each is looked for where Triton 3.6 to 3.9 looks, or Intel's fork of it, of which the
source was read and no release was at hand. A kernel that is in Triton's cache, with its launcher,
needs the driver alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import torch

from ...support.errors import Unsupported
from .packages import built_for

LDCONFIG = "/sbin/ldconfig"
DRIVERS = {
    "cuda": (
        "libcuda.so.1",
        "TRITON_LIBCUDA_PATH",
        "install NVIDIA's driver; a container gets it from the host with --gpus all",
    ),
    "hip": (
        "libamdhip64.so",
        "TRITON_LIBHIP_PATH",
        "install ROCm's runtime; a container needs --device /dev/kfd --device /dev/dri, too",
    ),
    "xpu": ("libze_loader.so.1", "", "apt-get install libze1 and Intel's GPU driver"),
}
"""By platform of torch: the library, the variable that names it, and the way out."""


@dataclass(frozen=True)
class Need:
    """found: where it is, or None. way_out: what to do if it is not there."""

    name: str
    found: str | None
    way_out: str


@dataclass(frozen=True)
class Machine:
    """What is looked at. environment: with PATH. include: of Python's headers. triton, torch: the
    packages' directories, None without. libraries: files that the loader knows; None if the program
    that lists them is missing. sycl: the installed package of Intel's runtime, or None."""

    platform: str
    environment: Mapping[str, str]
    include: Path
    triton: Path | None
    torch: Path | None = None
    libraries: tuple[str, ...] | None = ()
    sycl: str | None = None

    def program(self, *names: str) -> str | None:
        """The first of some programs that is on the path."""
        path = self.environment.get("PATH", "")
        return next((there for name in names if (there := shutil.which(name, path=path))), None)


def this_machine() -> Machine:
    """Of this process. platform: "" on Windows too, where triton-windows brings what is needed."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # as Triton does for Debian
    spec = util.find_spec("triton")
    return Machine(
        "" if platform.system() == "Windows" else built_for(),
        dict(os.environ),
        Path(sysconfig.get_paths(scheme=scheme)["include"]),
        Path(spec.origin).parent if spec is not None and spec.origin else None,
        Path(torch.__file__).parent,
        _loadable(),
        _sycl_package(),
    )


def _sycl_package() -> str | None:
    try:
        return f"intel-sycl-rt {metadata.version('intel-sycl-rt')}"
    except metadata.PackageNotFoundError:
        return None


def _loadable() -> tuple[str, ...] | None:
    try:
        done = subprocess.run([LDCONFIG, "-p"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return tuple(line.split()[-1] for line in done.stdout.splitlines() if " => " in line)


def needs(there: Machine) -> tuple[Need, ...]:
    """In the order in which a first launch meets them; none for a torch without GPU support."""
    if not there.platform:
        return ()
    tools = (_ptxas(there, "ptxas"), _ptxas(there, "ptxas-blackwell"))
    return (
        _driver(there),
        _compiler(there),
        _headers(there),
        *(tools if there.platform == "cuda" else ()),
        *((_sycl(there),) if there.platform == "xpu" else ()),
        _cache(there),
    )


def missing(there: Machine) -> tuple[Need, ...]:
    return tuple(need for need in needs(there) if need.found is None)


def explained(error: Exception, there: Machine) -> Unsupported | None:
    """What to raise in place of an error of a first launch: what the machine lacks, if anything."""
    lost = missing(there)
    if not lost:
        return None
    reasons = {need.name: f"not found; {need.way_out}" for need in lost}
    first_line = next(iter(str(error).splitlines()), "")
    what = f"Triton could not launch a kernel ({type(error).__name__}: {first_line}); it lacks:"
    return Unsupported(what, reasons, "`sparge doctor` lists what a first launch needs")


def _driver(there: Machine) -> Need:
    library, variable, way_out = DRIVERS[there.platform]
    name = f"driver ({library})"
    named = there.environment.get(variable, "") if variable else ""
    if named:
        file = Path(named) if there.platform == "hip" else Path(named, library)
        lost = f"{variable}={named} does not hold it; unset it, or {way_out}"
        return Need(name, str(file) if file.exists() else None, lost)
    if there.platform == "cuda" and there.libraries is None:
        how = f"{LDCONFIG}, which Triton asks, is missing: apt-get install libc-bin"
        return Need(name, None, f"{how}, or set {variable} to the directory of {library}")
    listed = there.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    places = [Path(file) for file in there.libraries or () if Path(file).name == library]
    places += [Path(folder, library) for folder in listed if folder]
    if there.platform == "hip":
        packages = [there.triton and there.triton / "backends" / "amd", there.torch]
        roots = [there.environment.get(name) for name in ("HIP_PATH", "ROCM_PATH")]
        rooms = [*packages, *map(Path, filter(None, roots)), Path("/opt/rocm")]
        places += [room / "lib" / library for room in rooms if room is not None]
    found = next((str(place) for place in places if place.exists()), None)
    return Need(name, found, way_out)


def _compiler(there: Machine) -> Need:
    if there.platform == "xpu":  # its launcher is C++
        named, way_out = there.environment.get("CXX"), "apt-get install g++, or set CXX"
        found = there.program(named) if named else there.program("icpx", "g++", "clang++")
        return Need("C++ compiler", found, way_out)
    named, way_out = there.environment.get("CC"), "apt-get install gcc, or set CC"
    if named:
        way_out = f"CC={named} is not a program on the path; correct it, or unset it"
    found = there.program(named) if named else there.program("gcc", "clang")
    return Need("C compiler", found, way_out)


def _sycl(there: Machine) -> Need:
    root = there.environment.get("ONEAPI_ROOT")
    found = there.program("icpx") or root or there.sycl
    return Need("SYCL headers", found, "pip install intel-sycl-rt, or set ONEAPI_ROOT")


def _headers(there: Machine) -> Need:
    file = there.include / "Python.h"
    way_out = "apt-get install python3-dev, of the version of Python that runs"
    return Need("Python headers", str(file) if file.exists() else None, way_out)


def _ptxas(there: Machine, tool: str) -> Need:
    variable = f"TRITON_{tool.upper().replace('-', '_')}_PATH"
    places = [Path(named)] if (named := there.environment.get(variable)) else []
    if there.triton is not None:
        places.append(there.triton / "backends" / "nvidia" / "bin" / tool)
    found = next((str(place) for place in places if os.access(place, os.X_OK)), None)
    return Need(tool, found, f"install triton again, which brings it, or set {variable}")


def _cache(there: Machine) -> Need:
    home = there.environment.get("TRITON_HOME") or there.environment.get("HOME") or "~"
    given = there.environment.get("TRITON_CACHE_DIR")
    folder = Path(given) if given else Path(home).expanduser() / ".triton" / "cache"
    there_is = next(place for place in (folder, *folder.parents) if place.exists())
    writable = there_is.is_dir() and os.access(there_is, os.W_OK)
    way_out = "set TRITON_CACHE_DIR to a directory that can be written"
    return Need("cache directory", str(folder) if writable else None, way_out)
