"""Queries, keys and values as the later stages pass them on, and as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...values.call import BLOCK_K, BLOCK_Q, Call
from ...values.stages import Prepared, PreparedKeys, PreparedQueries, QTensor
from .arguments import NOT_PACKED, Packed, block_dim, sizes_of, unit_rows, value_dim, value_types
from .blocks import SelectedLists
from .primitives import PooledEntries, Rows, Strides, ValueTypes


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
    v_logs: log2 of the scales of fp8 values. raised: the same keys in the caller's own precision,
    for heads that an error budget raises. packed: the sequences of a pack."""

    facts: Tensor | None = None
    v_logs: Tensor | None = None
    raised: KeysOnDevice | None = None
    packed: Packed = NOT_PACKED


def keys_of(prepared: Prepared) -> KeysOnDevice:
    assert isinstance(prepared.keys, KeysOnDevice)
    return prepared.keys


def in_own_precision(call: Call) -> Call:
    return replace(call, recipe=replace(call.recipe, precision=call.own_precision))


def rows_of(x: Tensor, scale: Tensor | None = None) -> Rows:
    """A tensor whose last dimension is contiguous."""
    return Rows(x, scale, Strides(*x.stride()[:3]))


def query_rows(call: Call, queries: PreparedQueries) -> Rows:
    query = queries.rows
    if isinstance(query, QTensor):
        codes = padded(query.codes, query.shape[2], block_dim(call.D))
        return rows_of(codes, query.scale.contiguous())
    return rows_of(unit_rows(query))


def key_rows(call: Call, keys: KeysOnDevice) -> Rows:
    """Without codes, scales of 1, and NaN for key blocks that are not finite."""
    key = keys.key
    if isinstance(key, QTensor):
        assert key.rows_per_scale == BLOCK_K, "one scale for each key block"
        rows = n_key_blocks(call, keys) * BLOCK_K
        return rows_of(padded(key.codes, rows, block_dim(call.D)), key.scale.contiguous())
    return rows_of(unit_rows(key), keys.facts)


def value_rows(call: Call, keys: KeysOnDevice) -> tuple[Rows, ValueTypes]:
    """fp8 values are read transposed: their rows are contiguous, their channels are not."""
    value = keys.value
    if not isinstance(value, QTensor):
        return rows_of(unit_rows(value)), value_types(call)
    rows = n_key_blocks(call, keys) * BLOCK_K
    codes = padded(value.codes.transpose(2, 3), value_dim(call.Dv), rows)
    stride_b, stride_h, stride_d = codes.stride()[:3]
    held = Rows(codes, value.scale.contiguous(), Strides(stride_b, stride_h, 1, stride_d))
    return held, value_types(call, codes.dtype)


def pooled_entries(call: Call, keys: KeysOnDevice, blocks: Tensor | None = None) -> PooledEntries:
    """blocks: which are pooled, if the kernel does not find out itself."""
    entries = keys.entries
    if entries is None:
        return PooledEntries()
    n = n_key_blocks(call, keys) * (BLOCK_K // entries.group)
    assert isinstance(entries.value, Tensor)
    key, scale = entries.key, None
    if isinstance(key, QTensor):
        scale = padded(key.scale.unsqueeze(3), n, 1)
        key = key.codes
    value = padded(entries.value, n, value_dim(call.Dv))
    return PooledEntries(padded(key, n, block_dim(call.D)), value, scale, blocks)


def n_key_blocks(call: Call, keys: KeysOnDevice) -> int:
    """Of all sequences of a pack."""
    return keys.packed.n_k or call.n_k


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
    sizes = sizes_of(call, keys_of(prepared).packed)
    device = prepared.queries.rows.device
    counts = torch.empty((call.B, call.Hq, sizes.n_q), dtype=torch.int32, device=device)
    indices = counts.new_empty((*counts.shape, sizes.n_k))
    pools = None
    if prepared.keys.entries is not None:
        pools = counts.new_empty(indices.shape, dtype=torch.uint8)
    return SelectedLists(counts, indices, torch.empty_like(counts), pools)
