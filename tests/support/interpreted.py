"""What of the suite runs in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests`.

Every test that takes `backend`, and those of the interpreter itself, but for what is left out here.
A kernel is a thousand times slower there: a launch takes 4 ms and a product of 64 x 64 tiles 2 ms.
"""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EVERYTHING = os.environ.get("SPARGE_INTERPRET_ALL") == "1"
EXAMPLES = 3
"""Of a test whose inputs Hypothesis draws; it draws the simplest first."""

# Reasons, and how the names of the tests begin.
LEFT_OUT = {
    "the interpreter runs one launch at a time, in one thread": (
        "test_many_callers_at_once[",
        "test_the_number_of_threads_changes_between_and_during_calls[",
    ),
    "torch's threads run no kernel": ("test_threads[",),
    "other parameters run the same kernels": (
        "test_batch_and_heads_around_a_sequence[triton-half",
        "test_batch_and_heads_around_a_sequence[triton-exact",
        "test_batch_and_heads_around_a_sequence[triton-int8-mean",
        "test_batch_and_heads_around_a_sequence[triton-int8-blend-pool",
        "test_batch_and_heads_around_a_sequence[triton-int8-fast-mean",
        "test_batch_and_heads_around_a_sequence[triton-int8-fast-blend-drop",
        "test_opcheck_of_every_stage[triton-int8-fast",
        "test_opcheck_of_every_stage[triton-half",
        "test_opcheck_of_every_stage[triton-exact",
        "test_nothing_left_out_is_dense_attention[triton-spas_sage2_attn_meansim_topk_cuda",
    ),
    # Left of KeepError: one case against the reference, one that is not finite, test_devices.py.
    "a call with an error budget takes 10 s and more": (
        "test_every_head_keeps_what_one_of_the_steps_keeps[",
        "test_every_backend_measures_the_same[triton-causal",
        "test_every_backend_measures_the_same[triton-chunk",
        "test_every_backend_measures_the_same[triton-tall",
        "test_every_backend_measures_the_same[triton-padding",
        "test_every_backend_measures_the_same[triton-bias",
        "test_a_larger_budget_keeps_less_and_none_is_overdrawn[",
        "test_precision_is_raised_where_8_bits_exceed_the_budget[",
        "test_nothing_is_raised_without_8_bits[",
        "test_the_error_told_counts_8_bits[",
        "test_nothing_to_measure_keeps_everything[",
        "test_what_is_not_finite_is_never_a_small_error[triton-0",
        "test_what_is_not_finite_is_never_a_small_error[triton-1-nan-int8",
        "test_what_is_not_finite_is_never_a_small_error[triton-1-nan-half",
        "test_what_is_not_finite_is_never_a_small_error[triton-1-inf",
        "test_what_is_not_finite_is_never_a_small_error[triton-2",
        "test_threads_batch_and_heads_change_nothing[",
        "test_forced_blocks_are_in_every_step[",
        "test_ops_and_graphs[",
        "test_gradients_flow_through_the_plan_as_a_constant[",
        "test_every_sequence_of_a_pack_measures_its_own[",
        "test_the_batch_is_known_by_its_worst[",
    ),
}


def examples(number: int) -> int:
    """How many examples Hypothesis draws."""
    return min(number, EXAMPLES) if INTERPRETED else number


def runs_interpreted(item) -> bool:
    """Whether the interpreted suite has this test; all of them with SPARGE_INTERPRET_ALL=1, which
    takes most of an hour."""
    if not EVERYTHING and any(item.name.startswith(beginnings) for beginnings in LEFT_OUT.values()):
        return False
    takes = {"backend", "interpreted"} & set(item.fixturenames)
    return bool(takes) or item.path.name.startswith("test_interpreter")
