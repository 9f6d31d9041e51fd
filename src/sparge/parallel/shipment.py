"""Keys and values on their way to another rank: the blocks that it keeps, and nothing else.

codes   as the kernel reads them: 8-bit keys with their scales, 16-bit or 8-bit values; skipped
        blocks as their pooled entries. For backends whose operands are plain tensors.
rows    the caller's own rows, prepared again by whoever receives them; of a skipped block that
        is pooled, every row is its group's mean. For every backend, and for error budgets,
        which may raise the precision of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..values.call import Call, half_dtype
from ..values.geometry import BLOCK_K, n_blocks
from ..values.qtensor import Pooled, QTensor, finite_rows, group_means, working
from ..values.stages import PreparedKeys, Stages
from .layout import Piece
from .messages import Spec, from_bytes, size_of, to_bytes


@dataclass(frozen=True)
class Cargo:
    """One piece of keys and values as it travels. largest: the largest |v| of each head, which
    bounds what pooled entries can add up to."""

    key: Tensor | QTensor
    value: Tensor | QTensor
    pooled: Pooled | None = None
    largest: Tensor | None = None

    def finite_blocks(self) -> Tensor:
        """Which key blocks hold only finite keys and values, bool `[B, Hk, n]`."""
        rows = finite_rows(self.key) & finite_rows(self.value)
        n = n_blocks(rows.shape[2], BLOCK_K)
        padded = torch.nn.functional.pad(rows, (0, n * BLOCK_K - rows.shape[2]), value=True)
        return padded.unflatten(2, (n, BLOCK_K)).all(-1)


@dataclass(frozen=True)
class _Form:
    """What a tensor of keys, values or their means is made of. tail: dimensions behind the rows.
    rows_per_scale: 0 for what is not coded."""

    dtype: torch.dtype
    tail: tuple[int, ...]
    rows_per_scale: int = 0
    per_channel: bool = False

    def tensors(self, x: Tensor | QTensor) -> list[tuple[Tensor, int]]:
        """Its tensors, each with the rows of a key block that one of its rows stands for."""
        return [(x.codes, 1), (x.scale, x.rows_per_scale)] if isinstance(x, QTensor) else [(x, 1)]

    def specs(self, rows: tuple[int, int, int]) -> list[tuple[Spec, int]]:
        B, H, n = rows
        found = [(Spec((B, H, n, *self.tail), self.dtype), 1)]
        if self.rows_per_scale:
            tail = self.tail if self.per_channel else ()
            scales = (B, H, n_blocks(n, self.rows_per_scale), *tail)
            found.append((Spec(scales, torch.float32), self.rows_per_scale))
        return found

    def build(self, tensors: Sequence[Tensor]) -> Tensor | QTensor:
        if not self.rows_per_scale:
            return tensors[0].contiguous()
        codes, scale = (x.contiguous() for x in tensors)
        return QTensor(codes, scale, self.rows_per_scale, self.per_channel)


def _form_of(x: Tensor | QTensor) -> _Form:
    if isinstance(x, QTensor):
        return _Form(x.codes.dtype, tuple(x.shape[3:]), x.rows_per_scale, x.per_channel)
    return _Form(x.dtype, tuple(x.shape[3:]))


class Shipment:
    """How the keys of one call travel. call: of the whole sequence."""

    def __init__(self, stages: Stages, call: Call, key_mean: Tensor | None, *, plain: bool) -> None:
        self.stages, self.call, self.key_mean = stages, call, key_mean
        self.coded = plain and not call.measures_error
        device = torch.device(*call.where) if key_mean is None else key_mean.device
        nothing = [
            torch.zeros((call.B, call.Hk, BLOCK_K, d), dtype=call.dtype, device=device)
            for d in (call.D, call.Dv)
        ]
        # The forms follow from backend and recipe; an empty piece shows them to every rank.
        sample = self.load(nothing[0], nothing[1])
        self._forms = [_form_of(sample.key), _form_of(sample.value)]
        self._pooled_forms: list[_Form] = []
        if sample.pooled is not None:
            self._pooled_forms = [_form_of(sample.pooled.key), _form_of(sample.pooled.value)]

    def load(self, key: Tensor, value: Tensor) -> Cargo:
        """A piece of keys and values, ready to travel or to be attended here."""
        call, recipe = self.call, self.call.recipe
        if not self.coded:
            pooled = None
            if recipe.pools:
                k, v = (group_means(x, recipe.pool_group).to(x.dtype) for x in (key, value))
                pooled = Pooled(k, v, recipe.pool_group)
            return Cargo(key, value, pooled)
        part = replace(call, Lk=key.shape[2], is_causal=False, label="")
        made = self.stages.prepare_keys(
            part, key, value, mean=self.key_mean, to_plan=False, to_attend=True
        )
        held, pooled, largest = made.value, made.entries, None
        if recipe.precision == "int8":
            held = _in_16_bits(held)
            pooled = pooled and replace(pooled, value=_in_16_bits(pooled.value))
        if pooled is not None:
            finite = torch.where(value.isfinite(), value, 0.0)
            largest = finite.abs().amax((2, 3)).float()
        return Cargo(made.key, held, pooled, largest)

    def pack(self, cargo: Cargo, wanted: Tensor, knows: Sequence[int]) -> Tensor:
        """The bytes of the wanted key blocks, bool `[B, Hk, n]`, and of what all need. knows: heads
        whose keys the receiver has, and needs the values of alone."""
        parts = zip(self._forms, (cargo.key, cargo.value), _blocks_sent(wanted, knows), strict=True)
        tensors = [
            _in_blocks(x, per)[which]
            for form, part, which in parts
            for x, per in form.tensors(part)
        ]
        tensors += self._shared(cargo)
        return to_bytes(tensors, wanted.device)

    def _shared(self, cargo: Cargo) -> list[Tensor]:
        if cargo.pooled is None:
            return []
        parts = [cargo.pooled.key, cargo.pooled.value]
        pairs = zip(self._pooled_forms, parts, strict=True)
        shared = [x for form, part in pairs for x, _ in form.tensors(part)]
        return shared if cargo.largest is None else [*shared, cargo.largest]

    def n_bytes(self, wanted: Tensor, knows: Sequence[int], length: int) -> int:
        """Of the message that `pack` makes of a piece of this length."""
        return size_of(self._specs(wanted, knows, length))

    def _specs(self, wanted: Tensor, knows: Sequence[int], length: int) -> list[Spec]:
        B, Hk, _ = wanted.shape
        specs = [
            Spec((int(which.sum()), BLOCK_K // per, *spec.shape[3:]), spec.dtype)
            for form, which in zip(self._forms, _blocks_sent(wanted, knows), strict=True)
            for spec, per in form.specs((B, Hk, length))
        ]
        if self._pooled_forms:
            rows = (B, Hk, n_blocks(length, self.call.recipe.pool_group))
            specs += [spec for form in self._pooled_forms for spec, _ in form.specs(rows)]
            if self.coded:
                specs.append(Spec((B, Hk), torch.float32))
        return specs

    def unpack(
        self, message: Tensor, wanted: Tensor, piece: Piece, known: Mapping[int, Tensor | QTensor]
    ) -> Cargo:
        """The piece again. Blocks that did not come are zero, or their groups' means. known: heads
        whose keys are here, all of the sequence."""
        length = len(piece)
        tensors = iter(from_bytes(message, self._specs(wanted, list(known), length)))
        B, Hk, n = wanted.shape
        parts = []
        for form, which in zip(self._forms, _blocks_sent(wanted, list(known)), strict=True):
            whole = []
            for spec, per in form.specs((B, Hk, length)):
                rows = BLOCK_K // per
                x = torch.zeros((B, Hk, n, rows, *spec.shape[3:]), dtype=spec.dtype)
                x = x.to(wanted.device)
                x[which] = next(tensors)
                whole.append(x.flatten(2, 3)[:, :, : spec.shape[2]])
            if form is self._forms[0]:
                for head, keys in known.items():
                    for x, (own, per) in zip(whole, form.tensors(keys), strict=True):
                        x[:, head] = own[:, 0, piece.start // per :][:, : x.shape[2]]
            parts.append(form.build(whole))
        if not self._pooled_forms:
            return Cargo(parts[0], parts[1])
        group = self.call.recipe.pool_group
        entries = (B, Hk, n_blocks(length, group))
        key, value = (
            form.build([next(tensors) for _ in form.specs(entries)]) for form in self._pooled_forms
        )
        pooled = Pooled(key, value, group)
        if self.coded:
            largest = next(tensors)
            return Cargo(parts[0], _bounded(parts[1], wanted, largest), pooled, largest)
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        keys = _filled(parts[0], key, wanted, group)
        return Cargo(keys, _filled(parts[1], value, wanted, group), pooled)

    def prepare_keys(self, call: Call, cargo: Cargo) -> PreparedKeys:
        """A piece as the attend stage reads it."""
        if self.coded:
            return PreparedKeys(cargo.key, cargo.value, entries=cargo.pooled)
        assert isinstance(cargo.key, Tensor)
        assert isinstance(cargo.value, Tensor)
        return self.stages.prepare_keys(
            call, cargo.key, cargo.value, mean=self.key_mean, to_plan=False, to_attend=True
        )


def _in_16_bits(value: Tensor | QTensor) -> Tensor | QTensor:
    """Values as the `"int8"` kernel reads them: it rounds those of 32 bits itself."""
    if isinstance(value, QTensor) or value.dtype != torch.float32:
        return value
    return working(value, "half").to(half_dtype(value.dtype))


def _blocks_sent(wanted: Tensor, knows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The blocks whose keys travel, and those whose values do."""
    keys = wanted.clone()
    keys[:, list(knows)] = False
    return keys, wanted


