"""Long real texts, as tokens, in windows of a length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import BLOCK_Q

from .settings import digest_of


@dataclass(frozen=True)
class Text:
    """prefix: the tokens that the tokenizer adds before every text, such as BOS."""

    name: str
    digest: str
    tokens: tuple[int, ...]
    prefix: tuple[int, ...] = ()

    def window(self, length: int, i: int = 0) -> Tensor:
        """[1, length] tokens. Windows are spread over the text; window i is always the same."""
        own = length - len(self.prefix)
        spare = len(self.tokens) - own
        if spare < 0:
            raise ValueError(_too_short(self, length))
        start = round(spread(i) * spare)
        return torch.tensor([[*self.prefix, *self.tokens[start : start + own]]])


def spread(i: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, …: each number halves the widest gap between earlier ones."""
    place, step = 0.0, 0.5
    while i:
        place += step * (i & 1)
        i, step = i >> 1, step / 2
    return place


def read_text(name: str) -> str:
    """The text of a file, or a text of the zoo."""
    path = Path(name)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {name!r} is not UTF-8 text: {error.reason}") from None
    from .. import zoo

    known = zoo.texts()
    if name not in known:
        raise ValueError(f"--text must be a file or one of {', '.join(known)}, got {name!r}")
    return str(zoo.text(name))


def tokenize(name: str, text: str, tokenizer: Any, *, needed: int) -> Text:
    """The text as tokens. Raises ValueError if it is shorter than `needed`."""
    # verbose: a tokenizer warns that the text is longer than its model allows.
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    prefix = tokenizer("")["input_ids"]
    found = Text(name, digest_of(text.encode()), tuple(tokens), tuple(map(int, prefix)))
    if len(tokens) < BLOCK_Q:
        raise ValueError(
            f"--text must have at least one block of {BLOCK_Q} tokens; {name!r} has {len(tokens)}; "
            "give a longer text"
        )
    if len(tokens) + len(prefix) < needed:
        raise ValueError(_too_short(found, needed))
    return found


def _too_short(text: Text, needed: int) -> str:
    has = len(text.tokens) + len(text.prefix)
    return (
        f"--text must have at least {needed} tokens for this length; {text.name!r} has {has}; "
        f"give a longer text, or lengths of at most {has}"
    )
