"""`sparge`: its messages and exit codes, and what is checked before any work."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest

import sparge
from cli_runs import EXPLAIN, complaint, run_text
from sparge import cli
from sparge.cli import main, screen
from sparge.cli.screen import Column, Table, to_json
from sparge_tools import zoo
from sparge_tools.commands import bench_command
from sparge_tools.commands.arguments import check_directory
from sparge_tools.screen import progress

pytestmark = pytest.mark.usefixtures("piped")


def test_version_and_help_and_the_module(capsys, monkeypatch):
    text = run_text(["--help"], capsys)
    assert all(name in text for name in cli.COMMANDS)
    assert "--kv-heads" in run_text(["explain", "--help"], capsys)
    argv = [sys.executable, "-m", "sparge", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"sparge {sparge.__version__}\n", "")
    monkeypatch.setattr(sys, "argv", ["sparge", "fly"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("sparge", run_name="__main__")
    assert stop.value.code == 2
    assert "'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "required: command"),
        (["doctor", "--fast"], "unrecognized arguments: --fast"),
        (["demo", "--tokens", "0"], "whole number of at least 1, got '0'"),
        (["demo", "--tokens", "many"], "whole number of at least 1, got 'many'"),
        (["demo", "--synthetic"], "unrecognized arguments: --synthetic"),
        (["bench", "--lengths", "256,"], "at least 1, got ''"),
        (["bench", "--head-dims", "64,300"], "--head-dims must be from 8 to 256, got 300"),
        (["bench", "--backends", "magic"], "--backends: unknown backend 'magic'; known: "),
        (["bench", "--backends", ","], "--backends: unknown backend ''; known: "),
        (["bench", "--contenders", "cpu,car"], "--contenders: no name contains 'car'"),
        (["explain"], "required: --shape"),
        (["explain", "--shape", "1,8,1024"], "B,H,L,D, four numbers; got 3"),
        (["explain", "--shape", "1,8,1024,300"], "head_dim must be at most 256, got 300"),
        (["explain", "--shape", f"{10**20},1,1,64"], "at most 2**48 elements; the query would be"),
        (["explain", "--shape", f"1,{2**32},{2**32},64"], "at most 2**48 elements; the query"),
        ([*EXPLAIN, "--kv-length", f"{2**63}"], "at most 2**48 elements; the key would be"),
        ([*EXPLAIN, "--value-dim", f"{10**30}"], "at most 2**48 elements; the value would be"),
        (["explain", "--shape", "9" * 5000], "whole number of at least 1, got '999"),
        ([*EXPLAIN, "--backend", "magic"], "unknown backend in backend='magic'"),
        ([*EXPLAIN, "--kv-heads", "3"], "multiple of key heads, got 8 and 3"),
        ([*EXPLAIN, "--dtype", "int8"], "invalid choice: 'int8'"),
        ([*EXPLAIN, "--device", "toaster"], "--device 'toaster' is not usable"),
        ([*EXPLAIN, "--recipe", "{keep"], "must be valid JSON"),
        ([*EXPLAIN, "--recipe", '{"keeep": 1}'], "unknown recipe fields ['keeep']"),
        ([*EXPLAIN, "--recipe", '{"pv_skip": "low"}'], "pv_skip must be a number"),
        ([*EXPLAIN, "--recipe", "no/such/file"], "cannot be read: No such file"),
        ([*EXPLAIN, "--recipe", "/dev/zero"], "at most 1048576 bytes; '/dev/zero' is longer"),
    ],
)
def test_the_callers_mistakes_are_one_clean_line(argv, message, capsys):
    assert message in complaint(argv, capsys)


def test_a_fault_of_ours_is_not_called_the_callers(capsys, monkeypatch):
    monkeypatch.setattr("sparge.cli.doctor_command.versions", lambda: None + 1)
    with pytest.raises(TypeError):
        main(["doctor"])
    assert complaint([*EXPLAIN, "--recipe", '{"sink_blocks": "two"}'], capsys).count("sink_blocks")


def test_a_reader_that_leaves_is_no_error_message():
    argv = [sys.executable, "-m", "sparge", *EXPLAIN, "--json"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as gone:
        done = subprocess.run(argv, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_narrow_terminal_cuts_no_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    number = "{:.6f}".format
    columns = [Column("text", "text"), Column("a", "a", number), Column("b", "b", number)]
    row = {"text": "a text that is much longer than forty columns", "a": 1234567.25}
    screen.show_table(screen.console(), Table("title", columns, [row]))
    words = capsys.readouterr().out.split()
    assert {*row["text"].split(), "1234567.250000", "–"} <= set(words)


def test_json_has_no_nan():
    data = {"a": [float("nan"), 1.5], "b": (float("inf"), None)}
    assert json.loads(to_json(data)) == {"a": [None, 1.5], "b": [None, None]}


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(capsys, monkeypatch):
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda there=is_terminal: there)
        with progress("walking", 2) as step:
            step("one mile")
            step("")
        shown = capsys.readouterr().err
        if is_terminal:
            assert all(word in shown for word in ("walking", "one mile", "50%"))
        else:
            assert shown == "sparge: 1 of 2: one mile\n"


BAD_FILES = ["missing/out.json", ".", "/dev/null", "file/out.json", "n" * 300]


@pytest.mark.parametrize("target", BAD_FILES)
@pytest.mark.parametrize(
    "command",
    [
        ["bench", "--output"],
        ["demo", "-o"],
        ["tune", "--model", "m", "--l1", "0.1", "-o"],
        ["tune", "--model", "m", "--l1", "0.1", "-o", "p.json", "--state"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_found_before_any_work(
    command, target, no_work, capsys, tmp_path
):
    option = "--state" if "--state" in command else "--output"
    assert option in complaint([*command, target], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("target", ["file", "file/deeper/run", "/proc/run", "n" * 300])
@pytest.mark.parametrize(
    "command",
    [
        ["trace", "--model", "m", "-o"],
        ["eval", "--model", "m", "-o"],
        ["tune", "--model", "m", "--l1", "0.1", "-o", "p.json", "--trace"],
    ],
    ids=" ".join,
)
def test_a_directory_that_cannot_be_made_is_found_before_any_work(
    command, target, no_work, capsys, tmp_path
):
    option = "--trace" if "--trace" in command else "--output"
    assert option in complaint([*command, target], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def no_work(monkeypatch, tmp_path):
    """Fails if a model is fetched, loaded or measured; the directory holds one file."""

    def worked(*_, **__):
        raise AssertionError("work was done before the output was checked")

    for name in ("load", "fetch", "text"):
        monkeypatch.setattr(zoo, name, worked)
    monkeypatch.setattr(bench_command, "check_backends", worked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()


def test_directories_that_can_be_made_are_not_made_by_the_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("new", "new/deeper", ".", str(tmp_path / "a")):
        check_directory(path)
    assert list(tmp_path.iterdir()) == []


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {blocked} else real(name, *rest)
{code}
"""


