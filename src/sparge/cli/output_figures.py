"""What a profile's budget was, and what was measured of it on held-out data, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..values.profile import Profile

WORDS = {
    "kl": "KL",
    "perplexity": "perplexity",
    "relative_l2": "change of the output",
    "psnr": "PSNR",
}


def budget_words(profile: Profile) -> str:
    """The bounds or the target, as a title has it."""
    if profile.bounds is not None:
        l1, l2 = profile.bounds
        return f"bounds {l1:g} and {'no second filter' if l2 is None else f'{l2:g}'}"
    output = profile.output or {}
    measure, target = str(output.get("measure")), output.get("target", 0.0)
    if measure == "psnr":
        return f"PSNR of renders at least {target:g} dB"
    told = f"+{target:.3g}" if measure != "perplexity" else f"+{target:.3%}"
    return f"{WORDS.get(measure, measure)} at most {told.removeprefix('+')}"


def budget_of(profile: Profile) -> Any:
    """The same as plain data, to compare."""
    if profile.bounds is not None:
        return list(profile.bounds)
    output = profile.output or {}
    return {name: output.get(name) for name in ("measure", "target")}


def held_out_lines(profile: Profile) -> list[str]:
    """A line for what was measured on held-out data, or one for each noise band."""
    output = profile.output
    if output is None:
        return []
    if "bands" in output:
        return [
            f"held out, noise {band['noise'][0]:g} to {band['noise'][1]:g}: "
            f"{_figures(band['held_out'])}"
            for band in output["bands"]
        ]
    return [f"held out: {_figures(output['held_out'])}"]


def _figures(held: Mapping[str, Any]) -> str:
    told = []
    if "kl" in held:
        told.append(f"KL {held['kl']:.5f} ± {held['kl_error']:.5f}")
        told.append(
            f"perplexity {held['dense_perplexity']:.3f} → {held['perplexity']:.3f} "
            f"({held['relative']:+.2%} ± {held['relative_error']:.2%})"
        )
        told.append(f"{held['tokens']} tokens")
    if "relative_l2" in held:
        told.append(f"change {held['relative_l2']:.4f} ± {held['relative_l2_error']:.4f}")
        told.append(f"{held['inputs']} inputs")
    if "psnr" in held:
        told.append(f"PSNR {held['psnr']:.2f} ± {held['psnr_error']:.2f} dB")
        told.append(f"worst {held['psnr_worst']:.2f}, SSIM {held['ssim']:.4f}")
        told.append(f"FLIP {held['flip']:.4f}, {held['renders']} renders")
    told.append(f"density {held['density']:.3f}")
    return ", ".join(told)


def sensitivity_rows(profile: Profile) -> list[dict[str, Any]]:
    """Of every layer: its change of the output at some errors, and the error chosen."""
    output = profile.output or {}
    rows = []
    for one in output.get("bands", [output]):
        band = f" [noise {one['noise'][0]:g} to {one['noise'][1]:g}]" if "noise" in one else ""
        for name, layer in one.get("sensitivity", {}).items():
            told = zip(layer["errors"], layer["changes"], strict=True)
            changes = ", ".join(f"{error:.2f}: {change:.2g}" for error, change in told)
            rows.append({"layer": f"{name}{band}", "changes": changes, "chosen": layer["chosen"]})
    return rows
