"""Tensors on a card that is not here: shapes, strides, dtypes and addresses, but no numbers.

Every operation on them is torch's own for the meta device. What would read a number of theirs is a
read of the card; tensors of the processor stay as real as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from pretended_card import Refused, Traffic

aten = torch.ops.aten
ALIGNMENT = 512
"""Of the addresses that torch's allocator gives."""
_READING = (
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
    aten.unique_consecutive,
    aten.bincount,
)
"""Results, or their shapes, are numbers that the card has."""
_MADE_OF_OTHERS = "CompositeImplicitAutograd"
"""Operations that inference mode does not take apart before they come here."""
_BETWEEN_DEVICES = (aten._to_copy, aten.copy_)


class OnCard(Tensor):
    """inner: a meta tensor with the same shape, strides and storage."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> OnCard:
        with torch.inference_mode(False):  # a view of a tensor from outside of it is none of it
            made: OnCard = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=device,
            )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        """What Triton specializes by: the storage is aligned, a view into it need not be."""
        storage = self.inner.untyped_storage()
        if storage.nbytes() == 0:
            return 0
        base = (1 << 40) + (storage._cdata % (1 << 32)) * ALIGNMENT
        return base + self.inner.storage_offset() * self.inner.element_size()

    def ptr_range(self) -> int:
        """Bytes behind the pointer, which Triton asks AMD's tensors for."""
        return self.inner.untyped_storage().nbytes()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.cpu().numpy()

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # reached outside of `TensorsOnCard` only
        raise Refused(f"{func} on a tensor of a card that is no longer pretended")


class TensorsOnCard(TorchDispatchMode):
    """Tensors of `device="cuda"` are `OnCard`, and the traffic is noted."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic
        self.pinned = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory") and _device_of(kwargs.get("device")) is None:
            made = func(*args, **{**kwargs, "pin_memory": False})
            self.pinned[made] = True
            return made
        leaves, _ = tree_flatten((args, kwargs))
        there = [x for x in leaves if isinstance(x, OnCard)]
        to = _device_of(kwargs.get("device"))
        if func.overloadpacket in _BETWEEN_DEVICES and (there or to is not None):
            return self._move(func, args, kwargs)
        if not there and to is None:
            return func(*args, **kwargs)
        if func.namespace == "sparge":
            # The body that runs on a card, not the fake one of graphs being traced.
            with self:
                return func.redispatch(_CUDA, *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _MADE_OF_OTHERS):
            with self:
                return func.decompose(*args, **kwargs)
        device = to or there[0].device
        _check_devices(func, leaves, device)
        if func.overloadpacket in _READING or _indexes_by_bool(func, args):
            return self._read(func, args, kwargs)
        self.traffic.work += 1
        return _on_meta(func, args, kwargs, device)

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies between the processor and the card, and within it."""
        target, source = (
            (args[0], args[1]) if func.overloadpacket is aten.copy_ else (None, args[0])
        )
        named = _device_of(kwargs.get("device"))
        if target is None:
            host = kwargs.get("device") is not None and named is None
            device = None if host else named or source.device
        else:
            device = target.device if isinstance(target, OnCard) else None
        if device is None:  # to the processor
            waits = target not in self.pinned or not _non_blocking(func, args, kwargs)
            (self.traffic.read if waits else self.traffic.copy_later)(f"{func} of {source!r}")
            inner = torch.zeros(source.shape, dtype=source.dtype)
            return func(*_replaced(args, source, inner), **kwargs)
        lone = target is not None and source.dim() == 0  # a number, which a kernel is given
        if not isinstance(source, OnCard) and not lone:
            self.traffic.write(f"{func} of {list(source.shape)} {source.dtype}")
        self.traffic.work += 1
        return _on_meta(func, args, kwargs, device)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a card whose memory is all zeros would answer."""
        self.traffic.read(str(func))
        numbers = tree_map(
            lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, OnCard) else x, args
        )
        answer = func(*numbers, **kwargs)
        device = next(x.device for x in tree_flatten(args)[0] if isinstance(x, OnCard))
        return tree_map(
            lambda x: OnCard(x.to("meta"), device) if isinstance(x, Tensor) else x, answer
        )


_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def _on_meta(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """The operation of the meta device; what it returns of its arguments is the argument itself."""
    leaves, spec = tree_flatten((args, kwargs))
    own = {id(x.inner): x for x in leaves if isinstance(x, OnCard)}
    inner_args, inner_kwargs = tree_unflatten([_inner(x) for x in leaves], spec)

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return own[id(x)] if id(x) in own else OnCard(x, device)

    return tree_map(wrapped, func(*inner_args, **inner_kwargs))


def _inner(x: Any) -> Any:
    if isinstance(x, OnCard):
        return x.inner
    if isinstance(x, Tensor):
        return x.to("meta")
    return torch.device("meta") if _device_of(x) is not None else x


def _device_of(x: Any) -> torch.device | None:
    """The card's device that an argument names, with its index."""
    if not isinstance(x, torch.device) or x.type != "cuda":
        return None
    return x if x.index is not None else torch.device("cuda", torch.cuda.current_device())


def _check_devices(func: Any, leaves: list[Any], device: torch.device) -> None:
    """As torch does: a lone number may come from the processor, and indices may."""
    indexes = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
    for x in leaves:
        if isinstance(x, Tensor) and x.device != device and x.dim() and not indexes:
            raise RuntimeError(
                f"{func}: expected all tensors on {device}, got {list(x.shape)} on {x.device}"
            )


def _indexes_by_bool(func: Any, args: Any) -> bool:
    return func.overloadpacket is aten.index and any(
        isinstance(x, OnCard) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )


def _non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    return func is aten.copy_.default and bool((*args[2:], kwargs.get("non_blocking"))[0])


def _replaced(args: tuple[Any, ...], old: Any, new: Any) -> tuple[Any, ...]:
    return tuple(new if x is old else x for x in args)
