"""Loads the native library and selects its instruction set.

`SPARGE_ISA` forces an instruction set by name. `tiles` is the AMX schedule over a scalar emulation
of the tile unit; it is for tests and never selected by default. `SPARGE_LIBRARY` is the path of
another build of the library, such as the one of `make sanitize`.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...values.backend import Host
from ...values.call import BLOCK_K, BLOCK_Q, Call, n_blocks
from ...values.recipe import KeepAll, Recipe, heads_of
from ...values.stages import Pooled, Prepared, QTensor
from ...values.tokenmask import TokenMask

ENV_ISA = "SPARGE_ISA"
ENV_LIBRARY = "SPARGE_LIBRARY"
# Best first; the positions are the numbers of csrc/isa.cpp.
ISAS = ("amx", "avx512", "avx2", "portable", "tiles")
FOR_TESTS = ("tiles",)


def library() -> str | None:
    """Path of the native library; None if there is none."""
    spec = importlib.util.find_spec("sparge._cpu")
    return os.environ.get(ENV_LIBRARY) or (spec.origin if spec else None)


@lru_cache(maxsize=1)
def _found() -> tuple[Any, str | None]:
    """`(ops, None)`, or `(None, reason)`."""
    path = library()
    if not path:
        return None, "the native library was not built for this platform"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return None, f"the native library does not load: {error}"
    return torch.ops.sparge_cpu, None


def why_missing() -> str | None:
    """The reason why the native core cannot be used; None if it can."""
    return _found()[1]


def ops() -> Any:
    """`torch.ops.sparge_cpu`; valid only if `why_missing()` is None."""
    return _found()[0]


@lru_cache(maxsize=1)
def available() -> tuple[str, ...]:
    """Instruction sets of this machine, best first, those for tests last."""
    if why_missing() is not None:
        return ()
    bits = int(ops().available_isas())
    return tuple(name for i, name in enumerate(ISAS) if bits >> i & 1)


def chosen_isa(there: tuple[str, ...]) -> str:
    """The instruction set to run: the one named by `SPARGE_ISA`, or the best of `there`."""
    asked = os.environ.get(ENV_ISA)
    if not asked:
        return there[0]
    if asked in there:
        return asked
    names = ", ".join(name for name in there if name not in FOR_TESTS)
    why = "this machine does not have it" if asked in ISAS else "no instruction set has that name"
    raise ValueError(f"{ENV_ISA}={asked}: {why}; here are {names}")


def isa_number() -> int:
    return ISAS.index(chosen_isa(available()))


ROWS_PER_SCALE = 1
"""Rows of Q and K that share a scale; the ops take any number."""


def parts_of(x: Tensor | QTensor) -> tuple[Tensor, Tensor | None]:
    """Numbers, or codes and their scales."""
    return (x.codes, x.scale.contiguous()) if isinstance(x, QTensor) else (x, None)


def pooled_parts(pooled: Pooled | None) -> tuple[Any, ...]:
    """`pooled_key, pooled_value, pooled_k_scale, pooled_v_scale, pool_group`."""
    if pooled is None:
        return None, None, None, None, 1
    (k, k_scale), (v, v_scale) = parts_of(pooled.key), parts_of(pooled.value)
    return k, v, k_scale, v_scale, pooled.group


def scored_parts(prepared: Prepared) -> tuple[Any, ...]:
    """`query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale`."""
    (q, q_scale), (k, k_scale) = parts_of(prepared.queries.rows), parts_of(prepared.keys.key)
    return q, k, q_scale, ROWS_PER_SCALE, k_scale, ROWS_PER_SCALE


def min_similarity(recipe: Recipe, Hq: int) -> Tensor | None:
    """Of each query head; None without a similarity test, as always for `KeepAll`."""
    least = recipe.min_similarity
    if least is None or isinstance(recipe.keep, KeepAll):
        return None
    return torch.tensor(heads_of(least, Hq, none=-1.0))


def token_parts(tokens: TokenMask) -> tuple[Tensor | None, Tensor | None, bool, int]:
    """`mask, kinds, is_causal, offset`."""
    kinds = tokens.kinds
    if kinds is None and tokens.attn_mask is not None:
        kinds = block_kinds(tokens)
    return tokens.attn_mask, kinds, tokens.is_causal, tokens.offset


def block_kinds(tokens: TokenMask) -> Tensor:
    """Kinds of blocks under the caller's mask. Without one, the kernels derive them from the
    diagonal."""
    mask = tokens.attn_mask
    assert mask is not None
    n_q, n_k = n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)
    kinds = mask.new_empty((*mask.shape[:2], n_q, n_k), dtype=torch.int8)
    facts = (tokens.Lq, tokens.Lk, tokens.is_causal, tokens.offset)
    ops().block_kinds(mask, *facts, kinds, isa_number())
    return kinds


# Read once: a graph being traced then sees constants.
MISSING, ISAS_HERE = why_missing(), available()


def refusal(host: Host, call: Call) -> str | None:
    if call.device != "cpu":
        return f"it runs on the cpu, and the tensors are on {call.device}"
    if call.dtype == torch.float64:
        return "it computes in fp32; the reference serves float64"
    if MISSING is None:
        chosen_isa(ISAS_HERE)  # raises if a forced name is not there
    return MISSING
