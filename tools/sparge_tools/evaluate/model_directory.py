"""What the directory of a transformers model holds; no weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .settings import digest_of

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
ENDS = 1 << 20
"""Bytes at both ends of a weight file that go into its digest; a whole file takes minutes."""


def tokenizer_of(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def directory_fingerprint(name: str, directory: Path) -> dict[str, Any]:
    """Facts about the model; digest: of its config and of the size and both ends of each file."""
    files = sorted(file for pattern in WEIGHTS for file in directory.glob(pattern))
    if not files:
        raise ValueError(f"there are no weights in {str(directory)!r}, such as model.safetensors")
    # Private fields, such as the transformers version, say nothing about the weights.
    config = {k: v for k, v in config_of(directory).items() if not k.startswith("_")}
    parts = [json.dumps(config, sort_keys=True)]
    for file in files:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            data = opened.read(ENDS)
            opened.seek(max(0, size - ENDS))
            data += opened.read(ENDS)
        parts.append(f"{file.name} {size} {digest_of(data)}")
    return {
        "name": name,
        "type": config.get("model_type"),
        "layers": config.get("num_hidden_layers"),
        "heads": config.get("num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads"),
        "max_tokens": max_tokens(config),
        "weight_bytes": sum(file.stat().st_size for file in files),
        "digest": digest_of("\n".join(parts).encode()),
    }


def config_of(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config.json in {str(directory)!r} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"config.json in {str(directory)!r} does not hold an object")
    return {**config, **(config.get("text_config") or {})}


def max_tokens(config: dict[str, Any]) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return None
