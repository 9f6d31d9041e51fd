"""A random Llama of two layers, built from its config; and what feeds it."""

from __future__ import annotations

import torch


def tiny_llama(seed=0, layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def token_inputs(n=2, L=400, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (1, L), generator=g) for _ in range(n)]


class Letters:
    """A tokenizer that needs no files: a letter is a token."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [ord(letter) % 64 for letter in text]}


def sharp_llama(seed=0, layers=3):
    """One whose attention is not even, and whose output depends on it."""
    model = tiny_llama(seed, layers)
    factors = {"q_proj": 5.0, "k_proj": 5.0, "v_proj": 4.0, "o_proj": 4.0, "lm_head": 20.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(next((f for part, f in factors.items() if part in name), 1.0))
    return model
