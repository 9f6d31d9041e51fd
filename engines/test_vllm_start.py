"""How vLLM starts: with nothing asked for, with wrong settings, with several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import vllm_engine as engine

# Runs in a process of its own, where vLLM starts its workers as it does for users.
SCRIPT = """
import json, sys
options, prompts, tokens = json.loads(sys.argv[1])
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    extension = "sparge.serving.vllm.WorkerExtension"
    llm = LLM(enforce_eager=True, max_num_seqs=4, worker_extension_cls=extension, **options)
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    found = {
        "tokens": [list(each.outputs[0].token_ids) for each in done],
        "reports": llm.collective_rpc("sparge_report"),
    }
    print("FOUND " + json.dumps(found))
"""


def run(tmp_path, options, prompts, *, tokens=6, env=None):
    """What a process of vLLM's found, or its output if it failed."""
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, **engine.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    variables = {name: v for name, v in variables.items() if not name.startswith("SPARGE_VLLM")}
    # Ranks are not bound to cores: there may be fewer NUMA nodes than ranks.
    variables |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables |= env or {}
    text = json.dumps([options, prompts, tokens])
    done = subprocess.run(
        [sys.executable, str(script), text],
        capture_output=True,
        text=True,
        env=variables,
        cwd=tmp_path,
        timeout=300,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if done.returncode or not found:
        return done.stdout + done.stderr
    return json.loads(found[0].removeprefix("FOUND "))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random Llama with heads that two ranks can share, and its directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=0,
        bos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(6.0 if "q_proj" in name or "k_proj" in name else 2.0)
    directory = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(directory)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, 128, (500,), generator=generator).tolist()
    options = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
    }
    return options, prompt, engine.transformers_tokens(model, [prompt], tokens=6)


def test_nothing_happens_by_being_installed(tiny, tmp_path):
    options, prompt, expected = tiny
    found = run(tmp_path, options, [prompt])
    assert found["tokens"] == expected
    assert found["reports"][0]["report"]["layers"] == []


def test_two_ranks_take_their_heads(tiny, tmp_path):
    """A recipe with a number for each head: each rank counts the density of its own."""
    options, prompt, _ = tiny
    recipe = {"keep": {"fraction": [0.2, 0.2, 1.0, 1.0]}, "precision": "exact"}
    section = {"sparge": {"recipe": recipe, "backend": "cpu"}}
    options = {**options, "tensor_parallel_size": 2, "additional_config": section}
    found = run(tmp_path, {**options, "attention_backend": "SPARGE"}, [prompt])
    assert isinstance(found, dict), found[-3000:]
    assert [each["rank"] for each in found["reports"]] == [0, 1]
    assert {each["ranks"] for each in found["reports"]} == {2}
    layers = [each["report"]["layers"][0] for each in found["reports"]]
    assert max(layers[0]["density_by_head"]) < 0.9
    assert layers[1]["density_by_head"] == [1.0, 1.0]


def test_two_ranks_take_their_heads_of_a_profile(tiny, tmp_path):
    """Heads of the second rank are sparser in layer 0 and denser in layer 1."""
    from transformers import LlamaForCausalLM

    from sparge.values.profile import HeadSettings, LayerSettings, Profile, fingerprint

    options, prompt, _ = tiny
    some, most = (HeadSettings(mass=mass, density=mass) for mass in (0.05, 0.9))
    layers = {
        f"model.layers.{i}.self_attn": LayerSettings(heads, precision="exact", sink_blocks=0)
        for i, heads in enumerate(((most, most, some, some), (some, some, most, most)))
    }
    file = tmp_path / "profile.json"
    model = fingerprint(LlamaForCausalLM.from_pretrained(options["model"]))
    Profile(layers, model, bounds=(0.5, None)).save(file)
    section = {"sparge": {"profile": str(file), "backend": "cpu"}}
    options = {**options, "tensor_parallel_size": 2, "additional_config": section}
    found = run(tmp_path, {**options, "attention_backend": "SPARGE"}, [prompt])
    assert isinstance(found, dict), found[-3000:]
    first, second = ([x["density"] for x in r["report"]["layers"]] for r in found["reports"])
    assert second[0] < first[0]
    assert first[1] < second[1]


def test_two_ranks_give_the_tokens_of_transformers(tiny, tmp_path):
    options, prompt, expected = tiny
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(engine.KEEP_ALL))
    section = {"sparge": {"backend": "cpu"}}
    options = {**options, "tensor_parallel_size": 2, "additional_config": section}
    options = {**options, "long_prefill_token_threshold": 200}
    env = {"SPARGE_VLLM": "1", "SPARGE_VLLM_RECIPE": str(file)}
    found = run(tmp_path, options, [prompt], env=env)
    assert isinstance(found, dict), found[-3000:]
    assert found["tokens"] == expected
    for each in found["reports"]:
        assert each["settings"] == "the recipe of SPARGE_VLLM_RECIPE"
        assert each["tokens"]["model.layers.0.self_attn.attn"]["served"] == len(prompt)


def test_a_wrong_recipe_ends_the_start(tiny, tmp_path):
    options, prompt, _ = tiny
    file = tmp_path / "recipe.json"
    file.write_text('{"keep": {"mass": 1.5}}')
    env = {"SPARGE_VLLM": "1", "SPARGE_VLLM_RECIPE": str(file)}
    said = run(tmp_path, options, [prompt], env=env)
    assert isinstance(said, str)
    assert "ValueError: SPARGE_VLLM_RECIPE: mass must be in (0, 1], got 1.5" in said


def test_layers_with_a_sliding_window_are_left_to_vllm(tiny, tmp_path):
    """Mistral's configuration, over the weights of the Llama: the same modules."""
    options, prompt, _ = tiny
    overrides = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    overrides |= {"sliding_window": 256}
    found = run(
        tmp_path, {**options, "hf_overrides": overrides}, [prompt], env={"SPARGE_VLLM": "1"}
    )
    assert isinstance(found, dict), found[-3000:]
    (report,) = found["reports"]
    assert set(report["report"]["left_alone"].values()) == {"sliding window"}
    assert report["report"]["layers"][0]["fallbacks"] == {"sliding window": 1}
    assert report["tokens"]["model.layers.0.self_attn.attn"]["own"] == len(prompt)
