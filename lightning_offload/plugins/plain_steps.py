"""Steps without a plan that run as without the plugin, where a budget has room for that: what they need is learned.

The peak of a step that swapped everything, and what it swapped, are together no less than its peak had it kept
everything. Under that, and under the peaks of those that did keep everything, the next one is taken to stay; since
steps without a plan differ from one another, with room to spare. Each one is watched: after the first that exceeds the
budget, or that the device has no memory for, none of its kind runs so any more.

The allocator of a CUDA device counts what such steps need. On a CPU nothing does without seeing each op.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

_MORE = 1.25  # times what any step so far needed is what the next one may need


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """What a CUDA device's allocator holds.

    Attributes:
        current_bytes: Alive now.
        peak_bytes: Alive at most, since that was last reset.
        reserved_bytes: Had from the device, in use or not.
    """

    current_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0

    @classmethod
    def on(cls, device: torch.device) -> Allocated:
        """Ask the allocator; zeros before the device was first used."""
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        if not stats:
            return cls()
        allocated = stats["allocated_bytes"]["all"]
        return cls(
            current_bytes=allocated["current"],
            peak_bytes=allocated["peak"],
            reserved_bytes=stats["reserved_bytes"]["all"]["current"],
        )


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
        if self.has_exceeded or self.most_bytes is None or device.type != "cuda":
            return False
        there, needed_bytes = Allocated.on(device), int(_MORE * self.most_bytes)
        if there.current_bytes + needed_bytes > budget_bytes:
            return False
        missing_bytes = needed_bytes - (there.reserved_bytes - there.current_bytes)
        return missing_bytes <= 0 or missing_bytes <= torch.cuda.mem_get_info(device)[0]


class PlainStep:
    """One step that keeps everything, under way under a budget.

    Args:
        need: What is known of steps of its kind.
        device: Where it runs.
        budget_bytes: The budget.

    Attributes:
        peak_bytes: The most that was alive in its scopes so far.
    """

    def __init__(self, need: PlainNeed, device: torch.device, budget_bytes: int) -> None:
        self.peak_bytes = 0
        self._need = need
        self._device = device
        self._budget_bytes = budget_bytes
        self._there_bytes = Allocated.on(device).current_bytes
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
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        except torch.OutOfMemoryError:
            self._need.has_exceeded = True
            raise
        finally:
            self._is_open = False
            self.peak_bytes = max(self.peak_bytes, Allocated.on(self._device).peak_bytes)
            self._need.learn(self.peak_bytes - self._there_bytes)
            self._need.has_exceeded |= self.peak_bytes > self._budget_bytes
