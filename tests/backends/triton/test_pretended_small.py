"""Before a launch, what a kernel needs is compared with the card: smaller tiles, or a reason."""

from __future__ import annotations

import pytest

from static_runs import needs_triton, run_alone

pytestmark = needs_triton


@pytest.fixture(scope="module")
def found():
    return run_alone("pretended_small.py")


def test_a_card_as_expected_gets_the_tiles_of_the_table(found):
    (rows, stages, _), *more = found["99"]["first"]
    assert (rows, stages, more) == (128, 3, [])


@pytest.mark.parametrize("size", ["48"])
def test_a_smaller_card_gets_smaller_tiles_once_and_for_all(found, size):
    (first,) = found[size]["first"]
    assert first[2] <= int(size) * 1024
    assert first[:2] != [128, 3]
    assert found[size]["second"] == [first], "not tried again"
    assert found[size]["why"] == ""


@pytest.mark.parametrize("size", ["16", "4"])
def test_what_fits_in_no_way_is_refused_with_both_numbers(found, size):
    why = found[size]["why"]
    assert why.startswith("DoesNotFit: a kernel does not fit this card:")
    assert f"of shared memory, and the card has {int(size) * 1024}" in why
    assert "use backend='dense'" in why
    assert found[size]["first"] == []
