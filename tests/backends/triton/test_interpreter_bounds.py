"""The check of addresses in Triton's interpreter: planted mistakes are found, and named."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run in Triton's interpreter alone: TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def copy_kernel(SRC, DST, n_read, n_write, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(SRC + i * stride, mask=i < n_read, other=0.0)
    tl.store(DST + i, x, mask=i < n_write)


def test_addresses_outside_of_an_argument_are_found():
    src, dst = torch.ones(100), torch.zeros(100)
    copy_kernel[(1,)](src, dst, 100, 100, 1, BLOCK=128)
    assert torch.equal(src, dst)
    with pytest.raises(IndexError, match=r"^load outside of SRC, shape \[100\]: 1 of 101 .* 100 "):
        copy_kernel[(1,)](src, dst, 101, 100, 1, BLOCK=128)
    with pytest.raises(IndexError, match=r"^store outside of DST, shape \[100\]: 28 of 128"):
        copy_kernel[(1,)](SRC=src, DST=dst, n_read=100, n_write=128, stride=1, BLOCK=128)
    with pytest.raises(IndexError, match="load outside of SRC"):
        copy_kernel[(1,)](src, dst, 100, 100, -1, BLOCK=128)


def test_the_memory_of_another_argument_is_outside():
    both = torch.zeros(128)
    with pytest.raises(IndexError, match="load outside of SRC"):
        copy_kernel[(1,)](both[:64], both[64:], 128, 64, 1, BLOCK=128)
    with pytest.raises(IndexError, match="store outside of DST"):
        copy_kernel[(1,)](both[:64], both[64:], 64, 65, 1, BLOCK=128)


def test_gaps_between_elements_are_outside():
    wide, dst = torch.arange(512.0).view(64, 8), torch.zeros(64)
    copy_kernel[(1,)](wide[:, 2], dst, 64, 64, 8, BLOCK=64)
    assert torch.equal(dst, wide[:, 2])
    with pytest.raises(IndexError, match="load outside of SRC"):
        copy_kernel[(1,)](wide[:, 2], dst, 8, 64, 4, BLOCK=64)
    part = wide[:, :5]
    copy_kernel[(1,)](part, dst, 5, 5, 1, BLOCK=64)
    with pytest.raises(IndexError, match="load outside of SRC"):
        copy_kernel[(1,)](part, dst, 6, 5, 1, BLOCK=64)
    copy_kernel[(1,)](torch.ones(1).expand(64), dst, 1, 1, 1, BLOCK=64)
    with pytest.raises(IndexError, match="load outside of SRC"):
        copy_kernel[(1,)](torch.ones(1).expand(64), dst, 2, 1, 1, BLOCK=64)


def test_an_empty_tensor_has_no_addresses():
    copy_kernel[(1,)](torch.empty(0), torch.zeros(4), 0, 4, 1, BLOCK=16)
    with pytest.raises(IndexError, match="load outside of SRC"):
        copy_kernel[(1,)](torch.empty(0), torch.zeros(4), 1, 4, 1, BLOCK=16)


@triton.jit
def atomic_kernel(X, COUNT, at, CAS: tl.constexpr):
    i = tl.arange(0, 16)
    if CAS:
        tl.atomic_cas(COUNT + at, 0, 1)
    else:
        tl.atomic_add(X + at + i, tl.full([16], 1, X.dtype.element_ty))


def test_atomics_are_checked():
    x, count = torch.zeros(16), torch.zeros(1, dtype=torch.int32)
    atomic_kernel[(1,)](x, count, 0, CAS=False)
    atomic_kernel[(1,)](x, count, 0, CAS=True)
    assert x.sum() == 16
    assert count.item() == 1
    with pytest.raises(IndexError, match=r"^atomic outside of X, shape \[16\]: 1 of 16"):
        atomic_kernel[(1,)](x, count, 1, CAS=False)
    with pytest.raises(IndexError, match="atomic outside of COUNT"):
        atomic_kernel[(1,)](x, count, 1, CAS=True)
    with pytest.raises(NotImplementedError, match="atomics of bf16"):
        atomic_kernel[(1,)](x.bfloat16(), count, 0, CAS=False)


@triton.jit
def choose_kernel(X, Y, OUT, n, at):
    i = tl.arange(0, 16)
    from_x = i < n
    tl.store(OUT + i, tl.load(tl.where(from_x, X + i, Y + i + at)))


def test_a_pointer_chosen_among_arguments_is_checked_against_all():
    x, y, out = torch.zeros(16), torch.ones(16), torch.empty(16)
    choose_kernel[(1,)](x, y, out, 4, 0)
    assert out.tolist() == [0.0] * 4 + [1.0] * 12
    with pytest.raises(IndexError, match="in no argument"):
        choose_kernel[(1,)](x, y, out, 4, 2**40)
