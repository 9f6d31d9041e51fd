"""The adapter of `sparge.accelerate` for diffusers pipelines and denoisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

from ...reorder import HILBERT
from ...values.recipe import VISION
from ...values.schedule import Schedule
from ..adapters import Attached, Found
from ..clock import Clock, SchedulerClock
from ..route import CROSS, Route
from ..site import Site
from ..tokens import Tokens
from .backend import NAME, accelerated, attention_call, give_back, is_accelerated
from .models import GRIDS, IN_UNET, RULES, UNETS, GridsById, Rule
from .stack import Stack

NO_PROCESSOR = "its attention does not go through diffusers' attention processors"
BY_HAND = "its processor computes attention by hand; set_attn_processor can give it one that calls"


class Denoisers(nn.ModuleDict):
    """Several denoisers of one pipeline, by the names that the pipeline has for them."""


class DiffusersAdapter:
    name = "diffusers"
    options = ("schedule", "order", "grid", "cross_attention", "protect_text")

    def find(self, model: Any, *, cross_attention: bool = False) -> Found | str:
        model = uncompiled(model)
        pipeline = model if isinstance(model, DiffusionPipeline) else None
        if pipeline is None and not isinstance(model, ModelMixin):
            return "it is neither a diffusers pipeline nor one of its models"
        parts, left_alone = ({"": model}, {}) if pipeline is None else denoisers_of(pipeline)
        if not parts:
            return "none of the parts of this pipeline is a denoiser"
        known = (*RULES, *UNETS)
        unknown = {name: type(part).__name__ for name, part in parts.items()}
        unknown = {name: kind for name, kind in unknown.items() if kind not in known}
        if len(unknown) == len(parts):
            return (
                f"the tokens of {', '.join(unknown.values())} are not known: which of them are "
                f"text, and what grid the others are on. Known are {', '.join(known)}. Without "
                f'that knowledge, set_attention_backend("{NAME}") serves a model that dispatches'
            )
        for name, kind in unknown.items():
            del parts[name]
            left_alone[name] = f"{kind}: its tokens are not known"
        root = next(iter(parts.values())) if len(parts) == 1 else Denoisers(parts)
        modules, reasons = attention_modules(root, cross_attention)
        left_alone |= reasons
        if not modules:
            return "; ".join(left_alone.values()) or NO_PROCESSOR
        defaults: dict[str, Any] = {"order": HILBERT, "recipe": VISION}
        if pipeline is not None and hasattr(pipeline, "scheduler"):
            defaults["schedule"] = Schedule()
        return Found(root, modules, left_alone, defaults, pipeline)

    def attach(
        self,
        found: Found,
        sites: Mapping[str, Site],
        *,
        schedule: Schedule | None = None,
        order: str = HILBERT,
        grid: Any = None,
        cross_attention: bool | None = None,
        protect_text: bool | None = None,
    ) -> Attached:
        protect = protect_text is not False
        stacks = stacks_of(found.model, partial(Tokens, order, grid, protect_text=protect))
        changed = []
        for name, site in sites.items():
            module: Any = found.modules[name]
            stack = next((stack for stack in stacks if stack.add(module, site)), None)
            tokens = None if stack is None else stack.tokens
            route = Route(site, tokens, cross=bool(cross_attention))
            changed.append((module, module.processor, accelerated(module.processor, route)))
        clock = Clock(sites.values(), [stack.follow for stack in stacks])
        for module, _, mine in changed:
            module.processor = mine
        handles = [handle for stack in stacks for handle in stack.hook()]
        scheduler, watched = getattr(found.pipeline, "scheduler", None), None
        if scheduler is not None:
            watched = SchedulerClock(scheduler, clock)
        taken = _Taken(found.pipeline, changed, handles, stacks, watched)
        return Attached(taken.give_back, clock, taken.notes)


ADAPTER = DiffusersAdapter()


def denoisers_of(pipeline: Any) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The denoisers of a pipeline by name, and the other modules with why they stay."""
    parts: dict[str, nn.Module] = {}
    left_alone: dict[str, str] = {}
    for name, part in pipeline.components.items():
        if not isinstance(part, nn.Module):
            continue
        part = uncompiled(part)
        home, of_diffusers = type(part).__module__, issubclass(type(part), ModelMixin)
        if of_diffusers and ".autoencoders." not in home and "vae" not in name:
            parts[name] = part
        else:
            left_alone[name] = f"{type(part).__name__}: only denoisers are accelerated"
    return parts, left_alone


