"""SAM 2's two exported files for a model of any size, as tiny inputs of `convert_sam2`."""

from __future__ import annotations

import flatbuffers
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from sparge_tools.zoo.vision.sam2 import Sam2

TYPES = {torch.float32: 1, torch.int64: 7}


def ort_file(tensors: dict[str, Tensor]) -> bytes:
    """An ONNX Runtime file with these initializers and nothing else."""
    builder = flatbuffers.Builder(1024)
    initializers = [ort_tensor(builder, name, tensor) for name, tensor in tensors.items()]
    graph = table(builder, 9, {0: vector(builder, initializers)})
    model = table(builder, 10, {7: graph})
    version = builder.CreateString("6")
    builder.Finish(table(builder, 3, {0: version, 1: model}), file_identifier=b"ORTM")
    return bytes(builder.Output())


def ort_tensor(builder: flatbuffers.Builder, name: str, tensor: Tensor) -> int:
    fields = {0: builder.CreateString(name)}
    if tensor.dim():
        fields[2] = builder.CreateNumpyVector(torch.tensor(tensor.shape).numpy())
    fields[4] = builder.CreateByteVector(tensor.contiguous().numpy().tobytes())
    return table(builder, 7, fields, numbers={3: TYPES[tensor.dtype]})


def table(
    builder: flatbuffers.Builder, size: int, fields: dict[int, int], *, numbers: dict | None = None
) -> int:
    builder.StartObject(size)
    for place, offset in fields.items():
        builder.PrependUOffsetTRelativeSlot(place, offset, 0)
    for place, number in (numbers or {}).items():
        builder.PrependInt32Slot(place, number, 0)
    return builder.EndObject()


def vector(builder: flatbuffers.Builder, offsets: list[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


def export_encoder(model: Sam2) -> dict[str, Tensor]:
    """The encoder's weights under the names of the published file."""
    trunk, tensors = "model.image_encoder.trunk", {"/Concat_output_0": torch.tensor([1, 32, -1])}
    state = model.encoder.state_dict()
    put = {
        "patches": f"{trunk}.patch_embed.proj",
        "to_fine": "model.sam_mask_decoder.conv_s0",
        "to_middle": "model.sam_mask_decoder.conv_s1",
        **{f"neck.{i}": f"model.image_encoder.neck.convs.{3 - i}.conv" for i in range(4)},
    }
    products = {"attention.qkv": "attn/qkv", "attention.out": "attn/proj", "widen": "proj"}
    products |= {"mlp.0": "mlp/layers.0", "mlp.2": "mlp/layers.1"}
    for i, block in enumerate(model.encoder.blocks):
        put |= {f"blocks.{i}.norm{n}": f"{trunk}.blocks.{i}.norm{n}" for n in (1, 2)}
        for name, path in products.items():
            if name == "widen" and block.widen is None:
                continue
            weight = state[f"blocks.{i}.{name}.weight"]
            tensors[f"/image_encoder/trunk/blocks.{i}/{path}/Transpose_output_0"] = weight.t()
            bias = f"{trunk}.blocks.{i}.{path.replace('/', '.')}.bias"
            tensors[bias] = state[f"blocks.{i}.{name}.bias"]
    for name, exported in put.items():
        for part in ("weight", "bias"):
            tensors[f"{exported}.{part}"] = state[f"{name}.{part}"]
    tensors["/image_encoder/trunk/Transpose_output_0"] = state["positions"]
    tensors["no_mem_embed"] = state["no_memory"].flatten(2)
    return tensors


def export_decoder(model: Sam2) -> bytes:
    """The decoder's weights in an ONNX file, whose nodes are only those that name weights."""
    state, named, read = model.decoder.state_dict(), {}, {}
    named["prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"] = state[
        "points.frequencies"
    ]
    for i, name in enumerate(("background", "object")):
        named[f"prompt_encoder.point_embeddings.{i}.weight"] = state[f"points.{name}"][None]
    named["prompt_encoder.not_a_point_embed.weight"] = state["points.no_point"][None]
    read["Mul", "/Mul_15_output_0"] = state["no_mask"]
    read["Expand", "/Expand_9_output_0"] = state["tokens"]
    read["Mul", "/output_upscaling.1/Mul_output_0"] = state["middle_norm.weight"][:, None, None]
    read["Add", "/output_upscaling.1/Add_1_output_0"] = state["middle_norm.bias"][:, None, None]
    attentions = {"final_attention": "transformer/final_attn_token_to_image"}
    products = {}
    put = {"final_norm": "transformer.norm_final_attn", "to_middle": "output_upscaling.0"}
    put["to_fine"] = "output_upscaling.3"
    put |= {f"iou.{2 * n}": f"iou_prediction_head.layers.{n}" for n in range(3)}
    for i in range(4):
        heads = f"output_hypernetworks_mlps.{i}"
        put |= {f"filters.{i}.{2 * n}": f"{heads}.layers.{n}" for n in range(3)}
    for i in range(model.config.decoder_layers):
        layer = f"transformer/layers.{i}"
        attentions[f"layers.{i}.self_attention"] = f"{layer}/self_attn"
        for name in ("token_to_image", "image_to_token"):
            attentions[f"layers.{i}.{name}"] = f"{layer}/cross_attn_{name}"
        products |= {f"layers.{i}.mlp.{2 * n}": f"{layer}/mlp/layers.{n}" for n in range(2)}
        put |= {f"layers.{i}.norm{n}": f"transformer.layers.{i}.norm{n}" for n in range(1, 5)}
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    for name, path in attentions.items():
        products |= {f"{name}.{own}": f"{path}/{theirs}" for own, theirs in parts.items()}
    for name, path in products.items():
        read["MatMul", f"/{path}/MatMul_output_0"] = state[f"{name}.weight"].t()
        named[f"mask_decoder.{path.replace('/', '.')}.bias"] = state[f"{name}.bias"]
    for name, exported in put.items():
        for part in ("weight", "bias"):
            named[f"mask_decoder.{exported}.{part}"] = state[f"{name}.{part}"]
    return onnx_file(named, read)


def onnx_file(named: dict[str, Tensor], read: dict[tuple[str, str], Tensor]) -> bytes:
    """named: initializers. read: others, with the node that reads each and its output."""
    weights = dict(named)
    nodes = []
    for i, ((op, output), tensor) in enumerate(read.items()):
        weights[f"onnx::{op}_{i}"] = tensor
        nodes.append(helper.make_node(op, ["given", f"onnx::{op}_{i}"], [output]))
    tensors = [numpy_helper.from_array(t.contiguous().numpy(), n) for n, t in weights.items()]
    given = helper.make_tensor_value_info("given", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "decoder", [given], [], tensors)
    return onnx.ModelProto(graph=graph).SerializeToString()
