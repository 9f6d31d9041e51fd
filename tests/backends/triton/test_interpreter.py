"""The interpreter that kernels are tested in: repaired to compute what a GPU does, and checked."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run in Triton's interpreter alone: TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

import interpreter
from interpreter import coarse_accumulation

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")
WIDENS_SCANS = triton.__version__.startswith(interpreter.CHECKED[:3])
"""Up to 3.8 the language itself widens bf16 before a scan."""


def bits(x):
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16)


def every_value(dtype):
    """All numbers of an 8-bit or 16-bit type."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def numbers_around(dtype):
    """fp32 numbers at, between and next to the numbers of a type, where rounding is decided."""
    own = every_value(dtype).float()
    own = own[own.isfinite()].sort().values
    between = (own[1:] + own[:-1]) / 2
    near = torch.cat([own, between])
    up, down = near.nextafter(torch.tensor(INF)), near.nextafter(torch.tensor(-INF))
    random = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    scaled = torch.cat([random * 2.0**e for e in range(-24, 20, 4)])
    most = torch.finfo(dtype).max
    ends = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, most * 1.01, most * 2, 3e38, 1e-45])
    return torch.cat([near, up, down, scaled, ends, -ends])


@triton.jit
def cast_kernel(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < n)
    tl.store(Y + i, x.to(Y.dtype.element_ty), mask=i < n)


def cast(x, dtype):
    y = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(triton.cdiv(x.numel(), 4096),)](x, y, x.numel(), BLOCK=4096)
    return y


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8])
@pytest.mark.parametrize("source", FLOATS)
def test_casts_round_to_nearest_even_and_saturate(source, dtype):
    x = numbers_around(dtype).to(source)
    most = torch.finfo(dtype).max
    want = x.float() if dtype == torch.bfloat16 else x.float().clamp(-most, most)
    want, got = want.to(dtype), cast(x, dtype)
    nan = x.isnan()
    assert nan.sum() >= 4
    assert got[nan].float().isnan().all()
    assert torch.equal(bits(got)[~nan], bits(want)[~nan])
    if dtype != torch.bfloat16:
        assert got[~nan].float().abs().max() == most  # the infinities, too


