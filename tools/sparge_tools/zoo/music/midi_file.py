"""Standard MIDI files as tokens of the music encoder.

A note is its distance to the previous one (left out if zero), its duration and its pitch, in units
of 32 ms and clipped to 127. All instruments but drums are one piano. Pedals are not applied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

START, DURATION, PITCH, MASK = 0, 128, 256, 384
"""The first token; offsets of durations and pitches; the token that stands for a hidden one."""
UNIT_MS = 32
LONGEST = 127
DRUMS = 9  # the channel


@dataclass(frozen=True)
class Note:
    start: float  # ms
    duration: float  # ms
    pitch: int


def tokens_of(notes: list[Note]) -> list[int]:
    """The tokens of notes, ordered by time and then from the highest pitch down."""
    by_onset: dict[tuple[int, int], int] = {}
    origin = min((note.start for note in notes), default=0.0)
    for note in sorted(notes, key=lambda note: note.start):
        onset = int((note.start - origin) / UNIT_MS)
        by_onset.setdefault((onset, -note.pitch), max(1, int(note.duration / UNIT_MS)))
    tokens, before = [START], 0
    following: dict[int, int] = {}
    ends: dict[tuple[int, int], int] = {}
    for onset, pitch in sorted(by_onset, reverse=True):
        # A note ends before the same pitch begins again.
        room = following.get(pitch, onset + LONGEST + 2) - onset - 1
        ends[onset, pitch] = max(1, min(by_onset[onset, pitch], room, LONGEST))
        following[pitch] = onset
    for onset, pitch in sorted(by_onset):
        if onset > before:
            tokens.append(min(onset - before, LONGEST))
        before = onset
        tokens += [DURATION + ends[onset, pitch], PITCH + max(1, -pitch)]
    return tokens


def read_notes(file: bytes) -> list[Note]:
    """All notes but drums. Raises ValueError if the file is no MIDI file with a tempo."""
    if file[:4] != b"MThd" or len(file) < 14:
        raise ValueError("the file is no MIDI file: it does not begin with MThd")
    division = int.from_bytes(file[12:14], "big")
    if not 0 < division < 0x8000:
        raise ValueError(f"the file counts frames (division {division}); only beats are read")
    try:
        tracks = [list(_events(chunk)) for name, chunk in _chunks(file[14:]) if name == b"MTrk"]
    except IndexError as error:
        raise ValueError("the file is no MIDI file: a track ends within an event") from error
    tempo = sorted((tick, tempo) for events in tracks for tick, _, tempo, _ in events if tempo)
    clock = _clock([(0, 500_000), *tempo], division)
    notes: list[Note] = []
    sounding: dict[tuple[int, int], int] = {}
    for events in tracks:
        sounding.clear()
        for tick, key, _, velocity in events:
            if key is None or key[0] == DRUMS:
                continue
            if key in sounding and velocity == 0:
                start = clock(sounding.pop(key))
                notes.append(Note(start, clock(tick) - start, key[1]))
            elif velocity:
                sounding[key] = tick
    return notes


def _clock(tempo: list[tuple[int, int]], division: int) -> Callable[[int], float]:
    """From ticks to milliseconds. tempo: ticks, and µs per beat from there on."""
    ticks = [tick for tick, _ in tempo]
    per_tick = [t / division / 1000 for _, t in tempo]
    spans = [(b - a) * rate for a, b, rate in zip(ticks, ticks[1:], per_tick, strict=False)]
    at = list(accumulate(spans, initial=0.0))

    def milliseconds(tick: int) -> float:
        i = bisect_right(ticks, tick) - 1
        return at[i] + (tick - ticks[i]) * per_tick[i]

    return milliseconds


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    while len(data) >= 8:
        size = int.from_bytes(data[4:8], "big")
        yield data[:4], data[8 : 8 + size]
        data = data[8 + size :]


Event = tuple[int, "tuple[int, int] | None", int, int]
"""Tick, channel and pitch, tempo in µs per beat (0 if it is none), velocity."""


def _events(track: bytes) -> Iterator[Event]:
    at = tick = status = 0

    def number() -> int:
        nonlocal at
        value = 0
        while True:
            byte = track[at]
            at += 1
            value = value << 7 | byte & 0x7F
            if byte < 0x80:
                return value

    while at < len(track):
        tick += number()
        if track[at] >= 0x80:
            status = track[at]
            at += 1
        if status in (0xF0, 0xF7, 0xFF):
            kind = track[at] if status == 0xFF else 0
            at += status == 0xFF
            size = number()
            if kind == 0x51:
                yield tick, None, int.from_bytes(track[at : at + size], "big"), 0
            at += size
            continue
        if status >> 4 in (8, 9):
            velocity = track[at + 1] if status >> 4 == 9 else 0
            yield tick, (status & 15, track[at]), 0, velocity
        at += 1 if status >> 4 in (12, 13) else 2
