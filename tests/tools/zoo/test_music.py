"""The music encoder: MIDI files as tokens, the net, its checkpoint, and its task."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F

from sparge_tools.zoo.music.encoder import MusicConfig, MusicEncoder, convert_music, rotate
from sparge_tools.zoo.music.midi_file import MASK, Note, read_notes, tokens_of
from sparge_tools.zoo.music.music_task import MaskedNotes
from tiny_zoo_modules import checkpoint, midi, saved

TINY = MusicConfig(vocabulary=386, width=16, layers=2, heads=2, inner=32, tokens=64)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MusicEncoder(TINY).eval()


def test_notes_of_a_midi_file():
    # 96 ticks are a beat: of 500 ms first, and of 250 ms after one beat.
    tempo = b"\x60\xff\x51\x03" + (250_000).to_bytes(3, "big") + b"\x00\xff\x2f\x00"
    notes = (
        b"\x00\x90\x3c\x40"  # C, on
        b"\x60\x3c\x00"  # off after a beat: running status, and velocity 0
        b"\x00\xf0\x02\x01\xf7"  # a message of somebody's own
        b"\x00\xc0\x05"  # another instrument: one byte
        b"\x00\x91\x40\x40"  # E, on another channel
        b"\x00\x99\x24\x40"  # a drum
        b"\x81\x40\x81\x40\x00"  # 192 ticks later: E, off
        b"\x00\x89\x24\x00"
    )
    assert read_notes(midi(tempo, notes)) == [Note(0.0, 500.0, 60), Note(500.0, 500.0, 64)]


@pytest.mark.parametrize(
    "file, reason",
    [
        (b"RIFF", "does not begin with MThd"),
        (midi(division=0x8000 | 24), "counts frames"),
        (midi(b"\x00\x90\x3c"), "a track ends within an event"),
        (midi(b"\x00"), "a track ends within an event"),
    ],
    ids=["another format", "frames", "half an event", "no event"],
)
def test_files_that_are_not_read(file, reason):
    with pytest.raises(ValueError, match=reason):
        read_notes(file)


def test_tokens_of_notes():
    notes = [
        Note(1000, 330, 60),
        Note(1000, 330, 67),  # a chord, from the highest pitch down
        Note(1320, 10, 60),  # too short for a unit
        Note(1320, 99, 60),  # twice the same
        Note(9000, 9000, 0),  # far away and long
    ]
    assert tokens_of(notes) == [0, 138, 323, 137, 316, 10, 129, 316, 127, 255, 257]
    assert tokens_of([]) == [0]


def test_a_note_ends_before_it_is_played_again():
    assert tokens_of([Note(0, 999, 60), Note(160, 32, 60)]) == [0, 132, 316, 5, 129, 316]
    assert tokens_of([Note(0, 999, 60), Note(32, 32, 60)]) == [0, 129, 316, 1, 129, 316]


def test_rotation_is_a_complex_product():
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 2)
    pairs = torch.view_as_complex(x[..., :4].unflatten(-1, (2, 2)).contiguous())
    exact = torch.view_as_real(pairs * torch.polar(torch.ones(5, 2), angles)).flatten(-2)
    assert torch.allclose(rotate(x, angles), torch.cat([exact, x[..., 4:]], -1), atol=1e-6)


def test_all_attention_is_sdpa_and_sees_both_sides(model, monkeypatch):
    calls, own = [], F.scaled_dot_product_attention

    def watch(*qkv, **rest):
        calls.append((tuple(qkv[0].shape), rest))
        return own(*qkv, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        whole = model(tokens)
        changed = model(torch.where(tokens == 19, 300, tokens))
    assert calls == [((1, 2, 20, 8), {})] * 4
    assert whole.shape == (1, 20, 386)
    assert not torch.equal(whole[:, 0], changed[:, 0])


def test_positions_matter_by_distance_only(model):
    """Rotary positions: a sequence of one token repeated looks the same everywhere."""
    with torch.no_grad():
        row, pair = model(torch.full((1, 6), 7))[0], model(torch.tensor([[7, 9]]))[0]
    assert torch.allclose(row, row[:1].expand_as(row), atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(model(torch.tensor([[9, 7]]))[0].flip(0), pair, atol=1e-5)


def test_weights_come_back_from_the_checkpoint(model):
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    found = convert_music(saved(checkpoint(state, TINY)), TINY)
    assert found.keys() == state.keys()
    assert all(torch.allclose(found[name], state[name], atol=1e-6) for name in state)


class Harmful:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    "file", [saved({"a": Harmful()}), pickle.dumps(Harmful(), protocol=2), b"", b"PK"]
)
def test_what_is_not_weights_alone_is_not_run(file, capfd):
    with pytest.raises(ValueError, match="no checkpoint of weights alone"):
        convert_music(file, TINY)
    assert capfd.readouterr().out == ""


def test_other_checkpoints_are_refused(model):
    with pytest.raises(ValueError, match="no state dict"):
        convert_music(saved([torch.ones(1)]), TINY)
    with pytest.raises(ValueError, match=r"no music encoder: embedding\.weight is .*needed is"):
        convert_music(saved(checkpoint(model.state_dict(), TINY)))


def test_the_task_repeats_itself(model):
    task = MaskedNotes(tuple(range(200)), length=64)
    first, second = task.inputs(2, seed=5)
    assert torch.equal(second.tokens, task.inputs(1, seed=6)[0].tokens)
    assert first.start != second.start
    assert task.caption(first) == f"tokens {first.start} to {first.start + 63}"
    result = task.run(model, first)
    assert torch.equal(result, task.run(model, first))
    assert torch.equal(result[1], first.tokens[first.hidden])
    assert task.picture(first, result) is None
    shares = torch.cat([window.hidden for window in task.inputs(50)]).double().mean().item()
    assert math.isclose(shares, 0.15, abs_tol=0.03)


def test_hidden_tokens_are_not_seen():
    seen = []

    class Watch(torch.nn.Embedding):
        def forward(self, tokens):
            seen.append(tokens)
            return super().forward(tokens)

    task = MaskedNotes(tuple(range(100)), length=100)
    (window,) = task.inputs(1)
    task.run(Watch(386, 386), window)
    assert (seen[0][0] == MASK).equal(window.hidden)


def test_agreement_and_accuracy():
    true = torch.tensor([1, 2, 3, 4])
    dense = torch.stack([torch.tensor([1, 2, 3, 0]), true])
    sparse = torch.stack([torch.tensor([1, 2, 0, 0]), true])
    found = MaskedNotes((0, 1), length=2).compare(dense, sparse)
    assert found == {"agreement": 0.75, "accuracy_dense": 0.75, "accuracy_sparse": 0.5}


@pytest.mark.parametrize("length", [1, 101])
def test_lengths_that_the_piece_has_not(length):
    with pytest.raises(ValueError, match=f"length must be 2 to 100, .*; got {length}"):
        MaskedNotes(tuple(range(100)), length=length)
