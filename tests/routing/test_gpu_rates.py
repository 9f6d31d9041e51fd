"""What the estimate for a card rests on: rates by its name, instructions of compiled kernels, and
the choices that follow from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from gpus import pretend, properties
from sparge.backends.triton.architectures import TABLE
from sparge.backends.triton.rates import (
    GEFORCE,
    LEGACY_INT8_COUNTS,
    THROUGHPUTS,
    instructions_of,
    rates_of,
    roofline,
    uses_legacy_int8,
)
from sparge.routing import choose
from sparge.values.backend import HEAD_DIMS
from sparge.values.recipe import PRECISIONS
from sparge_tools.static.ratchet import VERSIONS, ratchet_of, read_ratchet
from sparge_tools.static.targets import TARGETS
from sparge_tools.studies.auto_on_cards import CARDS, a_call, main, rows

GEFORCE_NAMES = [
    ("NVIDIA GeForce RTX 3090", "sm_86"),
    ("NVIDIA GeForce RTX 4090", "sm_89"),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", "sm_89"),
    ("GeForce RTX 5090 D", "sm_120"),
    ("NVIDIA TITAN Ada", "sm_89"),
]
PROFESSIONAL_NAMES = [
    ("NVIDIA RTX A6000", "sm_86"),
    ("NVIDIA A10", "sm_86"),
    ("NVIDIA A40", "sm_86"),
    ("NVIDIA RTX 6000 Ada Generation", "sm_89"),
    ("NVIDIA L4", "sm_89"),
    ("NVIDIA L40S", "sm_89"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120"),
    ("Some GPU", "sm_120"),
]


# --- rates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, architecture", GEFORCE_NAMES)
def test_geforce_cards_add_in_fp32_at_half_of_the_rate(name, architecture):
    found, professional = rates_of(name, architecture), THROUGHPUTS[architecture]
    assert found.half == professional.half / 2
    assert found.fp8 == professional.fp8 / 2
    assert found.int8 == professional.int8
    assert "GeForce" in found.source


@pytest.mark.parametrize("name, architecture", PROFESSIONAL_NAMES)
def test_other_names_have_the_full_rate(name, architecture):
    assert rates_of(name, architecture) is THROUGHPUTS[architecture]


@pytest.mark.parametrize("architecture", GEFORCE)
def test_a_name_that_is_not_known_favours_dense_attention(architecture):
    card = replace(CARDS["4090"], architecture=architecture)

    def ratio(name):
        costs = roofline(replace(card, name=name))
        return costs["bf16/128/int8"].element / costs["bf16/128/dense"].element

    assert ratio("Some GPU") > 1.2 * ratio("NVIDIA GeForce RTX 4090")


@pytest.mark.parametrize(
    "card, half, int8", [("4090", 165.2, 660.6), ("3090", 71, 284), ("5090", 209.5, 838)]
)
def test_peaks_are_those_of_the_whitepapers(card, half, int8):
    """TFLOP/s with fp32 accumulation and TOP/s, without sparsity."""
    card = CARDS[card]
    found = rates_of(card.name, card.architecture)
    per_rate = 2 * card.processors * card.clock / 1e12
    assert found.half * per_rate == pytest.approx(half, rel=0.01)
    assert found.int8 * per_rate == pytest.approx(int8, rel=0.01)


def test_the_static_check_has_the_same_rates():
    """It compiles for GeForce where there are two kinds of names."""
    for name, target in TARGETS.items():
        if not target.macs:
            continue
        rates = rates_of("GeForce" if name in GEFORCE else "", name)
        assert rates.int8 == target.macs["int8"] or name == "gfx1100", name
        assert rates.half == target.macs["half"] or name == "gfx1100", name
        assert rates.fp8 == target.macs.get("fp8", 0)


@pytest.mark.parametrize(
    "triton, int8", [("3.7.1", 2048), ("3.6.0+rocm", 2048), ("3.8.0", 8192), ("", 8192)]
)
def test_an_older_triton_multiplies_int8_the_old_way_on_sm_100(triton, int8):
    assert rates_of("NVIDIA B200", "sm_100", triton).int8 == int8
    assert rates_of("NVIDIA H100", "sm_90", triton) is THROUGHPUTS["sm_90"]
    old, new = (roofline(CARDS["B200"], version) for version in (triton, "3.9.0"))
    assert (old["bf16/128/int8"].element > new["bf16/128/int8"].element) == (int8 == 2048)
    assert old["bf16/128/half"] == new["bf16/128/half"]


# --- instructions -----------------------------------------------------------------------------

RECORDED = re.compile(r"attend (\S+) d(64|128) (?:causal|causal pool|full), attend_blocks on (\S+)")


def recorded():
    """Instructions of a pair by architecture, precision and head dim; the most of any variant."""
    found = {}
    each = [(v, *one) for v in VERSIONS for one in read_ratchet(ratchet_of(v)).items()]
    for version, name, entry in each:
        if not (match := RECORDED.fullmatch(name)):
            continue
        precision, D, target = match[1], int(match[2]), match[3]
        tiles = TABLE[target].tiles_for(precision, D)
        threads = tiles.num_warps * TARGETS[target].warp_size
        pair = entry.numbers["loop 1"] * threads / (tiles.block_m * 64)
        key = (target, precision, D, uses_legacy_int8(target, version))
        found[key] = max(pair, found.get(key, 0.0))
    return found


def test_instructions_are_those_of_the_compiled_kernels():
    """Never fewer, and no more than a seventh above the most of the architectures that share a
    number."""
    counted = recorded()
    assert {target for target, *_ in counted} == set(TARGETS)
    some = {("sm_89", "int8", 64), ("sm_89", "int8", 128), ("sm_90", "int8-fast", 128)}
    assert some <= {tuple(what[:3]) for what in counted}
    most = {}
    for (target, precision, D, legacy), pair in counted.items():
        table = instructions_of(target, precision, D, legacy=legacy)
        assert table >= pair, (target, precision, D, legacy, pair)
        alike = (table, precision, D)
        most[alike] = max(most.get(alike, 0.0), pair)
    for (table, *what), pair in most.items():
        assert table <= 1.15 * pair, (*what, pair)


def test_every_architecture_has_a_number_for_every_precision():
    for name in THROUGHPUTS:
        for precision in PRECISIONS:
            low, high = (instructions_of(name, precision, D) for D in HEAD_DIMS)
            assert 0 < low <= high
    assert instructions_of("sm_100", "int8", 128, legacy=True) == LEGACY_INT8_COUNTS["int8"][1]


# --- what follows -----------------------------------------------------------------------------


@pytest.mark.parametrize("card", ["4090", "5090"])
@pytest.mark.parametrize("recipe", ["DEFAULT", "VISION"])
@pytest.mark.parametrize("length", [32768, 131072])
def test_auto_is_sparse_on_geforce_before_anything_is_measured(card, recipe, length, monkeypatch):
    monkeypatch.setenv("SPARGE_CALIBRATE", "0")
    card = CARDS[card]
    facts = properties(
        card.name,
        *map(int, (card.architecture[3:-1], card.architecture[-1])),
        multi_processor_count=card.processors,
        clock_rate=int(card.clock / 1e3),
        memory_clock_rate=int(card.bandwidth / 96 / 1e3),
    )
    pretend(monkeypatch, facts)
    choice = choose(a_call(recipe, length))
    assert choice.backend == "triton"
    assert "nothing was measured" in choice.reason


def test_where_dense_attention_stays_right():
    """The faster a card multiplies 16 bits, the less must be kept."""
    limits = {(row.card, row.recipe, row.length): row.pays_below for row in rows()}
    at_32k = [limits[card, "DEFAULT", 32768] for card in ("4090", "L40S", "A100", "H100", "B200")]
    assert at_32k == sorted(at_32k, reverse=True)
    assert 0.3 < limits["H100", "DEFAULT", 32768] < 0.5
    assert limits["B200", "DEFAULT", 131072] < 0.4
    for row in rows():
        assert (row.choice == "sparse") == (row.density < row.pays_below)


def test_the_table_of_cards_is_printed(capsys):
    assert main(["--triton", "3.7.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(CARDS) * 2 * 3
    assert lines[0].count("|") == lines[-1].count("|")
    assert main(["--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(lines) - 2
