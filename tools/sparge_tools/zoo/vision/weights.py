"""Weights of the vision models under the names of their modules, from the exported files.

Terrain: convolutions and linear layers keep their names in the ONNX file. Scales and shifts of the
group norms are constants without a name; a norm is identified by the convolution it leads to.

SAM 2: the encoder comes as an ONNX Runtime file, the decoder as ONNX. Both exports keep the names
of most weights. Weights of matrix products were transposed and renamed: in the encoder by the place
of the product; in the decoder to numbers, so they are found by the output of the node that reads
them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...optional_libraries import need_libraries
from .sam2 import MASK_TOKENS, STAGES, ImageEncoder, MaskDecoder, Sam2Config
from .terrain import Terrain, TerrainConfig

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto


PREFIX = "network."
BLOCK = {
    "in_layers.0": "norm_in",
    "in_layers.2": "conv_in",
    "emb_layers.1": "modulate",
    "out_layers.0": "norm_out",
    "out_layers.3": "conv_out",
    "skip_connection": "skip",
}
"""Parts of a residual block: their names in the file, and here."""
ATTENTION = {"norm": "norm", "qkv": "qkv", "proj_out": "out"}
NORM_OF = {"in_layers.2": "in_layers.0", "out_layers.3": "out_layers.0", "qkv": "norm", "2": "0"}
"""By the convolution that a norm leads to, the name of the norm."""


def convert_terrain(file: bytes, config: TerrainConfig | None = None) -> dict[str, Tensor]:
    """The state dict of `Terrain(config)`, in float32.

    Raises ValueError if the file is no ONNX model or not of this net.
    """
    import onnx

    config = config or TerrainConfig()
    try:
        graph = onnx.load_model_from_string(file).graph
    except Exception as error:  # protobuf's own error types differ between its versions
        raise ValueError(f"the file is no ONNX model: {error}") from error
    found = _weights(graph)
    names = _names(config)
    with torch.device("meta"):
        needed = Terrain(config).state_dict()
    state: dict[str, Tensor] = {}
    for name, tensor in needed.items():
        part, _, kind = name.rpartition(".")
        source = f"{names[part]}.{kind}"
        if source not in found or found[source].numel() != tensor.numel():
            has = f"of shape {tuple(found[source].shape)}" if source in found else "missing"
            raise ValueError(
                f"the file is no terrain model: {source} is {has}, needed is {tuple(tensor.shape)}"
            )
        # 1×1 convolutions are linear layers here.
        state[name] = found.pop(source).reshape(tensor.shape)
    if found:
        raise ValueError(f"the file is no terrain model: it also has {', '.join(sorted(found))}")
    return state


def _names(config: TerrainConfig) -> dict[str, str]:
    """By the name of a layer here, its name in the file."""
    last, names = len(config.multipliers) - 1, {}
    for i in (0, 2):
        names[f"noise_embedding.{i}"] = f"time_embed.{i}"
        names[f"difficulty_embedding.{i}"] = f"label_emb.{i}"
    names |= {"stem": "input_blocks.0.0", "out_norm": "out.0", "out": "out.2"}

    def add(parts: Mapping[str, str], here: str, there: str) -> None:
        names.update({f"{here}.{ours}": f"{there}.{theirs}" for theirs, ours in parts.items()})

    # The file counts steps on the way down and on the way up; a step is a list of layers.
    step = 1
    for level in range(last + 1):
        for i in range(config.blocks):
            add(BLOCK, f"down.{level}.blocks.{i}", f"input_blocks.{step}.0")
            add(ATTENTION, f"down.{level}.attention.{i}", f"input_blocks.{step}.1")
            step += 1
        add(BLOCK, f"down.{level}.resample", f"input_blocks.{step}.0")
        step += 1
    add(BLOCK, "middle.blocks.0", "middle_block.0")
    add(ATTENTION, "middle.attention.0", "middle_block.1")
    add(BLOCK, "middle_out", "middle_block.2")
    step = 0
    for level in reversed(range(last + 1)):
        for i in range(config.blocks + 1):
            add(BLOCK, f"up.{level}.blocks.{i}", f"output_blocks.{step}.0")
            add(ATTENTION, f"up.{level}.attention.{i}", f"output_blocks.{step}.1")
            step += 1
        resample = 2 if level in config.attention_levels else 1
        add(BLOCK, f"up.{level}.resample", f"output_blocks.{step - 1}.{resample}")
    return names


def _weights(graph: GraphProto) -> dict[str, Tensor]:
    """All weights by their names in the file, those of the norms included."""
    from onnx import numpy_helper

    stored: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(numpy_helper.to_array(stored[name]).copy()).float()

    weights = {
        name.removeprefix(PREFIX): tensor(name) for name in stored if name.startswith(PREFIX)
    }
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.op_type != "InstanceNormalization":
            continue
        # A group norm is: normalize, reshape, multiply by a constant, add another.
        shift = _follow(node, ("Reshape", "Mul", "Add"), readers)
        if shift is None or not (conv := _next_convolution(shift, readers)):
            raise ValueError(f"the file is no terrain model: {node.output[0]} leads nowhere")
        scale = next(n for n in graph.node if n.output[0] in shift.input)
        name = _norm_of(conv.removeprefix(PREFIX).removesuffix(".weight"))
        for kind, of in (("weight", scale), ("bias", shift)):
            constants = [name for name in of.input if name in stored]
            if len(constants) != 1:
                raise ValueError(f"the file is no terrain model: {of.output[0]} is no norm's")
            weights[f"{name}.{kind}"] = tensor(constants[0])
    return weights


def _follow(
    node: NodeProto, kinds: tuple[str, ...], readers: Mapping[str, list[NodeProto]]
) -> NodeProto | None:
    """The last of a chain of nodes of these kinds, or None."""
    for kind in kinds:
        after = [n for n in readers.get(node.output[0], []) if n.op_type == kind]
        if len(after) != 1:
            return None
        node = after[0]
    return node


def _next_convolution(node: NodeProto, readers: Mapping[str, list[NodeProto]]) -> str:
    """The name of the weight of the first convolution behind a node, or ""."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop(0)
        for name in node.output:
            for reader in readers.get(name, []):
                if reader.op_type == "Conv":
                    return str(reader.input[1])
                if reader.output[0] not in seen:
                    seen.add(reader.output[0])
                    todo.append(reader)
    return ""


