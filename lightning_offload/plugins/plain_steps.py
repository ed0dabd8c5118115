"""Steps that run as without the plugin since a budget has room for that: what they need is learned.

Where structures change no plan tells what the coming step needs. The peak of a step that swapped everything, and what
it swapped, are together no less than its peak had it kept everything. Under that, and under the peaks of those that did
keep everything, the next one is taken to stay; since such steps differ from one another, with room to spare. After the
first that exceeds the budget, or that the device has no memory for, none of its kind runs so any more.

An accelerator's allocator watches each of them. On a CPU nothing does without seeing each op: there every second step
is watched, under its plan, then one in four, and so on to one in 128, anew from the first that needed much more than
any before; one in a thousand where the budget is several times what any of them needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from lightning_offload.accelerators import DeviceMemory, memory_of

_MORE = 1.25  # times what any step so far needed is what the next one may need
_MUCH_MORE = 1.1  # times that is worth watching them again
AMPLE = 4.0  # times that is a budget which steps will hardly exceed
_MOST_UNWATCHED, _MOST_WHERE_AMPLE = 128, 1024  # steps between two that are watched


@dataclasses.dataclass(slots=True)
class PlainNeed:
    """What steps of one kind need where they keep everything.

    Attributes:
        most_bytes: The most that one added to what was on the device when it began; None as long as none was seen.
        has_exceeded: Whether one that kept everything exceeded its budget, or ran out of memory.
        there_bytes: What was on the device when the last watched one began.
        num_unwatched: Steps since that.
        patience: How many of these there are until the next one.
        is_ample: Whether the budget was several times what any of them needed.
    """

    most_bytes: int | None = None
    has_exceeded: bool = False
    there_bytes: int = 0
    num_unwatched: int = 0
    patience: int = 1
    is_ample: bool = False

    def begin_step(self) -> None:
        """A step begins."""
        self.num_unwatched += 1

    @property
    def must_watch(self) -> bool:
        """Whether the step that begins is one to watch, where no allocator does."""
        return self.num_unwatched > self.patience

    def learn(self, num_bytes: int, there_bytes: int = 0) -> None:
        """A watched step needed so much beyond what was there when it began, or would have.

        Args:
            num_bytes: What it needed.
            there_bytes: What was there.
        """
        is_more = self.most_bytes is not None and num_bytes > _MUCH_MORE * self.most_bytes
        self.most_bytes, self.there_bytes = max(self.most_bytes or 0, num_bytes), there_bytes
        self.watched()
        if is_more:
            self.patience = 1

    def watched(self) -> None:
        """A step was watched."""
        most = _MOST_WHERE_AMPLE if self.is_ample else _MOST_UNWATCHED
        self.num_unwatched, self.patience = 0, min((4 if self.is_ample else 2) * self.patience, most)

    def fits_amply(self, device: torch.device, budget_bytes: int, size: float) -> bool:
        """Whether the coming step, of a size that nothing is known of, may keep everything: several times over.

        Args:
            device: Where it runs.
            budget_bytes: The budget.
            size: How many times as large it is as the largest that was watched.
        """
        if self.has_exceeded or self.most_bytes is None or self.must_watch:
            return False
        memory = memory_of(device)
        there_bytes = memory.allocated_bytes() if memory is not None else self.there_bytes
        needed_bytes = AMPLE * max(1.0, size) ** 2 * self.most_bytes
        self.is_ample = there_bytes + needed_bytes <= budget_bytes
        return self.is_ample and (memory is None or needed_bytes <= memory.free_bytes())

    def fits(self, device: torch.device, budget_bytes: int) -> bool:
        """Whether the coming step may keep everything: by the budget, and by what is free.

        Args:
            device: Where it runs.
            budget_bytes: The budget.
        """
        memory = memory_of(device)
        if self.has_exceeded or self.most_bytes is None:
            return False
        needed_bytes = int(_MORE * self.most_bytes)
        if memory is None:
            self.is_ample = self.there_bytes + AMPLE * self.most_bytes <= budget_bytes
            return not self.must_watch and self.there_bytes + needed_bytes <= budget_bytes
        there = memory.now()
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
