"""Lightning callbacks. `OffloadMonitor` is the class for the Lightning package in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_offload.callbacks.monitor import OffloadMonitorMixin as OffloadMonitor

__all__ = ["OffloadMonitor"]


def __getattr__(name: str) -> Any:
    if name != "OffloadMonitor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_offload.callbacks.monitor import build_monitor
    from lightning_offload.plugins.lightning_packages import current_package

    return build_monitor(current_package())