def test_casts_known_by_hand():
    """Not by torch: the carry into the exponent, ties, overflow, a subnormal, an infinity."""
    x = torch.tensor([0.4873, 1.0625, 1.1875, 1000.0, 470.0, 2.0**-9 * 1.5, INF, -INF])
    want = torch.tensor([0.5, 1.0, 1.25, 448.0, 448.0, 2.0**-8, 448.0, -448.0])
    assert torch.equal(cast(x, torch.float8_e4m3fn).float(), want)
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38])
    assert torch.equal(cast(x, torch.bfloat16).float(), torch.tensor([1.0, 1 + 2.0**-6, INF]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source", [torch.bfloat16, *FP8])
def test_casts_from_narrow_types_are_exact(source, dtype):
    x = every_value(source)
    got, want = cast(x, dtype), x.float().to(dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()])


def test_casts_round_once():
    tie = 1 + 2.0**-8
    x = torch.tensor([tie, tie + 2.0**-40, tie - 2.0**-40, INF, NAN, 1e300], dtype=torch.float64)
    got = cast(x, torch.bfloat16).float()
    assert got[:3].tolist() == [1.0, 1 + 2.0**-7, 1.0]
    assert (got[3].item(), got[4].isnan().item(), got[5].item()) == (INF, True, INF)
    # 2**30 + 2**22 is a tie in bf16, and one more is not a number of fp32.
    n = torch.tensor([2**30 + 2**22, 2**30 + 2**22 + 1, -3, 257, 259], dtype=torch.int32)
    want = [2.0**30, 2.0**30 + 2**23, -3, 256, 260]
    assert cast(n, torch.bfloat16).float().tolist() == want


@triton.jit
def rtz_kernel(X, Y):
    i = tl.arange(0, 16)
    tl.store(Y + i, tl.load(X + i).to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_rounding_toward_zero_is_refused():
    with pytest.raises(NotImplementedError, match="rtz"):
        rtz_kernel[(1,)](torch.ones(16), torch.ones(16, dtype=torch.bfloat16))


@triton.jit
def arithmetic_kernel(X, Y, OUT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(X + i), tl.load(Y + i)
    tl.store(OUT + i, x + y)
    tl.store(OUT + BLOCK + i, x - y)
    tl.store(OUT + 2 * BLOCK + i, x * y)
    tl.store(OUT + 3 * BLOCK + i, -x)
    tl.store(OUT + 4 * BLOCK + i, tl.abs(x))
    tl.store(OUT + 5 * BLOCK + i, tl.maximum(x, y))
    tl.store(OUT + 6 * BLOCK + i, tl.minimum(x, y))
    tl.store(OUT + 7 * BLOCK + i, tl.where(x > y, x, y * 2))
    tl.store(OUT + 8 * BLOCK + i, (x < y).to(tl.bfloat16))
    tl.store(OUT + 9 * BLOCK + i, tl.clamp(x, -0.5, 0.75))
    tl.store(OUT + 10 * BLOCK + i, tl.fma(x, y, y))
    tl.store(OUT + 11 * BLOCK + i, x / y)
    tl.store(OUT + 12 * BLOCK + i, tl.clamp(x, -0.5, 0.75, propagate_nan=tl.PropagateNan.ALL))
    tl.store(OUT + 13 * BLOCK + i, tl.cumprod(x))


def test_bf16_arithmetic():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(512, generator=g).bfloat16() for _ in range(2))
    y[:2] = torch.tensor([1.0, 1.0])  # x*y + y rounds up only if it rounds once
    x[0] = 2.0**-8 + 2.0**-15
    out = torch.empty(14, 512, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, BLOCK=512)
    want = [x + y, x - y, x * y, -x, x.abs(), torch.maximum(x, y), torch.minimum(x, y)]
    want += [torch.where(x > y, x, y * 2), (x < y).bfloat16(), x.clamp(-0.5, 0.75)]
    want += [(x.double() * y.double() + y.double()).bfloat16(), x / y]
    products = [x[0].float() if WIDENS_SCANS else x[0]]
    for number in x[1:]:
        products.append(products[-1] * number)
    want += [want[9], torch.stack(products).bfloat16()]
    for got, right in zip(out, want, strict=True):
        assert torch.equal(got, right)


@triton.jit
def extremes_kernel(X, OUT, one, flag):
    i = tl.arange(0, 4)
    x = tl.load(X + i)
    tl.store(OUT + i, tl.minimum(x, one))
    tl.store(OUT + 4 + i, tl.maximum(x, one))
    tl.store(OUT + 8 + i, tl.clamp(x, 0.0, one))
    tl.store(OUT + 12 + i, tl.maximum(x, one, propagate_nan=tl.PropagateNan.ALL))
    tl.store(OUT + 16 + i, ((i > 0) + (i > 1)).to(tl.float32) + flag)


def test_extremes_drop_nan_and_flags_wrap_around():
    out = torch.empty(5, 4)
    extremes_kernel[(1,)](torch.tensor([NAN, 2.0, -2.0, NAN]), out, 1.0, True)
    least, most, clamped, kept, flags = out
    assert least.tolist() == [1.0, 1.0, -2.0, 1.0]
    assert most.tolist() == [1.0, 2.0, 1.0, 1.0]
    assert clamped.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert kept.isnan().tolist() == [True, False, False, True]
    assert flags.tolist() == [1.0, 2.0, 1.0, 1.0]


@triton.jit
def compare_kernel(X, OUT, n):
    i = tl.arange(0, 16)
    x = tl.load(X + i)
    tl.store(OUT + i, (x > 0).to(tl.bfloat16))
    both = (n > 3) & (i < 8)
    y = tl.load(X + i, mask=both & (tl.load(X) == tl.load(X)), other=0.0)
    tl.store(OUT + 16 + i, tl.where(both, y.to(tl.bfloat16), 7.0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_comparisons_are_flags(dtype):
    """Also where a scalar one meets a tensor, and where one becomes bf16."""
    x, out = torch.randn(16).to(dtype), torch.empty(32, dtype=torch.bfloat16)
    for n in (3, 4):
        compare_kernel[(1,)](x, out, n)
        assert torch.equal(out[:16], (x > 0).bfloat16())
        assert torch.equal(
            out[16:24], x[:8].bfloat16() if n == 4 else torch.full((8,), 7.0).bfloat16()
        )
        assert (out[24:] == 7).all()


# --- reductions -------------------------------------------------------------------------------


@triton.jit
def reduce_kernel(X, SUM, MAX, MIN, ARG, TOTAL, CUM, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    x = tl.load(X + at)
    tl.store(SUM + i, tl.sum(x, 1))
    tl.store(MAX + i, tl.max(x, 1))
    tl.store(MIN + i, tl.min(x, 0))
    tl.store(ARG + i, tl.argmax(x, 1))
    tl.store(TOTAL, tl.sum(x))
    tl.store(CUM + at, tl.cumsum(x, 1))


def reduced(x):
    n = len(x)
    sums, most, least = (torch.empty(n, dtype=x.dtype) for _ in range(3))
    arg, total, cum = torch.empty(n, dtype=torch.int32), x.new_empty(1), torch.empty_like(x)
    reduce_kernel[(1,)](x, sums, most, least, arg, total, cum, N=n)
    return sums, most, least, arg, total, cum


@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions(dtype):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums, most, least, arg, total, cum = reduced(x)
    assert torch.equal(most, x.amax(1))
    assert torch.equal(least, x.amin(0))
    assert torch.equal(x.gather(1, arg.long()[:, None])[:, 0], most)
    slack = 64 * torch.finfo(dtype).eps * x.double().cumsum(1).abs().max()
    assert (sums - x.double().sum(1)).abs().max() < slack
    assert (cum - x.double().cumsum(1)).abs().max() < slack
    assert (total - x.double().sum()).abs() < 64 * slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_round_after_each_addition(dtype):
    """Else a kernel that sums in 16 bits would look better here than on a GPU."""
    x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums, *_, cum = reduced(x)
    want = x.clone()
    while want.shape[1] > 1:
        half = want.shape[1] // 2
        want = want[:, :half] + want[:, half:]
    assert torch.equal(sums, want[:, 0])
    assert not torch.equal(sums, x.double().sum(1).to(dtype))
    steps = [x[:, 0]]
    for i in range(1, 64):
        steps.append(steps[-1] + x[:, i])
    widened = dtype == torch.bfloat16 and WIDENS_SCANS
    want = x.float().cumsum(1).to(dtype) if widened else torch.stack(steps, 1)
    assert torch.equal(cum, want)


# --- products ---------------------------------------------------------------------------------


@triton.jit
def dot_kernel(A, B, OUT, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + k[:, None] * N + n[None, :])
    c = tl.dot(a, b, input_precision=EXACT, out_dtype=OUT.dtype.element_ty)
    tl.store(OUT + m[:, None] * N + n[None, :], c)


def dot(a, b, out=torch.float32, precision="ieee"):
    c = torch.empty(a.shape[0], b.shape[1], dtype=out)
    dot_kernel[(1,)](a, b, c, M=a.shape[0], K=a.shape[1], N=b.shape[1], EXACT=precision)
    return c


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *FP8])
def test_dot(dtype):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=g).to(dtype) for _ in range(2))
    torch.testing.assert_close(dot(a, b), (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)
    whole = [torch.randint(-8, 9, (64, 64), generator=g).to(dtype) for _ in range(2)]
    assert torch.equal(dot(*whole), whole[0].float() @ whole[1].float())  # exact in any order


def test_dot_of_fp8_carries_its_infinities():
    a, b = torch.ones(16, 32).to(torch.float8_e5m2), torch.ones(32, 16).to(torch.float8_e5m2)
    a[0, 0], a[1, 0] = INF, NAN
    got = dot(a, b)
    assert (got[0] == INF).all()
    assert got[1].isnan().all()
    assert (got[2:] == 32).all()


@pytest.mark.parametrize("K", [64, 2048])
def test_dot_of_int8_is_exact(K):
    a, b = torch.full((16, K), -128, dtype=torch.int8), torch.full((K, 16), 127, dtype=torch.int8)
    b[0] = 126
    want = a.int() @ b.int()
    assert torch.equal(dot(a, b, torch.int32), want)


def test_dot_of_fp32_reads_tf32_unless_told_otherwise():
    a = torch.full((16, 16), 1 + 2.0**-12)
    assert torch.equal(dot(a, torch.eye(16)), a)
    assert torch.equal(dot(a, torch.eye(16), precision="tf32"), torch.ones(16, 16))


@triton.jit
def weigh_kernel(P, V, OUT, blocks, CHAIN: tl.constexpr, EVERY: tl.constexpr):
    """P of one block times V of all of them: as attention adds up its values."""
    i, k = tl.arange(0, 16), tl.arange(0, 64)
    p = tl.load(P + i[:, None] * 64 + k[None, :])
    acc = tl.zeros([16, 16], tl.float32)
    for block in range(blocks):
        v = tl.load(V + (block * 64 + k)[:, None] * 16 + i[None, :])
        if CHAIN:
            acc = tl.dot(p, v, acc, max_num_imprecise_acc=EVERY)
        else:
            acc += tl.dot(p, v, max_num_imprecise_acc=EVERY)
    tl.store(OUT + i[:, None] * 16 + i[None, :], acc)


def weighed_error(chain, every, dtype=torch.float8_e4m3fn, blocks=400):
    g = torch.Generator().manual_seed(0)
    p = torch.rand(16, 64, generator=g).to(dtype)
    v = torch.rand(blocks * 64, 16, generator=g).to(dtype)
    out = torch.empty(16, 16)
    weigh_kernel[(1,)](p, v, out, blocks, CHAIN=chain, EVERY=every)
    want = p.double() @ v.double().view(blocks, 64, 16).sum(0)
    return ((out.double() - want).abs() / want).max().item()


def test_coarse_accumulation_shows_who_chains_an_accumulator():
    """As over 25 600 keys: in 13 bits, what a chained sum loses grows with every block."""
    assert weighed_error(True, 0) < 1e-5
    with coarse_accumulation():
        assert weighed_error(True, 0) > 0.01
        assert weighed_error(True, 0, blocks=100) < 0.6 * weighed_error(True, 0)
        assert weighed_error(False, 0) < 3e-4
        assert weighed_error(True, 64) < 3e-4
        assert weighed_error(True, 32) < 3e-4
        assert weighed_error(True, 0, torch.float16) < 1e-5
    with coarse_accumulation(bits=20):
        assert weighed_error(True, 0) < 3e-3
    assert weighed_error(True, 0) < 1e-5


# --- calls ------------------------------------------------------------------------------------


@triton.jit
def twice(x):
    return x + tl.zeros_like(x) + tl.where(x > 0, x, x)


@triton.jit
def nested_kernel(X, OUT):
    i = tl.arange(0, 16)
    x = twice(twice(tl.load(X + i)))
    tl.store(OUT + i, tl.sort(tl.flip(tl.maximum(x, tl.zeros([16], tl.float32)), 0)))


def test_nested_calls():
    x, out = torch.randn(16), torch.empty(16)
    nested_kernel[(1,)](x, out)
    assert torch.equal(out, (4 * x).relu().sort().values)
    assert tl.core.is_builtin(tl.core.where)  # the language is as it was before the launch


def test_installing_twice_changes_nothing():
    held = interpreter.InterpreterBuilder.binary_op
    interpreter.install()
    assert interpreter.InterpreterBuilder.binary_op is held


def test_installing_where_it_has_no_effect_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "3.10.0")
        with pytest.raises(RuntimeError, match=r"must be one of 3\.6, .* got 3\.10\.0"):
            interpreter.install()
    with monkeypatch.context() as patch:
        patch.setattr(tl, "max", lambda x: x)
        with pytest.raises(RuntimeError, match="imported before TRITON_INTERPRET=1"):
            interpreter.install()
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET must be 1"):
            interpreter.install()
