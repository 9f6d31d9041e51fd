"""Operands of a call as arguments of kernels: codes padded to whole blocks, or the caller's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...values.call import Call
from ...values.geometry import BLOCK_K
from ...values.qtensor import QTensor
from .architectures import Architecture, architecture_of
from .one_pass import Prepared
from .packed import NOT_PACKED
from .shapes import block_dim, held_in, most_of, tl_type, unit_rows


def type_arguments(call: Call, *, coded: bool) -> dict[str, Any]:
    """Sizes and types that most kernels are compiled for."""
    held = held_in(call)
    return {
        "D": call.D,
        "BLOCK_D": block_dim(call.D),
        "HELD": tl_type(held),
        "MOST": most_of(held),
        "CODED": coded,
        "EXACT": fp32_products(call) if call.recipe.precision == "exact" else "",
    }


def fp32_products(call: Call) -> str:
    """How `"exact"` multiplies, as Triton names it."""
    found = architecture_of(*call.where)
    assert isinstance(found, Architecture)
    return found.fp32


def query_arguments(call: Call, prepared: Prepared) -> dict[str, Any]:
    query = prepared.operands.query
    if isinstance(query, QTensor):
        codes = padded(query.codes, query.shape[2], block_dim(call.D))
        scale = query.scale.contiguous()
        given: dict[str, Any] = {"q": codes, "q_scale": scale}
    else:
        given = {"q": unit_rows(query), "q_scale": None}
    strides = given["q"].stride()
    names = ("stride_qb", "stride_qh", "stride_qm")
    coded = isinstance(query, QTensor)
    return {
        **given,
        **dict(zip(names, strides, strict=False)),
        **type_arguments(call, coded=coded),
    }


def key_arguments(call: Call, prepared: Prepared) -> dict[str, Any]:
    key = prepared.operands.key
    names = ("stride_kb", "stride_kh", "stride_kn")
    if isinstance(key, QTensor):
        assert key.rows_per_scale == BLOCK_K, "one scale for each key block"
        rows = n_key_blocks(call, prepared) * BLOCK_K
        codes = padded(key.codes, rows, block_dim(call.D))
        given: dict[str, Any] = {"k": codes, "k_scale": key.scale.contiguous()}
    else:
        given = {"k": unit_rows(key), "k_scale": key_facts(call, prepared)}
    return {**given, **dict(zip(names, given["k"].stride(), strict=False))}


def n_key_blocks(call: Call, prepared: Prepared) -> int:
    """Of all sequences of a pack."""
    return getattr(prepared, "packed", NOT_PACKED).n_k or call.n_k


def key_facts(call: Call, prepared: Prepared) -> Tensor:
    """1 for each key block, NaN if it is not finite."""
    from .prepare import OnDevice, _keys

    facts = prepared.key_facts if isinstance(prepared, OnDevice) else None
    if facts is None:
        key, value = prepared.operands.key, prepared.operands.value
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        made = _keys(call, unit_rows(key), unit_rows(value), None, False, False, False, NOT_PACKED)
        facts = made.scales
    return facts


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
