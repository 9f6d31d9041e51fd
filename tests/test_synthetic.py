"""Structured inputs have the structure they claim, and are the same for the same seed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sparge
from sparge.synthetic import NOISE, OFFSET, SINK_TOKENS, _topics, structured_qkv


def weights(query, key, h, group=2):
    """Causal attention weights of one head, `[L, L]`."""
    L, D = query.shape[2:]
    scores = query[0, h] @ key[0, h // group].T * D**-0.5
    return scores.masked_fill(torch.ones(L, L).triu(1).bool(), float("-inf")).softmax(-1)


def test_shapes_dtype_and_seed():
    query, key, value = structured_qkv(B=2, Hq=6, Hk=3, L=100, D=24, dtype=torch.bfloat16)
    assert query.shape == (2, 6, 100, 24)
    assert key.shape == value.shape == (2, 3, 100, 24)
    assert {x.dtype for x in (query, key, value)} == {torch.bfloat16}
    assert all(x.isfinite().all() for x in (query, key, value))
    again = structured_qkv(B=2, Hq=6, Hk=3, L=100, D=24, dtype=torch.bfloat16)
    assert all(torch.equal(x, y) for x, y in zip((query, key, value), again, strict=True))
    other = structured_qkv(B=2, Hq=6, Hk=3, L=100, D=24, dtype=torch.bfloat16, seed=1)
    assert not any(torch.equal(x, y) for x, y in zip((query, key, value), other, strict=True))


@pytest.mark.parametrize("D", [64, 256])
def test_the_number_of_threads_changes_nothing(D):
    one = structured_qkv(L=1024, D=D)
    torch.set_num_threads(3)
    three = structured_qkv(L=1024, D=D)
    assert all(torch.equal(x, y) for x, y in zip(one, three, strict=True))


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    structured_qkv(L=64)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("D", [8, 33, 256])
def test_any_head_dim_from_eight(D):
    query, key, _ = structured_qkv(L=130, D=D)
    assert query.shape[3] == key.shape[3] == D


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"D": 7}, "D must be at least 8, got 7"),
        ({"Hq": 3, "Hk": 2}, "multiple of key heads, got 3 and 2"),
        ({"L": 0}, "L must be at least 1, got 0"),
        ({"seed": -1}, "seed must be from 0"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        structured_qkv(**sizes)


def test_the_first_tokens_are_a_sink():
    query, key, value = structured_qkv(L=1024)
    for h in range(4):
        late = weights(query, key, h)[512:]
        to_sink, to_others = late[:, :SINK_TOKENS].mean(), late[:, SINK_TOKENS:512].mean()
        assert to_sink > 5 * to_others
    assert value[..., :SINK_TOKENS, :].norm() < 0.2 * value[..., 2 : 2 + SINK_TOKENS, :].norm()


def test_heads_run_from_local_to_diffuse():
    query, key, _ = structured_qkv(L=1024)
    near = torch.ones(1024, 1024).triu(-64).bool()
    shares = [float((weights(query, key, h) * near)[256:].sum(-1).mean()) for h in range(4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.6
    assert shares[3] < shares[0] - 0.2


def test_topics_come_back_and_are_attended_far_away():
    seed, L = 0, 2048
    topics = _topics(L, torch.Generator().manual_seed(seed))
    changes = int((topics[1:] != topics[:-1]).sum())
    assert changes + 1 > topics.unique().numel()
    query, key, _ = structured_qkv(L=L, seed=seed)
    far = torch.ones(L, L).tril(-512).bool() & (torch.arange(L) >= SINK_TOKENS)
    same = topics[:, None] == topics[None, :]
    given = weights(query, key, h=3)
    assert given[far & same].mean() > 10 * given[far & ~same].mean()


def test_keys_share_an_offset():
    _, key, _ = structured_qkv(L=1024)
    common = key.mean(2).norm(dim=-1)
    spread = (key - key.mean(2, keepdim=True)).norm(dim=-1).mean()
    assert (common > 0.8 * OFFSET).all()
    assert NOISE < spread < common.min()


def test_the_default_recipe_skips_much_and_costs_little():
    query, key, value = structured_qkv()
    facts = {"is_causal": True, "enable_gqa": True}
    plan = sparge.make_plan(query, key, **facts, backend="reference")
    assert 0.3 < plan.density < 0.6
    assert int((plan.head_density() < 0.75).sum()) >= 3
    out, _ = sparge.attend(query, key, value, plan, enable_gqa=True, backend="reference")
    dense = F.scaled_dot_product_attention(query, key, value, **facts)
    error = float((out - dense).abs().sum() / dense.abs().sum())
    assert 0 < error < 0.03
