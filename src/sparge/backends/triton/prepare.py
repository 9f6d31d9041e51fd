"""The first stage: codes, scales, block statistics and pooled entries, by prepare_kernel.py.

Codes of q are as long as q; those of k are padded to whole blocks, and both to `block_dim`
channels, so that the loops of the later kernels load without masks. What the stages pass on are
views of their shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...values.call import BLOCK_K, BLOCK_Q, Call, n_blocks
from ...values.stages import Pooled, QTensor
from . import prepare_kernel
from .arguments import (
    NOT_PACKED,
    TYPES,
    Packed,
    architecture,
    block_dim,
    held_in,
    most_of,
    rotated,
    types_of,
    unit_rows,
    value_dim,
    value_types,
)
from .launch import DoesNotFit, launch
from .operands import KeysOnDevice, QueriesOnDevice, in_own_precision, padded, rows_of
from .prepare_kernel import PreparedBlocks, PreparedRows
from .primitives import Types

_OPTIONS = {"num_warps": 8, "num_stages": 2}
_MANY_WARPS = {"num_warps": 16, "num_stages": 1}
"""For 128 rows of 128 channels or 64 of 256, which are rotated in registers at once."""
CHUNKS = 64
FEWEST_CODE_ROWS = 32


def prepare_keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    *,
    mean: Tensor | None = None,
    to_plan: bool,
    to_attend: bool,
    packed: Packed = NOT_PACKED,
) -> KeysOnDevice:
    """mean: defaults to the mean of `key`. A caller that holds part of the sequence passes the mean
    over all of it."""
    coded, pooled, similar = _wanted(call, to_plan=to_plan, to_attend=to_attend)
    if not (coded or pooled or similar):
        mean = None
    elif mean is None:
        mean = _mean_key(call, unit_rows(key), packed)
    read = value if to_attend or call.measures_error else None
    keys = _make_keys(
        call, key, value, mean, read, coded=coded, pooled=pooled, similar=similar, packed=packed
    )
    if not call.may_raise:
        return keys
    own = in_own_precision(call)
    read = value if to_attend else None
    return replace(keys, raised=_make_keys(own, key, value, None, read, coded=False))


def prepare_queries(
    call: Call,
    query: Tensor,
    *,
    mean: Tensor | None,
    to_plan: bool,
    to_attend: bool,
    packed: Packed = NOT_PACKED,
) -> QueriesOnDevice:
    """mean: `PreparedKeys.mean`, for lse_shift."""
    coded, pooled, similar = _wanted(call, to_plan=to_plan, to_attend=to_attend)
    deviates, shifts = to_plan and call.measures_error, coded and to_attend
    x = unit_rows(query)
    B, Hq, Lq, D, BLOCK_D = call.B, call.Hq, call.Lq, call.D, block_dim(call.D)
    n_q = packed.n_q or call.n_q
    made = PreparedRows(
        codes=_empty(x, B, Hq, Lq, BLOCK_D, when=coded, dtype=torch.int8),
        scales=_empty(x, B, Hq, Lq, when=coded),
        pooled=_empty(x, B, Hq, n_q, BLOCK_D, when=pooled),
        similarity=_empty(x, B, Hq, n_q, when=similar),
        lse_shift=_empty(x, B, Hq, Lq, when=shifts),
        deviation=_empty(x, B, Hq, Lq, when=deviates),
        energy=_empty(x, B, Hq, n_q, when=deviates),
    )

    def run(CODE_ROWS: int) -> None:
        launch(
            prepare_kernel.prepare_queries,
            (n_q, Hq, B),
            _MANY_WARPS if CODE_ROWS == BLOCK_Q and BLOCK_D == 128 else _OPTIONS,
            q=x,
            means=_padded_mean(call, mean) if shifts else None,
            made=made,
            pack=packed.of_queries,
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
            run(_code_rows(D))
        except DoesNotFit:
            run(FEWEST_CODE_ROWS)
    return QueriesOnDevice(
        QTensor(made.codes[..., :D], made.scales) if coded else _narrow(call, query),
        query,
        made.lse_shift,
        None if made.pooled is None else made.pooled[..., :D],
        made.similarity,
        made.deviation,
        made.energy,
    )


def _wanted(call: Call, *, to_plan: bool, to_attend: bool) -> tuple[bool, bool, bool]:
    """Whether codes, pooled tokens and self-similarities are needed."""
    coded = call.recipe.quantized and (to_attend or call.samples_rows)
    similar = to_plan and call.predicts and call.recipe.min_similarity is not None
    return coded, to_plan and call.pools_blocks, similar


def _empty(
    like: Tensor, *shape: int, when: bool, dtype: torch.dtype | None = torch.float32
) -> Tensor | None:
    return like.new_empty(shape, dtype=dtype) if when else None


def _code_rows(D: int) -> int:
    """Query rows that are rotated at a time. Rows pass through shared memory, of which 128 of 256
    channels take 128 KB; a second rotation, of a head dim that is no power of two, needs more
    registers than a thread has for so many."""
    if block_dim(D) > 128:
        return FEWEST_CODE_ROWS
    return BLOCK_Q if rotated(D) == D else 64


def _mean_key(call: Call, key: Tensor, packed: Packed) -> Tensor:
    """The mean key of each head `[sequences, Hk, D]`, fp32; a view of rows that are padded."""
    n, BLOCK_D = packed.sequences or call.B, block_dim(call.D)
    sums = key.new_empty((n, call.Hk, CHUNKS, BLOCK_D), dtype=torch.float32)
    means = key.new_empty((n, call.Hk, BLOCK_D), dtype=torch.float32)
    common: dict[str, Any] = {"pack": packed.of_keys, "Hk": call.Hk, "Lk": call.Lk}
    launch(
        prepare_kernel.sum_keys,
        (CHUNKS, call.Hk, n),
        _OPTIONS,
        k=key,
        sums=sums,
        strides=rows_of(key).strides,
        D=call.D,
        BLOCK_D=BLOCK_D,
        **common,
    )
    launch(
        prepare_kernel.mean_keys,
        (call.Hk, n),
        {"num_warps": 1},
        sums=sums,
        means=means,
        n_chunks=CHUNKS,
        BLOCK_D=BLOCK_D,
        **common,
    )
    return means[..., : call.D]


def _padded_mean(call: Call, mean: Tensor | None) -> Tensor | None:
    """A mean of the keys `[sequences, Hk, D]` with `block_dim` channels."""
    return None if mean is None else padded(mean[:, None], call.Hk, block_dim(call.D))


def _narrow(call: Call, x: Tensor) -> Tensor:
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
        (n_blocks(L, BLOCK_K), H, B),
        _OPTIONS,
        x=x,
        out=out,
        strides=rows_of(x).strides,
        H=H,
        L=L,
        TYPES=Types(D, value_dim(D), TYPES[held], most_of(held), ""),
    )
    return out


def _make_keys(
    call: Call,
    key: Tensor,
    value: Tensor | None,
    mean: Tensor | None,
    read: Tensor | None,
    *,
    coded: bool,
    pooled: bool = False,
    similar: bool = False,
    packed: Packed = NOT_PACKED,
) -> KeysOnDevice:
    """coded, pooled, similar: which fields there are to be. read: the value, if its fp8 codes or
    pooled entries are wanted, and what is not finite of it is looked for."""
    B, Hk, D, recipe = call.B, call.Hk, call.D, call.recipe
    k = unit_rows(key)
    v = None if read is None else unit_rows(read)
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
    n_entries, pools = n_k * (BLOCK_K // group) if group else 0, group > 0
    made = PreparedBlocks(
        codes=_empty(k, B, Hk, n_k * BLOCK_K, BLOCK_D, when=coded, dtype=torch.int8),
        scales=k.new_empty((B, Hk, n_k), dtype=torch.float32),
        pooled=_empty(k, B, Hk, n_k, BLOCK_D, when=pooled),
        similarity=_empty(k, B, Hk, n_k, when=similar),
        entry_k=_empty(
            k, B, Hk, n_entries, BLOCK_D, when=pools, dtype=torch.int8 if coded else held
        ),
        entry_v=_empty(k, B, Hk, n_entries, BLOCK_DV, when=pools, dtype=held),
        entry_scale=_empty(k, B, Hk, n_entries, when=pools),
        v_codes=_empty(k, B, Hk, BLOCK_DV, n_k * BLOCK_K, when=fast, dtype=fp8),
        v_scales=_empty(k, B, Hk, n_k, when=fast),
        v_logs=_empty(k, B, Hk, n_k, when=fast),
    )
    launch(
        prepare_kernel.prepare_keys,
        (n_k, Hk, B),
        _MANY_WARPS if max(BLOCK_D, BLOCK_DV) > 128 else _OPTIONS,
        k=k,
        v=v,
        means=_padded_mean(call, mean),
        made=made,
        pack=packed.of_keys,
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
        own = _narrow(call, own)
    entries = None
    if pools:
        n = n_entries if packed else n_blocks(call.Lk, group)
        mean_k: Tensor | QTensor = made.entry_k[:, :, :n, :D]
        if coded:
            mean_k = QTensor(made.entry_k[:, :, :n, :D], made.entry_scale[:, :, :n])
        entries = Pooled(mean_k, made.entry_v[:, :, :n, : call.Dv], group)
    return KeysOnDevice(
        QTensor(made.codes[:, :, :rows, :D], made.scales, BLOCK_K) if coded else _narrow(call, key),
        own,
        key,
        value,
        mean,
        None if made.pooled is None else made.pooled[..., :D],
        made.similarity,
        entries,
        facts=None if coded else made.scales,
        v_logs=made.v_logs,
        packed=packed,
    )
