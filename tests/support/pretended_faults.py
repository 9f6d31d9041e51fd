"""What a pretended card refuses, each fault planted: `python tests/support/pretended_faults.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from pretended_calls import CALLS, attend, compared, on_card
from pretended_card import CARDS
from pretended_driver import pretended
from sparge.backends.triton import blocks, launch
from sparge.backends.triton.primitives import KindStrides, View
from sparge_tools.static.targets import TARGETS
from sparge_tools.static.variants import launches_of

DEFAULT_CALL = CALLS[0]
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 0).any()),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy": lambda x: torch.empty(4).copy_(x),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "by a mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
}
WAITS: dict[str, Callable[[], Any]] = {
    "cuda": lambda: torch.cuda.synchronize(),
    "accelerator": lambda: torch.accelerator.synchronize(),
    "event": lambda: recorded().synchronize(),
    "stream": lambda: torch.cuda.current_stream().synchronize(),
}


def recorded() -> Any:
    """An event that the card has not come to."""
    made = torch.cuda.Event()
    made.record()
    return made


LISTS = {"Hq": 2, "Lk": 64, "n_q": 1, "n_k": 1}


def raised(run: Callable[[], Any]) -> str:
    """The type and text of what this raises; empty if nothing."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_inference_mode() -> None:
    """Operations reach the card's tensors in another form there."""
    with torch.inference_mode():
        torch.ones(4).to("cuda:0").reshape(2, 2).contiguous()


def in_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch_lists).result()


def launch_lists(**given: Any) -> None:
    """A small kernel, with one of its arguments replaced."""
    counts = torch.empty(1, 2, 1, dtype=torch.int32, device="cuda:0")
    lists = torch.empty(1, 2, 1, 1, dtype=torch.int32, device="cuda:0")
    kinds = torch.empty(1, 1, 1, 1, dtype=torch.int8, device="cuda:0")
    tensors = {"counts": counts, "indices": lists, "lists": lists, "n_full": counts}
    grid = given.pop("grid", (1, 2, 1))
    kinds = View(given.pop("kinds", kinds), KindStrides())
    arguments = {**tensors, "kinds": kinds, **LISTS, **given}
    launch.launch(blocks.split_lists, grid, {"num_warps": 2}, **arguments)


def faults() -> dict[str, str]:
    card = CARDS["sm_89"]
    found = {}
    with pretended(card) as traffic:
        x = torch.empty(4, device="cuda:0")
        found |= {f"read {name}": raised(lambda r=read: r(x)) for name, read in READS.items()}
        with torch.inference_mode():
            reads = {f"read {name} in inference mode": read for name, read in READS.items()}
            found |= {name: raised(lambda r=read: r(x)) for name, read in reads.items()}
        found |= {f"wait {name}": raised(wait) for name, wait in WAITS.items()}
        found |= {
            "two devices": raised(lambda: x + torch.ones(4)),
            "good": raised(launch_lists),
            "inference mode": raised(in_inference_mode),
            "another thread": raised(in_another_thread),
            "cpu pointer": raised(lambda: launch_lists(kinds=torch.ones(1, dtype=torch.int8))),
            "other card": raised(lambda: launch_lists(kinds=torch.ones(1, device="cuda:1"))),
            "grid": raised(lambda: launch_lists(grid=(1, 65536, 1))),
            "a name": raised(lambda: launch_lists(unheard=1)),
        }
        with traffic.capture():
            found["copy in a graph"] = raised(lambda: torch.ones(4).to("cuda:0"))
        found["reads"], found["waits"] = str(len(traffic.reads)), str(len(traffic.waits))
    with pretended(replace(card, shared=4 * 1024)):
        found["shared"] = raised(lambda: attend(DEFAULT_CALL, on_card(DEFAULT_CALL)))
    with pretended(card, refuses=False) as traffic:
        x = torch.empty(4, device="cuda:0")
        found["zeros"] = str([x.tolist(), x[0].item(), len(traffic.reads)])
    return found


def other_options() -> list[str]:
    """Launches that are compiled with other options than the static check's."""
    with pretended(CARDS["sm_89"]) as traffic:
        with mock.patch.dict(launch.COMMON, enable_fp_fusion=False):
            attend(DEFAULT_CALL, on_card(DEFAULT_CALL))
        checked = [x for each in launches_of(DEFAULT_CALL, "sm_89").values() for x in each]
        return compared(traffic, checked, TARGETS["sm_89"])


if __name__ == "__main__":
    print(json.dumps({"faults": faults(), "other options": other_options()}))
