"""`sparge doctor` and `sparge explain`."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import sparge
from calls import BUILT_IN
from cli_runs import EXPLAIN, WHY, attend_wrongly, complaint, run_json, run_text
from gpus import pretend, properties
from sparge import Recipe
from sparge.backends.triton.first_launch import Machine
from sparge.backends.triton.packages import Installation
from sparge.cli import machine
from sparge.routing import backends
from sparge_tools.machine import machine_line

pytestmark = pytest.mark.usefixtures("piped")


def checks_of(document):
    checks = document["self_check"]["checks"]
    return {check["backend"]: check for check in checks if check["precision"] == "exact"}


def test_doctor_checks_every_backend(capsys, monkeypatch):
    monkeypatch.setenv("SPARGE_TEST_NOTE", "here")
    found = run_json(["doctor"], capsys)
    assert found["versions"]["sparge"] == sparge.__version__
    assert found["versions"]["safetensors"] is not None
    assert found["environment"]["SPARGE_TEST_NOTE"] == "here"
    names = [backend.name for backend in backends()]
    judged = found["backends"][0]
    assert judged["call"] == "[1, 32/8, 8192, 128] bfloat16 on cpu causal"
    assert [row["backend"] for row in judged["rows"]] == [*names, "dense"]
    assert [row["serves"] for row in judged["rows"]][-2:] == ["yes", "yes"]
    assert sum(row["auto"].startswith("chosen: ") for row in judged["rows"]) == 1
    checks = checks_of(found)
    assert set(checks) == {*names, "dense", "auto"}
    assert 0 < checks["reference"]["error"] < 1e-5
    of_reference = [c for c in found["self_check"]["checks"] if c["backend"] == "reference"]
    assert [c["precision"] for c in of_reference] == ["exact", "half", "int8", "int8-fast"]
    text = run_text(["doctor"], capsys)
    for words in (torch.__version__, "SPARGE_TEST_NOTE=here", "slower than cpu"):
        assert words in text
    assert text.rstrip().endswith("self-check passed")


def test_doctor_tells_a_refusal_from_a_fault(add_backend, capsys):
    add_backend("picky", refusal=WHY)
    found = run_json(["doctor"], capsys)
    assert list(found["backends"][0]["rows"][0].values()) == ["picky", "no", WHY, WHY]
    assert checks_of(found)["picky"]["verdict"] == "refused"
    add_backend("wrong", attend=attend_wrongly)
    add_backend("broken", attend=None)
    checks = checks_of(run_json(["doctor"], capsys, code=1))
    assert checks["wrong"]["error"] == pytest.approx(1e-3, rel=1e-2)
    assert checks["broken"]["error"] is None
    assert checks["broken"]["why"] == "TypeError: 'NoneType' object is not callable"
    failed = {name for name, check in checks.items() if check["verdict"] == "failed"}
    assert failed == {"wrong", "broken"}
    assert "self-check FAILED" in run_text(["doctor"], capsys, code=1)


def test_doctor_finds_an_unknown_backend_in_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("SPARGE_BACKEND", "magic")
    found = run_json(["doctor"], capsys, code=1)
    assert "SPARGE_BACKEND=magic" in found["backends"][0]["rows"][0]["auto"]
    checks = checks_of(found)
    assert (checks["reference"]["verdict"], checks["auto"]["verdict"]) == ("passed", "failed")


@pytest.mark.parametrize(
    "text, sets",
    [
        ("model name : Fast\nflags : fpu avx2 amx_int8\n\nflags : avx512f", {"avx2", "amx_int8"}),
        ("model name : Fast\nFeatures : fp asimd", set()),
        ("model name : Fast", None),
    ],
)
def test_what_the_system_tells_of_its_cpu(text, sets, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sparge.support.cpuinfo.CPUINFO", tmp_path / "cpuinfo")
    assert machine.machine()["instruction_sets"] is None
    (tmp_path / "cpuinfo").write_text(text)
    facts = machine.machine()
    assert facts["cpu"] == "Fast"
    found = facts["instruction_sets"]
    assert (found and {name for name, there in found.items() if there}) == (found and sets)
    text = run_text(["doctor"], capsys)
    assert ("not listed" in text) == (found is None) == (sets is None)
    assert "environment           SPARGE_CACHE=" in text


def test_an_accelerator_is_named(monkeypatch):
    module = SimpleNamespace(get_device_name=lambda i: f"GPU {i}")
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: gpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert machine.accelerators() == ["GPU 0", "GPU 1"]
    assert machine.devices() == ["cpu", "cuda"]
    assert "GPU 0, GPU 1" in machine_line()


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Doctor on a machine with cards that are not here; nothing runs on them."""
    monkeypatch.setattr("sparge.cli.doctor_command.check_backends", lambda device: [])
    monkeypatch.setattr("sparge.cli.doctor_command.devices", lambda: ["cpu"])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)

    def doctor(*flags):
        found = run_json(["doctor", *flags], capsys)["gpu"]
        return found, " ".join(run_text(["doctor"], capsys).split())

    return doctor


def test_doctor_without_a_gpu_says_how_the_kernels_were_verified(doctor, monkeypatch):
    found, text = doctor()
    assert found["cards"] == []
    words = "no device: verified by interpreter and ahead-of-time compilation, see docs/backends.md"
    assert words in text
    nothing = Installation(False, {}, "Linux", "", "")
    monkeypatch.setattr("sparge.cli.doctor_command.installation", lambda: nothing)
    assert f"triton is not installed; {words}" in doctor()[1]


