"""Which backend serves a call, and why none of the others."""

from ..values.backend import AUTO, CPU, DENSE, ENV_BACKEND, Backend
from ..values.host import host
from .choose import Choice, choose, route_by_plan, settle
from .registry import backends, get_backend, register_backend, unregister_backend

__all__ = [
    "AUTO",
    "CPU",
    "DENSE",
    "ENV_BACKEND",
    "Backend",
    "Choice",
    "backends",
    "choose",
    "get_backend",
    "host",
    "register_backend",
    "route_by_plan",
    "settle",
    "unregister_backend",
]
