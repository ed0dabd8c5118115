"""Steps without a plan that run as without the plugin, where a budget has room for that: what they need is learned.

The peak of a step that swapped everything, and what it swapped, are together no less than its peak had it kept
everything. Under that, and under the peaks of those that did keep everything, the next one is taken to stay; since
steps without a plan differ from one another, with room to spare. Each one is watched: after the first that exceeds the
budget, or that the device has no memory for, none of its kind runs so any more.

An accelerator's allocator counts what such steps need. On a CPU nothing does without seeing each op.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from lightning_offload.accelerators import DeviceMemory, memory_of

_MORE = 1.25  # times what any step so far needed is what the next one may need


@dataclasses.dataclass(slots=True)
class PlainNeed:
    """What steps of one kind need where they keep everything.

    Attributes:
        most_bytes: The most that one added to what was on the device when it began; None as long as none was seen.
        has_exceeded: Whether one that kept everything exceeded its budget, or ran out of memory.
    """

    most_bytes: int | None = None
    has_exceeded: bool = False

    def learn(self, num_bytes: int) -> None:
        """A step needed so much beyond what was there when it began, or would have."""
        self.most_bytes = max(self.most_bytes or 0, num_bytes)

    def fits(self, device: torch.device, budget_bytes: int) -> bool:
        """Whether the coming step may keep everything: by the budget, and by what is free.

        Args:
            device: Where it runs.
            budget_bytes: The budget.
        """
        memory = memory_of(device)
        if self.has_exceeded or self.most_bytes is None or memory is None:
            return False
        there, needed_bytes = memory.now(), int(_MORE * self.most_bytes)
        if there.current_bytes + needed_bytes > budget_bytes:
            return False
        missing_bytes = needed_bytes - (there.reserved_bytes - there.current_bytes)
        return missing_bytes <= 0 or missing_bytes <= memory.free_bytes()


class PlainStep:
    """One step that keeps everything, under way under a budget.

    Args:
        need: What is known of steps of its kind.
        memory: The memory of the device that it runs on.
        budget_bytes: The budget.

    Attributes:
        peak_bytes: The most that was alive in its scopes so far.
    """

    def __init__(self, need: PlainNeed, memory: DeviceMemory, budget_bytes: int) -> None:
        self.peak_bytes = 0
        self._need = need
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._there_bytes = memory.now().current_bytes
        self._is_open = False

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Around each of its parts; a scope within another does nothing.

        Raises:
            torch.OutOfMemoryError: As it was raised inside; the next step of its kind does not keep everything.
        """
        if self._is_open:
            yield
            return
        self._is_open = True
        self._memory.reset_peak()
        try:
            yield
        except torch.OutOfMemoryError:
            self._need.has_exceeded = True
            raise
        finally:
            self._is_open = False
            self.peak_bytes = max(self.peak_bytes, self._memory.now().peak_bytes)
            self._need.learn(self.peak_bytes - self._there_bytes)
            self._need.has_exceeded |= self.peak_bytes > self._budget_bytes
