"""Cards that are not here, as torch would describe them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sparge.backends.triton.cost import COST, GpuCost


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
    monkeypatch.setattr("sparge.host._hosts", {})
    for name, nothing in vars(GpuCost()).items():
        monkeypatch.setattr(COST, name, nothing)
    monkeypatch.setattr("sparge.dispatch.call_cache._known", {})
