"""The backends there are, fastest first."""

from __future__ import annotations

from ..backends.cpu import CPU_BACKEND
from ..backends.reference import REFERENCE
from ..backends.triton import TRITON_BACKEND
from ..values.backend import AUTO, DENSE, Backend

_OURS = {backend.name: backend for backend in (TRITON_BACKEND, CPU_BACKEND, REFERENCE)}
_backends: dict[str, Backend] = dict(_OURS)
_changes = 0


def register_backend(backend: Backend) -> None:
    """Add a backend before those registered so far; the conformance suite then runs on it too."""
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a sparge.Backend, got {type(backend).__name__}")
    if backend.name in (AUTO, DENSE, *_backends):
        raise ValueError(f"backend name {backend.name!r} is taken; choose another")
    _replace({backend.name: backend, **_backends})


def unregister_backend(name: str) -> None:
    if name in _OURS or name not in _backends:
        raise ValueError(f"name must be of a backend that was registered, got {name!r}")
    _replace({n: b for n, b in _backends.items() if n != name})


def _replace(registry: dict[str, Backend]) -> None:
    global _backends, _changes
    _backends, _changes = registry, _changes + 1


def backends() -> tuple[Backend, ...]:
    """The backends that have stages, fastest first."""
    return tuple(_backends.values())


def get_backend(name: str) -> Backend:
    return _backends[name]


def generation() -> int:
    """Generation counter; a change invalidates cached choices."""
    return _changes + sum([backend.cost.generation for backend in _backends.values()])