def _norm_of(convolution: str) -> str:
    for layer, norm in NORM_OF.items():
        if convolution.endswith(f".{layer}"):
            return f"{convolution.removesuffix(layer)}{norm}"
    raise ValueError(f"the file is no terrain model: a norm leads to {convolution}")


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


Change = Callable[[Tensor], Tensor]
Rule = tuple[str, str, Change]
"""A name in `Sam2`, the name in the export, and what makes the one of the other."""

TRUNK = "model.image_encoder.trunk"


def convert_sam2(
    encoder_ort: bytes, decoder_onnx: bytes, *, config: Sam2Config | None = None
) -> dict[str, Tensor]:
    """The state dict of `Sam2(config)`; by default, of SAM 2 Hiera-Tiny.

    What a prompt of points does not use is left out: masks as prompts, and corners of boxes. Raises
    ValueError if a file is not what it should be: another format, a missing weight, another shape;
    Unsupported without the packages flatbuffers and onnx.
    """
    config = config or Sam2Config()
    with torch.device("meta"):
        parts = {"encoder": ImageEncoder(config), "decoder": MaskDecoder(config)}
        expected = nn.ModuleDict(parts).state_dict()
    encoder = _read("encoder_ort", encoder_ort, read_ort_weights)
    decoder = _read("decoder_onnx", decoder_onnx, read_onnx_weights)
    state = {f"encoder.{name}": tensor for name, tensor in _take(_encoder_rules(config), encoder)}
    state |= {f"decoder.{name}": tensor for name, tensor in _take(_decoder_rules(config), decoder)}
    assert state.keys() == expected.keys(), sorted(state.keys() ^ expected.keys())
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(expected[name].shape)}, got {list(tensor.shape)}"
            raise ValueError(f"{name} must be of shape {shapes}; is it another size of SAM 2?")
    return state


def _read(
    argument: str, data: bytes, read: Callable[[bytes], dict[str, Tensor]]
) -> dict[str, Tensor]:
    try:
        return read(data)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error


