"""`sparge profile`: show a profile, compare two, or check one against a model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..support.tools_package import MODELS, need_tool
from ..values.profile import RECIPE_FIELDS, HeadSettings, LayerSettings, Profile
from . import BAD_RESULT, OK
from .arguments import add_json
from .screen import Column, Table, console, deliver, error, share, show_table

WORDS = {"kl": "KL", "relative_l2": "change of the output"}
GIVEN = ("mass", "min_similarity", "pv_skip")
"""Settings of a head."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    show = actions.add_parser("show", help="what is kept in every layer, and its origin")
    diff = actions.add_parser("diff", help="the layers and heads that differ")
    check = actions.add_parser("check", help="whether a file is valid, and fits a model")
    for action in (show, diff, check):
        action.add_argument("profile", metavar="FILE")
        add_json(action)
    show.add_argument("--heads", action="store_true", help="also list every head")
    diff.add_argument("other", metavar="OTHER")
    about = "a model of the zoo, or a directory that transformers or diffusers can load"
    check.add_argument("--model", metavar="NAME|DIR", help=about)


def run(args: argparse.Namespace) -> int:
    profile = Profile.load(args.profile)
    if args.action == "show":
        deliver(profile.to_dict(), args, lambda: _show(profile, args.heads))
        return OK
    if args.action == "diff":
        rows = differences(profile, Profile.load(args.other))
        document = {"format": "sparge.profile.diff/1", "differences": rows}
        deliver(document, args, lambda: _show_differences(args, rows))
        return BAD_RESULT if rows else OK
    reasons: list[str] = []
    if args.model:
        load_model = need_tool(MODELS, "load_model", what="--model")
        reasons = profile.mismatches(load_model(args.model))
    document = {"format": "sparge.profile.check/1", "model": args.model, "reasons": reasons}
    deliver(document, args, lambda: _show_check(args, profile, reasons))
    return BAD_RESULT if reasons else OK


def layers_table(profile: Profile) -> Table:
    return Table(
        title=f"{profile.name or profile.model.architecture}: {target_words(profile)}, "
        f"density {profile.density:.3f}",
        columns=[
            Column("layer", "layer"),
            Column("predictor", "predictor"),
            Column("density", "density", share),
            Column("pv_skipped", "pv\nskipped", share),
            Column("error", "worst\nerror", error),
            Column("dense", "dense\nheads"),
        ],
        rows=[_row_of_layer(name, layer) for name, layer in profile.named_settings().items()],
    )


def _row_of_layer(name: str, layer: LayerSettings) -> dict[str, Any]:
    if not layer.is_tuned:
        return {"layer": name, "predictor": "not tuned: the default recipe"}
    heads = layer.heads
    return {
        "layer": name,
        "predictor": layer.predictor,
        "density": layer.density,
        "pv_skipped": sum(head.pv_skipped for head in heads) / len(heads),
        "error": max(head.error for head in heads),
        "dense": f"{sum(head.is_dense for head in heads)} of {len(heads)}",
    }


def heads_table(name: str, layer: LayerSettings) -> Table:
    return Table(
        title=f"{name}: {layer.predictor}, {layer.precision}, on {layer.inputs} inputs",
        columns=[
            Column("head", "head"),
            *(Column(name, name, "{:g}".format) for name in GIVEN),
            *(Column(name, name, share) for name in ("density", "pv_skipped")),
            Column("error", "error", error),
        ],
        rows=[{"head": str(h), **vars(head)} for h, head in enumerate(layer.heads)],
    )


def _show(profile: Profile, heads: bool) -> None:
    screen, model = console(), profile.model
    show_table(screen, layers_table(profile))
    if (table := sensitivity_table(profile)).rows:
        show_table(screen, table)
    for name, layer in profile.named_settings().items():
        if heads and layer.is_tuned:
            show_table(screen, heads_table(name, layer))
    shapes = ", ".join(f"{name} {number}" for name, number in model.shapes.items())
    facts = "; ".join(
        f"{name} {', '.join(value) if isinstance(value, list) else value}"
        for name, value in profile.calibration.items()
    )
    for line in held_out_lines(profile):
        screen.print(line)
    screen.print(
        f"for {model.architecture}: {shapes}; weights {model.weights[:19] or 'unknown'}…\n"
        f"tuned by sparge {profile.version}, {profile.date}, on {profile.machine}\n"
        f"calibration: {facts}"
    )


def differences(a: Profile, b: Profile) -> list[dict[str, Any]]:
    """One row for each difference in what runs; dates and machines are not compared."""
    rows: list[dict[str, Any]] = []

    def note(where: str, first: Any, second: Any) -> None:
        if first != second:
            rows.append({"where": where, "first": first, "second": second})

    for reason in a.model.differences(b.model):
        rows.append({"where": "model", "first": "", "second": reason})
    note("bounds", target_of(a), target_of(b))
    note("default", a.default.to_dict(), b.default.to_dict())
    first, second = a.named_settings(), b.named_settings()
    for name in dict.fromkeys([*first, *second]):
        one, two = first.get(name), second.get(name)
        if one is None or two is None:
            note(name, "present" if one else "missing", "present" if two else "missing")
            continue
        for field in RECIPE_FIELDS:
            note(f"{name} {field}", getattr(one, field), getattr(two, field))
        note(f"{name} heads", len(one.heads), len(two.heads))
        for h, (x, y) in enumerate(zip(one.heads, two.heads, strict=False)):
            note(f"{name} head {h}", head_text(x), head_text(y))
    return rows


