"""A schedule as a value: what it means at a position, what it refuses, and its JSON."""

from __future__ import annotations

import json
import math

import pytest

from sparge import DEFAULT, KeepAll, KeepFraction, Recipe, Schedule
from sparge.models.clock import (
    BY_SCHEDULE,
    DENSE_LAYER,
    NO_POSITION,
    Clock,
    Scheduled,
    known_recipes,
    schedule_recipes,
)
from sparge.models.site import Site
from sparge.values.schedule import Context

LESS, MORE = Recipe(KeepFraction(0.2)), Recipe(KeepFraction(0.6))


def dense_steps(schedule, steps):
    return [i for i in range(steps) if schedule.recipe_at(i / steps, DEFAULT) is None]


@pytest.mark.parametrize("steps, dense", [(1, 1), (4, 1), (5, 1), (10, 2), (50, 10), (1000, 200)])
def test_the_default_leaves_the_noisiest_fifth_dense(steps, dense):
    assert dense_steps(Schedule(), steps) == list(range(dense))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.7])
def test_shares_that_are_no_binary_fractions_count_as_they_are_written(share):
    for steps in (10, 20, 30, 50):
        assert len(dense_steps(Schedule(dense_first=share), steps)) == round(share * steps)
        last = dense_steps(Schedule(dense_first=0.0, dense_last=share), steps)
        assert last == list(range(steps - round(share * steps), steps))


def test_both_ends():
    schedule = Schedule(dense_first=0.25, dense_last=0.25)
    assert dense_steps(schedule, 8) == [0, 1, 6, 7]
    assert dense_steps(Schedule(dense_first=0.0), 8) == []
    for whole in (Schedule(1.0), Schedule(0.5, 0.5), Schedule(0.0, 1.0), Schedule(0.9, 0.1)):
        assert dense_steps(whole, 10) == list(range(10))
        assert whole.recipe_at(1.0, DEFAULT) is None


def test_bands():
    schedule = Schedule(0.2, 0.2, bands=((0.2, 0.5, MORE), (0.5, 0.6, None), (0.6, 0.8, LESS)))
    at = [schedule.recipe_at(i / 10, DEFAULT) for i in range(10)]
    assert at == [None, None, MORE, MORE, MORE, None, LESS, LESS, None, None]
    whole = Schedule(0.0, bands=((0, 1, LESS),))
    assert whole.recipe_at(1.0, DEFAULT) == LESS


def test_positions():
    run, noise = Schedule(), Schedule(by="noise")
    context = Context(noise_level=0.75, step=3, progress=0.5)
    assert run.position(context) == 0.5
    assert noise.position(context) == 0.25
    assert run.position(Context(noise_level=0.5)) is None
    assert noise.position(Context(progress=0.5)) is None


@pytest.mark.parametrize("bands, match", [
    (((0.2, 0.5, LESS), (0.6, 1.0, MORE)), "a gap between 0.5 and 0.6"),
    (((0.3, 1.0, LESS),), "a gap between 0.2 and 0.3"),
    (((0.0, 1.0, LESS),), "an overlap between 0 and 0.2"),
    (((0.2, 0.7, LESS), (0.6, 1.0, MORE)), "an overlap between 0.6 and 0.7"),
    (((0.2, 0.9, LESS),), "must reach 1 - dense_last, which is 1; the last one ends at 0.9"),
    (((0.5, 0.5, LESS),), "must stop after its start"),
    (((0.6, 1.0, MORE), (0.2, 0.6, LESS)), "a gap between 0.2 and 0.6"),
])  # fmt: skip
def test_bands_with_gaps_and_overlaps_are_refused(bands, match):
    with pytest.raises(ValueError, match=match):
        Schedule(bands=bands)


@pytest.mark.parametrize("fields, error, match", [
    ({"dense_first": 10}, ValueError, "dense_first must be in .* a share, not a count"),
    ({"dense_first": -0.1}, ValueError, "dense_first"),
    ({"dense_first": math.nan}, ValueError, "dense_first"),
    ({"dense_first": True}, TypeError, "dense_first must be a number"),
    ({"dense_first": "0.2"}, TypeError, "dense_first must be a number"),
    ({"dense_first": 0.6, "dense_last": 0.5}, ValueError, "at most 1 together"),
    ({"dense_first_layers": -1}, ValueError, "dense_first_layers"),
    ({"dense_last_layers": 1.5}, TypeError, "dense_last_layers must be a whole number"),
    ({"by": "steps"}, ValueError, "by must be 'run' or 'noise'"),
    ({"bands": "0.2-1"}, TypeError, "bands must be"),
    ({"bands": ((0.2, 1.0),)}, TypeError, "a band must be"),
    ({"bands": ((0.2, 1.0, 0.5),)}, TypeError, "a band's recipe must be a Recipe or None"),
])  # fmt: skip
def test_mistakes_are_refused(fields, error, match):
    with pytest.raises(error, match=match):
        Schedule(**fields)


