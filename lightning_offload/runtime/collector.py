"""Keeps Python's garbage collector from going through what a planned step holds, again and again.

The collector runs whenever so many more objects were made than were freed, 700 unless the program says otherwise. A
planned step makes some five for each saved tensor and frees them in backward: so in each forward it would run several
times, find nothing, and take what it looked through for long-lived, until it looks through the whole process for that.
For as long as these objects live, its threshold is higher by their number: garbage of the program's own is found after
as many objects of its own as without us.
"""

from __future__ import annotations

import gc
import sys
import threading

from lightning_offload.runtime.hooks import dynamo_disabled


class _Threshold:
    """The threshold of the youngest generation, as the program has it and as it is now.

    Finalizers come here, in any thread and perhaps in the midst of another call of the same one: so nobody waits for
    the lock, and who has it looks again once it is free.

    Attributes:
        allowances: How many objects are not to be counted, by who says so.
    """

    def __init__(self) -> None:
        self.allowances: dict[int, int] = {}
        self._lock = threading.Lock()
        self._allowed = 0
        self._own: dict[int, int] = {}  # by what was set lately: what of that is the program's own, who may put it back

    def adjust(self) -> None:
        """Have the threshold be the program's own and all that is allowed."""
        while self._allowed != sum(list(self.allowances.values())) and self._lock.acquire(blocking=False):
            try:
                self._allowed = sum(list(self.allowances.values()))
                now, *others = gc.get_threshold()
                own = self._own.get(now, now)
                if own > 0:  # else collections are off
                    raised = min(own + self._allowed, _LARGEST)
                    self._note(raised, own)
                    gc.set_threshold(raised, *others)
            finally:
                self._lock.release()

    def _note(self, raised: int, own: int) -> None:
        self._own.pop(raised, None)
        self._own[raised] = own
        if len(self._own) > _NUM_REMEMBERED:
            del self._own[next(iter(self._own))]


_LARGEST = 2**31 - 1  # the most that Python's collector takes as a threshold
_NUM_REMEMBERED = 64  # thresholds that were raised
_threshold = _Threshold()


class Allowance:
    """Counts objects out of the collector's threshold for as long as it lives.

    Args:
        num_objects: How many the collector is not to count.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, num_objects: int) -> None:
        if num_objects:
            _threshold.allowances[id(self)] = num_objects
            _threshold.adjust()

    @dynamo_disabled
    def __del__(self) -> None:
        if not sys.is_finalizing() and _threshold.allowances.pop(id(self), 0):
            _threshold.adjust()
