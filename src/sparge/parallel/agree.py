"""What must be the same on every rank, compared before any work is done."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import torch

from .exchange import Exchange

_N_FACTS = 6
"""Numbers of each rank that may differ: they follow the digest of what may not."""


def agree(exchange: Exchange, facts: dict[str, Any], own: list[int]) -> list[list[int]] | str:
    """The numbers `own` of every rank; or, on every rank, which facts differ and where.

    A rank whose call was refused gives the reason as the fact `refused`, and the others say so.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    digest = hashlib.sha256(text).digest()
    numbers = torch.tensor([*own, *[0] * (_N_FACTS - 1 - len(own)), len(text)], dtype=torch.int64)
    header = torch.cat([torch.tensor(list(digest), dtype=torch.uint8), numbers.view(torch.uint8)])
    header = header.to(exchange.device)
    heads = exchange.gather("agree", header)
    digests = [bytes(head[:32].tolist()) for head in heads]
    numbers_of = [head[32:].cpu().clone().view(torch.int64).tolist() for head in heads]
    if len(set(digests)) > 1 or "refused" in facts:
        body = torch.tensor(list(text), dtype=torch.uint8, device=exchange.device)
        bodies = exchange.gather("agree", body, [found[-1] for found in numbers_of])
        said = [json.loads(bytes(body.tolist())) for body in bodies]
        return _disagreement(said, digests)
    return [found[: len(own)] for found in numbers_of]


def _disagreement(said: list[dict[str, Any]], digests: list[bytes]) -> str:
    refused = {rank: facts["refused"] for rank, facts in enumerate(said) if "refused" in facts}
    if refused:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in refused.items())
        return f"ring_attention was refused on another rank, so on all: {reasons}"
    common, _ = Counter(digests).most_common(1)[0]
    usual = said[digests.index(common)]
    lines = []
    for rank, facts in enumerate(said):
        for name in usual:
            if facts[name] != usual[name]:
                lines.append(f"rank {rank} has {name} {facts[name]}, the others {usual[name]}")
    return "every rank of ring_attention must be given the same: " + "; ".join(lines)
