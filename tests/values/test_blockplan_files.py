"""Plans in files: nothing lost, nothing half-written, nothing damaged let in."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

import sparge
from plans import a_plan, call
from sparge import BlockPlan, KeepFraction, Recipe

# --- files ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(**call, seed=st.integers(0, 100))
def test_file_round_trip_bit_for_bit(tmp_path_factory, Lq, Lk, is_causal, align, seed):
    path = tmp_path_factory.mktemp("plans") / "plan.safetensors"
    plan = a_plan(Lq, Lk, is_causal=is_causal, align=align, seed=seed)
    plan.save(path)
    back = BlockPlan.load(path)
    for name in ("counts", "indices", "allowed"):
        assert getattr(back, name).dtype == getattr(plan, name).dtype
        assert torch.equal(getattr(back, name), getattr(plan, name))
    for name in ("Lq", "Lk", "is_causal", "offset", "has_mask"):
        assert getattr(back, name) == getattr(plan, name)
        assert type(getattr(back, name)) is type(getattr(plan, name))
    assert back.equal(plan)


def test_a_loaded_plan_attends_as_the_one_that_was_saved(tmp_path):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 200, 16, generator=g)
    made = Recipe(keep=KeepFraction(0.5))
    plan = sparge.make_plan(x, x, is_causal=True, recipe=made)
    plan.save(str(tmp_path / "plan"))
    back = BlockPlan.load(str(tmp_path / "plan"))
    for one, other in zip(sparge.attend(x, x, x, plan), sparge.attend(x, x, x, back), strict=True):
        assert torch.equal(one, other)


def test_has_mask_survives_a_file(tmp_path):
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    tokens = torch.ones(1, 1, 10, 10, dtype=torch.bool)
    BlockPlan.from_mask(mask, Lq=10, Lk=10, attn_mask=tokens).save(tmp_path / "plan")
    assert BlockPlan.load(tmp_path / "plan").has_mask


def test_an_existing_file_is_replaced(tmp_path):
    path = tmp_path / "plan.safetensors"
    a_plan(seed=0).save(path)
    loaded = BlockPlan.load(path)
    a_plan(40, 50, seed=1).save(path)
    assert BlockPlan.load(path).equal(a_plan(40, 50, seed=1))
    assert loaded.equal(a_plan(seed=0))
    assert os.listdir(tmp_path) == ["plan.safetensors"]


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "plan.safetensors"
    a_plan(seed=0).save(path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fail)
        with pytest.raises(OSError, match="disk full"):
            a_plan(seed=1).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.safetensors"]


def test_a_directory_that_cannot_be_written_to(tmp_path):
    with pytest.raises(FileNotFoundError):
        a_plan().save(tmp_path / "nowhere" / "plan.safetensors")
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(OSError):  # noqa: PT011 - which one is the system's to say
        a_plan().save(tmp_path / "file" / "plan.safetensors")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):  # noqa: PT011
        a_plan().save(tmp_path / "taken")
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 50, -1, -100])
def test_truncated_files_are_refused(tmp_path, cut):
    path = tmp_path / "plan.safetensors"
    a_plan().save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"plan\.safetensors is damaged"):
        BlockPlan.load(path)


@settings(deadline=None, max_examples=200)
@given(where=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_one_changed_byte_is_refused_or_still_a_whole_plan(tmp_path_factory, where, byte):
    path = tmp_path_factory.mktemp("plans") / "plan.safetensors"
    plan = a_plan(200, 200, B=1, H=1)
    plan.save(path)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] = byte
    path.write_bytes(data)
    back, error = None, None
    try:
        back = BlockPlan.load(path)
    except ValueError as raised:
        error = raised
    if back is None:
        assert str(path) in str(error)
    else:
        back.validate()
        assert back.to_mask().shape == (1, 1, 2, 4)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04K\x01.", b"\xff" * 64, b"PK\x03\x04"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "plan.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.safetensors is damaged or not a block plan"):
        BlockPlan.load(path)


def test_pickles_are_not_opened(tmp_path):
    torch.save(a_plan().counts, tmp_path / "plan.pt")
    with pytest.raises(ValueError, match=r"plan\.pt"):
        BlockPlan.load(tmp_path / "plan.pt")


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "sparge.blockplan/3"}])
def test_other_formats_are_named(tmp_path, metadata):
    path = tmp_path / "plan.safetensors"
    plan = a_plan()
    save_file(
        {name: getattr(plan, name) for name in ("counts", "indices", "allowed")}, path, metadata
    )
    came = repr((metadata or {}).get("format"))
    with pytest.raises(ValueError, match=rf"{came}.*sparge\.blockplan/2"):
        BlockPlan.load(path)


def write(path, plan, *, drop=(), facts=None, form="sparge.blockplan/2", **tensors):
    """A plan file as somebody might have edited it."""
    kept = {name: getattr(plan, name) for name in ("counts", "indices", "allowed")}
    kept = {name: x.contiguous() for name, x in (kept | tensors).items() if name not in drop}
    names = ("Lq", "Lk", "is_causal", "offset", "has_mask")
    text = facts if isinstance(facts, str) else None
    if text is None:
        values = {name: getattr(plan, name) for name in names} | (facts or {})
        text = json.dumps({name: value for name, value in values.items() if name not in drop})
    metadata = {"format": form, "plan": text}
    if "plan" in drop:
        del metadata["plan"]
    path.write_bytes(save(kept, metadata))


CAUSAL = BlockPlan.from_mask(
    torch.ones(1, 1, 2, 4, dtype=torch.bool), Lq=256, Lk=256, is_causal=True
)


def test_the_writer_of_the_tampered_files_is_itself_right(tmp_path):
    write(tmp_path / "plan", CAUSAL)
    assert BlockPlan.load(tmp_path / "plan").equal(CAUSAL)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"drop": ("plan",)}, id="no facts"),
        pytest.param({"facts": "{"}, id="facts cut off"),
        pytest.param({"facts": "[]"}, id="facts a list"),
        pytest.param({"facts": "3"}, id="facts a number"),
        pytest.param({"drop": ("Lq",)}, id="no Lq"),
        pytest.param({"facts": {"extra": 1}}, id="an unknown fact"),
        pytest.param({"facts": {"Lq": "256"}}, id="Lq a string"),
        pytest.param({"facts": {"Lq": None}}, id="Lq null"),
        pytest.param({"facts": {"Lq": 256.0}}, id="Lq a float"),
        pytest.param({"facts": {"Lk": -256}}, id="Lk negative"),
        pytest.param({"facts": {"Lk": 300}}, id="Lk of more blocks"),
        pytest.param({"facts": {"Lq": 128}}, id="Lq of fewer blocks"),
        pytest.param({"facts": {"causal_align": "top_left"}}, id="both diagonals"),
        pytest.param({"facts": {"offset": 1.0}}, id="offset a float"),
        pytest.param({"facts": {"offset": 1 << 60}}, id="offset absurd"),
        pytest.param({"facts": {"offset": 500}}, id="another offset"),
        pytest.param({"facts": {"error": "boo"}}, id="an error that is no tensor"),
        pytest.param({"facts": "[" * 100_000 + "]" * 100_000}, id="nested too deeply"),
        pytest.param({"facts": '{"Lq": 256, "Lq": 256}'}, id="a fact twice"),
        pytest.param(
            {name: getattr(CAUSAL, name)[:0] for name in ("counts", "indices", "allowed")},
            id="no batch",
        ),
        pytest.param({"facts": {"is_causal": "yes"}}, id="causal a string"),
        pytest.param({"facts": {"is_causal": 1}}, id="causal a number"),
        pytest.param({"facts": {"has_mask": "no"}}, id="has_mask a string"),
        pytest.param({"facts": {"is_causal": False}}, id="no longer causal"),
        pytest.param({"drop": ("counts",)}, id="no counts"),
        pytest.param({"drop": ("allowed",)}, id="no allowed"),
        pytest.param({"counts": CAUSAL.counts.long()}, id="counts int64"),
        pytest.param({"counts": CAUSAL.counts[..., :1]}, id="a count missing"),
        pytest.param({"counts": CAUSAL.counts.flatten()}, id="counts flat"),
        pytest.param({"counts": CAUSAL.counts * -1}, id="counts negative"),
        pytest.param({"counts": CAUSAL.counts + 100}, id="counts too large"),
        pytest.param({"counts": CAUSAL.counts - 1}, id="more listed than counted"),
        pytest.param({"indices": CAUSAL.indices + 1}, id="indices out of range"),
        pytest.param({"indices": CAUSAL.indices - 1}, id="indices below 0"),
        pytest.param({"indices": CAUSAL.indices.flip(-1)}, id="indices descending"),
        pytest.param({"indices": CAUSAL.indices.clamp(max=0)}, id="indices repeated"),
        pytest.param({"indices": CAUSAL.indices.float()}, id="indices float"),
        pytest.param({"indices": CAUSAL.indices[..., :3]}, id="lists cut short"),
        pytest.param({"allowed": CAUSAL.allowed * 0}, id="nothing allowed"),
        pytest.param({"allowed": CAUSAL.allowed + 100}, id="more allowed than there is"),
        pytest.param(
            {"allowed": torch.full_like(CAUSAL.allowed, 4)}, id="allowed counts the causal future"
        ),
        pytest.param(
            {
                "allowed": torch.full_like(CAUSAL.allowed, 4),
                "counts": torch.full_like(CAUSAL.counts, 4),
                "indices": torch.arange(4, dtype=torch.int32).expand(1, 1, 2, 4),
            },
            id="blocks of the causal future",
        ),
    ],
)
def test_tampered_files_are_refused(tmp_path, changes):
    path = tmp_path / "plan.safetensors"
    write(path, CAUSAL, **changes)
    with pytest.raises(ValueError, match=r"plan\.safetensors is damaged"):
        BlockPlan.load(path)
