"""The first stage: codes, scales, block statistics and pooled entries, by prepare_kernel.py.

Codes of q are as long as q; those of k are padded to whole blocks, and both to `block_dim`
channels, so that the loops of the later kernels load without masks. What the stages pass on are
views of their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...values.call import Call, Inputs
from ...values.geometry import BLOCK_K, BLOCK_Q
from ...values.qtensor import Pooled, QTensor
from . import prepare_kernel
from .architectures import Architecture, architecture_of
from .launch import DoesNotFit, launch
from .one_pass import Operands, Prepared, Statistics
from .packed import NOT_PACKED, Packed
from .shapes import block_dim, held_in, most_of, rotated, tl_type, unit_rows, value_dim

_OPTIONS = {"num_warps": 8, "num_stages": 2}
_MANY_WARPS = {"num_warps": 16, "num_stages": 1}
"""For 128 rows of 128 channels or 64 of 256, which are rotated in registers at once."""
CHUNKS = 64
FEWEST_CODE_ROWS = 32


@dataclass(frozen=True)
class OnDevice(Prepared):
    """key_facts: for each key block 1, or NaN if it is not finite; of unquantized precisions.
    deviation, energy: what `KeepError` chooses rows by. v_logs: log2 of the scales of V. notes:
    what a stage leaves for a later one of the same call."""

    key_facts: Tensor | None = None
    deviation: Tensor | None = None
    energy: Tensor | None = None
    v_logs: Tensor | None = None
    packed: Packed = NOT_PACKED
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Keys:
    codes: Tensor | None
    scales: Tensor
    pooled: Tensor | None
    similarity: Tensor | None
    entries: Pooled | None
    value: Tensor | QTensor | None
    v_logs: Tensor | None


def prepare(
    call: Call,
    inputs: Inputs,
    *,
    to_plan: bool,
    to_attend: bool,
    packed: Packed = NOT_PACKED,
    mean: Tensor | None = None,
) -> OnDevice:
    query, key = unit_rows(inputs.query), unit_rows(inputs.key)
    value = None if inputs.value is None else unit_rows(inputs.value)
    coded = call.recipe.quantized and (to_attend or call.samples_rows)
    pooled = to_plan and call.pools_blocks
    similar = to_plan and call.predicts and call.recipe.min_similarity is not None
    reads_v = (to_attend or call.measures_error) and value is not None
    mean = _mean(call, key, mean, packed) if coded or pooled or similar else None
    q = _queries(call, query, mean, coded, to_attend, pooled, similar, to_plan, packed)
    k = _keys(call, key, value if reads_v else None, mean, coded, pooled, similar, packed)
    operands = _operands(call, inputs, q, k, coded, packed)
    D = call.D
    cut = [x if x is None else x[..., :D] for x in (q["pooled"], k.pooled)]
    statistics = Statistics(cut[0], cut[1], q["similarity"], k.similarity)
    return OnDevice(
        operands,
        statistics,
        inputs.query,
        inputs.key,
        inputs.value,
        k.entries,
        None if mean is None else mean[..., :D],
        None if coded else k.scales,
        q["deviation"],
        q["energy"],
        k.v_logs,
        packed,
    )


def _operands(
    call: Call, inputs: Inputs, q: dict[str, Any], k: _Keys, coded: bool, packed: Packed
) -> Operands:
    """Codes, or the caller's own tensors in the type that they are multiplied in."""
    value = inputs.key if inputs.value is None else inputs.value
    if not coded:
        held = [narrow(call, x) for x in (inputs.query, inputs.key)]
        same = inputs.value is None
        return Operands(held[0], held[1], held[1] if same else narrow(call, value))
    assert k.codes is not None
    value = narrow(call, value) if k.value is None and inputs.value is not None else value
    rows = k.codes.shape[2] if packed else call.Lk
    return Operands(
        QTensor(q["codes"][..., : call.D], q["scales"]),
        QTensor(k.codes[:, :, :rows, : call.D], k.scales, BLOCK_K),
        value if k.value is None else k.value,
        q["lse_shift"],
    )


