"""vLLM inside this process, so that a test can look at its scheduler and its layers."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

KEEP_ALL = {"keep": "all", "precision": "exact"}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def start(model, *, sparge=None, **options):
    """An engine in this process. sparge: its settings; without them vLLM's own attention runs."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    if sparge is not None:
        options |= {"attention_backend": "SPARGE", "additional_config": {"sparge": sparge}}
    defaults = {
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
    }
    return LLM(str(model), **defaults | options)


def stop(llm):
    """End an engine, so that this process can start another."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from sparge.serving.vllm.worker import WORKER

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    WORKER.layers.clear()


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def chunks_of(llm, tokens):
    """Prefill in chunks of at most so many tokens of a prompt, 0 for whole; nothing is cached."""
    config = scheduler_of(llm).scheduler_config
    before = config.long_prefill_token_threshold
    config.long_prefill_token_threshold = tokens
    llm.reset_prefix_cache()
    try:
        yield
    finally:
        config.long_prefill_token_threshold = before


@contextmanager
def recipe_of(recipe, backend="auto"):
    """Every layer with another recipe, without starting the engine again."""
    from sparge.serving.vllm.worker import WORKER

    before = {name: (each.shape, each.backend) for name, each in WORKER.layers.items()}
    for each in WORKER.layers.values():
        each.shape, each.backend = replace(each.shape, recipe=recipe), backend
    WORKER.reset()
    try:
        yield WORKER
    finally:
        for name, (shape, was) in before.items():
            WORKER.layers[name].shape, WORKER.layers[name].backend = shape, was


def generate(llm, prompts, tokens=12):
    """Greedy tokens of each prompt, which is a list of token numbers."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    done = llm.generate(inputs, params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in done]


def transformers_tokens(model, prompts, tokens=12):
    """The same from transformers, one prompt after another, with its dense attention."""
    import torch

    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        made.append(out[0, len(prompt) :].tolist())
    return made
