"""`sparge bench --static`: what it prints, its document, its exit code and its refusals."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from sparge.cli import BAD_RESULT, MISTAKE, OK, UNSUPPORTED, main
from sparge_tools.commands import bench_static
from sparge_tools.static import compile, ratchet, suite
from sparge_tools.static.chain import Chain
from sparge_tools.static.checks import Intent
from sparge_tools.static.variants import default_variants
from static_runs import MEANT, a_kernel, a_loop

STATIC = ["bench", "--static"]
NAME = "attend int8 d128 causal pool"


@pytest.fixture
def made():
    """What compiling gives; tests change it."""
    good = suite.Made(NAME, "attend_blocks", "sm_80", MEANT, a_kernel())
    other = replace(a_kernel(), loops=(), target="gfx942", matrix={}, shared=2048)
    return [good, suite.Made("default recipe", "sum_keys", "gfx942", Intent(), other)]


@pytest.fixture
def compiler(monkeypatch, made, tmp_path):
    """No compiler: `made` is what it returns. The ratchet is a file of the test's."""

    def compile_all(tasks, *, step):
        for task in tasks:
            step(task[0].name)
        return list(made)

    file = tmp_path / "ratchet.json"
    least = Chain("8 heads", (("prepare", "sum_keys", 900), ("attend", "attend_blocks", 500)), 1000)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(compile, "find_spec", lambda name: True)
    monkeypatch.setattr(bench_static, "triton_version", lambda: "3.9.0")
    monkeypatch.setattr(bench_static, "compile_all", compile_all)
    monkeypatch.setattr(bench_static, "chain_of", lambda variant: least)
    monkeypatch.setattr(bench_static, "CALLS", [None])
    monkeypatch.setattr(bench_static, "read_ratchet", lambda path: ratchet.read_ratchet(file))
    monkeypatch.setattr(
        bench_static,
        "update_ratchet",
        lambda found, why, path: ratchet.update_ratchet(found, why, file),
    )
    return file


def test_the_document(compiler, capsys, tmp_path):
    target = tmp_path / "static.json"
    argv = [*STATIC, "--json", "--output", str(target), "--update-ratchet", "first numbers"]
    assert main(argv) == OK
    found = json.loads(capsys.readouterr().out)
    assert json.loads(target.read_text()) == found
    assert found["format"] == "sparge.bench.static/1"
    assert found["missed"] == []
    assert found["triton"] == "3.9.0"
    assert len(found["ratchet_changed"]) == 2
    by_name = {row["variant"]: row for row in found["rows"]}
    row = by_name[NAME]
    assert row["ok"]
    assert (row["registers"], row["spills"], row["shared"]) == (200, 0, 65552)
    (loop,) = row["loops"]
    assert (loop["name"], loop["per_tile"], loop["depth"]) == ("full", 500, 2)
    assert loop["estimate"]["bound"] == "tensor"
    assert {verdict["rule"] for verdict in row["verdicts"]} > {"spills", "matrix", "ratchet"}
    (chain,) = found["chains"]
    assert (chain["ratio"], chain["ok"]) == (1.4, True)
    assert chain["by_kernel"] == {"sum_keys": 900, "attend_blocks": 500}
    # The next run compares with what was recorded.
    assert main([*STATIC, "--json"]) == OK


def test_the_tables(compiler, capsys, piped):
    assert main([*STATIC, "--update-ratchet", "first numbers"]) == OK
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert "GPU kernels, compiled and read; not measured" in text
    assert "ESTIMATE, not a measurement" in text
    assert "0 of 2 kernels break a rule" in text
    assert "8 heads 2 0.0 1.40x sum_keys 0.0, attend_blocks 0.0" in text
    (line,) = [line for line in out.splitlines() if "sm_80" in line and "65552" in line]
    assert " 200 " in line
    assert " 500 " in line
    assert line.split()[-1] == "ok"


def test_a_broken_rule_is_said_and_is_the_exit_code(compiler, made, capsys, piped):
    assert main([*STATIC, "--update-ratchet", "first numbers"]) == OK
    made[0] = replace(made[0], compiled=a_kernel(a_loop(instructions=520), spills=12))
    made.append(suite.Made(NAME, "attend_blocks", "sm_86", MEANT, None, "ValueError: no"))
    capsys.readouterr()
    assert main(STATIC) == BAD_RESULT
    said = capsys.readouterr()
    assert "RED: spills, ratchet" in said.out
    assert "RED: compiles" in said.out
    assert f"{NAME}, attend_blocks on sm_80: spills: 12 spilled" in said.err
    assert f"{NAME}, attend_blocks on sm_80: ratchet: loop 1 520, recorded 500" in said.err
    assert f"{NAME}, attend_blocks on sm_86: compiles: ValueError: no" in said.err


def test_a_call_that_launches_too_much(compiler, monkeypatch, capsys):
    much = Chain("a call", (("prepare", "sum_keys", 200),) * 9, 1000)
    monkeypatch.setattr(bench_static, "chain_of", lambda variant: much)
    assert main([*STATIC, "--json", "--update-ratchet", "first numbers"]) == BAD_RESULT
    assert json.loads(capsys.readouterr().out)["missed"] == [
        "a call: 9 launches, at most 8",
        "a call: 1800 bytes are 1.80 times the least, at most 1.6",
    ]


def test_what_is_compiled(compiler, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(
        bench_static, "compile_all", lambda tasks, *, step: seen.extend(tasks) or []
    )
    main([*STATIC, "--targets", "sm_90,sm_80", "--variants", "int8 d64", "--json"])
    assert {name for _, name in seen} == {"sm_90", "sm_80"}
    names = {x.name for x in default_variants() if "int8 d64" in x.name}
    assert {variant.name for variant, _ in seen} == names
    n = len(seen)
    main([*STATIC, "--full", "--targets", "sm_90,sm_80", "--variants", "int8 d64", "--json"])
    assert len(seen) - n > n


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--targets", "sm_75"], "unknown target 'sm_75'; known: sm_80"),
        (["--variants", "int4"], "none contains int4; known: default recipe"),
        (["--update-ratchet", "  so  "], "must say why the numbers change"),
        (["--output", "/nowhere/x.json"], "/nowhere"),
    ],
)
def test_mistakes_are_said_before_any_work(argv, says, capsys, monkeypatch):
    monkeypatch.setattr(bench_static, "compile_all", None)
    assert main([*STATIC, *argv]) == MISTAKE
    assert says in capsys.readouterr().err


def test_refusals(monkeypatch, capsys):
    monkeypatch.setattr(bench_static, "compile_all", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(compile, "find_spec", lambda name: True)
    assert main(STATIC) == UNSUPPORTED
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.setattr(compile, "find_spec", lambda name: None)
    assert main(STATIC) == UNSUPPORTED
    assert "triton is not installed" in capsys.readouterr().err


# Workers


def work_or_die(task):
    """Of the second variant, the compiler dies and takes its process along."""
    variant, target = task
    if variant.name == default_variants()[1].name:
        os._exit(7)
    return [suite.Made(variant.name, "attend", target, MEANT, a_kernel())]


def test_a_compiler_that_crashes_is_a_failure_of_its_kernel_alone():
    tasks = [(variant, "sm_80") for variant in default_variants()[:3]]
    steps = []
    made = suite.compile_all(tasks, step=steps.append, work=work_or_die)
    assert [x.error for x in made] == ["", "the compiler crashed", ""]
    assert [x.variant for x in made] == [variant.name for variant, _ in tasks]
    assert len(steps) == 3
