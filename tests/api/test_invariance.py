"""Bit for bit: threads, the batch and heads around a sequence, and where queries are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparge
from interpreted import examples
from oracle import clustered_qkv, make_qkv, same_bits
from sparge import KeepAll, KeepMass, Recipe

PRECISIONS = ["int8", "int8-fast", "half", "exact"]
RECIPES = [
    Recipe(KeepMass(0.8), predictor=predictor, precision=precision, pv_skip=4.0)
    for precision in PRECISIONS
    for predictor in ("mean", "blend")
] + [
    Recipe(KeepMass(0.5), precision=precision, pv_skip=4.0, skipped="pool", pool_group=group)
    for precision, group in zip(PRECISIONS, (64, 16, 64, 4), strict=True)
]


def named(recipe):
    return f"{recipe.precision}-{recipe.predictor}-{recipe.skipped}"


def run(q, k, v, recipe, backend, **options):
    gqa = q.shape[1] != k.shape[1]
    options |= {"enable_gqa": gqa, "recipe": recipe, "backend": backend, "return_lse": True}
    return sparge.attention(q, k, v, **options)


def assert_same(a, b):
    assert same_bits(a[0], b[0])
    assert same_bits(a[1], b[1])


@pytest.mark.rule("5.12")
@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_threads(backend, recipe):
    q, k, v = clustered_qkv(Hq=2, Hk=1, L=400, D=64, noise=0.8)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(q, k, v, recipe, backend, is_causal=True))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.rule("5.13")
@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_batch_and_heads_around_a_sequence(backend, recipe):
    q, k, v = clustered_qkv(B=3, Hq=4, Hk=2, L=300, D=24, noise=0.8)
    whole = run(q, k, v, recipe, backend, is_causal=True)
    one = slice(1, 2)
    entry = run(q[one], k[one], v[one], recipe, backend, is_causal=True)
    assert_same(entry, [x[one] for x in whole])
    group = run(q[one, 2:], k[one, 1:], v[one, 1:], recipe, backend, is_causal=True)
    assert_same(group, [x[one, 2:] for x in whole])


@pytest.mark.rule("5.14")
@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_queries_cut_at_block_boundaries(backend, recipe):
    q, k, v = clustered_qkv(Hq=2, L=450, D=24, noise=0.8)
    whole = run(q, k, v, recipe, backend)
    for cut in (128, 256):
        parts = [run(part, k, v, recipe, backend) for part in (q[:, :, :cut], q[:, :, cut:])]
        assert_same([torch.cat(x, 2) for x in zip(*parts, strict=True)], whole)


@pytest.mark.rule("5.14", "3.20")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_causal_queries_cut_with_both_alignments(backend, precision):
    """The first rows top-left and the last rows bottom-right are the whole causal map."""
    q, k, v = clustered_qkv(Hq=2, L=450, D=24, noise=0.8)
    recipe = Recipe(KeepMass(0.8), precision=precision)
    whole = run(q, k, v, recipe, backend, is_causal=True)
    first = run(q[:, :, :256], k, v, recipe, backend, is_causal=True)
    align = {"is_causal": True, "causal_align": "bottom_right"}
    last = run(q[:, :, 256:], k, v, recipe, backend, **align)
    assert_same([torch.cat(x, 2) for x in zip(first, last, strict=True)], whole)


@pytest.mark.rule("5.13")
@settings(max_examples=examples(15), deadline=None)
@given(
    order=st.permutations(range(4)), precision=st.sampled_from(PRECISIONS), seed=st.integers(0, 99)
)
def test_permuting_heads_permutes_results(backend, order, precision, seed):
    q, k, v = make_qkv(Hq=4, Lq=140, Lk=200, D=12, seed=seed)
    recipe = Recipe(KeepMass((0.3, 0.6, 0.9, 1.0)), precision=precision)
    permuted = Recipe(KeepMass([(0.3, 0.6, 0.9, 1.0)[h] for h in order]), precision=precision)
    straight = run(q, k, v, recipe, backend)
    shuffled = run(q[:, order], k[:, order], v[:, order], permuted, backend)
    assert_same([x[:, order] for x in straight], shuffled)


@pytest.mark.rule("5.12", "5.13", "5.14")
@settings(max_examples=examples(30), deadline=None)
@given(
    recipe=st.sampled_from(RECIPES),
    D=st.integers(1, 40),
    Lk=st.integers(1, 300),
    blocks=st.integers(1, 2),
    tail=st.integers(1, 128),
    seed=st.integers(0, 99),
)
def test_nothing_around_a_row_changes_it(backend, recipe, D, Lk, blocks, tail, seed):
    """Threads, batch and cut at once, over shapes nobody picked."""
    cut = 128 * blocks
    q, k, v = make_qkv(B=2, Hq=2, Hk=1, Lq=cut + tail, Lk=Lk, D=D, seed=seed)
    torch.set_num_threads(2)
    whole = run(q, k, v, recipe, backend)
    torch.set_num_threads(1)
    parts = [run(x, k[1:], v[1:], recipe, backend) for x in (q[1:, :, :cut], q[1:, :, cut:])]
    assert_same([torch.cat(x, 2) for x in zip(*parts, strict=True)], [x[1:] for x in whole])


def test_the_same_call_twice(backend):
    q, k, v = clustered_qkv(Hq=2, L=300)
    for precision in PRECISIONS:
        recipe = Recipe(KeepAll(), precision=precision)
        assert_same(run(q, k, v, recipe, backend), run(q, k, v, recipe, backend))