def test_a_json_round_trip_loses_nothing():
    bands = ((0.3, 0.5, MORE), (0.5, 0.6, None), (0.6, 0.9, Recipe(KeepAll())))
    for schedule in (
        Schedule(),
        Schedule(0.3, 0.1, 1, 2, "noise", bands),
        Schedule(0.0, by="run", bands=[[0, 1, LESS]]),
    ):
        text = schedule.to_json()
        again = Schedule.from_json(text)
        assert again == schedule
        assert hash(again) == hash(schedule)
        assert again.to_dict() == json.loads(text)


@pytest.mark.parametrize("data, error, match", [
    ([], TypeError, "a schedule is a JSON object"),
    ({"dense": 0.2}, ValueError, "unknown schedule fields .*dense"),
    ({"reuse_steps": 2}, ValueError, "reuse_steps.* no longer known.*leave them out"),
    ({"bands": 3}, TypeError, "bands must be a list"),
    ({"bands": [[0.2, 1.0]]}, ValueError, "a band must be"),
    ({"bands": [[0.2, 1.0, "all"]]}, TypeError, "a band's recipe"),
    ({"bands": [[0.2, 0.5, None]]}, ValueError, "must reach"),
])  # fmt: skip
def test_json_of_something_else_is_refused(data, error, match):
    with pytest.raises(error, match=match):
        Schedule.from_json(json.dumps(data))


@pytest.mark.parametrize("fields, match", [
    ({"noise_level": 500.0}, "divide it by the number of training timesteps"),
    ({"noise_level": -0.1}, "noise_level"), ({"step": -1}, "step must be at least 0"),
    ({"progress": 10}, "it is step / number of steps"),
])  # fmt: skip
def test_a_context_is_checked(fields, match):
    with pytest.raises(ValueError, match=match):
        Context(**fields)


NAMES = ["blocks.0.attn", "blocks.0.attn2", "blocks.1.attn", "singles.0.attn", "singles.1.attn"]


def dense_layers(names, **fields):
    made = schedule_recipes(dict.fromkeys(names, LESS), Schedule(**fields))
    return [name for name, each in made.items() if each.dense_layer]


def test_layers_are_counted_by_blocks():
    assert dense_layers(NAMES, dense_first_layers=1) == NAMES[:2]
    assert dense_layers(NAMES, dense_last_layers=2) == NAMES[3:]
    assert dense_layers(NAMES, dense_first_layers=2, dense_last_layers=2) == NAMES
    assert dense_layers(["layers.0", "layers.1"], dense_first_layers=1) == ["layers.0"]
    assert dense_layers(["first", "second"], dense_first_layers=1) == ["first", "second"]
    nested = [f"down.{i}.attentions.{j}.blocks.0.attn1" for i in range(2) for j in range(2)]
    assert dense_layers(nested, dense_first_layers=1) == nested[:1]
    with pytest.raises(ValueError, match="at most 4 together, the number of blocks; got 3 and 2"):
        dense_layers(NAMES, dense_first_layers=3, dense_last_layers=2)


def test_a_layer_without_a_recipe_stays_without():
    made = schedule_recipes({"blocks.0.attn": None, "blocks.1.attn": LESS}, Schedule())
    assert made["blocks.0.attn"] is None
    assert made["blocks.1.attn"].recipe is LESS


def test_a_clock_turns_sites_and_says_why_they_are_dense():
    sites = [
        Site("a", Scheduled(Schedule(), LESS), follows_clock=True),
        Site("b", Scheduled(Schedule(), LESS, dense_layer=True), follows_clock=True),
        Site("c", LESS, follows_clock=True),
    ]
    followed = []
    clock = Clock(sites, [lambda: followed.append(clock.context if followed else None)])
    assert [site.recipe_now() for site in sites] == [None, None, LESS]
    assert (sites[0].left_out, sites[1].left_out) == (NO_POSITION, DENSE_LAYER)
    with clock.inside(Context(progress=0.1)):
        assert [site.recipe_now() for site in sites] == [None, None, LESS]
        assert sites[0].left_out == BY_SCHEDULE
        with clock.inside(Context(progress=0.5)):
            assert [site.recipe_now() for site in sites] == [LESS, None, LESS]
        assert sites[0].recipe_now() is None
    assert sites[0].left_out == NO_POSITION
    assert len(followed) == 5


def test_a_recipe_that_is_a_function_is_asked_by_context():
    def by_noise(context):
        return MORE if context.noise_level and context.noise_level > 0.5 else LESS

    scheduled = Scheduled(Schedule(dense_first=0.1), by_noise)
    assert scheduled(Context(noise_level=0.9, progress=0.05)) is None
    assert scheduled(Context(noise_level=0.9, progress=0.2)) is MORE
    assert scheduled(Context(noise_level=0.1, progress=0.9)) is LESS


def test_the_recipes_that_a_site_may_come_to_use():
    banded = Schedule(0.2, bands=((0.2, 0.5, MORE), (0.5, 1.0, None)))
    assert known_recipes(LESS) == (LESS,)
    assert known_recipes(Scheduled(Schedule(), LESS)) == (LESS,)
    assert known_recipes(Scheduled(banded, LESS)) == (MORE,)
    assert known_recipes(Scheduled(banded, LESS, dense_layer=True)) == ()
    assert known_recipes(lambda context: LESS) == ()
