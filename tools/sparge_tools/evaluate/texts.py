"""Long real texts, as tokens, in windows of a length; and texts that hide one fact at one depth:
documents for the lm-eval task `sparge_needle`."""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import BLOCK_Q

from .settings import digest_of

# fmt: off
CITIES = (
    "Lisbon", "Nairobi", "Oslo", "Lima", "Hanoi", "Vienna", "Dakar", "Quito", "Riga", "Perth",
    "Tunis", "Seoul", "Bogota", "Zagreb", "Manila", "Havana", "Accra", "Dublin", "Cairo", "Kyoto",
)
# fmt: on
QUESTION = "What is the special magic number for {city}?"
PREFIX = "The special magic number for {city} is:"
FACT = f"{PREFIX} {{number}}."
SENTENCE_END = re.compile(r"[.!?][\"')]?\s+")
SHORTEST_TEXT = 16  # fewest tokens of text besides the question and the chat template


@dataclass(frozen=True)
class Text:
    """prefix: the tokens that the tokenizer adds before every text, such as BOS."""

    name: str
    digest: str
    tokens: tuple[int, ...]
    prefix: tuple[int, ...] = ()

    def window(self, length: int, i: int = 0) -> Tensor:
        """[1, length] tokens. Windows are spread over the text; window i is always the same."""
        return self.window_at(spread(i), length)[0]

    def window_at(self, share: float, length: int) -> tuple[Tensor, int]:
        """[1, length] tokens from a place in the text on, 0 to 1, and the number of their first."""
        own = length - len(self.prefix)
        spare = len(self.tokens) - own
        if spare < 0:
            raise ValueError(_too_short(self, length))
        start = round(share * spare)
        return torch.tensor([[*self.prefix, *self.tokens[start : start + own]]]), start


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


@dataclass(frozen=True)
class Needle:
    """depth: percent of the text before the fact. tokens: of prompt and answer."""

    context: str
    question: str
    prefix: str
    answer: str
    length: int
    depth: int
    tokens: int

    @property
    def fact(self) -> str:
        return f"{self.prefix} {self.answer}."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_needle(text: Text, tokenizer: Any, *, length: int, depth: int, seed: int) -> Needle:
    """The longest document of at most `length` tokens; deterministic for a seed."""
    rng = random.Random(f"sparge needle {seed} {length} {depth}")
    city, number = rng.choice(CITIES), str(rng.randrange(1_000_000, 10_000_000))
    fact = FACT.format(city=city, number=number)
    question, prefix = QUESTION.format(city=city), PREFIX.format(city=city)
    around = count_tokens(tokenizer, fact, question, prefix, number)
    own = length - around
    if own < SHORTEST_TEXT:
        raise ValueError(
            f"a needle needs a length of at least {around + SHORTEST_TEXT} tokens with this "
            f"tokenizer, its question and template included; got {length}"
        )
    # Another part of the text for each document, so no passage is in all of them.
    start = rng.randrange(max(1, len(text.tokens) - own))
    while True:
        haystack = tokenizer.decode(text.tokens[start : start + own])
        context = hide(fact, haystack, depth)
        tokens = count_tokens(tokenizer, context, question, prefix, number)
        if tokens <= length:
            return Needle(context, question, prefix, number, length, depth, tokens)
        # Text cut at another place can have a few more tokens.
        own -= tokens - length


def hide(fact: str, haystack: str, depth: int) -> str:
    """The haystack with the fact between two sentences, as near to its depth as possible."""
    ends = [0, *(match.end() for match in SENTENCE_END.finditer(haystack)), len(haystack)]
    wanted = len(haystack) * depth / 100
    at = min(ends, key=lambda end: abs(end - wanted))
    before, after = haystack[:at].rstrip(), haystack[at:].lstrip()
    return " ".join(part for part in (before, fact, after) if part)


def prompt_of(tokenizer: Any, context: str, question: str, prefix: str) -> str:
    """The text that asks for the answer, in the chat template if the tokenizer has one."""
    asked = f"{context}\n\n{question}"
    if tokenizer.chat_template is None:
        return f"{asked} {prefix}"
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": prefix}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True))


def count_tokens(tokenizer: Any, context: str, question: str, prefix: str, answer: str) -> int:
    """Of prompt and answer as lm-eval counts: no second BOS if the chat template writes one."""
    prompt = prompt_of(tokenizer, context, question, prefix)
    has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
    special = tokenizer.chat_template is None or not has_bos
    return len(tokenizer.encode(f"{prompt} {answer}", add_special_tokens=special))
