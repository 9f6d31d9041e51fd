"""Files as the packages of plain modules have them, tiny."""

from __future__ import annotations

from sparge_tools.zoo.vision.weights import NORM_OF, PREFIX, _names

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
