"""Serving with vLLM: sparse prefill, decode by vLLM's own kernels (docs/serving.md).

vLLM finds this through the entry point group `vllm.general_plugins`. It adds the backend name
`SPARGE`; vLLM's CPU attention is replaced when that name or `SPARGE_VLLM=1` asks for it, never by
being installed. Importing this imports no vLLM.
"""

from __future__ import annotations

from typing import Any

from .registration import register
from .worker import WORKER, WorkerReport

__all__ = ["WorkerExtension", "WorkerReport", "register", "report", "reset"]


def report() -> WorkerReport:
    """What the layers of this process did; empty outside of vLLM's workers."""
    return WORKER.report()


def reset() -> None:
    """Start counting again."""
    WORKER.reset()


class WorkerExtension:
    """Methods for vLLM's workers, for `worker_extension_cls`; see `LLM.collective_rpc`."""

    def sparge_report(self) -> dict[str, Any]:
        """`report()` of this worker as plain JSON."""
        return report().to_dict()

    def sparge_reset(self) -> None:
        """`reset()` of this worker."""
        reset()

    def sparge_serve(self, on: bool) -> None:
        """Turn serving off, so that vLLM's own attention runs everything, or on again."""
        WORKER.paused = not on
