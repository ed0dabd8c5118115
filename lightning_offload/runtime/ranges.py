"""Free ranges of one address space: best fit, or at a planned place; shared by the host pool and the spill file."""

from __future__ import annotations

import bisect
import contextlib
from collections import deque

from lightning_offload.errors import SpillError
from lightning_offload.runtime.lanes import Copy


class Ranges:
    """Hands out ranges of ``[0, num_bytes)`` and takes them back.

    Free ranges are ordered by offset and never adjacent. A range may come back while a copy still uses it; its next
    owner is told, cf. :meth:`users`.
    """

    __slots__ = ("_cooling", "free", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.free: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []
        self._cooling: deque[tuple[int, int, Copy]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is handed out."""
        return sum(size for _, size in self.free) == self.num_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes handed out."""
        return self.num_bytes - sum(size for _, size in self.free)

    def take(self, num_bytes: int, least: int = 0) -> int | None:
        """Offset of a range cut from the smallest free range that fits beyond an offset, or None."""
        fitting = [
            (size, i) for i, (begin, size) in enumerate(self.free) if begin + size >= max(begin, least) + num_bytes
        ]
        if not fitting:
            return None
        _, i = min(fitting)
        offset = max(self.free[i][0], least)
        self._cut(i, offset, num_bytes)
        return offset

    def take_at(self, offset: int, num_bytes: int) -> bool:
        """Take this very range; False if it is not free."""
        i = bisect.bisect_right(self.free, (offset, self.num_bytes)) - 1
        if i < 0:
            return False
        begin, size = self.free[i]
        if offset + num_bytes > begin + size:
            return False
        self._cut(i, offset, num_bytes)
        return True

    def give(self, offset: int, num_bytes: int, busy: Copy | None = None) -> None:
        """Return a range and merge it with its neighbours.

        Args:
            offset: Where it begins.
            num_bytes: Its size.
            busy: The last copy that uses it, if there may be one.
        """
        if busy is not None and not busy.is_done:
            self._cooling.append((offset, num_bytes, busy))
        i = bisect.bisect(self.free, (offset, 0))
        if i < len(self.free) and self.free[i][0] == offset + num_bytes:
            num_bytes += self.free.pop(i)[1]
        if i > 0 and sum(self.free[i - 1]) == offset:
            i -= 1
            offset, extra = self.free.pop(i)
            num_bytes += extra
        self.free.insert(i, (offset, num_bytes))

    def users(self, offset: int, num_bytes: int) -> tuple[Copy, ...]:
        """Copies that may still use a range that was just taken.

        Only those are asked whether they are done, and the oldest: to ask all takes long where many are waiting.
        """
        cooling, end = self._cooling, offset + num_bytes
        if not cooling:
            return ()
        while cooling and cooling[0][2].is_done:
            cooling.popleft()
        found = tuple(copy for begin, size, copy in cooling if begin < end and offset < begin + size)
        return tuple(copy for copy in found if not copy.is_done)

    def settle(self) -> None:
        """Block until no copy uses a range that was given back."""
        for _, _, copy in self._cooling:
            with contextlib.suppress(SpillError):  # a copy that failed uses it no more
                copy.synchronize()
        self._cooling.clear()

    def extend(self, num_bytes: int) -> None:
        """Add ``num_bytes`` at the end."""
        offset, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        self.give(offset, num_bytes)

    def _cut(self, i: int, offset: int, num_bytes: int) -> None:
        begin, size = self.free.pop(i)
        rest = begin + size - (offset + num_bytes)
        if rest:
            self.free.insert(i, (offset + num_bytes, rest))
        if offset > begin:
            self.free.insert(i, (begin, offset - begin))
