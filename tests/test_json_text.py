"""JSON files that people hand in: sizes, pipes, keys, depth, and fields by name."""

from __future__ import annotations

import os

import pytest

from sparge.support.json_text import MAX_DEPTH, Fields, parse_json, read_json_text, short


def test_a_file_up_to_the_limit_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("x" * 100)
    assert read_json_text(path, limit=100) == "x" * 100
    with pytest.raises(ValueError, match=r"a.json must be at most"):
        read_json_text(path, limit=99)


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_json_text(tmp_path / "pipe")


def test_bytes_that_are_no_text_are_a_value_error(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\x80")
    with pytest.raises(ValueError, match="must be UTF-8 text"):
        read_json_text(tmp_path / "a.json")


def test_depth_is_bounded():
    assert parse_json("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "it")
    for depth in (MAX_DEPTH + 1, 1000, 1_000_000):
        with pytest.raises(ValueError, match="levels deep"):
            parse_json("[" * depth + "]" * depth, "it")


def test_a_key_may_stand_twice_in_two_objects_but_not_in_one():
    assert parse_json('[{"a": 1}, {"a": 2}]', "it") == [{"a": 1}, {"a": 2}]
    with pytest.raises(ValueError, match="'a' stands twice"):
        parse_json('{"a": 1, "b": {}, "a": 1}', "it")


def test_short_is_one_line_of_anything():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert len(short(deep)) <= 80
    assert len(short("x" * 10**6)) <= 80
    assert short("a") == "'a'"


NAMES = ("count", "share", "words")


@pytest.mark.parametrize(
    "data, read, says",
    [
        ([], None, "the thing must be a JSON object, got \\[\\]"),
        ({"more": 1}, None, "the thing has an unknown field 'more'; known: count, share, words"),
        ({}, lambda f: f.number("count"), "the thing has no count"),
        ({"count": 1.0}, lambda f: f.number("count", whole=True), "count must be a whole number"),
        ({"count": True}, lambda f: f.number("count"), "count must be a number, got True"),
        ({"share": None}, lambda f: f.number("share"), "share must be a number, got None"),
        ({"share": float("nan")}, lambda f: f.number("share"), "share must be finite"),
        ({"share": 10**400}, lambda f: f.number("share"), "share must be finite"),
        ({"share": 2}, lambda f: f.number("share", most=1), "share must be at most 1, got 2"),
        ({"share": 0}, lambda f: f.number("share", above=0), "share must be greater than 0"),
        ({"share": -1}, lambda f: f.number("share", least=0), "share must be at least 0, got -1"),
        ({"words": 3}, lambda f: f.get("words", str), "words must be a string, got 3"),
    ],
)
def test_a_field_that_is_not_right_is_named(data, read, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        read(Fields(data, "", NAMES, what="the thing"))


def test_fields_that_are_right():
    fields = Fields({"count": 3, "share": None}, "here", NAMES, what="the thing")
    assert fields.number("count", whole=True) == 3
    assert fields.number("share", null=True) is None
    assert fields.number("words", 7) == 7
    assert fields.place("count") == "here.count"
