"""The study `scale_model`: its formulas against a real ring, and its documents."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import sparge
from gloo_ranks import run_ranks
from sparge import DEFAULT, VISION, KeepAll, Recipe
from sparge.synthetic import structured_qkv
from sparge_tools.studies import scale_model
from sparge_tools.studies.scale_model import (
    KINDS,
    MEASURED,
    Layer,
    Machine,
    at,
    block_bytes,
    dense_ring_bytes,
    estimate,
    measure,
    move_bytes,
    needed_share,
    plan_bytes,
    read,
    ring_seconds,
    ulysses_bytes,
)

SIZES = {"Hq": 4, "Hk": 2, "D": 64}
L, WORLD = 4096, 2
PLAIN = Recipe(DEFAULT.keep, precision="exact")
RECIPES = {"pooled": DEFAULT, "dropped": replace(DEFAULT, skipped="drop"), "plain": PLAIN}
RECIPES["budget"] = VISION
GIVEN = Layer(131072, 16, Hq=32, Hk=8, D=128, recipe=DEFAULT, density=0.3, needed=0.5)


def rings(rank, world):
    """Bytes that a real ring sent, by purpose; what it needed; and what a dense ring sends."""
    from sparge.parallel import ring_attention, shard

    found = {}
    qkv = structured_qkv(L=L, **SIZES, dtype=torch.bfloat16)
    for name, recipe in RECIPES.items():
        for causal in (False, True):
            mine = [shard(x) for x in qkv]
            rest = {"is_causal": causal, "enable_gqa": True, "recipe": recipe, "backend": "cpu"}
            with sparge.record() as runs:
                ring_attention(*mine, **rest)
            ring = runs[-1].ring
            plan = sparge.make_plan(*qkv[:2], value=qkv[2], **rest)
            kept = plan.to_mask().unflatten(1, (SIZES["Hk"], -1)).any(2)
            sent = {
                name: sum(share.sent[name] for share in ring.shares) for name in ring.shares[0].sent
            }
            needed = needed_share(kept, world, causal)
            found[f"{name} {causal}"] = {**sent, "needed": needed, "dense": ring.dense_bytes}
    return found


@pytest.fixture(scope="module")
def counted():
    return run_ranks(rings, WORLD, timeout=60)[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_those_that_a_ring_counts(name, causal, counted):
    real = counted[f"{name} {causal}"]
    facts = {"is_causal": causal, "needed": real["needed"]}
    layer = Layer(L, WORLD, **SIZES, recipe=RECIPES[name], **facts)
    assert WORLD * dense_ring_bytes(layer) == real["dense"]
    assert WORLD * plan_bytes(layer) == pytest.approx(real["plan"], rel=0.1)
    assert WORLD * block_bytes(layer) == pytest.approx(real["blocks"], rel=0.1)
    assert WORLD * move_bytes(layer) == pytest.approx(real["move"], rel=0.2)


def test_nothing_is_faster_than_its_parts():
    machine = Machine()
    found = estimate(GIVEN, machine)
    assert found["ring_seconds"] > found["density"] * found["dense_ring_seconds"]
    assert found["ulysses_seconds"] < found["dense_ulysses_seconds"]
    slow = estimate(GIVEN, replace(machine, link=1e9))
    assert slow["ring_waits_for"] == "links"
    assert slow["dense_ring_seconds"] >= found["dense_ring_bytes"] / 1e9
    fast = estimate(GIVEN, replace(machine, link=1e15, latency=0.0))
    assert fast["ring_waits_for"] == "computing"


def test_a_ring_hides_what_it_receives():
    machine = Machine(link=1e9, latency=0.0)
    assert ring_seconds(GIVEN, machine, 0.0, 1.6) == pytest.approx(1.6)
    assert ring_seconds(GIVEN, machine, 15e9, 1.6) == pytest.approx(0.1 + 15.0)


def test_more_ranks_than_heads():
    assert ulysses_bytes(replace(GIVEN, world=32)) is not None
    assert ulysses_bytes(replace(GIVEN, world=64)) is None, "a rank without a head"
    assert replace(GIVEN, world=64).plans_per_head == 8, "eight ranks plan a key head"
    assert replace(GIVEN, world=64, recipe=VISION).busiest == 8.0, "eight heads over 64 ranks"


def test_what_a_rank_needs():
    kept = torch.zeros(1, 1, 8, 16, dtype=torch.bool)
    kept[..., 0] = True  # a sink alone
    assert needed_share(kept, 2, False) == pytest.approx(0.5 * (0 + 1 / 8))
    assert needed_share(torch.ones_like(kept), 4, True) == 1.0
    with pytest.raises(ValueError, match="two blocks of 128 queries for each of 8 ranks"):
        needed_share(kept, 8, False)


def test_densities_are_not_extrapolated():
    rows = [{"kind": "text", "L": n, "density": d, "needed": {"2": 0.8, "4": 0.6}}
            for n, d in ((4096, 0.4), (8192, 0.3))]  # fmt: skip
    assert at(rows, "text", 1 << 20, 512) == (0.3, 0.6), "2048 rows, as a fourth of 8192"
    assert at(rows, "text", 1 << 20, 256) == (0.3, 0.8)
    assert at(rows, "text", 1 << 20, 128) == (0.3, 1.0), "no rank measured had as many rows"
    assert at(rows, "text", 6000, 8) == (0.4, 0.6)
    with pytest.raises(ValueError, match="rows of kind 'video'"):
        at(rows, "video", 8192, 2)


def test_the_measured_file():
    rows = read()
    assert {row["kind"] for row in rows} == {*KINDS}
    small = measure("video", 4096, [2])
    kept = next(row for row in rows if (row["kind"], row["L"]) == ("video", 4096))
    assert small["density"] == pytest.approx(kept["density"], rel=0.05)
    assert MEASURED.stat().st_size < 20000


def test_the_document(capsys):
    assert scale_model.main(["--kinds", "text", "--worlds", "8,64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "sparge.scale_model/1"
    assert document["machine"]["link"] == 5e10
    assert len(document["rows"]) == 2 * len(scale_model.LENGTHS)
    assert document["rows"][1]["ulysses_seconds"] is None
    assert scale_model.main([]) == 0
    text = capsys.readouterr().out
    assert "A model, not a measurement" in text


def test_measuring_writes_what_is_read(tmp_path, capsys):
    path = tmp_path / "densities.json"
    given = ["--measure", "--lengths", "2048", "--kinds", "text"]
    assert scale_model.main([*given, "--output", str(path)]) == 0
    assert "needed by ranks" in capsys.readouterr().out
    assert scale_model.main(["--kinds", "text", "--densities", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["density"] == read(path)[0]["density"]


@pytest.mark.parametrize(
    "given",
    [
        ["--kinds", "music"],
        ["--link", "0"],
        ["--latency", "-1"],
        ["--worlds", "1"],
        ["--densities", "README.md"],
        ["--measure", "--kinds", "video", "--lengths", "5000"],
    ],
)
def test_mistakes_are_named(given, capsys):
    assert scale_model.main(given) == 2
    assert given[-2] in capsys.readouterr().err


def test_keeping_all_without_8_bits_is_a_dense_ring():
    layer = replace(GIVEN, recipe=Recipe(KeepAll(), precision="exact"), needed=1.0)
    assert block_bytes(layer) == dense_ring_bytes(layer)
