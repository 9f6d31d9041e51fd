"""Calls on a card that is not here, through Triton's own runtime: what is launched and compiled,
and that nothing is read from the card or waited for."""

from __future__ import annotations

import pytest

from static_runs import needs_triton, run_alone

pytestmark = needs_triton

ON_ONE = ("default", "vision", "mask", "int8-fast", "half", "exact", "pack")
CALLS = {
    "sm_89": ON_ONE,
    "sm_90": ("default", "int8-fast"),
    "gfx942": ("default", "vision", "pack"),
}
EACH = [(card, call) for card, calls in CALLS.items() for call in calls]
LAUNCHES = {"default": 7, "vision": 13, "mask": 9, "int8-fast": 7, "half": 7, "exact": 7, "pack": 7}


@pytest.fixture(scope="module")
def found():
    return {card: run_alone("pretended_calls.py", card, *calls) for card, calls in CALLS.items()}


@pytest.mark.parametrize(("card", "call"), EACH)
def test_a_call_compiles_what_the_static_check_reads(found, card, call):
    """Grid, signature, constants, attributes, options and machine code of every launch."""
    assert found[card][call]["differences"] == []
    assert len(found[card][call]["first"]["launches"]) == LAUNCHES[call]


@pytest.mark.parametrize(("card", "call"), EACH)
def test_a_later_call_compiles_and_copies_nothing(found, card, call):
    """While its stream is captured, where waiting, reading and copying from the host raise."""
    first, captured = found[card][call]["first"], found[card][call]["captured"]
    assert captured["launches"] == first["launches"]
    assert first["compiled"] != []
    for what in ("compiled", "writes", "reads", "waits"):
        assert captured[what] == []


@pytest.mark.parametrize(("card", "call"), EACH)
def test_nothing_is_read_or_waited_for(found, card, call):
    assert (found[card][call]["first"]["reads"], found[card][call]["first"]["waits"]) == ([], [])


@pytest.mark.parametrize(("card", "call"), EACH)
def test_other_lengths_compile_nothing(found, card, call):
    compiled = [name for each in found[card][call]["compiled by length"].values() for name in each]
    # The strides of a mask are lengths, and either divisible by 16 or not.
    with_mask = ["classify_blocks", "predict_rows", "attend_blocks"]
    assert compiled == (with_mask if call == "mask" else [])


@pytest.mark.parametrize("call", [call for call in ON_ONE if call != "pack"])
def test_outputs_are_on_the_card(found, call):
    shape, dtype, device = found["sm_89"][call]["out"]
    assert device == "cuda:0"
    assert shape[:3] == [1, 8, 4096]
    assert dtype == ("torch.float32" if call == "exact" else "torch.bfloat16")


def test_a_labelled_call_neither_reads_nor_waits():
    found = run_alone("pretended_calls.py", "sm_89", "labelled")["labelled"]
    for call in ("first", "captured"):
        assert len(found[call]["launches"]) == LAUNCHES["default"]
        assert (found[call]["reads"], found[call]["waits"]) == ([], [])
    assert len(found["first"]["later"]) == 1, "its counts, to be read once the card is there"
    assert (found["captured"]["writes"], found["captured"]["later"]) == ([], [])
    assert len(found["runs"]) == 2


@pytest.fixture(scope="module")
def planted():
    return run_alone("pretended_faults.py")


def test_reads_and_waits_are_refused(planted):
    """Else that there are none would show nothing."""
    faults = planted["faults"]
    reads = [why for name, why in faults.items() if name.startswith("read ")]
    waits = [why for name, why in faults.items() if name.startswith("wait ")]
    assert (len(reads), len(waits)) == (22, 4)
    for why in (*reads, *waits, faults["copy in a graph"]):
        assert why.startswith("Refused: ")
    assert (faults["reads"], faults["waits"]) == ("22", "4")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("good", ""),
        ("inference mode", ""),
        ("another thread", ""),
        ("two devices", "RuntimeError: aten.add.Tensor: expected all tensors on cuda:0"),
        ("cpu pointer", "ValueError: pointer argument data cannot be accessed from Triton"),
        ("other card", "ValueError: pointer argument data cannot be accessed from Triton"),
        ("grid", "RuntimeError: grid (1, 65536, 1) is beyond"),
        ("a name", "KeyError: 'Keyword argument unheard was specified but unrecognised'"),
        ("shared", "DoesNotFit: a kernel does not fit this card"),
        ("zeros", "[[0.0, 0.0, 0.0, 0.0], 0.0, 2]"),
    ],
)
def test_faults_are_seen(planted, fault, why):
    assert planted["faults"][fault].startswith(why)
    assert bool(planted["faults"][fault]) == bool(why)


def test_other_options_are_seen(planted):
    options = [text for text in planted["other options"] if "enable_fp_fusion" in text]
    assert len(options) == LAUNCHES["default"]
    assert options[0] == "sum_keys: enable_fp_fusion False, checked True"
    assert any("attend_blocks: binary" in text for text in planted["other options"])
