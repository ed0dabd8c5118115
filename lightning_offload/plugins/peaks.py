"""What a device's own allocator counts: peaks between steps, and reserved memory. Nothing on a CPU, which has none.

Reading the allocator's statistics costs host time, so they are read around watched steps alone.
"""

from __future__ import annotations

import torch


class DevicePeaks:
    """Reads the allocator at the seams between steps.

    Attributes:
        optimizer_peak_bytes: The highest peak between a watched step and the one after it: the optimizer's.
        reserved_bytes: What the allocator held from the device then, in use or not.
    """

    def __init__(self) -> None:
        self.optimizer_peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self._was_watched = False

    def begin_step(self, device: torch.device, *, is_watched: bool) -> None:
        """Note what came after the last watched step; start counting anew if the coming one is watched."""
        if device.type != "cuda":
            return
        if self._was_watched:
            # The most of them: with accumulated gradients an optimizer does not follow every step.
            self.optimizer_peak_bytes = max(self.optimizer_peak_bytes or 0, torch.cuda.max_memory_allocated(device))
            self.reserved_bytes = torch.cuda.memory_reserved(device)
        if is_watched:
            torch.cuda.reset_peak_memory_stats(device)
        self._was_watched = is_watched

    def end_scope(self, device: torch.device) -> int | None:
        """Peak since a watched step began; the optimizer's is counted from here on."""
        if device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