def head_text(head: HeadSettings) -> str:
    """The settings of one head, with its density and error."""
    if head.is_dense:
        return "dense"
    given = [f"{name} {getattr(head, name):g}" for name in GIVEN if getattr(head, name) is not None]
    return f"{', '.join(given)}: density {head.density:.3f}, error {head.error:.4f}"


def _show_differences(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if not rows:
        console().print("the profiles keep the same blocks")
        return
    headings = {"where": "where", "first": args.profile, "second": args.other}
    columns = [Column(key, heading) for key, heading in headings.items()]
    show_table(console(), Table(f"{len(rows)} differences", columns, rows))


def _show_check(args: argparse.Namespace, profile: Profile, reasons: list[str]) -> None:
    valid = f"{args.profile} is a valid profile of {profile.name or profile.model.architecture}"
    untuned = f", {len(profile.untuned)} layers not tuned" if profile.untuned else ""
    lines = [f"{valid}: {len(profile.layers)} layers{untuned}", *held_out_lines(profile)]
    lines += [f"does not fit {args.model}: {reason}" for reason in reasons]
    lines += [f"it was tuned for {args.model}"] if args.model and not reasons else []
    console().print("\n".join(lines))


def target_words(profile: Profile) -> str:
    """The bounds or the target, as a title has it."""
    if profile.bounds is not None:
        l1, l2 = profile.bounds
        return f"bounds {l1:g} and {'no second filter' if l2 is None else f'{l2:g}'}"
    output = profile.output or {}
    measure, target = str(output.get("measure")), output.get("target", 0.0)
    if measure == "psnr":
        return f"PSNR of renders at least {target:g} dB"
    most = f"{target:.3%}" if measure == "perplexity" else f"{target:.3g}"
    return f"{WORDS.get(measure, measure)} at most {most}"


def target_of(profile: Profile) -> Any:
    """The same as plain data, to compare."""
    if profile.bounds is not None:
        return list(profile.bounds)
    output = profile.output or {}
    return {name: output.get(name) for name in ("measure", "target")}


def held_out_lines(profile: Profile) -> list[str]:
    """A line for what was measured on held-out data, or one for each noise band."""
    if profile.output is None:
        return []
    lines = []
    for one in profile.output.get("bands", [profile.output]):
        band = f", noise {one['noise'][0]:g} to {one['noise'][1]:g}" if "noise" in one else ""
        lines.append(f"held out{band}: {_figures(one['held_out'])}")
    return lines


def _figures(held: Mapping[str, Any]) -> str:
    figures = []
    if "kl" in held:
        figures.append(f"KL {held['kl']:.5f} ± {held['kl_error']:.5f}")
        figures.append(
            f"perplexity {held['dense_perplexity']:.3f} → {held['perplexity']:.3f} "
            f"({held['relative']:+.2%} ± {held['relative_error']:.2%})"
        )
        figures.append(f"{held['tokens']} tokens")
    if "relative_l2" in held:
        figures.append(f"change {held['relative_l2']:.4f} ± {held['relative_l2_error']:.4f}")
        figures.append(f"{held['inputs']} inputs")
    if "psnr" in held:
        figures.append(f"PSNR {held['psnr']:.2f} ± {held['psnr_error']:.2f} dB")
        figures.append(f"worst {held['psnr_worst']:.2f}, SSIM {held['ssim']:.4f}")
        figures.append(f"FLIP {held['flip']:.4f}, {held['renders']} renders")
    figures.append(f"density {held['density']:.3f}")
    return ", ".join(figures)


def sensitivity_table(profile: Profile) -> Table:
    """Of every layer: its change of the output at some errors, and the error chosen."""
    output = profile.output or {}
    rows = []
    for one in output.get("bands", [output]):
        band = f" [noise {one['noise'][0]:g} to {one['noise'][1]:g}]" if "noise" in one else ""
        for name, layer in one.get("sensitivity", {}).items():
            measured = zip(layer["errors"], layer["changes"], strict=True)
            changes = ", ".join(f"{error:.2f}: {change:.2g}" for error, change in measured)
            rows.append({"layer": f"{name}{band}", "changes": changes, "chosen": layer["chosen"]})
    columns = [
        Column("layer", "layer"),
        Column("changes", "error: change of the output"),
        Column("chosen", "error\nchosen", error),
    ]
    note = "the first error is 0: everything kept, the precision alone"
    return Table("how far each layer alone moves the output", columns, rows, [note])
