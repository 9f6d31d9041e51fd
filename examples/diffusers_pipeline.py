"""A diffusers pipeline with sparse attention, its noisiest fifth left dense.

With weights: `python examples/diffusers_pipeline.py DIRECTORY "a prompt"`, a directory written by
`save_pretrained`. Without arguments a small denoiser with random weights stands in, to show what a
report says.
"""

import sys

import torch

import sparge


def run_pipeline(directory: str, prompt: str) -> None:
    from diffusers import DiffusionPipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = DiffusionPipeline.from_pretrained(directory, torch_dtype=torch.bfloat16).to(device)
    with sparge.accelerate(pipe, schedule=sparge.Schedule(dense_first=0.2)) as handle:
        pipe(prompt, generator=torch.Generator().manual_seed(0))
        print(handle.report())


def run_small_denoiser() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 64, "ffn_dim": 128, "num_layers": 2}
    channels = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32}
    denoiser = WanTransformer3DModel(patch_size=(1, 2, 2), rope_max_seq_len=64, **sizes, **channels)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5)
    latents, text = torch.randn(1, 4, 4, 32, 32), torch.randn(1, 12, 16)
    # Named, because `auto` may find dense attention faster for so few tokens.
    options = {"schedule": sparge.Schedule(), "backend": "cpu"}
    with torch.no_grad(), sparge.accelerate(denoiser, **options) as handle:
        for i, t in enumerate(scheduler.timesteps):
            # A pipeline tells its schedule the step by itself; a loop of one's own does it here.
            with handle.context(step=i, progress=i / 5, noise_level=float(t) / 1000):
                noise = denoiser(latents, t[None], text, return_dict=False)[0]
            latents = scheduler.step(noise, t, latents, return_dict=False)[0]
        print(handle.report())


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_pipeline(sys.argv[1], sys.argv[2])
    else:
        run_small_denoiser()
