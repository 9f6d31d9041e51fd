"""Cards that are not here, as torch would describe them."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from calls import a_call
from sparge import DEFAULT
from sparge.backends.cpu import CPU_BACKEND
from sparge.routing import calibration, current_router
from sparge.routing.choice import compare_with_dense
from sparge.values.backend import Measuring


def properties(name="Some GPU", major=8, minor=9, **facts):
    """As of an L40S, but for what is given."""
    common = {"multi_processor_count": 142, "clock_rate": 2_520_000}
    memory = {"memory_clock_rate": 9_001_000, "memory_bus_width": 384}
    return SimpleNamespace(
        **{"name": name, "major": major, "minor": minor} | common | memory | facts
    )


def pretend(monkeypatch, *cards):
    """torch sees these cards, the first of which is current."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: cards[device].name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("sparge.values.backend._hosts", {})


def compared(call, router=None):
    """What is predicted of the Triton backend beside dense attention."""
    router = router or current_router()
    numbers = partial(router.numbers, call=call)
    return compare_with_dense(call, router.backend("triton"), numbers, router.environment())


def a_4090():
    facts = {"multi_processor_count": 128, "memory_clock_rate": 10_501_000}
    return properties("NVIDIA GeForce RTX 4090", 8, 9, **facts)


def an_h100():
    facts = {"multi_processor_count": 132, "clock_rate": 1_980_000}
    memory = {"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    return properties("NVIDIA H100 80GB HBM3", 9, 0, **facts, **memory)


class PretendedClock:
    """Seconds that pass only in work: `cost` for each query-key pair of an attention call.

    The router of the rest of the test measures by it, at small sizes on the processor: real trials,
    real fits, and the key of the pretended card.
    """

    def __init__(self, monkeypatch, new_router, *, ours, dense):
        self.now, self.measured, self.before_each = 0.0, [], lambda: None
        self.costs = {"ours": ours, "dense": dense}
        attend_dense, stages = calibration.attend_dense, CPU_BACKEND.stages()

        def attend(call, *args, **more):
            self._pass("ours", call.Hq * call.Lq * call.Lk)
            return stages.attend(call, *args, **more)

        def dense_attend(query, key, *args, **more):
            self._pass("dense", query.shape[1] * query.shape[2] * key.shape[2])
            return attend_dense(query, key, *args, **more)

        monkeypatch.setattr(calibration, "attend_dense", dense_attend)
        self._backend = replace(
            CPU_BACKEND,
            stages=lambda: SimpleNamespace(**{**vars(stages), "attend": attend}),
            refusal=lambda host, call: None,
            cost=tiny_rates(timer=self.timed),
        )
        new_router(measure=self._measure)

    def _pass(self, name, pairs):
        self.now += self.costs[name] * pairs

    def timed(self, work):
        start = self.now
        done = work()
        return self.now - start, done

    def _measure(self, backend, place, *, wanted, in_call, proceed):
        assert in_call
        self.measured.append(wanted)
        self.thread = threading.current_thread()
        self.before_each()
        return calibration.measure(
            self._backend, place, wanted=wanted, in_call=True, proceed=proceed
        )


def tiny_rates(timer=None):
    """Rates of a card that is measured on the processor, as little as can be."""
    how = Measuring("cpu", 1, (128, 256), (128,), 0.0, 0.0, 1, warms_up=True, timer=timer)
    return replace(CPU_BACKEND.cost, on_host=False, measuring=lambda place: how)


def gpu_call(L=32768, **facts):
    """The attention of one Llama-like layer on a card."""
    common = {"Hq": 32, "Hk": 8, "D": 128, "Dv": 128, "dtype": torch.bfloat16, "device": "cuda"}
    return a_call(L, **{**common, "recipe": DEFAULT, "is_causal": True, **facts})
