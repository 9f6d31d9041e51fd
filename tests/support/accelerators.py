"""An accelerator that is not here: a stream whose work a test completes, and a count of what the
host reads meanwhile.

Its tensors are the processor's, so a call computes what it computes anywhere. What reaches the host
through it arrives late: a copy holds rubbish, and a mark has no time, until the stream is there.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sparge
from sparge.support import accelerator
from sparge.values.backend import Backend, FixedCost
from sparge.values.blockplan import plan_from_mask
from sparge.values.stages import Attended, PreparedKeys, PreparedQueries

READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal")
"""Operations of torch that return a number, or a shape that depends on one, to the host."""
METHODS = ("tolist", "numpy", "cpu", "item", "__int__", "__float__", "__bool__", "__index__")
"""Methods that do so; the first three run no operation if a tensor is on the processor."""


class Mark:
    def __init__(self, stream, device):
        self.stream, self.device, self.at = stream, device, len(stream.work)
        stream.work.append(None)

    def query(self):
        self.stream.queries += 1
        return self.stream.done > self.at

    def synchronize(self):
        if self.stream.done <= self.at:
            self.stream.waits += 1
            self.stream.complete(self.at + 1)

    def elapsed_time(self, end):
        """1 ms for each piece of work between the two."""
        assert self.stream.done > max(self.at, end.at), "the stream has not come to both marks"
        return float(end.at - self.at)


class PretendedStream:
    """The vocabulary of `sparge.support.accelerator.Accelerator`. done: pieces of work that are
    complete. waits: how often the host waited; queries: how often it asked."""

    def __init__(self):
        self.work, self.done = [], 0
        self.waits = self.queries = 0
        self.is_capturing = False

    def capturing(self):
        return self.is_capturing

    def mark(self, device):
        assert not self.is_capturing, "an event would be captured"
        return Mark(self, device)

    def start_copy(self, x):
        assert not self.is_capturing, "a copy would be captured"
        host, found = torch.full_like(x, 0xA5), x.clone()
        self.work.append(lambda: host.copy_(found))
        return host

    def complete(self, upto=None):
        """Let the stream come to the end, or to this many pieces of work."""
        upto = len(self.work) if upto is None else upto
        for i in range(self.done, upto):
            copy = self.work[i]
            if copy is not None:
                copy()
                self.work[i] = None
        self.done = max(self.done, upto)

    @property
    def touched(self):
        return len(self.work) + self.queries + self.waits


def pretend_stream(monkeypatch, kind="cpu"):
    """Devices of this type record as accelerators do, through the stream that is returned."""
    stream = PretendedStream()
    monkeypatch.setitem(accelerator.KNOWN, kind, stream)
    return stream


class _Counting(TorchDispatchMode):
    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in READS:
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def host_activity(monkeypatch, *, compiled=False):
    """A list of whatever reads a number of a tensor or waits for a device, as it happens.

    compiled: by methods of tensors alone; a compiled graph runs eagerly while operations are
    watched.
    """
    seen = []
    with monkeypatch.context() as patch, nullcontext() if compiled else _Counting(seen):
        for name in METHODS:
            patch.setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name), name, seen))
        patch.setattr(torch.accelerator, "synchronize", lambda *_: seen.append("synchronize"))
        yield seen


def _noting(method, name, seen):
    def noting(self, *args, **kwargs):
        seen.append(name)
        return method(self, *args, **kwargs)

    return noting


def packed_call(recipe):
    """Three packed sequences through the backend below."""
    x = torch.randn(520, 2, 16, generator=torch.Generator().manual_seed(1))
    cuts = torch.tensor([0, 20, 150, 520], dtype=torch.int32)
    return sparge.attention_varlen(x, x, x, cuts, cuts, recipe=recipe, backend="gpu")


def gpu_backend():
    """A backend of that name whose stages read nothing back, with counts that differ by head and by
    row; it keeps what no recipe asks for."""
    stages = {
        "prepare_keys": _prepare_keys,
        "prepare_queries": _prepare_queries,
        "predict": _predict,
        "select": _select,
        "attend": _attend,
    }
    return Backend(
        "gpu",
        "of a test",
        lambda: SimpleNamespace(**stages),
        lambda host, call: None,
        FixedCost(True, "fast"),
        row_group=64,
        raises_heads=True,
    )


def _prepare_keys(call, key, value, *, mean=None, to_plan, to_attend):
    return PreparedKeys(key, key if value is None else value)


def _prepare_queries(call, query, *, mean, to_plan, to_attend):
    return PreparedQueries(query)


def _predict(call, prepared, tokens):
    at = torch.arange(call.B * call.Hq * call.n_q * call.n_k)
    return (at % 7).view(call.B, call.Hq, call.n_q, call.n_k).float()


def _select(call, prepared, mass, tokens):
    measured = None
    if call.measures_error:
        measured = torch.arange(3 * call.B * call.Hq).view(3, call.B, call.Hq) / 64.0
        measured[2, :, call.Hq // 2 :] = 0
    return plan_from_mask(mass > 2, tokens, measured=measured)


def _attend(call, prepared, plan, tokens):
    given = (prepared.keys.key, prepared.keys.value)
    key, value = (x.repeat_interleave(call.Hq // call.Hk, 1) for x in given)
    scores = prepared.queries.rows @ key.mT * call.scale
    return Attended(scores.softmax(-1) @ value, scores.logsumexp(-1), plan.counts // 2 + 1)
