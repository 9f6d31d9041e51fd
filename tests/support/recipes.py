"""Recipes drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import assume, settings
from hypothesis import strategies as st

from sparge import KeepAll, KeepFraction, KeepMass, Recipe

quick = settings(deadline=None, max_examples=100)


def numbers(low, high, *, exclude_low=False):
    return st.floats(low, high, exclude_min=exclude_low, allow_nan=False)


def per_head(number):
    return number | st.lists(number, min_size=1, max_size=4).map(tuple)


def per_head_or_off(number):
    return st.none() | number | st.lists(st.none() | number, min_size=1, max_size=4).map(tuple)


shares = per_head(numbers(0.0, 1.0, exclude_low=True))


keeps = st.builds(KeepMass, shares) | st.builds(KeepFraction, shares) | st.just(KeepAll())


@st.composite
def ranges(draw):
    start = draw(st.integers(-(10**6), 10**6))
    stop = draw(st.none() | st.integers(-(10**6), 10**6))
    assume(stop is None or (stop != 0 and ((start < 0) != (stop < 0) or start < stop)))
    return start, stop


pooling = st.sampled_from([{}, {"skipped": "pool"}, {"skipped": "pool", "pool_group": 16}])


@st.composite
def recipes(draw):
    keep = draw(keeps)
    everything = isinstance(keep, KeepAll)  # predicts nothing
    predictor = draw(st.sampled_from(["blend"] if everything else ["mean", "rows", "blend"]))
    similarity = per_head_or_off(numbers(-1.0, 1.0)) if predictor == "mean" else st.none()
    return Recipe(
        keep=keep,
        predictor=predictor,
        min_similarity=draw(similarity),
        pv_skip=draw(per_head_or_off(numbers(0.0, 1e300, exclude_low=True))),
        precision=draw(st.sampled_from(["int8", "int8-fast", "half", "exact"])),
        sink_blocks=draw(st.integers(0, 10**9)),
        local_blocks=draw(st.none() | st.integers(0, 10**9)),
        protect=tuple(draw(st.lists(ranges(), max_size=3))),
        sample_rows=4 if everything or predictor == "mean" else draw(st.integers(1, 128)),
        **draw(pooling),
    )
