"""What a process of its own tells of whole calls on meta tensors: `static_calls.py`.

Launches of every variant on every architecture, and how often new lengths compile a kernel again.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from sparge_tools.static.chain import CALLS, chain_of
from sparge_tools.static.compile import specialize
from sparge_tools.static.targets import TARGETS
from sparge_tools.static.variants import full_variants, launches_of

LENGTHS = (64, 100, 128, 1000, 1024, 4097, 32768, 131072)
"""Tensors of more than 2 GB (AMD) and strides of 64 bits compile a kernel once more."""


def launches():
    """Kernel names of each variant's stages by target; a read of any tensor's numbers raises."""
    found = {}
    for target in TARGETS:
        for variant in full_variants():
            if target in variant.targets:
                made = launches_of(variant, target)
                names = {stage: [one.name for one in each] for stage, each in made.items()}
                found[f"{variant.name} on {target}"] = names
    return found


def compilations(variant, target):
    """Distinct compilations of each kernel in calls of these lengths, all stages.

    Triton compiles once for each key: the kernel's source, its constants, the types of its
    arguments and what is known of them (1, divisible by 16)."""
    keys = {}
    for length in LENGTHS:
        for launches in launches_of(replace(variant, L=length), target).values():
            for launch in launches:
                key = specialize(launch, TARGETS[target]).key
                keys.setdefault(launch.name, set()).add(key)
    return {name: len(found) for name, found in keys.items()}


def reads_are_refused():
    """That this shows anything: a meta tensor has no numbers to read."""
    refused = []
    for read in (torch.Tensor.item, torch.Tensor.tolist, bool, int):
        try:
            read(torch.ones(1, device="meta"))
        except (RuntimeError, NotImplementedError):
            refused.append(read.__name__)
    return refused


if __name__ == "__main__":
    by_variant = {
        f"{variant.name} on {target}": compilations(variant, target)
        for target in ("sm_90", "gfx942")
        for variant in full_variants()
        if target in variant.targets and not variant.mask  # its strides are lengths
    }
    chains = [chain_of(variant) for variant in CALLS]
    document = {
        "refused": reads_are_refused(),
        "launches": launches(),
        "compilations": by_variant,
        "chains": [[len(x.launches), x.bytes, x.least, x.failures] for x in chains],
    }
    print(json.dumps(document))
