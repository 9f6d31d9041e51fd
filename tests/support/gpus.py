"""Cards that are not here, as torch would describe them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import torch

from calls import a_call
from sparge import DEFAULT
from sparge.backends.cpu import CPU_BACKEND
from sparge.backends.triton import calibrate
from sparge.backends.triton.cost import COST, GpuCost
from sparge.backends.triton.roofline import card_of
from sparge.routing import calibration as trials


def properties(name="Some GPU", major=8, minor=9, **facts):
    """As of an L40S, but for what is given."""
    common = {"multi_processor_count": 142, "clock_rate": 2_520_000}
    memory = {"memory_clock_rate": 9_001_000, "memory_bus_width": 384}
    return SimpleNamespace(
        **{"name": name, "major": major, "minor": minor} | common | memory | facts
    )


def pretend(monkeypatch, *cards):
    """torch sees these cards, the first of which is current; what ran before is forgotten."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: cards[device].name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("sparge.values.host._hosts", {})
    for name, nothing in vars(GpuCost()).items():
        monkeypatch.setattr(COST, name, nothing)
    monkeypatch.setattr("sparge.routing.call_cache._known", {})


def a_4090():
    facts = {"multi_processor_count": 128, "memory_clock_rate": 10_501_000}
    return properties("NVIDIA GeForce RTX 4090", 8, 9, **facts)


def an_h100():
    facts = {"multi_processor_count": 132, "clock_rate": 1_980_000}
    memory = {"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    return properties("NVIDIA H100 80GB HBM3", 9, 0, **facts, **memory)


class PretendedClock:
    """Seconds that pass only in work: `cost` for each query-key pair of an attention call.

    Its measurement is the backend's own, at small sizes on the processor: real trials, real fits,
    and the key of the pretended card.
    """

    def __init__(self, monkeypatch, *, ours, dense):
        self.now, self.measured, self.before_each = 0.0, [], lambda: None
        self.costs = {"ours": ours, "dense": dense}
        attend_dense, stages = trials.attend_dense, CPU_BACKEND.stages()

        def attend(call, *args, **more):
            self._pass("ours", call.Hq * call.Lq * call.Lk)
            return stages.attend(call, *args, **more)

        def dense_attend(query, key, *args, **more):
            self._pass("dense", query.shape[1] * query.shape[2] * key.shape[2])
            return attend_dense(query, key, *args, **more)

        monkeypatch.setattr(trials, "attend_dense", dense_attend)
        self._backend = replace(
            CPU_BACKEND,
            stages=lambda: SimpleNamespace(**{**vars(stages), "attend": attend}),
            refusal=lambda host, call: None,
        )
        monkeypatch.setattr(calibrate, "FEWEST_ROUNDS", 1)
        monkeypatch.setattr(calibrate, "card_of", lambda kind, index: card_of("cuda", index))
        monkeypatch.setattr(calibrate, "measure_for_call", self._measure)

    def _pass(self, name, pairs):
        self.now += self.costs[name] * pairs

    def timed(self, work):
        start = self.now
        done = work()
        return self.now - start, done

    def _measure(self, backend, kind, index, *, wanted, proceed):
        self.measured.append(wanted)
        self.thread = threading.current_thread()
        self.before_each()
        sizes = {"heads": 1, "lengths": (128, 256), "lse_lengths": (128,), "budget": 0.0}
        return calibrate.measure(
            self._backend, "cpu", timed=self.timed, proceed=proceed, wanted=wanted, **sizes
        )


def gpu_call(L=32768, **facts):
    """The attention of one Llama-like layer on a card."""
    common = {"Hq": 32, "Hk": 8, "D": 128, "Dv": 128, "dtype": torch.bfloat16, "device": "cuda"}
    return a_call(L, **{**common, "recipe": DEFAULT, "is_causal": True, **facts})
