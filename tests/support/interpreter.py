"""Triton's CPU interpreter, made to compute what a GPU computes; for tests alone.

Stock Triton 3.6 to 3.9 is silently wrong here (https://github.com/triton-lang/triton/issues/11584,
4972, 8322), or more exact than a GPU, which hides a kernel's errors:

    casts        to bf16 truncated, to fp8 without carry; fp8 infinities and NaN lost
    arithmetic   on the bits of bf16 as if they were integers; so are its reductions and `tl.dot`
    comparisons  tagged as their operands: a scalar one is no mask where it meets a tensor
    tl.dot       fp32 operands unrounded, where tensor cores read them as tf32 unless told `ieee`
    tl.sum       of 16-bit numbers rounded once; the compiled tree rounds after each addition
    addresses    outside of the tensors read and written

and up to 3.8, whose compilers are right:

    extremes     `tl.minimum`, `tl.maximum` and `tl.clamp` keep NaN that a GPU drops unless told to
    flags        added as if by `or`; flags that are arguments are 32-bit integers
    types        no constants of bf16, no fp8 of AMD

`install()` repairs these for the process, and `coarse_accumulation()` imitates the fp8 accumulators
of tensor cores. Errors inside a kernel are raised as they are, not as an `InterpreterError`.

Not covered: rounding toward zero, fp8e4b15, bf16 atomics and before 3.9 `tl.fma` of wide types
(refused); `tl.dot_scaled` and NaN padding of descriptors (stock); the order of sums, races, and
what the compiler rejects or rewrites.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock_interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    ReduceOps,
    ScanOps,
    TensorHandle,
)

from interpreter_bounds import begin_launch, check_addresses, forget_argument, remember_argument
from interpreter_numbers import NARROW, encode, is_narrow, rounded, rounded_to_tf32, widen

CHECKED = ("3.6", "3.7", "3.8", "3.9")
"""Versions of Triton whose internals the repairs were written against."""

ROUNDS_ONCE = not triton.__version__.startswith(CHECKED[:3])
"""Whether stock `tl.fma` rounds once, as the instruction does."""

MMA_K = 32
"""Products of one fp8 instruction of a tensor core."""

_repairs: list[tuple[Any, str, Callable[..., Any]]] = []
_installed = False
_coarse_bits: ContextVar[int | None] = ContextVar("coarse_bits", default=None)


def install() -> None:
    """Repair the interpreter of this process, once. Raises where that would have no effect."""
    global _installed
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET must be 1, or kernels are compiled, not interpreted")
    if ".".join(triton.__version__.split(".")[:2]) not in CHECKED:
        raise RuntimeError(
            f"triton must be one of {', '.join(CHECKED)}, got {triton.__version__}; read its "
            "interpreter.py, check what tests/support/interpreter.py repairs, and change CHECKED"
        )
    if not isinstance(tl.max, InterpretedFunction):
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it earlier")
    if _installed:
        return
    for owner, name, repair in _repairs:
        setattr(owner, name, _bound(repair, getattr(owner, name, None)))
    triton.knobs.compilation.front_end_debugging = True  # raises errors of kernels as they are
    _installed = True


def repairs(owner: Any, *names: str) -> Callable[..., Any]:
    """`repair(stock, ...)` replaces these functions of the interpreter; `stock` is the old one,
    None where a version of Triton lacks it."""

    def register(repair: Callable[..., Any]) -> Callable[..., Any]:
        _repairs.extend((owner, name, repair) for name in names)
        return repair

    return register


def _bound(repair: Callable[..., Any], stock: Callable[..., Any] | None) -> Callable[..., Any]:
    @wraps(stock or repair)
    def repaired(*args: Any, **kwargs: Any) -> Any:
        return repair(stock, *args, **kwargs)

    return repaired


# --- numbers ------------------------------------------------------------------------------------


@repairs(InterpreterBuilder, "get_bf16")
def _bf16_constant(stock: Any, self: Any, value: float) -> TensorHandle:
    return TensorHandle(encode(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)


@repairs(InterpreterBuilder, "cast_impl")
def _cast(stock: Any, self: Any, x: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    dtype = dst_type.scalar
    if dtype in NARROW:
        return TensorHandle(encode(widen(x).data, dtype), dtype)
    return stock(self, widen(x), dst_type)


@repairs(InterpreterBuilder, "create_fp_to_fp")
def _cast_float(
    stock: Any, self: Any, x: TensorHandle, dst_type: tl.dtype, rounding: Any
) -> TensorHandle:
    if rounding == ir.ROUNDING_MODE.RTZ:
        raise NotImplementedError("fp_downcast_rounding='rtz' is not checked in the interpreter")
    if tl.float8e4b15 in (x.dtype.scalar, dst_type.scalar):
        raise NotImplementedError("fp8e4b15 is not checked in the interpreter; torch has no such")
    return self.cast_impl(x, dst_type)


# --- arithmetic ---------------------------------------------------------------------------------


@repairs(InterpreterBuilder, "create_minnumf")
def _minimum(stock: Any, self: Any, x: TensorHandle, y: TensorHandle) -> TensorHandle:
    return self.binary_op(x, y, np.fmin)


@repairs(InterpreterBuilder, "create_maxnumf")
def _maximum(stock: Any, self: Any, x: TensorHandle, y: TensorHandle) -> TensorHandle:
    return self.binary_op(x, y, np.fmax)


@repairs(InterpreterBuilder, "create_clampf")
def _clamp(
    stock: Any, self: Any, x: TensorHandle, low: TensorHandle, high: TensorHandle, nan: Any
) -> TensorHandle:
    if nan == ir.PROPAGATE_NAN.NONE:
        return self.binary_op(self.binary_op(x, low, np.fmax), high, np.fmin)
    return self.binary_op(self.binary_op(x, low, np.maximum), high, np.minimum)


@repairs(InterpreterBuilder, "binary_op", "unary_op")
def _wide(stock: Any, self: Any, x: TensorHandle, *rest: Any) -> TensorHandle:
    """In fp32, rounded to the type. For + - * / and square roots of bf16 that is the number an
    instruction with one rounding gives: fp32 has more than twice the digits.

    Comparisons are int1. Stock tags them with the type of their operands, and a scalar one becomes
    an integer, or bits of bf16, where it meets a tensor. Sums of flags wrap around."""
    others = tuple(widen(y) if isinstance(y, TensorHandle) else y for y in rest)
    if all(v.data.dtype == np.bool_ for v in (x, *others) if isinstance(v, TensorHandle)):
        bits = (TensorHandle(v.data.astype(np.int8), tl.int8) for v in (x, *others[:-1]))
        return TensorHandle((stock(self, *bits, others[-1]).data & 1).astype(np.bool_), tl.int1)
    found = stock(self, widen(x), *others)
    if found.data.dtype == np.bool_:
        return TensorHandle(found.data, tl.int1)
    return (
        TensorHandle(encode(found.data, x.dtype.scalar), x.dtype.scalar) if is_narrow(x) else found
    )


@repairs(InterpreterBuilder, "create_fma")
def _fma(stock: Any, self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """Rounded once: product and sum of bf16 are exact in fp64, or far from a tie."""
    if not is_narrow(z) and not ROUNDS_ONCE:
        raise NotImplementedError(f"tl.fma of {z.dtype} rounds twice in this Triton's interpreter")
    if not is_narrow(z):
        return stock(self, x, y, z)
    a, b, c = (widen(v).data.astype(np.float64) for v in (x, y, z))
    return TensorHandle(encode(a * b + c, z.dtype.scalar), z.dtype.scalar)


@repairs(InterpreterBuilder, "create_atomic_rmw")
def _atomic(stock: Any, self: Any, op: Any, ptr: Any, x: Any, mask: Any, *rest: Any) -> Any:
    if is_narrow(x):
        raise NotImplementedError(f"atomics of {x.dtype} are integer operations in the interpreter")
    check_addresses("atomic", ptr, mask)
    return stock(self, op, ptr, x, mask, *rest)


# --- reductions ---------------------------------------------------------------------------------


@repairs(ReduceOps, "min_max")
def _min_max(stock: Any, self: Any, x: Any, *ops: Any, **named: Any) -> Any:
    x = x[0] if isinstance(x, tuple) else x
    if not is_narrow(x.handle):
        return stock(self, x, *ops, **named)
    wide = tl.core.tensor(widen(x.handle), tl.block_type(tl.float32, list(x.handle.data.shape)))
    found = stock(self, wide, *ops, **named)
    value, *index = found if isinstance(found, tuple) else (found,)
    value = self.to_tensor(encode(value.handle.data, x.dtype), x.dtype)
    return (value, *index) if index else value


@repairs(ReduceOps, "sum")
def _sum(stock: Any, self: Any, x: Any) -> Any:
    """Of 16 bits by halves, rounded after each addition. The order on a GPU depends on the
    layout; the size of the error does not."""
    if not _rounds_sums(x):
        return stock(self, x)
    data, axis = widen(x.handle).data.astype(np.float32), self.axis
    shape = np.sum(data, axis=axis, keepdims=self.keep_dims).shape
    parts = data.reshape(-1) if axis is None else np.moveaxis(data, axis, 0)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = rounded(parts[:half] + parts[half:], x.dtype)
    return self.to_tensor(_stored(parts.reshape(shape), x.dtype), x.dtype)


@repairs(ScanOps, "cumsum")
def _cumsum(stock: Any, self: Any, x: Any) -> Any:
    return _scan(self, x, np.add) if _rounds_sums(x) else stock(self, x)


@repairs(ScanOps, "cumprod")
def _cumprod(stock: Any, self: Any, x: Any) -> Any:
    return _scan(self, x, np.multiply) if _rounds_sums(x) else stock(self, x)


def _scan(self: Any, x: Any, op: np.ufunc) -> list[Any]:
    along = np.moveaxis(widen(x.handle).data.astype(np.float32), self.axis, 0)
    for i in range(1, len(along)):
        along[i] = rounded(op(along[i - 1], along[i]), x.dtype)
    return [self.to_tensor(_stored(np.moveaxis(along, 0, self.axis), x.dtype), x.dtype)]


def _rounds_sums(x: Any) -> bool:
    return is_narrow(x.handle) or x.handle.data.dtype == np.float16


def _stored(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    return encode(x, dtype) if dtype in NARROW else x


# --- products -----------------------------------------------------------------------------------


@contextmanager
def coarse_accumulation(bits: int = 13) -> Iterator[None]:
    """fp8 `tl.dot` adds in accumulators of `bits` mantissa bits, as tensor cores of Ada and Hopper
    do: truncated after every 32 products. A dot with `acc` goes on in it; with
    `max_num_imprecise_acc=n`, every n products begin anew and are added to `acc` in fp32.

    A compiler may fold `acc + tl.dot(p, v)` into `tl.dot(p, v, acc)`; this does not."""
    token = _coarse_bits.set(bits)
    try:
        yield
    finally:
        _coarse_bits.reset(token)


@repairs(InterpreterBuilder, "create_dot")
def _dot(
    stock: Any, self: Any, a: TensorHandle, b: TensorHandle, acc: TensorHandle, ieee: Any, n: int
) -> TensorHandle:
    """Exact products, added in fp32."""
    if a.data.dtype == np.float64:
        return stock(self, a, b, acc, ieee, n)
    left, right = _factor(a, ieee), _factor(b, ieee)
    bits = _coarse_bits.get()
    if bits is not None and a.dtype.scalar.is_fp8():
        return TensorHandle(_coarse_dot(left, right, acc.data, n, bits), acc.dtype.scalar)
    if a.data.dtype == np.int8 and a.data.shape[-1] > 1024:  # sums of fp32 are exact up to there
        return stock(self, a, b, acc, ieee, n)
    products = left @ right
    total = products + acc.data if acc.data.dtype != np.int32 else products.astype(int) + acc.data
    return TensorHandle(total.astype(acc.data.dtype), acc.dtype.scalar)


def _factor(x: TensorHandle, precision: Any) -> np.ndarray:
    """One operand in fp32, as the tensor cores read it."""
    if x.data.dtype == np.float32 and precision == ir.INPUT_PRECISION.TF32:
        return rounded_to_tf32(x.data)
    return widen(x).data.astype(np.float32)


def _coarse_dot(a: np.ndarray, b: np.ndarray, acc: np.ndarray, every: int, bits: int) -> np.ndarray:
    total = np.zeros_like(acc, dtype=np.float32) if every else acc.astype(np.float32)
    for k in range(0, a.shape[-1], MMA_K):
        products = a[..., k : k + MMA_K] @ b[..., k : k + MMA_K, :]
        total = _truncate(total + products, bits)
        if every and (k + MMA_K) % every == 0:
            acc, total = acc + total, np.zeros_like(total)
    return (acc + total if every else total).astype(acc.dtype)


def _truncate(x: np.ndarray, bits: int) -> np.ndarray:
    """fp32 with the lower of its 23 mantissa bits cut off."""
    mask = np.uint32((0xFFFFFFFF << (23 - bits)) & 0xFFFFFFFF)
    return (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) & mask).view(np.float32)


# --- launches and addresses ---------------------------------------------------------------------


@repairs(InterpreterBuilder, "create_masked_load")
def _load(stock: Any, self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
    check_addresses("load", pointers, mask)
    return stock(self, pointers, mask, *rest, **named)


@repairs(InterpreterBuilder, "create_masked_store")
def _store(stock: Any, self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    check_addresses("store", pointers, mask)
    return stock(self, pointers, value, mask, *rest)


@repairs(InterpreterBuilder, "create_atomic_cas")
def _compare_and_swap(stock: Any, self: Any, pointers: Any, *rest: Any) -> Any:
    check_addresses("atomic", pointers)
    return stock(self, pointers, *rest)


@repairs(InterpreterBuilder, "create_select")
def _select(stock: Any, self: Any, condition: Any, x: TensorHandle, y: TensorHandle) -> Any:
    chosen = stock(self, condition, x, y)
    if isinstance(y.dtype, tl.pointer_type) and x.dtype is not y.dtype:
        forget_argument(chosen)
    return chosen


@repairs(GridExecutor, "_init_args_hst")
def _note_names(stock: Any, self: Any, args: Any, kwargs: Any) -> Any:
    host_args, host_kwargs = stock(self, args, kwargs)
    begin_launch({**dict(zip(self.arg_names, host_args, strict=False)), **host_kwargs})
    return host_args, host_kwargs


@repairs(stock_interpreter, "_implicit_cvt")
def _convert_argument(stock: Any, x: Any) -> Any:
    if isinstance(x, bool):
        return tl.tensor(TensorHandle(np.array([x]), tl.int1), tl.int1)
    converted = stock(x)
    if hasattr(x, "data_ptr"):
        remember_argument(converted.handle, stock_interpreter._unwrap_tensor(x), x)
    return converted


@repairs(GridExecutor, "__call__")
def _launch(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with np.errstate(all="ignore"):  # a GPU does not warn of infinities
        return stock(self, *args, **kwargs)


@repairs(stock_interpreter, "_patch_lang")
def _patch_language(stock: Any, fn: Any) -> Any:
    """All of the language at a launch, whatever the kernel imports: then nested calls need not."""
    scope = stock(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # numpy no longer takes arrays of one element for numbers, which 3.6 relies on.
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
    to_ir = tl.dtype.to_ir
    scope.set_attr(
        tl.dtype, "to_ir", lambda self, builder: self if self in NARROW else to_ir(self, builder)
    )
    return scope


@repairs(InterpretedFunction, "__call__")
def _call_nested(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stock patches the language again at each call, a quarter of the time of a kernel."""
    return self.rewrite()(*args, **kwargs)
