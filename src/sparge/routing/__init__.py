"""Which backend serves a call, and why none of the others."""

from ..values.backend import AUTO, CPU, DENSE, ENV_BACKEND, Backend, host
from .choice import Choice
from .router import (
    Router,
    backends,
    choose,
    current_router,
    get_backend,
    register_backend,
    unregister_backend,
    use_router,
)

__all__ = [
    "AUTO",
    "CPU",
    "DENSE",
    "ENV_BACKEND",
    "Backend",
    "Choice",
    "Router",
    "backends",
    "choose",
    "current_router",
    "get_backend",
    "host",
    "register_backend",
    "unregister_backend",
    "use_router",
]
