"""Measured costs in the user's cache directory."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from calls import BUILT_IN
from sparge import KeepFraction, Recipe
from sparge.routing import cost_file as cache
from sparge.support.cache_directory import cache_directory

KEY = {"cpu": "Fast", "isa": "avx2", "threads": "1"}
MEASURED = replace(BUILT_IN, key=KEY, date="2026-01-01", took=1.5, noise=1.1, measured=True)
RECIPE = Recipe(KeepFraction(0.5))


# --- the file ---------------------------------------------------------------------------------


def test_what_is_written_is_read():
    assert cache.read(KEY) == (None, "nothing was measured yet")
    assert cache.write(MEASURED) == ""
    assert cache.read(KEY) == (MEASURED, "")
    assert cache.path_of(KEY).parent == Path(os.environ["SPARGE_CACHE"])
    assert json.loads(cache.path_of(KEY).read_text())["format"] == "sparge.crossover/2"
    assert os.listdir(cache_directory()) == [cache.path_of(KEY).name]
    assert cache.read({**KEY, "threads": "2"})[0] is None


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda text: text[:100], "damaged"),
        (lambda text: "", "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: "null", "damaged"),
        (
            lambda text: text.replace("crossover/2", "crossover/3"),
            "sparge.crossover/3",
        ),
        (lambda text: text.replace('"Fast"', '"Slow"'), "another key"),
        (lambda text: text.replace("fp32/64/int8-fast", "fp8/64/int8"), "fp32/64/int8-fast"),
        (lambda text: text.replace('"call": 2e-05', '"call": -1'), "must be seconds"),
        (lambda text: text.replace('"call": 2e-05', '"call": NaN'), "must be seconds"),
        (lambda text: text.replace('"call": 2e-05', '"call": "0"'), "damaged"),
        (lambda text: text.replace('"call": 2e-05', '"call": true'), "must be seconds"),
        (lambda text: text.replace('"call"', '"cost"'), "damaged"),
        (lambda text: text.replace('"2026-01-01"', '"\\ud800"'), ""),
    ],
)
def test_a_damaged_file_counts_as_none_and_is_replaced(damage, says):
    cache.write(MEASURED)
    path = cache.path_of(KEY)
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    found, why = cache.read(KEY)
    assert says in why
    assert (found is None) == bool(says)
    assert cache.write(MEASURED) == ""
    assert cache.read(KEY) == (MEASURED, "")


def test_bytes_that_are_no_text():
    cache.write(MEASURED)
    cache.path_of(KEY).write_bytes(b"\xff\xfe\x00")
    assert "damaged" in cache.read(KEY)[1]


@pytest.mark.parametrize("kind", ["a file in its place", "a folder in the file's place"])
def test_a_place_that_cannot_be_written(kind, monkeypatch, tmp_path):
    if kind == "a file in its place":
        (tmp_path / "taken").write_text("")
        monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "taken"))
    else:
        cache.path_of(KEY).mkdir(parents=True)
    assert "cannot be written and is kept in memory" in cache.write(MEASURED)
    found, why = cache.read(KEY)
    assert found is None
    assert "cannot be read" in why


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_may_not_be_written():
    cache_directory().mkdir(mode=0o500)
    assert "kept in memory" in cache.write(MEASURED)


@pytest.mark.parametrize(
    "platform, set_to, ends",
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/sparge"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache/sparge"),
        ("darwin", {}, "/home/me/Library/Caches/sparge"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/sparge"),
    ],
)
def test_where_each_system_keeps_it(platform, set_to, ends, monkeypatch):
    monkeypatch.delenv("SPARGE_CACHE")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert cache_directory().as_posix() == ends


def test_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPARGE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert "home" in cache.read(KEY)[1]
    assert "home" in cache.write(MEASURED)