def narrow(call: Call, x: Tensor) -> Tensor:
    """fp32 rows in the 16-bit type of a precision that multiplies in one, once for all launches:
    loaded as fp32, tiles of K and V would take more shared memory than most cards have."""
    held = held_in(call)
    if x.dtype == held or held == torch.float32:
        return x
    x = unit_rows(x)
    B, H, L, D = x.shape
    out = torch.empty(x.shape, dtype=held, device=x.device)
    launch(
        prepare_kernel.narrow_rows,
        (-(-L // BLOCK_K), H, B),
        _OPTIONS,
        x=x,
        out=out,
        **_strides("x", "n", x),
        H=H,
        L=L,
        D=D,
        BLOCK_D=value_dim(D),
        MOST=most_of(held),
    )
    return out


def _mean(call: Call, key: Tensor, given: Tensor | None, packed: Packed) -> Tensor:
    """The mean key of each head, padded; the caller's where one is given."""
    if given is None:
        return mean_key(call, key, packed)
    return F.pad(given, (0, block_dim(call.D) - call.D)).contiguous()


def mean_key(call: Call, key: Tensor, packed: Packed) -> Tensor:
    """The mean key of each head `[sequences, Hk, BLOCK_D]`, fp32."""
    n, BLOCK_D = packed.sequences or call.B, block_dim(call.D)
    sums = key.new_empty((n, call.Hk, CHUNKS, BLOCK_D), dtype=torch.float32)
    means = key.new_empty((n, call.Hk, BLOCK_D), dtype=torch.float32)
    common = {"Hk": call.Hk, "Lk": call.Lk, "BLOCK_D": BLOCK_D, **packed.arguments()}
    launch(
        prepare_kernel.sum_keys,
        (CHUNKS, call.Hk, n),
        _OPTIONS,
        k=key,
        sums=sums,
        **_strides("k", "n", key),
        D=call.D,
        **common,
    )
    launch(
        prepare_kernel.mean_keys,
        (call.Hk, n),
        {"num_warps": 1},
        sums=sums,
        means=means,
        n_chunks=CHUNKS,
        **common,
    )
    return means


def _queries(
    call: Call,
    query: Tensor,
    mean: Tensor | None,
    coded: bool,
    to_attend: bool,
    pooled: bool,
    similar: bool,
    to_plan: bool,
    packed: Packed,
) -> dict[str, Any]:
    B, Hq, Lq = call.B, call.Hq, call.Lq
    BLOCK_D = block_dim(call.D)
    n_q = packed.n_q or call.n_q
    deviates = to_plan and call.measures_error

    def room(when: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return query.new_empty(shape, dtype=dtype) if when else None

    given = {
        "codes": room(coded, B, Hq, Lq, BLOCK_D, dtype=torch.int8),
        "scales": room(coded, B, Hq, Lq),
        "pooled": room(pooled, B, Hq, n_q, BLOCK_D),
        "similarity": room(similar, B, Hq, n_q),
        "lse_shift": room(coded and to_attend, B, Hq, Lq),
        "deviation": room(deviates, B, Hq, Lq),
        "energy": room(deviates, B, Hq, n_q),
    }

    def run(CODE_ROWS: int) -> None:
        launch(
            prepare_kernel.prepare_queries,
            (n_q, Hq, B),
            _MANY_WARPS if CODE_ROWS == BLOCK_Q and BLOCK_D == 128 else _OPTIONS,
            q=query,
            means=mean,
            **given,
            **_strides("q", "m", query),
            Hq=Hq,
            group=Hq // call.Hk,
            Lq=Lq,
            n_q=n_q,
            softmax_scale=call.scale,
            D=call.D,
            BLOCK_D=BLOCK_D,
            WIDTH=rotated(call.D),
            CODES=coded,
            SHIFT=coded and to_attend,
            POOLED=pooled,
            SIMILARITY=similar,
            DEVIATION=deviates,
            CODE_ROWS=CODE_ROWS,
            **packed.arguments(of="queries"),
        )

    if any(x is not None for x in given.values()):
        try:
            run(code_rows(call.D))
        except DoesNotFit:
            run(FEWEST_CODE_ROWS)
    return given


def _keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    mean: Tensor | None,
    coded: bool,
    pooled: bool,
    similar: bool,
    packed: Packed,
) -> _Keys:
    B, Hk, recipe = call.B, call.Hk, call.recipe
    n_k = packed.n_k or call.n_k
    BLOCK_D, BLOCK_DV = block_dim(call.D), value_dim(call.Dv)
    fast = coded and recipe.precision == "int8-fast" and value is not None
    group = recipe.pool_group if recipe.pools and value is not None else 0
    held = held_in(call)
    # Values are read here where the blocks that hold them may be skipped later.
    values = value is not None and (fast or group > 0 or recipe.pv_skip is not None)
    fp8 = _fp8(call) if fast else torch.int8
    n_entries = n_k * (BLOCK_K // group) if group else 0
    p_max = most_of(fp8) if fast else 1.0

    def room(when: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return key.new_empty(shape, dtype=dtype) if when else None

    scales = key.new_empty((B, Hk, n_k), dtype=torch.float32)
    codes = room(coded, B, Hk, n_k * BLOCK_K, BLOCK_D, dtype=torch.int8)
    v_codes = room(fast, B, Hk, BLOCK_DV, n_k * BLOCK_K, dtype=fp8)
    v_scales, v_logs = room(fast, B, Hk, n_k), room(fast, B, Hk, n_k)
    k_type = torch.int8 if coded else held
    pooled_k = room(group > 0, B, Hk, n_entries, BLOCK_D, dtype=k_type)
    pooled_v = room(group > 0, B, Hk, n_entries, BLOCK_DV, dtype=held)
    pooled_scale = room(group > 0, B, Hk, n_entries)
    k_pooled, k_similarity = room(pooled, B, Hk, n_k, BLOCK_D), room(similar, B, Hk, n_k)
    launch(
        prepare_kernel.prepare_keys,
        (n_k, Hk, B),
        _MANY_WARPS if max(BLOCK_D, BLOCK_DV) > 128 else _OPTIONS,
        k=key,
        v=value if values else None,
        means=mean,
        codes=codes,
        scales=scales,
        pooled=k_pooled,
        similarity=k_similarity,
        pooled_k=pooled_k,
        pooled_v=pooled_v,
        pooled_scale=pooled_scale,
        v_codes=v_codes,
        v_scales=v_scales,
        v_logs=v_logs,
        **_strides("k", "n", key),
        **_strides("v", "n", key if value is None else value),
        Hk=Hk,
        Lk=call.Lk,
        n_blocks_k=n_k,
        D=call.D,
        BLOCK_D=BLOCK_D,
        WIDTH=rotated(call.D),
        DV=call.Dv,
        BLOCK_DV=BLOCK_DV,
        CODES=coded,
        SMOOTH=mean is not None,
        POOLED=pooled,
        SIMILARITY=similar,
        VALUES=values,
        POOL_GROUP=group,
        FAST=fast,
        P_MAX=p_max,
        HELD=tl_type(held),
        MOST=most_of(held),
        **packed.arguments(of="keys"),
    )
    entries, v = None, None
    if group:
        assert pooled_k is not None
        assert pooled_v is not None
        n = n_entries if packed else -(-call.Lk // group)
        mean_k: Tensor | QTensor = pooled_k[:, :, :n, : call.D]
        if coded:
            assert pooled_scale is not None
            mean_k = QTensor(pooled_k[:, :, :n, : call.D], pooled_scale[:, :, :n])
        entries = Pooled(mean_k, pooled_v[:, :, :n, : call.Dv], group)
    if fast:
        assert v_codes is not None
        assert v_scales is not None
        rows = n_k * BLOCK_K if packed else call.Lk
        v = QTensor(v_codes.transpose(2, 3)[:, :, :rows, : call.Dv], v_scales, BLOCK_K)
    return _Keys(codes, scales, k_pooled, k_similarity, entries, v, v_logs)


def code_rows(D: int) -> int:
    """Query rows that are rotated at a time. Rows pass through shared memory, of which 128 of 256
    channels take 128 KB; a second rotation, of a head dim that is no power of two, needs more
    registers than a thread has for so many."""
    if block_dim(D) > 128:
        return FEWEST_CODE_ROWS
    return BLOCK_Q if rotated(D) == D else 64


def _fp8(call: Call) -> torch.dtype:
    found = architecture_of(*call.where)
    assert isinstance(found, Architecture)
    assert found.fp8 is not None
    return found.fp8


def _strides(of: str, rows: str, x: Tensor) -> dict[str, int]:
    names = (f"stride_{of}b", f"stride_{of}h", f"stride_{of}{rows}")
    return dict(zip(names, x.stride()[:3], strict=True))
