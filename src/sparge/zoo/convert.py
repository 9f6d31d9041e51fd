"""`python -m sparge.zoo.convert FILE.gguf DIRECTORY`: convert a model for transformers.

In its own process: the libraries' progress bars, memory and global settings stay there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, target: Path) -> None:
    """Float32, which holds every 4-bit value exactly; bfloat16 would round them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    # The weights are plain numbers now, but transformers refuses to save a GGUF model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target, max_shard_size="100GB")
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        with open(file, "rb+") as data:
            os.fsync(data.fileno())


if __name__ == "__main__":
    convert(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
