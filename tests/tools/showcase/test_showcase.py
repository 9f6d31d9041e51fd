"""One document through both variants: every number against a plain computation of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import sparge
from sparge import KeepAll, KeepMass, Recipe
from sparge.backends.cpu import library as native
from sparge.values.call import BLOCK_K, BLOCK_Q
from sparge_tools.showcase import measure
from sparge_tools.showcase.measure import (
    ANSWER_TOKENS,
    LayerCall,
    block_mass,
    measure_showcase,
    prepare_inputs,
)
from sparge_tools.zoo import load
from tiny_lm import MAX_TOKENS, save, sentences

OURS = "cpu" if native.why_missing() is None else "reference"
TOKENS = 450
SPARSE = Recipe(keep=KeepMass(0.6))
WHERE = {"machine_line": "here"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, its text, and two recipes' showcases of them."""
    directory = tmp_path_factory.mktemp("showcase")
    text = directory / "text.txt"
    text.write_text(sentences(3000))
    model = save(directory / "model", chat=True)
    prepared = prepare_inputs(model=model, text=str(text), tokens=TOKENS, seed=0)
    return SimpleNamespace(
        path=model, text=str(text), prepared=prepared, model=load(model, dtype=torch.float32)[0]
    )


def show_of(place, recipe, **changes):
    settings = {"repeats": 1, "command": "a command", "where": WHERE} | changes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARGE_BACKEND", OURS)  # `auto` would give such short calls to dense
        return measure_showcase(place.prepared, place.model, recipe=recipe, **settings)


@pytest.fixture(scope="module")
def show(place):
    return show_of(place, SPARSE)


@pytest.fixture
def ours(monkeypatch):
    monkeypatch.setenv("SPARGE_BACKEND", OURS)


def losses(model, ids):
    logits = model(ids).logits[0, :-1].double()
    return F.cross_entropy(logits, ids[0, 1:])


def written(model, place):
    ids = place.prepared.ids
    made = model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return place.prepared.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_document_has_its_needle_where_it_is_said(place):
    needle, ids = place.prepared.needle, place.prepared.ids
    assert TOKENS - 20 < ids.shape[1] <= TOKENS - len(needle.answer)
    text = place.prepared.tokenizer.decode(ids[0, needle.token :])
    # The tiny tokenizer puts a space between all of its pieces.
    assert text.replace(" ", "").startswith(needle.fact.replace(" ", ""))
    assert text.replace(" ", "").endswith(needle.prefix.replace(" ", ""))
    assert 0.3 < needle.token / ids.shape[1] < 0.5
    assert needle.answer in needle.fact
    assert needle.answer not in needle.question + needle.prefix


@torch.inference_mode()
def test_dense_is_the_model_itself(place, show):
    loss = losses(place.model, place.prepared.ids)
    assert show.dense.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    assert show.dense.answer == written(place.model, place)
    assert show.dense.ran == {"dense": 2}
    assert show.dense.fallbacks == {}


@torch.inference_mode()
def test_sparge_is_the_accelerated_model(place, show, ours):
    with sparge.accelerate(place.model, SPARSE) as handle:
        loss = losses(place.model, place.prepared.ids)
        report = handle.report()
        assert show.sparge.answer == written(place.model, place)
    assert show.sparge.perplexity == pytest.approx(float(loss.exp()), rel=1e-5)
    assert show.sparge.perplexity != pytest.approx(show.dense.perplexity, rel=1e-5)
    assert show.density_by_head == tuple(layer.density_by_head for layer in report.layers)
    assert show.density == pytest.approx(report.density)
    assert 0 < show.density < 0.95
    assert sum(show.sparge.ran.values()) == 2
    assert show.agreement < 1
    assert show.kl > 0


def test_keep_all_exactly_is_dense(place):
    show = show_of(place, Recipe(keep=KeepAll(), precision="exact"))
    assert show.sparge.perplexity == pytest.approx(show.dense.perplexity, rel=1e-5)
    assert show.sparge.answer == show.dense.answer
    assert (show.density, show.agreement) == (1, 1)
    assert show.error < 1e-5
    assert show.kl < 1e-6
    assert all(view.mass_kept == pytest.approx(1) for view in show.heads)