def _in_blocks(x: Tensor, per: int) -> Tensor:
    """Rows `[B, H, L / per, …]` as `[B, H, n, rows of a block, …]`, padded with zeros."""
    rows = BLOCK_K // per
    n = n_blocks(x.shape[2], rows)
    if missing := n * rows - x.shape[2]:
        x = torch.cat([x, x.new_zeros((*x.shape[:2], missing, *x.shape[3:]))], 2)
    return x.unflatten(2, (n, rows))


def _bounded(value: Tensor | QTensor, wanted: Tensor, largest: Tensor) -> Tensor | QTensor:
    """Values with the piece's largest |v| in a block that did not come.

    A kernel bounds its output by the largest value that it sees, and means of values that stayed
    behind may be larger than those that came.
    """
    missing = (~wanted).any(-1)
    block = (~wanted).to(torch.int8).argmax(-1)
    b, h = missing.nonzero(as_tuple=True)
    row, most = block[b, h] * BLOCK_K, largest[b, h]
    if isinstance(value, QTensor):
        value.codes[b, h, row, 0] = 127
        place = (b, h, row // value.rows_per_scale)
        value.scale[(*place, 0) if value.per_channel else place] = most / 127
    else:
        value[b, h, row, 0] = most.to(value.dtype)
    return value


def _filled(rows: Tensor | QTensor, means: Tensor, wanted: Tensor, group: int) -> Tensor:
    """Rows, with those of blocks that did not come replaced by the means of their groups."""
    assert isinstance(rows, Tensor)
    length = rows.shape[2]
    mean_of_row = means.repeat_interleave(group, dim=2)[:, :, :length]
    came = wanted.repeat_interleave(BLOCK_K, dim=2)[:, :, :length, None]
    return torch.where(came, rows, mean_of_row)


def bytes_of_dense_ring(call: Call, world: int) -> int:
    """Every rank receives the keys and values of all others, in the caller's dtype."""
    rows = call.B * call.Hk * call.Lk
    return (world - 1) * rows * (call.D + call.Dv) * call.dtype.itemsize


__all__ = ["Cargo", "Shipment", "bytes_of_dense_ring"]