def run_without(blocked, code, **env):
    text = WITHOUT.format(blocked=set(blocked), code=code)
    command = [sys.executable, "-c", text]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


def test_attention_needs_neither_rich_nor_filelock():
    code = "import torch, sparge; x = torch.ones(1, 2, 300, 64);"
    code += "print(sparge.attention(x, x, x).shape)"
    done = run_without(["rich", "filelock"], code)
    assert (done.stdout, done.stderr) == ("torch.Size([1, 2, 300, 64])\n", "")


@pytest.mark.parametrize("command", [EXPLAIN, ["doctor", "--json"], ["eval", "--model", "m"]])
def test_the_command_line_without_rich_names_the_extra(command):
    code = f"from sparge.cli import main\nsys.exit(main({command!r}))"
    done = run_without(["rich"], code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"sparge: error: sparge {command[0]} needs the package rich, which is not installed; "
        'install it with: pip install "sparge[cli]"\n'
    )


def test_the_zoo_without_filelock_names_the_extra(tmp_path):
    code = (
        "import sparge, sparge_tools.zoo\n"
        "try: sparge_tools.zoo.text()\nexcept sparge.Unsupported as e: print(e)"
    )
    done = run_without(["filelock"], code, SPARGE_CACHE=str(tmp_path))
    assert done.stderr == ""
    assert "filelock: not installed" in done.stdout
    assert 'pip install "sparge-tools[zoo]"' in done.stdout
    assert list(tmp_path.iterdir()) == []
