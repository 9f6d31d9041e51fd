"""Inputs for tuning from long texts: windows at places that evaluation does not use.

Evaluation takes its windows at 0, 1/2, 1/4, 3/4, … of a text; these lie a sixteenth further on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..evaluate.texts import read_text, spread, tokenize

MOST_OF_A_TEXT = 16


@dataclass(frozen=True)
class Window:
    """`[1, length]` tokens of a text, from its token `start` on."""

    tokens: Tensor
    text: str
    start: int

    @property
    def about(self) -> str:
        return f"{self.text} from token {self.start}"


def calibration_windows(
    names: Sequence[str], tokenizer: Any, *, length: int, inputs: int
) -> list[Window]:
    """Windows of some texts in turn; the texts are named, of the zoo or files."""
    if inputs > MOST_OF_A_TEXT * len(names):
        raise ValueError(
            f"at most {MOST_OF_A_TEXT} inputs are taken of one text, got {inputs} of {len(names)}; "
            "give another --text"
        )
    return _windows(names, tokenizer, length, inputs, place_of)


def disjoint_windows(
    names: Sequence[str], tokenizer: Any, *, length: int, inputs: int, held_out: int
) -> tuple[list[Window], list[Window]]:
    """Windows to calibrate on and, where evaluation has its own, windows to verify on.

    Texts too short for both are refused.
    """
    mine = calibration_windows(names, tokenizer, length=length, inputs=inputs)
    others = _windows(names, tokenizer, length, held_out, spread)
    for one in mine:
        for other in others:
            if one.text == other.text and abs(one.start - other.start) < length:
                raise ValueError(
                    f"--text must be long enough for {inputs} windows to calibrate on and "
                    f"{held_out} held out, of {length} tokens each; in {one.text!r} those from "
                    f"tokens {one.start} and {other.start} overlap: give a longer text or another "
                    "one more, a shorter --length, or fewer --inputs and --held-out"
                )
    return mine, others


def place_of(j: int) -> float:
    """Where the j-th window of a text begins, as a share of the text."""
    return spread(j) + (1 / 16 if j < MOST_OF_A_TEXT // 2 else 1 / 32)


def _windows(
    names: Sequence[str], tokenizer: Any, length: int, n: int, place: Callable[[int], float]
) -> list[Window]:
    texts = [tokenize(name, read_text(name), tokenizer, needed=length) for name in names]
    windows = []
    for j in range(n):
        text = texts[j % len(texts)]
        tokens, start = text.window_at(place(j // len(texts)), length)
        windows.append(Window(tokens, text.name, start))
    return windows
