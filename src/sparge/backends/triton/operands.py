"""Queries, keys and values as the kernels read them: made of the caller's tensors by
prepare_kernel.py, or views of what was made.

Codes of q are as long as q; those of k are padded to whole blocks, and both to `block_dim`
channels, so that the loops of the later kernels load without masks. What the stages pass on are
views of their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...values.call import BLOCK_K, BLOCK_Q, Call
from ...values.stages import Pooled, Prepared, PreparedKeys, PreparedQueries, QTensor
from . import prepare_kernel
from .arguments import (
    NOT_PACKED,
    Packed,
    architecture,
    block_dim,
    held_in,
    most_of,
    rotated,
    sizes_of,
    tl_type,
    types_of,
    unit_rows,
    value_dim,
    value_types,
)
from .blocks import SelectedLists
from .launch import DoesNotFit, launch
from .prepare_kernel import PreparedBlocks, PreparedRows
from .primitives import PooledEntries, Rows, Strides, Types, ValueTypes

_OPTIONS = {"num_warps": 8, "num_stages": 2}
_MANY_WARPS = {"num_warps": 16, "num_stages": 1}
"""For 128 rows of 128 channels or 64 of 256, which are rotated in registers at once."""
CHUNKS = 64
FEWEST_CODE_ROWS = 32


@dataclass(frozen=True)
class QueriesOnDevice(PreparedQueries):
    """deviation `[B, Hq, Lq]`, energy `[B, Hq, n_q]`: what `KeepError` chooses rows by."""

    deviation: Tensor | None = None
    energy: Tensor | None = None

    def blocks(self, start: int, stop: int) -> QueriesOnDevice:
        cut = super().blocks(start, stop)
        assert isinstance(cut, QueriesOnDevice)
        if self.deviation is None or self.energy is None:
            return cut
        rows = slice(start * BLOCK_Q, stop * BLOCK_Q)
        return replace(
            cut, deviation=self.deviation[:, :, rows], energy=self.energy[..., start:stop]
        )


@dataclass(frozen=True)
class KeysOnDevice(PreparedKeys):
    """facts: for each key block 1, or NaN if it is not finite; of unquantized precisions.
    v_logs: log2 of the scales of fp8 values. packed: the sequences of a pack."""

    facts: Tensor | None = None
    v_logs: Tensor | None = None
    packed: Packed = NOT_PACKED


def packed_of(prepared: Prepared) -> Packed:
    keys = prepared.keys
    return keys.packed if isinstance(keys, KeysOnDevice) else NOT_PACKED


# --- made of the caller's tensors ---------------------------------------------------------------


def mean_key(call: Call, key: Tensor, packed: Packed) -> Tensor:
    """The mean key of each head `[sequences, Hk, D]`, fp32; a view of rows that are padded."""
    n, BLOCK_D = packed.sequences or call.B, block_dim(call.D)
    sums = key.new_empty((n, call.Hk, CHUNKS, BLOCK_D), dtype=torch.float32)
    means = key.new_empty((n, call.Hk, BLOCK_D), dtype=torch.float32)
    common: dict[str, Any] = {
        "pack": packed.of_keys(),
        "Hk": call.Hk,
        "Lk": call.Lk,
        "BLOCK_D": BLOCK_D,
    }
    launch(
        prepare_kernel.sum_keys,
        (CHUNKS, call.Hk, n),
        _OPTIONS,
        k=key,
        sums=sums,
        strides=rows_of(key).strides,
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
    return means[..., : call.D]


def padded_mean(call: Call, mean: Tensor | None) -> Tensor | None:
    """A mean of the keys `[sequences, Hk, D]` with `block_dim` channels."""
    return None if mean is None else padded(mean[:, None], call.Hk, block_dim(call.D))


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
        strides=rows_of(x).strides,
        H=H,
        L=L,
        TYPES=Types(D, value_dim(D), tl_type(held), most_of(held), ""),
    )
    return out


def make_queries(
    call: Call,
    query: Tensor,
    mean: Tensor | None,
    *,
    coded: bool,
    pooled: bool,
    similar: bool,
    deviates: bool,
    shifts: bool,
    packed: Packed,
) -> QueriesOnDevice:
    """coded, pooled, similar, deviates, shifts: which fields there are to be."""
    x = unit_rows(query)
    B, Hq, Lq, D, BLOCK_D = call.B, call.Hq, call.Lq, call.D, block_dim(call.D)
    n_q = packed.n_q or call.n_q

    def empty(when: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return x.new_empty(shape, dtype=dtype) if when else None

    made = PreparedRows(
        codes=empty(coded, B, Hq, Lq, BLOCK_D, dtype=torch.int8),
        scales=empty(coded, B, Hq, Lq),
        pooled=empty(pooled, B, Hq, n_q, BLOCK_D),
        similarity=empty(similar, B, Hq, n_q),
        lse_shift=empty(shifts, B, Hq, Lq),
        deviation=empty(deviates, B, Hq, Lq),
        energy=empty(deviates, B, Hq, n_q),
    )

    def run(CODE_ROWS: int) -> None:
        launch(
            prepare_kernel.prepare_queries,
            (n_q, Hq, B),
            _MANY_WARPS if CODE_ROWS == BLOCK_Q and BLOCK_D == 128 else _OPTIONS,
            q=x,
            means=padded_mean(call, mean) if shifts else None,
            made=made,
            pack=packed.of_queries(),
            strides=rows_of(x).strides,
            Hq=Hq,
            group=Hq // call.Hk,
            Lq=Lq,
            n_q=n_q,
            softmax_scale=call.scale,
            D=D,
            BLOCK_D=BLOCK_D,
            WIDTH=rotated(D),
            CODE_ROWS=CODE_ROWS,
        )

    if any(out is not None for out in made):
        try:
            run(code_rows(D))
        except DoesNotFit:
            run(FEWEST_CODE_ROWS)
    return QueriesOnDevice(
        QTensor(made.codes[..., :D], made.scales) if coded else narrow(call, query),
        query,
        made.lse_shift,
        None if made.pooled is None else made.pooled[..., :D],
        made.similarity,
        made.deviation,
        made.energy,
    )


def code_rows(D: int) -> int:
    """Query rows that are rotated at a time. Rows pass through shared memory, of which 128 of 256
    channels take 128 KB; a second rotation, of a head dim that is no power of two, needs more
    registers than a thread has for so many."""
    if block_dim(D) > 128:
        return FEWEST_CODE_ROWS
    return BLOCK_Q if rotated(D) == D else 64


def make_keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    mean: Tensor | None,
    *,
    coded: bool,
    reads_values: bool = True,
    pooled: bool = False,
    similar: bool = False,
    packed: Packed = NOT_PACKED,
) -> KeysOnDevice:
    """coded, pooled, similar: which fields there are to be. reads_values: fp8 codes and pooled
    entries are wanted, and what is not finite among the values is looked for."""
    B, Hk, D, recipe = call.B, call.Hk, call.D, call.recipe
    k = unit_rows(key)
    v = None if value is None or not reads_values else unit_rows(value)
    n_k = packed.n_k or call.n_k
    BLOCK_D, BLOCK_DV = block_dim(D), value_dim(call.Dv)
    fp8 = None
    if coded and recipe.precision == "int8-fast" and v is not None:
        fp8 = architecture(call).fp8
        assert fp8 is not None
    fast, held = fp8 is not None, held_in(call)
    group = recipe.pool_group if recipe.pools and v is not None else 0
    # Values are read here where the blocks that hold them may be skipped later.
    if not (fast or group > 0 or recipe.pv_skip is not None):
        v = None
    n_entries = n_k * (BLOCK_K // group) if group else 0

    def empty(when: bool, *shape: int, dtype: torch.dtype | None = torch.float32) -> Tensor | None:
        return k.new_empty(shape, dtype=dtype) if when else None

    made = PreparedBlocks(
        codes=empty(coded, B, Hk, n_k * BLOCK_K, BLOCK_D, dtype=torch.int8),
        scales=k.new_empty((B, Hk, n_k), dtype=torch.float32),
        pooled=empty(pooled, B, Hk, n_k, BLOCK_D),
        similarity=empty(similar, B, Hk, n_k),
        entry_k=empty(group > 0, B, Hk, n_entries, BLOCK_D, dtype=torch.int8 if coded else held),
        entry_v=empty(group > 0, B, Hk, n_entries, BLOCK_DV, dtype=held),
        entry_scale=empty(group > 0, B, Hk, n_entries),
        v_codes=empty(fast, B, Hk, BLOCK_DV, n_k * BLOCK_K, dtype=fp8),
        v_scales=empty(fast, B, Hk, n_k),
        v_logs=empty(fast, B, Hk, n_k),
    )
    launch(
        prepare_kernel.prepare_keys,
        (n_k, Hk, B),
        _MANY_WARPS if max(BLOCK_D, BLOCK_DV) > 128 else _OPTIONS,
        k=k,
        v=v,
        means=padded_mean(call, mean),
        made=made,
        pack=packed.of_keys(),
        k_strides=rows_of(k).strides,
        v_strides=rows_of(k if v is None else v).strides,
        Hk=Hk,
        Lk=call.Lk,
        n_blocks_k=n_k,
        # How fp32 is multiplied does not matter here.
        TYPES=types_of(call)._replace(EXACT=""),
        WIDTH=rotated(D),
        VALUES=value_types(call, fp8),
        POOL_GROUP=group,
    )
    rows = n_k * BLOCK_K if packed else call.Lk
    own: Tensor | QTensor = key if value is None else value
    if fast:
        own = QTensor(made.v_codes.transpose(2, 3)[:, :, :rows, : call.Dv], made.v_scales, BLOCK_K)
    elif isinstance(own, Tensor) and (value is not None or not coded):
        own = narrow(call, own)
    entries = None
    if group:
        n = n_entries if packed else -(-call.Lk // group)
        mean_k: Tensor | QTensor = made.entry_k[:, :, :n, :D]
        if coded:
            mean_k = QTensor(made.entry_k[:, :, :n, :D], made.entry_scale[:, :, :n])
        entries = Pooled(mean_k, made.entry_v[:, :, :n, : call.Dv], group)
    return KeysOnDevice(
        QTensor(made.codes[:, :, :rows, :D], made.scales, BLOCK_K) if coded else narrow(call, key),
        own,
        key,
        value,
        mean,
        None if made.pooled is None else made.pooled[..., :D],
        made.similarity,
        entries,
        None if coded else made.scales,
        made.v_logs,
        packed,
    )


# --- as arguments -------------------------------------------------------------------------------


def rows_of(x: Tensor, scale: Tensor | None = None) -> Rows:
    """A tensor whose last dimension is contiguous."""
    return Rows(x, scale, Strides(*x.stride()[:3]))


def query_rows(call: Call, queries: PreparedQueries) -> Rows:
    query = queries.rows
    if isinstance(query, QTensor):
        codes = padded(query.codes, query.shape[2], block_dim(call.D))
        return rows_of(codes, query.scale.contiguous())
    return rows_of(unit_rows(query))


def key_rows(call: Call, keys: PreparedKeys) -> Rows:
    """Without codes, scales of 1, and NaN for key blocks that are not finite."""
    key = keys.key
    if isinstance(key, QTensor):
        assert key.rows_per_scale == BLOCK_K, "one scale for each key block"
        rows = n_key_blocks(call, keys) * BLOCK_K
        return rows_of(padded(key.codes, rows, block_dim(call.D)), key.scale.contiguous())
    facts = keys.facts if isinstance(keys, KeysOnDevice) else None
    if facts is None:  # keys that were not prepared here
        assert isinstance(keys.value, Tensor)
        facts = make_keys(call, key, keys.value, None, coded=False).facts
    return rows_of(unit_rows(key), facts)


def value_rows(call: Call, keys: PreparedKeys) -> tuple[Rows, ValueTypes]:
    """fp8 values are read transposed: their rows are contiguous, their channels are not."""
    value = keys.value
    if not isinstance(value, QTensor):
        return rows_of(unit_rows(value)), value_types(call)
    rows = n_key_blocks(call, keys) * BLOCK_K
    codes = padded(value.codes.transpose(2, 3), value_dim(call.Dv), rows)
    stride_b, stride_h, stride_d = codes.stride()[:3]
    strides = Strides(stride_b, stride_h, 1, stride_d)
    held = Rows(codes, value.scale.contiguous(), strides)
    return held, value_types(call, codes.dtype)


def pooled_entries(call: Call, keys: PreparedKeys, blocks: Tensor | None = None) -> PooledEntries:
    """blocks: which are pooled, if the kernel does not find out itself."""
    entries = keys.entries
    if entries is None:
        return PooledEntries()
    n = n_key_blocks(call, keys) * (BLOCK_K // entries.group)
    assert isinstance(entries.value, Tensor)
    key, scale = entries.key, None
    if isinstance(key, QTensor):
        scale = padded(key.scale.unsqueeze(3), n, 1)
    codes = key.codes if isinstance(key, QTensor) else key
    return PooledEntries(
        padded(codes, n, block_dim(call.D)),
        padded(entries.value, n, value_dim(call.Dv)),
        scale,
        blocks,
    )


def n_key_blocks(call: Call, keys: PreparedKeys) -> int:
    """Of all sequences of a pack."""
    return (keys.packed.n_k if isinstance(keys, KeysOnDevice) else 0) or call.n_k


def padded(x: Tensor, rows: int, channels: int) -> Tensor:
    """`x [B, H, n, c]` with `rows` rows and `channels` channels: the memory that this backend's own
    tensors have behind them, or a copy filled up with zeros."""
    B, H = x.shape[:2]
    strides, first = x.stride(), x.storage_offset()
    last = first + (B - 1) * strides[0] + (H - 1) * strides[1] + (rows - 1) * strides[2] + channels
    held = x.untyped_storage().nbytes() // x.element_size()
    apart = H == 1 or strides[1] >= rows * strides[2]
    if strides[3] == 1 and strides[2] >= channels and apart and last <= held:
        return x.as_strided((B, H, rows, channels), strides, first)
    made = x.new_zeros((B, H, rows, channels))
    made[:, :, : x.shape[2], : x.shape[3]] = x
    return made


def empty_lists(call: Call, prepared: Prepared) -> SelectedLists:
    """To be written; pools only where there are pooled entries to attend."""
    sizes = sizes_of(call, packed_of(prepared))
    device = prepared.queries.rows.device
    counts = torch.empty((call.B, call.Hq, sizes.n_q), dtype=torch.int32, device=device)
    indices = counts.new_empty((*counts.shape, sizes.n_k))
    pools = None
    if prepared.keys.entries is not None:
        pools = counts.new_empty(indices.shape, dtype=torch.uint8)
    return SelectedLists(counts, indices, torch.empty_like(counts), pools)
