"""Spending an allowed change over parts: never beyond it; more of it never keeps more."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparge_tools.tuning.levels import Option, allocate, hull

# Whole numbers: sums of them are exact, so an equal change is equal.
numbers = st.integers(0, 100).map(float)
options = st.lists(st.builds(Option, numbers, numbers), min_size=1, max_size=6)
parts = st.dictionaries(st.integers(0, 9), options, min_size=1, max_size=4)


def total(parts, chosen, what):
    return sum(getattr(parts[part][i], what) for part, i in chosen.items())


def least(parts):
    return sum(min(option.change for option in each) for each in parts.values())


@settings(max_examples=300, deadline=None)
@given(parts, numbers)
def test_the_target_is_never_exceeded(parts, target):
    chosen = allocate(parts, target)
    assert set(chosen) == set(parts)
    limit = max(target, least(parts))
    assert total(parts, chosen, "change") <= limit * (1 + 1e-12) + 1e-12


@settings(max_examples=300, deadline=None)
@given(parts, st.lists(numbers, min_size=2, max_size=5))
def test_a_larger_target_never_keeps_more(parts, targets):
    kept = [total(parts, allocate(parts, target), "kept") for target in sorted(targets)]
    for more, fewer in itertools.pairwise(kept):
        assert fewer <= more * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(parts)
def test_with_all_there_is_every_part_is_sparsest(parts):
    kept = total(parts, allocate(parts, math.inf), "kept")
    assert kept == sum(min(option.kept for option in each) for each in parts.values())


@settings(max_examples=200, deadline=None)
@given(parts, numbers)
def test_no_other_choice_of_the_same_change_keeps_fewer(parts, target):
    """On the corners of the hull the greedy choice is the best of all choices for its change."""
    chosen = allocate(parts, target)
    spent, kept = (total(parts, chosen, what) for what in ("change", "kept"))
    for choice in itertools.product(*(range(len(each)) for each in parts.values())):
        other = dict(zip(parts, choice, strict=True))
        if total(parts, other, "change") <= spent:
            assert total(parts, other, "kept") >= kept - 1e-6 * max(kept, 1)


def test_the_hull_leaves_out_what_is_never_worth_it():
    line = [Option(10, 0), Option(9, 3), Option(5, 2), Option(5, 4), Option(1, 10)]
    assert hull(line) == [0, 2, 4]
    assert hull([Option(3, 1), Option(2, 1), Option(1, 1)]) == [2]


def test_the_cheapest_part_is_taken_first():
    sensitive = [Option(10, 0), Option(5, 1.0)]
    robust = [Option(10, 0), Option(5, 0.1), Option(1, 0.5)]
    parts = {"a": sensitive, "b": robust}
    assert allocate(parts, 0.05) == {"a": 0, "b": 0}
    assert allocate(parts, 0.2) == {"a": 0, "b": 1}
    assert allocate(parts, 0.5) == {"a": 0, "b": 2}
    assert allocate(parts, 1.5) == {"a": 1, "b": 2}


@pytest.mark.parametrize("kept, change", [(-1, 0), (1, math.nan), (math.inf, 0), (1, -0.1)])
def test_options_are_numbers_of_some_sense(kept, change):
    with pytest.raises(ValueError, match="kept and change must be finite and at least 0"):
        Option(kept, change)


def test_a_part_without_options():
    with pytest.raises(ValueError, match="'x' has none"):
        allocate({"x": []}, 1.0)
