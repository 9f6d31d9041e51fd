"""Which key blocks each query block reads. Prints itself, counts itself, goes to files.

For every `(b, h, i_q)` a count and an ascending list of key-block indices, int32. A plan also
holds the lengths and the causal diagonal it was made for and is refused for others.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..support.atomic_files import replace_file
from ..support.block_picture import draw_blocks
from ..support.json_text import parse_json
from .call import (
    BLOCK_K,
    BLOCK_Q,
    CAUSAL_ALIGNS,
    MAX_OFFSET,
    ROW_GROUP,
    block_sizes,
    diagonal_offset,
    n_blocks,
)
from .tokenmask import EXCLUDED, TokenMask, as_4d, check_mask

FILE_FORMAT = "sparge.blockplan/2"
_MASK_DTYPES = (torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """counts, allowed `[B, Hq, n_q]` and indices `[B, Hq, n_q, n_k]`, int32.

    counts: blocks kept in each row; indices: those blocks, ascending, then -1.
    allowed: blocks the row may attend; the denominator of every density.
    offset: query row `i` stands at key position `i + offset`; a causal row sees keys up to there.
    has_mask: made with an `attn_mask`, which must then be given to `attend` too.
    measured: by `KeepError`, fp64 `[3, B, Hq]`: error, bound, raised; neither saved nor compared.

    `to_mask()` is equivalent to

        mask = torch.zeros(B, Hq, n_q, n_k, dtype=torch.bool)
        for b, h, i_q in itertools.product(range(B), range(Hq), range(n_q)):
            mask[b, h, i_q, indices[b, h, i_q, : counts[b, h, i_q]].long()] = True
    """

    counts: Tensor
    indices: Tensor
    allowed: Tensor
    Lq: int
    Lk: int
    is_causal: bool = False
    offset: int = 0
    has_mask: bool = False
    measured: Tensor | None = None
    _valid_at: list[int] = field(init=False, repr=False, default_factory=list)
    """torch's counts of in-place changes of the tensors when the plan was last known to be valid;
    empty before. Each plan has its own; `dataclasses.replace` makes a new one."""

    @property
    def error(self) -> Tensor | None:
        """Error of each head that `KeepError` measured, `[B, Hq]`."""
        return None if self.measured is None else self.measured[0]

    @property
    def bound(self) -> Tensor | None:
        """Upper confidence bound of the error, by which `KeepError` chose, `[B, Hq]`."""
        return None if self.measured is None else self.measured[1]

    @property
    def raised(self) -> Tensor | None:
        """Query heads that run in the caller's own precision, bool `[Hq]`."""
        return None if self.measured is None else raised_heads(self.measured)

    @classmethod
    def from_mask(
        cls,
        mask: Tensor,
        *,
        Lq: int,
        Lk: int,
        is_causal: bool = False,
        causal_align: str = "top_left",
        attn_mask: Tensor | None = None,
    ) -> BlockPlan:
        """The plan of a bool block mask `[B, Hq, n_q, n_k]`, less the blocks nothing may attend."""
        if causal_align not in CAUSAL_ALIGNS:
            raise ValueError(f"causal_align must be one of {CAUSAL_ALIGNS}, got {causal_align!r}")
        check_facts(Lq, Lk, is_causal)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"a block mask must be bool, got {came}; write mask.bool()")
        n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K)
        if mask.dim() != 4 or tuple(mask.shape[2:]) != (n_q, n_k):
            raise ValueError(
                f"a block mask for lengths {Lq} and {Lk} must have shape [B, Hq, {n_q}, {n_k}] "
                f"(query blocks of {BLOCK_Q}, key blocks of {BLOCK_K} rows), got "
                f"{tuple(mask.shape)}"
            )
        offset = diagonal_offset(Lq, Lk, causal_align)
        given = TokenMask(Lq, Lk, is_causal, offset, attn_mask)
        tokens = checked_tokens(given, (mask.shape[0], mask.shape[1]), mask.device)
        return plan_from_mask(mask, tokens)

    @property
    def diagonal(self) -> TokenMask:
        """Lengths and diagonal, without the caller's mask."""
        return TokenMask(self.Lq, self.Lk, self.is_causal, self.offset)

    def to_mask(self) -> Tensor:
        """The kept blocks as bool `[B, Hq, n_q, n_k]`."""
        n_k, device = self.indices.shape[-1], self.indices.device
        used = torch.arange(n_k, device=device) < self.counts[..., None]
        # Unused entries land in an extra column that is cut off again.
        where = torch.where(used, self.indices, n_k).long()
        mask = torch.zeros((*self.counts.shape, n_k + 1), dtype=torch.bool, device=device)
        return mask.scatter_(-1, where, True)[..., :n_k]

    @property
    def density(self) -> float:
        """Kept blocks / allowed blocks; 1.0 where nothing may be attended."""
        allowed = int(self.allowed.sum())
        return int(self.counts.sum()) / allowed if allowed else 1.0

    def head_density(self) -> Tensor:
        """Density of each head, `[B, Hq]` fp64."""
        allowed = self.allowed.sum(-1).double()
        return torch.where(allowed > 0, self.counts.sum(-1) / allowed, 1.0)

    def row_groups(self, rows: int = ROW_GROUP) -> Tensor:
        """Groups of `rows` (the backend's) query rows in each query block, `[n_q]`."""
        sizes = block_sizes(self.Lq, BLOCK_Q, self.counts.device)
        return (sizes + rows - 1) // rows

    def pv_groups(self, rows: int = ROW_GROUP) -> int:
        """Row groups x kept blocks: the PV products that the second filter may skip."""
        return int((self.counts * self.row_groups(rows)).sum())

    def pv_skipped(self, pv_skips: Tensor | None, rows: int = ROW_GROUP) -> float:
        """Share of those products that the second filter skipped, `pv_skips` `[B, Hq, n_q]`."""
        skips = 0 if pv_skips is None else int(pv_skips.sum())
        return skips / self.pv_groups(rows) if skips else 0.0

    def sparsity(self, pv_skips: Tensor | None = None, rows: int = ROW_GROUP) -> float:
        """(skipped QK blocks + skipped PV blocks) / (2 · allowed blocks). A block that is not kept
        counts in both; `pv_skips` `[B, Hq, n_q]` counts row groups skipped inside kept blocks."""
        allowed = int(self.allowed.sum())
        if not allowed:
            return 0.0
        skipped = allowed - int(self.counts.sum())
        inside = 0.0 if pv_skips is None else float((pv_skips / self.row_groups(rows)).sum())
        return (2 * skipped + inside) / (2 * allowed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; an existing one is replaced at once or not at all."""
        from safetensors.torch import save

        facts = {name: getattr(self, name) for name in _FACTS}
        tensors = {name: getattr(self, name).cpu().contiguous() for name in _TENSORS}
        data = save(tensors, metadata={"format": FILE_FORMAT, "plan": json.dumps(facts)})
        replace_file(path, data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BlockPlan:
        """Read a file that `save` wrote; a damaged one is refused."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if (written := metadata.get("format")) != FILE_FORMAT:
                    raise ValueError(
                        f"{path} is not a block plan this version reads: its format is "
                        f"{written!r}, needed is {FILE_FORMAT!r}"
                    )
                facts = parse_json(metadata["plan"], f"{path} is damaged: its metadata")
                if not isinstance(facts, dict) or set(facts) != {*_FACTS}:
                    needed = f"its metadata must have exactly {sorted(_FACTS)}"
                    raise ValueError(f"{path} is damaged: {needed}")
                plan = cls(**{name: file.get_tensor(name) for name in _TENSORS}, **facts)
            plan.validate(f"{path} is damaged: ")
            return plan
        except (SafetensorError, KeyError, TypeError, RecursionError, AttributeError) as error:
            raise ValueError(f"{path} is damaged or not a block plan: {error}") from error

    def validate(self, where: str = "") -> None:
        """Raise unless facts, shapes, counts and lists agree; for plans that come from outside."""
        check_facts(self.Lq, self.Lk, self.is_causal, self.has_mask, self.offset, where)
        tensors = {name: getattr(self, name) for name in _TENSORS}
        n_k = check_plan_tensors(tensors, self.Lq, self.Lk, where)
        used = torch.arange(n_k, device=self.counts.device) < self.counts[..., None]
        within = torch.where(used, (self.indices >= 0) & (self.indices < n_k), self.indices == -1)
        rising = (self.indices[..., 1:] > self.indices[..., :-1]) | ~used[..., 1:]
        counted = (self.counts >= 0) & (self.counts <= self.allowed) & (self.allowed <= n_k)
        if not (within.all() and rising.all() and counted.all()):
            raise ValueError(
                f"{where}each list must hold `count` ascending block indices below {n_k}, then -1, "
                "and count at most `allowed`"
            )
        may = self.diagonal.block_kinds(self.counts.device) != EXCLUDED
        most = may.sum(-1)
        agrees = (self.allowed <= most) if self.has_mask else (self.allowed == most)
        if not agrees.all() or (self.to_mask() & ~may).any():
            raise ValueError(
                f"{where}its diagonal (is_causal={self.is_causal}, offset {self.offset}) does not "
                "allow the blocks that it keeps or counts"
            )
        self.trust()

    @property
    def is_valid(self) -> bool:
        """Made by a stage or validated, and its tensors not changed in place since."""
        return bool(self._valid_at) and self._valid_at == self._versions()

    def trust(self) -> BlockPlan:
        """Mark the plan as valid for as long as its tensors are not changed in place."""
        self._valid_at[:] = self._versions()
        return self

    def _versions(self) -> list[int]:
        """torch's counts of in-place changes; empty for inference tensors, which have none."""
        tensors = [getattr(self, name) for name in _TENSORS]
        if any(x.is_inference() for x in tensors):
            return []
        return [x._version for x in tensors]

    def to(self, device: torch.device | str) -> BlockPlan:
        """The plan on another device; a loaded plan is on the CPU."""
        measured = None if self.measured is None else self.measured.to(device)
        moved = {name: getattr(self, name).to(device) for name in _TENSORS}
        return replace(self, **moved, measured=measured)

    def equal(self, other: BlockPlan) -> bool:
        """The same blocks for the same lengths and diagonal, on one device; as `==` says."""
        if not isinstance(other, BlockPlan) or self.counts.device != other.counts.device:
            return False
        return all(getattr(self, name) == getattr(other, name) for name in _FACTS) and all(
            torch.equal(getattr(self, name), getattr(other, name)) for name in _TENSORS
        )

    def __eq__(self, other: object) -> bool:
        return self.equal(other) if isinstance(other, BlockPlan) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # tensors have no value to hash by

    def picture(self, b: int = 0, h: int = 0, width: int = 32) -> str:
        """One head drawn with query blocks downwards and key blocks across."""
        allowed = self.diagonal.block_kinds(self.counts.device)[0, 0] != EXCLUDED
        return draw_blocks(self.to_mask()[b, h], allowed, width)

    def __str__(self) -> str:
        B, Hq, n_q = self.counts.shape
        at = f" offset {self.offset}" if self.offset else ""
        causal = f", causal{at}" if self.is_causal else ""
        masked = ", token mask" if self.has_mask else ""
        head = (
            f"BlockPlan {B} x {Hq} heads, {self.Lq} queries x {self.Lk} keys "
            f"({n_q} x {self.indices.shape[-1]} blocks){causal}{masked}, density {self.density:.3f}"
        )
        return f"{head}\nhead 0:\n{self.picture()}"

    def __repr__(self) -> str:
        return str(self).split("\n", 1)[0].join("<>")


_TENSORS = ("counts", "indices", "allowed")
_FACTS = ("Lq", "Lk", "is_causal", "offset", "has_mask")


def raised_heads(measured: Tensor) -> Tensor:
    """`BlockPlan.raised` of its `measured`."""
    return (measured[2] > 0).any(0)


def plan_from_mask(kept: Tensor, tokens: TokenMask, *, measured: Tensor | None = None) -> BlockPlan:
    """The plan of a bool map `[B, Hq, n_q, n_k]`; blocks that nothing may attend are dropped."""
    may = (tokens.block_kinds(kept.device) != EXCLUDED).expand_as(kept)
    counts, indices = lists_from_mask(kept & may)
    allowed = may.sum(-1, dtype=torch.int32)
    return plan_from_lists(counts, indices, allowed, tokens, measured=measured)


def plan_from_lists(
    counts: Tensor,
    indices: Tensor,
    allowed: Tensor,
    tokens: TokenMask,
    *,
    measured: Tensor | None = None,
) -> BlockPlan:
    """The plan of lists that a stage made."""
    return BlockPlan(
        counts,
        indices,
        allowed,
        Lq=tokens.Lq,
        Lk=tokens.Lk,
        is_causal=tokens.is_causal,
        offset=tokens.offset,
        has_mask=tokens.attn_mask is not None,
        measured=measured,
    ).trust()


def lists_from_mask(kept: Tensor, *, fill: int = -1) -> tuple[Tensor, Tensor]:
    """Counts and ascending index lists, `fill` behind them."""
    counts = kept.sum(-1, dtype=torch.int32)
    order = kept.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    used = torch.arange(kept.shape[-1], device=kept.device) < counts[..., None]
    return counts, torch.where(used, order, fill).to(torch.int32)


def block_counts(tokens: TokenMask) -> tuple[int, int]:
    """`n_q, n_k` of some lengths."""
    return n_blocks(tokens.Lq, BLOCK_Q), n_blocks(tokens.Lk, BLOCK_K)


def check_facts(
    Lq: int,
    Lk: int,
    is_causal: bool,
    has_mask: bool = False,
    offset: int = 0,
    where: str = "",
) -> None:
    """Raise unless these can be the lengths and the diagonal of a plan."""
    for name, number in (("Lq", Lq), ("Lk", Lk), ("offset", offset)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{where}{name} must be a whole number, got {number!r}")
    for name, length in (("Lq", Lq), ("Lk", Lk)):
        if length < 1:
            raise ValueError(f"{where}{name} must be at least 1, got {length}")
    if abs(offset) > MAX_OFFSET:
        raise ValueError(f"{where}offset must be within ±{MAX_OFFSET}, got {offset}")
    for name, flag in (("is_causal", is_causal), ("has_mask", has_mask)):
        if not isinstance(flag, bool):
            raise TypeError(f"{where}{name} must be True or False, got {flag!r}")


def check_plan_tensors(tensors: dict[str, Tensor], Lq: int, Lk: int, where: str) -> int:
    """`n_k`, or raise unless counts, allowed and indices are those of a plan for these lengths."""
    n_q, n_k = n_blocks(Lq, BLOCK_Q), n_blocks(Lk, BLOCK_K)
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{where}{name} must be a tensor, got {x!r}")
    counts = tensors["counts"]
    if counts.dim() != 3 or 0 in counts.shape:
        raise ValueError(
            f"{where}counts must be [B, Hq, n_q], none of them 0, got {tuple(counts.shape)}"
        )
    shape = (*counts.shape[:2], n_q)
    for name, needed in (("counts", shape), ("allowed", shape), ("indices", (*shape, n_k))):
        x = tensors[name]
        if tuple(x.shape) != needed or x.dtype != torch.int32:
            raise ValueError(
                f"{where}{name} must be int32 of shape {needed} for lengths {Lq} and {Lk}, got "
                f"{x.dtype} {tuple(x.shape)}"
            )
    return n_k


def checked_tokens(given: TokenMask, heads: tuple[int, int], device: torch.device) -> TokenMask:
    """`given` with its mask checked for `heads` = `(B, Hq)` and viewed as 4-D."""
    if given.attn_mask is None:
        return given
    weights = (*heads, given.Lq, given.Lk)
    check_mask(given.attn_mask, weights, device=device, dtypes=_MASK_DTYPES)
    return replace(given, attn_mask=as_4d(given.attn_mask))
