"""Lightning callbacks; each name is the class for the Lightning package in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_offload.callbacks.batch_size_finder import EfficientBatchSizeFinderMixin as EfficientBatchSizeFinder
    from lightning_offload.callbacks.monitor import OffloadMonitorMixin as OffloadMonitor
    from lightning_offload.callbacks.tuning.options import AdvancedTuning as AdvancedTuning

__all__ = ["AdvancedTuning", "EfficientBatchSizeFinder", "OffloadMonitor"]


def __getattr__(name: str) -> Any:
    from lightning_offload.lightning_packages import current_package

    if name == "OffloadMonitor":
        from lightning_offload.callbacks.monitor import build_monitor

        return build_monitor(current_package())
    if name == "EfficientBatchSizeFinder":
        from lightning_offload.callbacks.batch_size_finder import build_finder

        return build_finder(current_package())
    if name == "AdvancedTuning":
        from lightning_offload.callbacks.tuning.options import AdvancedTuning

        return AdvancedTuning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