def test_doctor_shows_each_card(doctor, monkeypatch):
    pretend(monkeypatch, properties(), properties(), properties("Other GPU"))
    found, text = doctor()
    some, other = found["cards"]
    assert (some["name"], some["architecture"], some["indices"]) == ("Some GPU", "sm_89", [0, 1])
    assert (some["launch"]["num_warps"], some["launch"]["fp8"]) == (8, "float8_e4m3fn")
    assert some["cost"]["source"] == "estimate"
    assert other["indices"] == [2]
    for words in (
        "gpu 0, 1 Some GPU (sm_89); triton",
        "128 queries per program, 8 warps",
        "roofline estimate, nothing was measured on this card; `sparge doctor --calibrate`",
        "dense from",
    ):
        assert words in text


def test_doctor_names_what_a_first_launch_lacks(doctor, monkeypatch, tmp_path):
    """A slim container: a card, torch and Triton, and nothing to compile a launcher with."""
    pretend(monkeypatch, properties())
    slim = Machine("cuda", {"PATH": "", "HOME": str(tmp_path)}, tmp_path, tmp_path, libraries=())
    monkeypatch.setattr("sparge.cli.doctor_command.this_machine", lambda: slim)
    two = Installation(True, {"triton": "3.9.0", "triton-rocm": "3.7.1"}, "Linux", "cuda", "")
    monkeypatch.setattr("sparge.cli.doctor_command.installation", lambda: two)
    found, text = doctor()
    names = [need["name"] for need in found["first_launch"] if need["found"] is None]
    assert names == [
        "driver (libcuda.so.1)",
        "C compiler",
        "Python headers",
        "ptxas",
        "ptxas-blackwell",
    ]
    for words in (
        "C compiler: not found; apt-get install gcc, or set CC",
        "Python headers: not found; apt-get install python3-dev",
        "first launch has cache directory",
        "triton 3.9.0 and triton-rocm 3.7.1 are installed, whose files are the same",
    ):
        assert words in text
    assert (found["triton"], found["packages"]) == ("3.9.0", two.found)


def test_doctor_on_a_card_that_is_not_known(doctor, monkeypatch):
    pretend(monkeypatch, properties("Old GPU", 7, 0))
    found, text = doctor()
    (old,) = found["cards"]
    assert "too old" in old["launch"]
    assert old["cost"]["source"] == "none"
    assert "dense attention: the throughput of Old GPU (sm_70) is not known here" in text
    assert "launch none: sm_70 is too old" in text


def test_doctor_calibrates_a_card(doctor, monkeypatch, new_router):
    pretend(monkeypatch, properties())
    nothing = {"state": "none", "why": ""}
    monkeypatch.setattr("sparge.cli.doctor_command.cpu_status", lambda measure: nothing)
    made = replace(BUILT_IN, date="2026-01-01", took=90.0, noise=1.8, measured=True)
    new_router(measure=lambda backend, place: made)
    (card,) = doctor("--calibrate")[0]["cards"]
    assert (card["cost"]["source"], card["cost"]["state"]) == ("measured", "measured now")
    found, text = doctor()
    assert found["cards"][0]["cost"] == {**card["cost"], "state": "measured before"}
    for words in ("measured before, 2026-01-01, in 90.0 s", "not steady", card["cost"]["file"]):
        assert words in text

    def fail(backend, place):
        raise MemoryError("none left")

    new_router(measure=fail)
    failed = doctor("--calibrate")[0]["cards"][0]["cost"]
    assert (failed["failure"], failed["source"]) == ("MemoryError: none left", "measured")


def test_a_card_can_be_calibrated_without_a_native_core(doctor, monkeypatch, new_router):
    pretend(monkeypatch, properties())
    monkeypatch.setattr("sparge.backends.cpu.library.why_missing", lambda: "it was not built")
    new_router(measure=lambda backend, place: 1 / 0)
    assert "division" in doctor("--calibrate")[0]["cards"][0]["cost"]["failure"]


def test_explain(capsys):
    x = torch.empty(1, 8, 1024, 64, dtype=torch.bfloat16)
    choice = sparge.explain(x, x, x)
    found = run_json(EXPLAIN, capsys)
    assert found["call"] == "[1, 8, 1024, 64] bfloat16 on cpu"
    assert found["choice"] == choice.to_dict()
    assert run_text(EXPLAIN, capsys) == f"[1, 8, 1024, 64] bfloat16 on cpu\n{choice}\n"


def test_explain_every_option(capsys, tmp_path):
    file = tmp_path / "recipe.json"
    file.write_text(Recipe(precision="exact", sink_blocks=3).to_json())
    # The query alone would need 256 GB.
    argv = "explain --shape 4,32,8388608,128 --kv-heads 8 --kv-length 9000000 --value-dim 64"
    argv += f" --dtype fp16 --causal --align bottom_right --backend reference --lse --recipe {file}"
    found = run_json(argv.split(), capsys)
    call = "[4, 32/8, 8388608x9000000, 128/64] float16 on cpu causal offset 611392"
    assert found["call"] == call
    assert found["return_lse"] is True
    assert found["recipe"] == json.loads(file.read_text())
    assert found["choice"]["reason"] == "asked for by backend='reference'"
    in_place = run_json([*EXPLAIN, "--recipe", '{"keep": {"mass": 0.9}}'], capsys)
    assert in_place["recipe"]["keep"] == {"mass": 0.9}


def test_unsupported_has_its_own_code_and_all_reasons(add_backend, capsys):
    add_backend("picky", refusal=WHY)
    message = complaint([*EXPLAIN, "--backend", "picky"], capsys, code=3)
    assert f"picky: {WHY}" in message
    assert "reference: can serve it" in message
