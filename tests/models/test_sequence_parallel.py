"""Documents in the sequences that DeepSpeed's Ulysses collects: each is attended by itself."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge import KeepFraction, Recipe
from sparge.models import Site
from sparge.models.transformers.sequence_parallel import (
    attend_documents,
    document_mask,
    documents,
)

RECIPE = Recipe(KeepFraction(0.5))
B, Hq, Hk, L, D = 2, 4, 2, 300, 16
LENGTHS = [[150, 1, 149], [300]]
RANGES = [(0, 0, 150), (0, 151, 300), (1, 0, 300)]
ARGUMENTS = {"is_causal": True, "scale": 0.2, "enable_gqa": True}


class Owner:
    """Holds a site open."""


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(B, H, L, D, generator=generator) for H in (Hq, Hk, Hk)]


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
def site(owner):
    site = Site("layer", RECIPE, "cpu", measure_error=True)
    site.open(owner)
    yield site
    site.close()


def alone(qkv, i, a, b):
    q, k, v = (x[i : i + 1, :, a:b] for x in qkv)
    return sparge.attention(q, k, v, **ARGUMENTS, recipe=RECIPE, backend="cpu", return_lse=True)


def test_documents_by_their_positions(qkv):
    rows = [torch.cat([torch.arange(n) for n in row]) for row in LENGTHS]
    assert documents(torch.stack(rows), qkv[0]) == LENGTHS
    assert documents(torch.arange(L).expand(B, L), qkv[0]) is None
    assert documents(None, qkv[0]) is None


def test_each_document_is_what_it_is_alone_and_is_counted(qkv, site):
    taps = []
    site.tap = lambda query, key, value, arguments: taps.append((query.shape[2], arguments))
    out = attend_documents(site, *qkv, LENGTHS, recipe=RECIPE, return_lse=False, **ARGUMENTS)
    for i, a, b in RANGES:
        assert torch.equal(out[i : i + 1, :, a:b], alone(qkv, i, a, b)[0])
    value = qkv[2].repeat_interleave(Hq // Hk, dim=1)
    assert torch.equal(out[0, :, 150], value[0, :, 150]), "one token is its value"
    assert [length for length, _ in taps] == [150, 149, 300]
    assert taps[0][1] == {"attn_mask": None, **ARGUMENTS}
    layer = site.report()
    assert (layer.calls, layer.sparse_calls) == (3, 3)
    assert len(layer.error_by_head) == Hq


def test_an_lse_is_of_every_document(qkv, site):
    out, lse = attend_documents(site, *qkv, LENGTHS, recipe=RECIPE, return_lse=True, **ARGUMENTS)
    for i, a, b in [*RANGES, (0, 150, 151)]:
        want, want_lse = alone(qkv, i, a, b)
        assert torch.equal(out[i : i + 1, :, a:b], want)
        assert torch.equal(lse[i : i + 1, :, a:b], want_lse)
    assert site.report().calls == 4


def test_padding_alone_needs_no_attention(qkv, site):
    ones = [[1] * L] * B
    out = attend_documents(site, *qkv, ones, recipe=RECIPE, return_lse=False, **ARGUMENTS)
    assert torch.equal(out, qkv[2].repeat_interleave(Hq // Hk, dim=1))
    assert site.report().calls == 0


@pytest.mark.parametrize("is_causal", [True, False])
def test_documents_as_a_mask(qkv, is_causal):
    mask = document_mask(LENGTHS, qkv[0], is_causal=is_causal)
    assert mask.shape == (B, 1, L, L)
    want = torch.zeros(L, L, dtype=torch.bool)
    for a, b in ((0, 150), (150, 151), (151, 300)):
        want[a:b, a:b] = True
    assert torch.equal(mask[0, 0], want.tril() if is_causal else want)
