"""Run a transformers model with sparse attention, and restore it.

    python examples/transformers_model.py [tokens]

The model here is a small one with random weights, so nothing is downloaded. For a real one:

    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")

or, without a model hub, `model, tokenizer = sparge_tools.zoo.load("smollm2-135m-instruct")`.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparge

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=tokens)).eval()
prompt = torch.randint(0, 1000, (1, tokens))

with torch.inference_mode():
    dense = model(prompt, logits_to_keep=1).logits
    # Random weights attend evenly, so the default recipe would keep everything: keep half.
    # backend="cpu" forces sparse attention; the default "auto" uses it where it is faster.
    half = sparge.Recipe(sparge.KeepFraction(0.5))
    with sparge.accelerate(model, half, backend="cpu", measure_error=True) as handle:
        sparse = model(prompt, logits_to_keep=1).logits
        report = handle.report()
    restored = model(prompt, logits_to_keep=1).logits

print(report)
print(f"density {report.density:.3f}, error {report.error:.4f}")
print(f"logits differ by at most {(sparse - dense).abs().max():.4f}")
print("restored:", torch.equal(restored, dense))
