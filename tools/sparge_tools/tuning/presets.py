"""Error bounds by model family, as published: `(l1, l2)`, of the first filter and of both."""

from __future__ import annotations

Bounds = tuple[float, float | None]

PRESETS: dict[str, Bounds] = {
    "llama": (0.08, 0.09),
    "cogvideox": (0.05, 0.06),
    "mochi": (0.05, 0.06),
    "sd3.5": (0.07, 0.08),
    "flux": (0.07, 0.08),
    "open-sora-plan": (0.03, 0.035),
}

_DENOISERS = {
    "CogVideoX": "cogvideox",
    "Mochi": "mochi",
    "SD3": "sd3.5",
    "Flux": "flux",
    "OpenSora": "open-sora-plan",
    "Wan": "cogvideox",
    "Hunyuan": "cogvideox",
    "LTX": "cogvideox",
    "QwenImage": "flux",
}
"""How class names begin. Of families without published bounds, those of the nearest kind."""


def preset_of(architecture: str) -> str:
    """The preset to begin with for a model's class, such as FluxTransformer2DModel."""
    names = [name for start, name in _DENOISERS.items() if architecture.startswith(start)]
    return names[0] if names else "llama"


def check_bounds(l1: float, l2: float | None) -> Bounds:
    for name, bound in (("l1", l1), ("l2", l2)):
        if bound is not None and not 0.0 < bound < 1.0:
            raise ValueError(f"{name} must be a relative error between 0 and 1, got {bound}")
    if l2 is not None and l2 < l1:
        raise ValueError(
            f"l2 bounds both filters together and must be at least l1, got l1={l1}, l2={l2}; "
            "None leaves the second filter off"
        )
    return l1, l2


def bounds_of(preset: str) -> Bounds:
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; there are {', '.join(PRESETS)}")
    return PRESETS[preset]