def uncompiled(model: Any) -> Any:
    """The module inside of what `torch.compile` returned."""
    return getattr(model, "_orig_mod", model) if isinstance(model, nn.Module) else model


def attention_modules(
    root: nn.Module, cross: bool = False
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Self- and joint attention in the blocks of denoisers; and what else there is, with why.

    cross: take attention to other tokens as well.
    """
    modules: dict[str, nn.Module] = {}
    left_alone: dict[str, str] = {}
    for name, module in root.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None or not callable(processor):
            continue
        rule, inside = _rule_around(root, name)
        if not inside:
            left_alone[name] = "outside of the transformer blocks"
        elif not cross and _is_cross(name, module, rule):
            left_alone[name] = CROSS
        elif not attention_call(processor):
            left_alone[name] = f"{type(processor).__name__}: {BY_HAND} SDPA"
        else:
            modules[name] = module
    return modules, left_alone


def _rule_around(root: nn.Module, name: str) -> tuple[Rule | None, bool]:
    """The rule of the denoiser that a module is in, and whether it is in one of its blocks."""
    around = root
    for step in name.split("."):
        rule = RULES.get(type(around).__name__)
        if rule is not None:
            return rule, step in rule.blocks
        around = getattr(around, step)
    return None, True


def _is_cross(name: str, module: Any, rule: Rule | None) -> bool:
    """Attention to other tokens than its own, such as a text that is not in the sequence."""
    if rule is not None and name.rpartition(".")[2] in rule.cross:
        return True
    joint = ("added_kv_proj_dim", "add_q_proj")
    if all(getattr(module, name, None) is not None for name in joint):
        return False
    stated = getattr(module, "is_cross_attention", None)
    if isinstance(stated, bool):
        return stated
    own, other = getattr(module, "query_dim", None), getattr(module, "cross_attention_dim", None)
    return other is not None and other != own


def stacks_of(model: nn.Module, new_tokens: Callable[[], Tokens]) -> list[Stack]:
    """A stack for every denoiser with a rule, and for every transformer inside of a UNet."""
    stacks = []
    for part in model.modules():
        kind = type(part).__name__
        rule = RULES.get(kind)
        if kind == "Transformer2DModel" and getattr(part, "is_input_continuous", False):
            rule = IN_UNET
        if rule is not None:
            vars(part).setdefault(GRIDS, GridsById())
            stacks.append(Stack(part, rule, new_tokens()))
    return stacks


@dataclass(frozen=True)
class _Taken:
    """What was changed in a model. changed: modules, with their processors before and now."""

    pipeline: Any
    changed: list[tuple[Any, Any, Any]]
    handles: list[Any]
    stacks: list[Stack]
    watched: SchedulerClock | None

    def give_back(self) -> None:
        for module, before, mine in self.changed:
            if module.processor is mine:  # otherwise the user has changed it since
                module.processor = before
                give_back(mine, before)
        for handle in self.handles:
            handle.remove()
        for stack in self.stacks:
            vars(stack.model).pop(GRIDS, None)
        if self.watched is not None:
            self.watched.stop()

    def notes(self) -> list[str]:
        notes = []
        if self.watched is not None and self.pipeline.scheduler is not self.watched.scheduler:
            notes.append(
                "the pipeline has another scheduler now; accelerate it again to follow that"
            )
        if lost := sum(not is_accelerated(module.processor) for module, _, _ in self.changed):
            notes.append(f"{lost} attention processors were replaced since; accelerate again")
        tokens = [stack.tokens for stack in self.stacks]
        if grids := {known.map.grid for known in tokens if known.map is not None}:
            shown = ", ".join("×".join(map(str, grid)) for grid in sorted(grids))
            notes.append(f"grids of visual tokens: {shown}, in order {tokens[0].order!r}")
        return notes
