"""One fact at one depth of a long text: documents for the lm-eval task `sparge_needle`."""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from typing import Any

from .texts import Text

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
