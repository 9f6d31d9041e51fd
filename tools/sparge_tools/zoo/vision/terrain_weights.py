"""Weights of the terrain model, from the ONNX file that carries them.

Convolutions and linear layers keep their names in the file. Scales and shifts of the group norms
are constants without a name; a norm is identified by the convolution that it leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
