"""Packages as the zoo reads them: a tiny Llama in 4-bit GGUF, a few texts. No network anywhere."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

from sparge_tools.zoo.catalogue import Carrier, Member, ZooModel, ZooText

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_wheel(
    folder: Path, package: str, members: dict[str, bytes], needed: tuple[str, ...] = ()
) -> Carrier:
    """A wheel that pip takes, of a Python later than any that runs this.

    needed: the members that a model is made from.
    """
    stem = f"{package.replace('-', '_')}-1.0"
    file = folder / f"{stem}-py3-none-any.whl"
    name = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0"
    about = {
        "METADATA": f"{name}\nRequires-Python: >=3.99",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
        "RECORD": "",
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        for name, text in about.items():
            archive.writestr(f"{stem}.dist-info/{name}", f"{text}\n")
    data = file.read_bytes()
    found = tuple(_member(path, members[path]) for path in needed)
    return Carrier(package, "1.0", file.name, _sha256(data), len(data), found, python="3.99")


def write_npm_package(folder: Path, package: str, members: dict[str, bytes]) -> Carrier:
    """A .tgz as `npm pack` makes it, all of whose members but package.json are needed."""
    file = folder / f"{package.removeprefix('@').replace('/', '-')}-1.0.0.tgz"
    about = json.dumps({"name": package, "version": "1.0.0"}).encode()
    with tarfile.open(file, "w:gz") as archive:
        for path, data in {"package/package.json": about, **members}.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    data = file.read_bytes()
    found = tuple(_member(path, content) for path, content in members.items())
    return Carrier(package, "1.0.0", file.name, _sha256(data), len(data), found, registry="npm")


def tiny_text(folder: Path) -> ZooText:
    members = {
        "texts/in/b.txt": b"second\n",
        "texts/in/a.txt": "\nfirst: \u03c0\n".encode(),
        "texts/in/c.py": b"no text",
        "texts/out.txt": b"elsewhere",
    }
    carrier = write_wheel(folder, "tiny-texts", members)
    digest = _sha256("first: \u03c0\n\nsecond".encode())
    return ZooText("tiny", "two files", "none", carrier, "texts/in/", digest)


def tiny_model(folder: Path) -> tuple[ZooModel, dict[str, bytes]]:
    """A model in a wheel, and the 4-bit blocks of its matrices by their names in transformers."""
    gguf, blocks = _write_gguf(folder / "tiny.gguf")
    member = "tiny_llama/tiny.gguf"
    files = {member: gguf, "tiny_llama/__init__.py": b"1/0"}
    carrier = write_wheel(folder, "tiny-llama", files, needed=(member,))
    return ZooModel("tiny", "a tiny Llama", "none", "causal-lm", (carrier,), 9), blocks


def damaged(model: ZooModel, folder: Path) -> ZooModel:
    """The model of a wheel whose member is as recorded, and no GGUF."""
    (member,) = model.members
    files = {member.path: b"GGUF, but no more"}
    carrier = write_wheel(folder, "tiny-junk", files, needed=(member.path,))
    return replace(model, carriers=(carrier,))


def _member(path: str, data: bytes) -> Member:
    return Member(path, _sha256(data), len(data))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_gguf(file: Path) -> tuple[bytes, dict[str, bytes]]:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he"]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 32)]
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    random, blocks = np.random.default_rng(0), {}

    def add(name: str, rows: int, columns: int, in_transformers: str = "") -> None:
        data = quantize(
            random.standard_normal((rows, columns), dtype=np.float32) / columns**0.5,
            GGMLQuantizationType.Q4_1,
        )
        blocks[in_transformers] = data.tobytes()
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.Q4_1)

    add("token_embd.weight", len(tokens), HIDDEN, "model.embed_tokens.weight")
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(HIDDEN, dtype=np.float32))
        add(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN)  # its rows are in another order here
        add(f"blk.{i}.attn_k.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        v, o = (f"model.layers.{i}.self_attn.{name}_proj.weight" for name in "vo")
        add(f"blk.{i}.attn_v.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN, v)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN, o)
        for name in ("gate", "up"):
            full = f"model.layers.{i}.mlp.{name}_proj.weight"
            add(f"blk.{i}.ffn_{name}.weight", INNER, HIDDEN, full)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INNER, f"model.layers.{i}.mlp.down_proj.weight")
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    del blocks[""]
    return file.read_bytes(), blocks


def values(blocks: bytes) -> list[float]:
    """The numbers of 4-bit blocks, said plainly: 32 codes q of 4 bits stand for d·q + m."""
    import struct

    numbers = []
    for start in range(0, len(blocks), 20):
        d, m = struct.unpack_from("<2e", blocks, start)
        codes = blocks[start + 4 : start + 20]
        numbers += [d * q + m for q in [c & 15 for c in codes] + [c >> 4 for c in codes]]
    return numbers
