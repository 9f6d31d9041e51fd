"""A showcase made by hand, for the tests of what is written and drawn of it."""

from __future__ import annotations

import torch

from sparge import Recipe
from sparge_tools.showcase.result import AttentionMap, HiddenFact, Reading, Showcase

TOKENS = 300


def make_reading(**changes):
    facts = {
        "seconds": (20.0, 30.0, 25.0),
        "attention": (10.0, 12.0, 15.0),
        "stages": {"attend": 10.0},
        "perplexity": 12.5,
        "answer": " 1234567.",
        "found": True,
        "ran": {"dense": 2},
        "fallbacks": {},
    }
    return Reading(**{**facts, **changes})


def make_view(layer, head, density):
    torch.manual_seed(10 * layer + head)
    allowed = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    mass = torch.rand(3, 5).masked_fill(~allowed, 0)
    kept = allowed & (torch.rand(3, 5) < density)
    return AttentionMap(layer, head, density, 0.9, 0.01, mass / mass.sum(-1, keepdim=True), kept)


def make_show(**changes):
    facts = {
        "command": "sparge demo --text 'a & b.txt'",
        "model": {"name": "tiny", "layers": 2, "heads": 2, "digest": "0123456789abcdef"},
        "text": {"name": "a & b.txt", "digest": "fedcba9876543210"},
        "where": {
            "versions": {"sparge": "9.8.7", "torch": "7.6.5", "triton": None},
            "machine": {"cpu": "A <fast> CPU", "threads": 3},
            "machine_line": "A <fast> CPU, cores: 3",
            "isa": "avx2",
            "load_average": 0.25,
            "date": "2026-01-02T03:04:05+00:00",
        },
        "dtype": "float32",
        "recipe": Recipe(sink_blocks=3),
        "tokens": TOKENS,
        "needle": HiddenFact("The number is: 1234567.", "Which?", "It is:", "1234567", 40, 117),
        "order": ("dense", "sparge") * 3,
        "warmup_tokens": 100,
        "dense": make_reading(),
        "sparge": make_reading(
            seconds=(10.0, 10.0, 5.0),
            attention=(2.0, 4.0, 3.0),
            stages={"prepare": 0.25, "predict": 0.25, "select": 0.25, "attend": 1.25},
            perplexity=12.75,
            ran={"cpu (avx2)": 2},
            fallbacks={"one query <decode>": 24},
        ),
        "density": 0.345,
        "density_by_head": ((0.25, 0.5), None),
        "error": 0.0321,
        "error_layers": (0, 1),
        "agreement": 0.96,
        "kl": 0.01,
        "heads": tuple(make_view(i, h, 0.2 + 0.2 * i + 0.1 * h) for i in (0, 1) for h in (0, 1)),
        "took_seconds": 61.5,
    }
    return Showcase(**{**facts, **changes})
