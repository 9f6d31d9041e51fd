"""`sparge bench --static`: the rules, the ratchet, the estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparge_tools.static import checks, ir, ratchet, roofline, suite
from sparge_tools.static.checks import Intent, LoopIntent
from sparge_tools.static.targets import TARGETS
from static_runs import MEANT, a_kernel, a_loop


def red_rules(compiled, intent=MEANT, recorded=None):
    recorded = checks.ratchet_numbers(compiled) if recorded is None else recorded
    return [verdict.rule for verdict in checks.check(compiled, intent, recorded) if not verdict.ok]


# Rules


def test_a_good_kernel_is_green():
    verdicts = checks.check(a_kernel(), MEANT, {"loop 1": 500})
    assert all(verdict.ok and verdict.reason for verdict in verdicts)
    assert len({verdict.rule for verdict in verdicts}) == len(verdicts) == 10


@pytest.mark.parametrize(
    ("rule", "compiled"),
    [
        ("spills", a_kernel(spills=12)),
        ("spills", a_kernel(stack=8)),
        ("shared memory", a_kernel(shared=163 * 1024 + 1)),
        ("shared memory", a_kernel(target="sm_86", shared=100 * 1024)),
        ("matrix", a_kernel(a_loop(matrix={"HMMA.16816.F32": 96}))),
        ("matrix", a_kernel(a_loop(matrix={}))),
        ("depth", a_kernel(a_loop(buffers=(ir.Buffer(2, (128, 64), "i8"),)))),
        ("loop length", a_kernel(a_loop(instructions=531))),
        ("loop length", a_kernel(a_loop(tiles=None))),
    ],
)
def test_each_rule_can_fail(rule, compiled):
    assert rule in red_rules(compiled)


def test_a_number_of_loops_that_was_not_meant():
    assert red_rules(a_kernel(a_loop(), a_loop())) == ["loops"]
    assert red_rules(a_kernel(a_loop(), a_loop()), Intent()) == []


def test_the_matrix_instructions_must_be_the_target_s_own():
    """On sm_90 those of a single warp leave most of the matrix units idle."""
    deep = (ir.Buffer(3, (128, 64), "i8"), ir.Buffer(3, (64, 128), "bf16"))
    own = {"IGMMA.64x64x32.S8.S8": 4, "HGMMA.64x128x16.F32.BF16": 4}
    assert red_rules(a_kernel(a_loop(matrix=own, buffers=deep), target="sm_90")) == []
    assert red_rules(a_kernel(a_loop(buffers=deep), target="sm_90")) == ["matrix"]
    # One buffer more, because they are read asynchronously.
    assert red_rules(a_kernel(a_loop(matrix=own), target="sm_90")) == ["depth"]
    waits = Intent((replace(MEANT.loops[0], waits=True),))
    assert red_rules(a_kernel(a_loop(matrix=own), target="sm_90"), waits) == []


def test_two_tiles_in_one_iteration_count_half():
    assert red_rules(a_kernel(a_loop(instructions=1000, tiles=2.0))) == []


def test_no_more_instructions_than_recorded():
    assert red_rules(a_kernel(), recorded={"loop 1": 499}) == ["ratchet"]
    assert red_rules(a_kernel(), recorded={"loop 1": 501}) == []
    assert red_rules(a_kernel(), recorded={}) == ["ratchet"]  # a new loop
    assert red_rules(a_kernel(), recorded={"loop 1": 500, "loop 2": 9}) == ["ratchet"]
    unknown = checks.no_growth(a_kernel(), None)
    assert not unknown.ok
    assert "--update-ratchet" in unknown.reason
    assert checks.ratchet_numbers(replace(a_kernel(), loops=())) == {"instructions": 2000}


def test_a_kernel_that_does_not_compile_is_red():
    made = suite.Made("attend int8", "attend", "sm_80", MEANT, None, "ValueError: no")
    result = suite.judge(made, {})
    assert not result.ok
    other = replace(result, made=replace(made, target="sm_86"))
    same = "attend int8, attend on sm_80, sm_86: compiles: ValueError: no"
    assert suite.failures([result, other]) == [same]


def test_the_reason_is_the_innermost_cause():
    error = RuntimeError("at 99:33")
    error.__cause__ = ValueError("shapes  do\nnot match")
    assert suite.reason_of(error) == "ValueError: shapes do not match"


# The ratchet


def test_the_ratchet_is_updated_at_once_and_with_a_reason(tmp_path, monkeypatch):
    file = tmp_path / "ratchet.json"
    assert ratchet.read_ratchet(file) == {}
    with pytest.raises(ValueError, match="must say why"):
        ratchet.update_ratchet({"a": {"loop 1": 5}}, "  why  ", file)
    assert not file.exists()
    both = {"a": {"loop 1": 5}, "b": {"loop 1": 7}}
    assert ratchet.update_ratchet(both, "first numbers", file) == ["a", "b"]
    changed = {"a": {"loop 1": 5}, "b": {"loop 1": 8}}
    assert ratchet.update_ratchet(changed, "masks of b cost more", file) == ["b"]
    found = ratchet.read_ratchet(file)
    assert found["a"] == ratchet.Entry({"loop 1": 5}, "first numbers")
    assert found["b"] == ratchet.Entry({"loop 1": 8}, "masks of b cost more")
    before = file.read_bytes()

    def fails(*args):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="no space"):
        ratchet.update_ratchet({"a": {"loop 1": 9}}, "never written", file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["ratchet.json"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": "other", "entries": {}}',
        f'{{"format": "{ratchet.FORMAT}", "entries": {{"a": {{"numbers": {{"x": 1}}}}}}}}',
        f'{{"format": "{ratchet.FORMAT}", "entries": {{"a": {{"numbers": {{"x": -1}}, '
        '"reason": "r"}}}',
    ],
)
def test_a_damaged_ratchet_is_refused(text, tmp_path):
    file = tmp_path / "ratchet.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"ratchet|must be|no reason"):
        ratchet.read_ratchet(file)


# The estimate


def test_the_estimate_of_a_loop():
    found = roofline.estimate(a_kernel(), a_loop())
    assert found.issue == 500 * 8 / 4
    assert found.mufu == 34 * 8 / 4 * 8
    assert found.tensor == 128 * 64 * 128 * (1 / 2048 + 1 / 1024)
    assert (found.bound, found.programs, found.limit) == ("tensor", 1, "registers")
    halved = roofline.estimate(a_kernel(), a_loop(tiles=2.0))
    assert halved.issue == found.issue / 2
    fp8 = a_loop(products=(ir.Product("fp8", 64, 64, 64),))
    assert roofline.estimate(a_kernel(), fp8).tensor is None  # sm_80 has no fp8
    assert roofline.estimate(a_kernel(target="gfx942"), a_loop()) is None


def test_programs_on_a_multiprocessor():
    def programs(**more):
        compiled = a_kernel(**more)
        return roofline.occupancy(compiled, TARGETS[compiled.target])

    assert programs(registers=128, shared=50000) == (2, "registers")
    assert programs(registers=32, shared=80000) == (2, "shared memory")
    assert programs(registers=16, shared=0) == (8, "warps")


def test_chained_products_stay_off_tensor_memory():
    made = a_kernel(matrix={"UTCHMMA": 4}, target="sm_100")
    for chained, ok in ((True, False), (False, True)):
        assert checks.chains_nothing(made, checks.Intent(chained=chained)).ok == ok
    assert checks.chains_nothing(a_kernel(), checks.Intent(chained=True)).ok


def test_the_main_loop_stays_in_registers():
    spills = a_kernel(a_loop(spills=36), a_loop(), spills=72, stack=24)
    loops = (LoopIntent("full"), LoopIntent("partial"))
    for known, ok in ((0, False), (35, False), (36, True)):
        intent = Intent(loops, spills=72, loop_spills=known)
        assert checks.main_loop_stays_in_registers(spills, intent).ok == ok
    later = a_kernel(a_loop(), a_loop(spills=36), spills=72, stack=24)
    assert checks.main_loop_stays_in_registers(later, Intent(loops)).ok


def test_int8_is_multiplied_by_what_a_version_of_triton_knows():
    """By the instruction of sm_80 on sm_100 before 3.8, and on sm_103 with every version."""
    meant = Intent((LoopIntent("full", ("int8", "half")),))
    old = {"IMMA.16832.S8.S8": 32, "UTCHMMA": 4}
    new = {"UTCIMMA": 8, "UTCHMMA": 4}
    for target, version, matrix, ok in (
        ("sm_100", "3.7.1", old, True),
        ("sm_100", "3.8.0", old, False),
        ("sm_100", "3.8.0", new, True),
        ("sm_103", "3.9.0", old, True),
        ("sm_90", "3.9.0", old, False),
    ):
        made = a_kernel(a_loop(matrix=matrix), target=target, triton=version)
        assert checks.uses_matrix_units(made, meant).ok == ok, (target, version)
