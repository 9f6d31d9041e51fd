"""Files as the packages of plain modules have them: ONNX, a checkpoint, MIDI. All tiny."""

from __future__ import annotations

import io

import torch

from sparge_tools.zoo.music.encoder import ATTENTION, COMPUTED, INNER, OTHERS
from sparge_tools.zoo.vision.terrain_weights import NORM_OF, PREFIX, _names

NORMS = {norm: layer for layer, norm in NORM_OF.items()}


def onnx_of(state, config):
    """An ONNX file with these weights as the real one has them: norms are unnamed constants.

    Each norm leads to its convolution, through what may be between them. Nothing can run it.
    """
    from onnx import helper, numpy_helper

    names, constants, nodes = _names(config), [], []

    def constant(name, tensor):
        constants.append(numpy_helper.from_array(tensor.numpy(), name))

    for name, tensor in state.items():
        part, _, kind = name.rpartition(".")
        norm = next((norm for norm in NORMS if names[part].endswith(f".{norm}")), None)
        if "norm" not in part:
            flat = kind == "weight" and names[part].endswith((".qkv", ".proj_out"))
            there = tensor[..., None, None] if flat else tensor  # 1×1 convolutions
            constant(f"{PREFIX}{names[part]}.{kind}", there)
            continue
        constant(f"val_{name}", tensor[:, None, None])
        if kind == "weight":
            to = f"{PREFIX}{names[part].removesuffix(norm)}{NORMS[norm]}.weight"
            steps = [
                ("InstanceNormalization", ["one", "zero"]),
                ("Reshape", ["shape"]),
                ("Mul", [f"val_{name}"]),
                ("Add", [f"val_{part}.bias"]),
                ("Sigmoid", []),
                ("Conv", [to]),
            ]
            before = f"in_{part}"
            for step, more in steps:
                nodes.append(helper.make_node(step, [before, *more], [f"{step}_{part}"]))
                before = f"{step}_{part}"
    return helper.make_model(helper.make_graph(nodes, "net", [], [], constants))


def checkpoint(state, config):
    """The names of the file: attention and inner layers are layers of their own."""
    theirs = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if parts[0] != "layers":
            theirs[{ours: name for name, ours in OTHERS.items()}[name]] = tensor
            continue
        i = 2 * int(parts[1])
        if parts[2] == "attention":
            part = {ours: name for name, ours in ATTENTION.items()}[parts[3]]
            theirs[f"attn_layers.layers.{i}.1.{part}.weight"] = tensor
        elif parts[2].endswith("norm"):
            theirs[f"attn_layers.layers.{i + (parts[2] == 'inner_norm')}.0.0.gamma"] = tensor
        else:
            part = {ours: name for name, ours in INNER.items()}[parts[2]]
            theirs[f"attn_layers.layers.{i + 1}.1.{part}.{parts[3]}"] = tensor
    theirs["attn_layers.final_norm.gamma"] = state["norm.weight"]
    theirs = {k: v - 1 if k.endswith("gamma") else v for k, v in theirs.items()}
    return {**theirs, COMPUTED: torch.ones(config.head_dim // 4)}


def saved(data):
    file = io.BytesIO()
    torch.save(data, file)
    return file.getvalue()


def track(data: bytes) -> bytes:
    return b"MTrk" + len(data).to_bytes(4, "big") + data


def midi(*tracks: bytes, division: int = 96) -> bytes:
    header = (1).to_bytes(2, "big") + len(tracks).to_bytes(2, "big") + division.to_bytes(2, "big")
    return b"MThd" + (6).to_bytes(4, "big") + header + b"".join(map(track, tracks))
