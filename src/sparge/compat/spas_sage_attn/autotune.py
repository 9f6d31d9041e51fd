"""The original's tuned attention module, and its saved values.

The values are numbers that the planner reads, so they stay float32 on the CPU wherever the model
goes (the original casts them with the model: 0.98 becomes 0.98047). Saved values are matched to
modules by their whole name (the original takes any name that contains another).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...support.tools_package import INSTALL, TUNER, find_tool
from ...values.recipe import KeepAll, Recipe
from ._recipes import (
    FIELDS,
    READ,
    Values,
    check_flag,
    check_values,
    precision_of,
    read_saved,
    recipe_of_values,
    refuse,
    safest,
    values_of_recipe,
)
from .core import Result, heads_first, run

Model = TypeVar("Model", bound=nn.Module)
SIM_RULES = ("l1", "cosine", "rmse")


class SparseAttentionMeansim(nn.Module):
    """Attention with each head's own thresholds, found by tuning or loaded.

    l1, pv_l1: error bounds of tuning, for the first filter and for both. tune_pv: False leaves
    the second filter off. sim_rule, cos_sim, rmse: kept; only "l1" can be tuned by.
    Each value is None until it is tuned or loaded, then one number per query head.
    """

    is_sparse: Tensor | None
    cdfthreshd: Tensor | None
    simthreshd1: Tensor | None
    simthreshd2: Tensor | None
    pvthreshd: Tensor | None

    def __init__(
        self,
        sim_rule: str = "l1",
        l1: float = 0.07,
        pv_l1: float = 0.08,
        cos_sim: float = 0.98,
        rmse: float = 0.07,
        rearrange_kwargs: Mapping[str, Any] = MappingProxyType({}),
        tune_pv: bool = True,
    ) -> None:
        super().__init__()
        if sim_rule not in SIM_RULES:
            raise ValueError(f"sim_rule must be one of {', '.join(SIM_RULES)}; got {sim_rule!r}")
        if not (0 <= l1 < pv_l1 and cos_sim <= 1 and rmse >= 0):
            raise ValueError(
                "needed are 0 <= l1 < pv_l1, cos_sim <= 1 and rmse >= 0; got "
                f"l1={l1}, pv_l1={pv_l1}, cos_sim={cos_sim}, rmse={rmse}"
            )
        if rearrange_kwargs:
            raise refuse(
                f"rearrange_kwargs must be empty, as the original ignores it; got "
                f"{dict(rearrange_kwargs)!r}",
                "reorder the tokens before the call",
            )
        self.sim_rule, self.l1, self.pv_l1 = sim_rule, l1, pv_l1
        self.cos_sim, self.rmse = cos_sim, rmse
        self.tune_pv = check_flag("tune_pv", tune_pv)
        self.num_data_passed = 0
        for name in FIELDS:
            self.register_buffer(name, None)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: None = None,
        is_causal: bool = False,
        scale: float | None = None,
        tensor_layout: str = "HND",
        tune_mode: bool = False,
        smooth_k: bool = True,
        return_sparsity: bool = False,
    ) -> Result:
        """`out`, or `(out, sparsity)`; while tuning, exact attention.

        Tunes when `tune_mode` or the environment's TUNE_MODE is set: one call is one sample, and
        of several samples each head keeps its safest values.
        """
        if mask is not None:
            raise refuse(
                f"mask must be None, as the original ignores it; got {type(mask).__name__}",
                "sparge.attention(q, k, v, attn_mask=...) honours masks exactly",
            )
        tensors = heads_first(q, k, v, tensor_layout)
        options: dict[str, Any] = {
            "is_causal": is_causal,
            "scale": scale,
            "tensor_layout": tensor_layout,
            "return_sparsity": return_sparsity,
        }
        if check_flag("tune_mode", tune_mode) or os.environ.get("TUNE_MODE"):
            self._tune(*tensors, is_causal=is_causal, scale=scale)
            return run(tensors, Recipe(keep=KeepAll()), backend="dense", **options)
        recipe = self._recipe(tensors[0].shape[1], precision_of(q.dtype, smooth_k))
        return run(tensors, recipe, **options)

    def values(self) -> Values | None:
        """The five values by name; None before tuning or loading."""
        found = {name: getattr(self, name) for name in FIELDS}
        if all(value is None for value in found.values()):
            return None
        given = {name: value for name, value in found.items() if value is not None}
        return check_values(given, type(self).__name__)

    def set_values(self, values: Mapping[str, Tensor], where: str = "") -> None:
        """Take one value per head, after checking all of them."""
        for name, value in check_values(values, where or type(self).__name__).items():
            setattr(self, name, value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _recipe(self, heads: int, precision: str) -> Recipe:
        values = {name: getattr(self, name) for name in READ}
        if any(value is None for value in values.values()):
            self.values()  # some without the others: says which
            raise ValueError(
                "this SparseAttentionMeansim has no values yet; load some with "
                "load_sparse_attention_state_dict(model, saved), or tune it with tune_mode=True"
            )
        tuned = len(values["cdfthreshd"])
        if tuned != heads:
            raise ValueError(
                f"this SparseAttentionMeansim has values for {tuned} heads and q has {heads}; "
                "load those of this model, or see whether tensor_layout is right"
            )
        return recipe_of_values(values, precision)

    @torch.no_grad()
    def _tune(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
    ) -> None:
        if self.sim_rule != "l1":
            raise refuse(
                f"tuning here bounds the relative L1 error, got sim_rule={self.sim_rule!r}",
                'use sim_rule="l1" with l1 and pv_l1',
            )
        l2 = self.pv_l1 if self.tune_pv else None
        found = _tuner()(query, key, value, is_causal=is_causal, scale=scale, l1=self.l1, l2=l2)
        values, earlier = values_of_recipe(found, query.shape[1]), self.values()
        self.set_values(values if earlier is None else safest(values, earlier))
        self.num_data_passed += 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`.to(...)`, `.half()` and the like leave the values as they are."""
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """A model's ordinary state dict brings the values too, also to a module without any."""
        given = {n: state_dict[prefix + n] for n in FIELDS if prefix + n in state_dict}
        if given:
            try:
                self.set_values(given, prefix.rstrip("."))
            except ValueError as error:
                error_msgs.append(str(error))
        elif self.values() is not None:
            missing_keys.extend(prefix + name for name in FIELDS)
        if strict:
            mine = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
            unexpected_keys.extend(prefix + name for name in mine if name not in FIELDS)