def read_onnx_weights(data: bytes) -> dict[str, Tensor]:
    """The float32 initializers of an ONNX file.

    By name, and also by the outputs of the nodes that read no other one. Raises ValueError if
    the data is not an ONNX model with a graph, Unsupported without the package onnx.
    """
    need_libraries("ONNX files cannot be read", "onnx", extra="vision")
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        graph = onnx.load_model_from_string(data).graph
    except DecodeError as error:
        raise ValueError(f"data must be an ONNX model, got {len(data)} other bytes") from error
    weights = {
        tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    if not weights:
        raise ValueError(f"data must be an ONNX model with weights, got none in {len(data)} bytes")
    readers = {}
    for node in graph.node:
        read = [weights[name] for name in node.input if name in weights]
        if len(read) == 1:
            readers[node.output[0]] = read[0]
    return {**readers, **weights}


def _take(rules: Iterator[Rule], weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, source, change in rules:
        if source not in weights:
            way_out = "is it the export of another model?"
            raise ValueError(f"{source} must be among the weights of the file; {way_out}")
        yield name, change(weights[source]).contiguous()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t() if tensor.dim() == 2 else tensor


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


def _channels(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, -1, 1, 1)


def _both(name: str, source: str) -> Iterator[Rule]:
    yield f"{name}.weight", f"{source}.weight", _same
    yield f"{name}.bias", f"{source}.bias", _same


def _encoder_rules(config: Sam2Config) -> Iterator[Rule]:
    yield from _both("patches", f"{TRUNK}.patch_embed.proj")
    yield "positions", "/image_encoder/trunk/Transpose_output_0", _same
    for i, block in enumerate(config.blocks()):
        layers = {
            "attention.qkv": "attn.qkv",
            "attention.out": "attn.proj",
            "mlp.0": "mlp.layers.0",
            "mlp.2": "mlp.layers.1",
        }
        if block.width_in != block.width:
            layers["widen"] = "proj"
        for name, source in layers.items():
            # "/image_encoder/trunk/blocks.0/mlp/layers.0/…": a number stays with its list.
            path = source.replace(".", "/").replace("layers/", "layers.")
            product = f"/image_encoder/trunk/blocks.{i}/{path}/Transpose_output_0"
            yield f"blocks.{i}.{name}.weight", product, _transposed
            yield f"blocks.{i}.{name}.bias", f"{TRUNK}.blocks.{i}.{source}.bias", _same
        for name in ("norm1", "norm2"):
            yield from _both(f"blocks.{i}.{name}", f"{TRUNK}.blocks.{i}.{name}")
    for stage in range(STAGES):  # the export counts from the coarsest
        yield from _both(
            f"neck.{stage}", f"model.image_encoder.neck.convs.{STAGES - 1 - stage}.conv"
        )
    yield "no_memory", "no_mem_embed", _channels
    yield from _both("to_fine", "model.sam_mask_decoder.conv_s0")
    yield from _both("to_middle", "model.sam_mask_decoder.conv_s1")


def _decoder_rules(config: Sam2Config) -> Iterator[Rule]:
    yield "points.frequencies", "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix", _same
    yield "points.background", "prompt_encoder.point_embeddings.0.weight", _flat
    yield "points.object", "prompt_encoder.point_embeddings.1.weight", _flat
    yield "points.no_point", "prompt_encoder.not_a_point_embed.weight", _flat
    yield "no_mask", "/Mul_15_output_0", _channels
    yield "tokens", "/Expand_9_output_0", _same
    for i in range(config.decoder_layers):
        layer = f"transformer.layers.{i}"
        yield from _attention(f"layers.{i}.self_attention", f"{layer}.self_attn")
        for name in ("token_to_image", "image_to_token"):
            yield from _attention(f"layers.{i}.{name}", f"{layer}.cross_attn_{name}")
        for n in range(1, 5):
            yield from _both(f"layers.{i}.norm{n}", f"mask_decoder.{layer}.norm{n}")
        for n in range(2):
            yield from _product(f"layers.{i}.mlp.{2 * n}", f"{layer}.mlp.layers.{n}")
    yield from _attention("final_attention", "transformer.final_attn_token_to_image")
    yield from _both("final_norm", "mask_decoder.transformer.norm_final_attn")
    yield from _both("to_middle", "mask_decoder.output_upscaling.0")
    yield "middle_norm.weight", "/output_upscaling.1/Mul_output_0", _flat
    yield "middle_norm.bias", "/output_upscaling.1/Add_1_output_0", _flat
    yield from _both("to_fine", "mask_decoder.output_upscaling.3")
    heads = {f"filters.{i}": f"output_hypernetworks_mlps.{i}" for i in range(MASK_TOKENS)}
    for name, source in {**heads, "iou": "iou_prediction_head"}.items():
        for n in range(3):
            yield from _both(f"{name}.{2 * n}", f"mask_decoder.{source}.layers.{n}")


def _attention(name: str, source: str) -> Iterator[Rule]:
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    for part, exported in parts.items():
        yield from _product(f"{name}.{part}", f"{source}.{exported}")


def _product(name: str, source: str) -> Iterator[Rule]:
    """A linear layer whose weight is known by the output of its product."""
    path = source.replace(".", "/").replace("layers/", "layers.")
    yield f"{name}.weight", f"/{path}/MatMul_output_0", _transposed
    yield f"{name}.bias", f"mask_decoder.{source}.bias", _same
