"""How vLLM comes to know the backend: its list of names, its processes, its CPU platform."""

from __future__ import annotations

import copyreg
from functools import wraps
from typing import Any

from .settings import ENV_SERVE, asked_for

NAME = "SPARGE"
PACKAGE = __name__.rpartition(".")[0]
CPU_PATH = f"{PACKAGE}.cpu.SpargeCPUBackend"
GPU_PATH = f"{PACKAGE}.gpu.SpargeBackend"


def register() -> None:
    """Add the name `SPARGE`; stand in for the CPU's attention if `SPARGE_VLLM=1` asks for it.

    Called by vLLM in each of its processes, maybe more than once.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend_member()
    copyreg.pickle(AttentionBackendEnum, _reduce_member)
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        _obey_name(type(current_platform))
    if not _asked():
        return
    if on_cpu:
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_PATH)
        return
    from vllm.logger import init_logger

    message = "%s=1 is for the CPU; on this device use --attention-backend %s"
    init_logger("vllm.sparge").warning(message, ENV_SERVE, NAME)


def backend_member() -> Any:
    """The member of vLLM's enum that is named `SPARGE`, added where it is missing."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, CPU_PATH if current_platform.is_cpu() else GPU_PATH)
    return AttentionBackendEnum.__members__[NAME]


def _reduce_member(member: Any) -> tuple[Any, ...]:
    """How a member is pickled. vLLM starts processes with its configuration as an argument, which
    is read before plugins are loaded: ours must bring its registration along."""
    if member.name == NAME:
        return backend_member, ()
    return type(member), (member.value,)


def _obey_name(platform: Any) -> None:
    """Let `--attention-backend SPARGE` be obeyed on the CPU, where vLLM knows one name only."""
    theirs = platform.get_attn_backend_cls
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if selected_backend is not backend_member():
            path: str = theirs(selected_backend, attn_selector_config, num_heads)
            return path
        path = theirs(None, attn_selector_config, num_heads)
        if path not in (CPU_PATH, AttentionBackendEnum.CPU_ATTN.get_path()):
            raise ValueError(
                f"attention backend {NAME} cannot serve this model on the CPU, which needs {path}; "
                "leave the option out"
            )
        return CPU_PATH

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _asked() -> bool:
    """Whether `SPARGE_VLLM` asks for this. vLLM only logs what a plugin raises and goes on, so a
    wrong value counts as yes here, and is refused when the layers are bound."""
    try:
        return asked_for()
    except ValueError:
        return True