def extract_sparse_attention_state_dict(model: nn.Module, verbose: bool = False) -> Values:
    """The values of every tuned module, as `"<module name>.<value>"`; torch.save keeps them."""
    out: Values = {}
    for name, module in _modules(model).items():
        values = module.values()
        if values is not None:
            out |= {_join(name, field): value for field, value in values.items()}
            if verbose:
                print(f"{name}: values of {len(values['cdfthreshd'])} heads")
    return out


def load_sparse_attention_state_dict(
    model: Model,
    saved: Mapping[str, Tensor] | str | os.PathLike[str],
    multigpu: bool = False,
    verbose: bool = False,
) -> Model:
    """Give every module its saved values, by its whole name; all of them or none.

    saved: the dict, or a file of it, read as tensors and nothing else. multigpu: no difference,
    the values stay on the CPU.
    """
    check_flag("multigpu", multigpu)
    tensors, modules = read_saved(saved), _modules(model)
    expected = {_join(name, field): (name, field) for name in modules for field in FIELDS}
    unknown = [key for key in tensors if key not in expected]
    given: dict[str, Values] = {}
    for key, value in tensors.items():
        if key in expected:
            name, field = expected[key]
            given.setdefault(name, {})[field] = value
    bare = [name for name in modules if name not in given]
    if unknown or bare:
        raise ValueError(
            "saved values and SparseAttentionMeansim modules must match by name; "
            f"values without a module: {_some(unknown)}; modules without values: {_some(bare)}. "
            "Put the modules into the model first, and rename keys if the model is wrapped"
        )
    checked = {name: check_values(values, name or "saved") for name, values in given.items()}
    for name, values in checked.items():
        modules[name].set_values(values, name)
        if verbose:
            print(f"{name}: {len(values['cdfthreshd'])} heads loaded")
    return model


def _tuner() -> Callable[..., Recipe]:
    """`tune_head_settings(query, key, value, *, is_causal, scale, l1, l2) -> Recipe`.

    The recipe has one mass, min_similarity and pv_skip per query head; l2=None leaves pv_skip off.
    """
    found: Callable[..., Recipe] | None = find_tool(TUNER, "tune_head_settings")
    if found is None:
        raise refuse(
            "tune_mode asks for tuning, and sparge-tools, which has the tuner, is not installed",
            f"install it with {INSTALL}, or load values that were tuned elsewhere with "
            "load_sparse_attention_state_dict, or use "
            "spas_sage2_attn_meansim_topk_cuda, which needs none",
        )
    return found


def _modules(model: nn.Module) -> dict[str, SparseAttentionMeansim]:
    found = model.named_modules()
    return {name: m for name, m in found if isinstance(m, SparseAttentionMeansim)}


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) + more) or "none"
