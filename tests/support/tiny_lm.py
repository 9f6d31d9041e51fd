"""A tiny random language model with a tokenizer of a few words, made in a directory."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparge_tools.evaluate.texts import CITIES, FACT, QUESTION

WORDS = [a + b for a in "bdfklmnprst" for b in ("a", "e", "i", "o", "u", "ai", "au", "ou")]
MAX_TOKENS = 1024
CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] }}"
    "{% if not loop.last %}{{ ' <end> ' }}{% endif %}{% endfor %}"
)


def make_tokenizer(*, chat=False):
    phrases = f"{FACT} {QUESTION} : . ? < > end user assistant".replace("{", " ").replace("}", " ")
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    pieces = [piece for piece, _ in splitter.pre_tokenize_str(phrases)]
    vocab = ["<unk>", "<eos>", *WORDS, *CITIES, *"0123456789", *pieces]
    index = {word: i for i, word in enumerate(dict.fromkeys(vocab))}
    inner = Tokenizer(models.WordLevel(index, unk_token="<unk>"))
    inner.pre_tokenizer = splitter
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def make_model(*, seed=0, **changes):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.2,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def save(directory, *, chat=False, **changes):
    make_model(**changes).save_pretrained(directory)
    make_tokenizer(chat=chat).save_pretrained(directory)
    return str(directory)


def sentences(n, seed=0):
    """About n tokens of words and full stops."""
    rng = random.Random(seed)
    words = rng.choices(WORDS, k=n)
    return " ".join(f"{word}." if i % 9 == 8 else word for i, word in enumerate(words))
