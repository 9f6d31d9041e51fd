"""Read the weights of an ONNX Runtime file (`.ort`), which is a flatbuffer.

Only what is needed: session → model → graph → initializers. The numbers are the places of the
fields in ONNX Runtime's public schema (ort.fbs), which may grow at the end but does not change.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from ...optional_libraries import need_libraries

IDENTIFIER = b"ORTM"
SESSION_MODEL = 1
MODEL_GRAPH = 7
GRAPH_INITIALIZERS = 0
TENSOR_NAME, TENSOR_DIMS, TENSOR_TYPE, TENSOR_RAW = 0, 2, 3, 4
FLOAT = 1
"""float32 among the data types of ONNX."""


def read_ort_weights(data: bytes) -> dict[str, Tensor]:
    """The float32 initializers of a file by name, copied.

    Constants of other types are left out; they are shapes. Raises ValueError if the data is not an
    ONNX Runtime file or is damaged, Unsupported without the package flatbuffers.
    """
    if data[4:8] != IDENTIFIER:
        came = f"{len(data)} bytes with {bytes(data[4:8])!r}"
        raise ValueError(
            f"data must be an ONNX Runtime file, with {IDENTIFIER!r} at byte 4; got {came}; an "
            ".onnx file is another format"
        )
    need_libraries("ONNX Runtime files cannot be read", "flatbuffers", extra="vision")
    try:
        session = _table(data, struct.unpack_from("<I", data)[0])
        graph = _child(_child(session, SESSION_MODEL), MODEL_GRAPH)
        tensors = [_read_tensor(table) for table in _children(graph, GRAPH_INITIALIZERS)]
    except (struct.error, IndexError, TypeError, UnicodeDecodeError, OverflowError) as error:
        reason = "the file is damaged or was cut"
        raise ValueError(f"data could not be read as an ONNX Runtime file: {reason}") from error
    return {name: tensor for name, tensor in tensors if tensor is not None}


def _read_tensor(table: Any) -> tuple[str, Tensor | None]:
    from flatbuffers import number_types  # type: ignore[import-untyped]

    name = _bytes(table, TENSOR_NAME, "a name").decode()
    kind = table.Offset(4 + 2 * TENSOR_TYPE)
    if not kind or table.Get(number_types.Int32Flags, table.Pos + kind) != FLOAT:
        return name, None
    dims = table.Offset(4 + 2 * TENSOR_DIMS)  # left out for a scalar
    n = table.VectorLen(dims) if dims else 0
    shape = struct.unpack_from(f"<{n}q", table.Bytes, table.Vector(dims)) if n else ()
    values = bytearray(_bytes(table, TENSOR_RAW, name))
    if len(values) != 4 * math.prod(shape) or min(shape, default=0) < 0:
        raise ValueError(f"data is damaged: {name} {list(shape)} has {len(values)} bytes")
    flat = torch.frombuffer(values, dtype=torch.float32) if values else torch.empty(0)
    return name, flat.view(shape)


def _bytes(table: Any, field: int, what: str) -> bytes:
    """The bytes of a vector or a string."""
    offset = _offset(table, field)
    start, size = table.Vector(offset), table.VectorLen(offset)
    if start + size > len(table.Bytes):
        raise ValueError(f"data was cut: {what} ends at byte {start + size} of {len(table.Bytes)}")
    return table.Bytes[start : start + size]


def _table(data: bytes, position: int) -> Any:
    from flatbuffers.table import Table  # type: ignore[import-untyped]

    if not 0 <= position < len(data):
        raise IndexError(position)
    return Table(data, position)


def _offset(table: Any, field: int) -> int:
    """Where a field is, from the start of its table. Raises ValueError if it is left out."""
    offset = int(table.Offset(4 + 2 * field))  # the first two entries are sizes
    if not offset:
        raise ValueError(f"data must have field {field} in each table that is read, got none")
    return offset


def _child(table: Any, field: int) -> Any:
    return _table(table.Bytes, table.Indirect(table.Pos + _offset(table, field)))


def _children(table: Any, field: int) -> list[Any]:
    offset = _offset(table, field)
    start = table.Vector(offset)
    places = range(start, start + 4 * table.VectorLen(offset), 4)
    return [_table(table.Bytes, table.Indirect(place)) for place in places]