def test_the_clock_has_every_stage(show):
    for reading in (show.dense, show.sparge):
        assert 0 < reading.attention[0] < reading.seconds[0]
        assert sum(reading.stages.values()) == pytest.approx(reading.attention[0])
    assert set(show.dense.stages) == {"attend"}
    assert list(show.sparge.stages)[-1] == "attend"
    assert len(show.sparge.stages) > 2
    (reason, n), *rest = show.sparge.fallbacks.items()
    assert "decode" in reason
    assert n % 2 == 0
    assert not rest


def test_rounds_take_turns_and_the_first_gives_the_rest(place):
    steps = []
    show = show_of(place, SPARSE, repeats=3, step=steps.append)
    assert show.order == ("dense", "sparge", "sparge", "dense", "dense", "sparge")
    assert show.rounds == len(show.sparge.attention) == 3
    assert show.warmup_tokens == show.tokens  # there are no 512
    assert sum(show.sparge.stages.values()) == pytest.approx(show.sparge.attention[0])
    assert len(steps) == 3 + 2 * 3
    assert steps[1] == f"dense reads {show.tokens} tokens"
    assert not hasattr(place.model, "_sparge_handle")


def test_a_model_that_does_not_split_gives_the_same(place, show, monkeypatch):
    monkeypatch.setattr(measure, "splits", lambda model, ids: False)
    whole = show_of(place, SPARSE)
    for name in ("dense", "sparge"):
        one, other = getattr(whole, name), getattr(show, name)
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)
        assert one.answer == other.answer


def test_the_heads_shown_are_plans_that_ran(show):
    assert len(show.heads) == 6
    assert [view.density for view in show.heads] == sorted(view.density for view in show.heads)
    n_q, n_k = -(-show.tokens // BLOCK_Q), -(-show.tokens // BLOCK_K)
    for view in show.heads:
        assert view.density == pytest.approx(show.density_by_head[view.layer][view.head])
        assert tuple(view.mass.shape) == tuple(view.kept.shape) == (n_q, n_k)
        assert torch.allclose(view.mass.sum(-1), torch.ones(n_q))
        assert view.mass_kept == pytest.approx(float(view.mass[view.kept].sum()) / n_q)
        assert 0 < view.error < 1
    assert show.error_layers == (0, 1)
    assert 0 < show.error < 1


@pytest.mark.parametrize("causal", [True, False])
def test_the_mass_of_blocks_is_the_softmax(causal):
    torch.manual_seed(0)
    L = 300
    query, key = torch.randn(1, 4, L, 16), torch.randn(1, 2, L, 16)
    facts = {"is_causal": causal, "causal_align": "top_left", "attn_mask": None, "scale": None}
    mass = block_mass(LayerCall(query, key, key, facts), 3)
    scores = query[0, 3].double() @ key[0, 1].double().T / 4
    if causal:
        scores.masked_fill_(torch.ones(L, L).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    for i_q in range(3):
        for i_k in range(5):
            block = weights[i_q * 128 : (i_q + 1) * 128, i_k * 64 : (i_k + 1) * 64]
            assert float(mass[i_q, i_k]) == pytest.approx(float(block.sum(-1).mean()), abs=1e-6)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": 100}, "--tokens must be at least one block of 128, got 100"),
        (
            {"tokens": MAX_TOKENS},
            f"--tokens must be at most {MAX_TOKENS - ANSWER_TOKENS}, got {MAX_TOKENS}",
        ),
        ({"text": "short"}, "at least one block of 128 tokens"),
        ({"text": "medium"}, "at least 450 tokens for this length"),
        ({"text": "nowhere"}, "--text must be a file or one of"),
        ({"model": "nowhere"}, "is no model of the zoo and is no directory"),
    ],
)
def test_mistakes_are_found_before_the_weights(changes, message, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text(sentences(100))
    (tmp_path / "medium").write_text(sentences(300))
    settings = {"model": place.path, "text": place.text, "tokens": TOKENS, "seed": 0}
    with pytest.raises(ValueError, match=message):
        prepare_inputs(**{**settings, **changes})


def test_another_seed_is_another_needle(place):
    def needle(seed):
        settings = {"model": place.path, "text": place.text, "tokens": TOKENS}
        return prepare_inputs(**settings, seed=seed).needle

    assert needle(0) == place.prepared.needle != needle(1)
