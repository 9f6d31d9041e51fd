"""What a process of its own tells of calls on a card that is not here, through Triton's runtime:
`python tests/support/pretended_calls.py sm_89 default pack`.

Each call is compared with what `sparge bench --static` compiles for it, made a second time, made
with other lengths, and made while its stream is captured. Warnings are errors.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from hashlib import sha256
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import sparge
from pretended_card import CARDS, Traffic
from pretended_driver import Launched, pretended
from sparge import DEFAULT, VISION, KeepFraction, KeepMass, Recipe
from sparge.api.attention import attention_and_run
from sparge.backends.triton.launch import Launch, watch_launches
from sparge_tools.static.compile import build, specialize
from sparge_tools.static.targets import TARGETS, Target
from sparge_tools.static.variants import FP8, STAGES, Variant, launches_of

LENGTHS = (64, 100, 1000, 4097, 32768)
WHOLE: dict[str, Any] = {"L": 4096, "stages": STAGES}
CALLS = (
    Variant("default", DEFAULT, **WHOLE),
    Variant("vision", VISION, 64, is_causal=False, **WHOLE),
    Variant("mask", Recipe(KeepMass(0.9)), 64, mask=torch.bool, **WHOLE),
    Variant("int8-fast", replace(DEFAULT, precision="int8-fast"), targets=FP8, **WHOLE),
    Variant("half", Recipe(KeepFraction(0.3), precision="half", pv_skip=8.0), **WHOLE),
    Variant("exact", Recipe(precision="exact"), 64, dtype=torch.float32, **WHOLE),
)
PACK = (100, 1000, 64, 4097)
LAYOUT = {"is_causal": True, "enable_gqa": True, "backend": "triton"}


def attend(variant: Variant, inputs: tuple[Any, ...], **more: Any) -> Tensor:
    query, key, value, mask = inputs[:4]
    options = {**LAYOUT, "is_causal": variant.is_causal, "recipe": variant.recipe, **more}
    return sparge.attention(query, key, value, attn_mask=mask, **options)


def on_card(variant: Variant) -> tuple[Any, ...]:
    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda:0")

    return tuple(there(x) for x in variant.inputs())


def attend_pack(lengths: tuple[int, ...]) -> Tensor:
    """The boundaries are on the processor."""
    cuts = torch.tensor((0, *lengths)).cumsum(0).int()
    T = sum(lengths)
    query, key = (torch.empty(T, H, 128, dtype=torch.bfloat16, device="cuda:0") for H in (8, 4))
    return sparge.attention_varlen(query, key, torch.empty_like(key), cuts, cuts, **LAYOUT)


def plain(x: Any) -> Any:
    """As metadata of a kernel come back from their file."""
    return json.loads(json.dumps(x, default=str))


def without_paths(name: str, option: Any) -> Any:
    """Libraries by their names: a cache may come from another copy of the same Triton."""
    return [each[0] for each in option or ()] if name == "extern_libs" else option


def differences(made: Launched, launch: Launch, target: Target) -> list[str]:
    """Between a launch and what the static check compiles for the same one."""
    how = specialize(launch, target)
    told = plain(how.options.__dict__)
    pairs = {
        "kernel": (made.kernel, launch.name),
        "grid": (made.grid, (*launch.grid, 1, 1)[:3]),
        "signature": (made.signature, how.signature),
        "constants": (made.constants, how.constants),
        "attributes": (made.attributes, how.attributes),
        **{
            name: (without_paths(name, plain(made.options.get(name))), without_paths(name, value))
            for name, value in told.items()
        },
        "binary": (
            sha256(made.binary).hexdigest(),
            sha256(build(launch, target).kernel).hexdigest(),
        ),
    }
    return [
        f"{launch.name}: {what} {ran}, checked {checked}"
        for what, (ran, checked) in pairs.items()
        if ran != checked
    ]


def compared(traffic: Traffic, launches: list[Launch], target: Target) -> list[str]:
    if len(traffic.launches) != len(launches):
        return [f"{len(traffic.launches)} launches, {len(launches)} checked"]
    pairs = zip(traffic.launches, launches, strict=True)
    return [text for made, launch in pairs for text in differences(made, launch, target)]


def told(traffic: Traffic) -> dict[str, Any]:
    return {
        "launches": [x.kernel for x in traffic.launches],
        "compiled": list(traffic.compiled),
        "reads": list(traffic.reads),
        "later": list(traffic.later),
        "writes": list(traffic.writes),
        "waits": list(traffic.waits),
    }


def call_by_call(variant: Variant, architecture: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pretended(CARDS[architecture]) as traffic:
        inputs = on_card(variant)
        out = attend(variant, inputs)
        found["out"] = [list(out.shape), str(out.dtype), str(out.device)]
        found["first"] = told(traffic)
        checked = [x for each in launches_of(variant, architecture).values() for x in each]
        found["differences"] = compared(traffic, checked, TARGETS[architecture])
        found["shared"] = max(x.shared for x in traffic.launches)
        traffic.clear()
        with traffic.capture():
            attend(variant, inputs)
        found["captured"] = told(traffic)
        found["compiled by length"] = {}
        for length in LENGTHS:
            traffic.clear()
            attend(variant, on_card(replace(variant, L=length)))
            found["compiled by length"][length] = list(traffic.compiled)
    return found


def pack(architecture: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pretended(CARDS[architecture]) as traffic:
        with watch_launches() as launches:
            attend_pack(PACK)
        found["first"] = told(traffic)
        found["differences"] = compared(traffic, launches, TARGETS[architecture])
        traffic.clear()
        with traffic.capture():
            attend_pack(PACK)
        found["captured"] = told(traffic)
        traffic.clear()
        attend_pack((3, *LENGTHS))
        found["compiled by length"] = {"others": list(traffic.compiled)}
    return found


def labelled(architecture: str) -> dict[str, Any]:
    """A call that a model's report counts, captured after one call outside of the graph."""
    variant: Variant = CALLS[0]
    options = {**LAYOUT, "is_causal": variant.is_causal, "recipe": variant.recipe}
    with pretended(CARDS[architecture]) as traffic:
        query, key, value, mask = on_card(variant)[:4]
        tensors = {"query": query, "key": key, "value": value, "attn_mask": mask}
        *_, run = attention_and_run(**tensors, **options, recorded=True)
        first = told(traffic)
        traffic.clear()
        with traffic.capture():
            *_, in_graph = attention_and_run(**tensors, **options, recorded=True)
        captured = told(traffic)
        traffic.finish()
        assert run is not None
        assert in_graph is not None
        return {"first": first, "captured": captured, "runs": [run.kept, in_graph.kept]}


if __name__ == "__main__":
    warnings.simplefilter("error")
    architecture, *wanted = sys.argv[1:]
    document: dict[str, Any] = {}
    # A tensor of a real card is a plain one, which does not go through the op.
    with mock.patch("sparge.api.attention.wants_op", lambda x: x.is_meta):
        for variant in CALLS:
            if variant.name in wanted:
                document[variant.name] = call_by_call(variant, architecture)
        for whole in (pack, labelled):
            if whole.__name__ in wanted:
                document[whole.__name__] = whole(architecture)
    print(json.dumps(document))
