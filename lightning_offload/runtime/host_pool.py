"""Host memory for swapped tensors: slabs cut into blocks, freed by garbage collection without a lock.

A block returns to the pool when the last reference to it goes; its finalizer only appends to a deque, so it may
run in any thread at any time. The pool itself is used from the thread that packs and unpacks, under the
executor's lock.

Slabs are plain memory mappings, not tensors: no tracker of tensors counts them, and they leave the process when
they are trimmed.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
from collections import deque

_log = logging.getLogger(__name__)
_ALIGNMENT = 64
_MIN_SLAB_BYTES = 4 << 20


class _Slab:
    """One mapping with its free ranges, ordered by offset and never adjacent."""

    __slots__ = ("address", "free", "memory", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.memory = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.free: list[tuple[int, int]] = [(0, num_bytes)]

    def take(self, num_bytes: int) -> int | None:
        """Offset of a range cut from the smallest free range that fits, or None."""
        fitting = [(size, i) for i, (_, size) in enumerate(self.free) if size >= num_bytes]
        if not fitting:
            return None
        size, i = min(fitting)
        offset = self.free[i][0]
        if size == num_bytes:
            del self.free[i]
        else:
            self.free[i] = (offset + num_bytes, size - num_bytes)
        return offset

    def give(self, offset: int, num_bytes: int) -> None:
        """Return a range and merge it with its neighbours."""
        i = bisect.bisect(self.free, (offset, 0))
        if i < len(self.free) and self.free[i][0] == offset + num_bytes:
            num_bytes += self.free.pop(i)[1]
        if i > 0 and sum(self.free[i - 1]) == offset:
            i -= 1
            offset, extra = self.free.pop(i)
            num_bytes += extra
        self.free.insert(i, (offset, num_bytes))

    @property
    def is_empty(self) -> bool:
        return self.free == [(0, self.num_bytes)]


class HostBlock:
    """A range of host memory that goes back to its pool when it is dropped.

    Attributes:
        address: Where it begins.
        num_bytes: Its size as asked for.
    """

    __slots__ = ("_returned", "_size", "_slab", "address", "num_bytes")

    def __init__(self, slab: _Slab, offset: int, num_bytes: int, size: int, returned: deque[_Range]) -> None:
        self.address = slab.address + offset
        self.num_bytes = num_bytes
        self._slab = slab
        self._size = size
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append((self._slab, self.address - self._slab.address, self._size))


_Range = tuple[_Slab, int, int]


class HostPool:
    """Blocks of host memory under an optional budget."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._slabs: list[_Slab] = []
        self._has_warned = False
        self._returned: deque[_Range] = deque()

    @property
    def slab_bytes(self) -> int:
        """Bytes mapped, used or not."""
        return sum(slab.num_bytes for slab in self._slabs)

    def allocate(self, num_bytes: int) -> HostBlock | None:
        """A block of ``num_bytes``, or None where the budget does not allow it or the host has no memory."""
        self.collect()
        size = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        if self.budget_bytes is not None and self.used_bytes + size > self.budget_bytes:
            return None
        for slab in self._slabs:
            offset = slab.take(size)
            if offset is not None:
                return self._block(slab, offset, num_bytes, size)
        try:
            slab = self.reserve(size)
        except (OSError, OverflowError) as error:
            if not self._has_warned:
                _log.warning("the host refused %d bytes for swapped tensors (%s): they stay on the device", size, error)
            self._has_warned = True
            return None
        offset = slab.take(size)
        assert offset is not None
        return self._block(slab, offset, num_bytes, size)

    def reserve(self, num_bytes: int) -> _Slab:
        """Map a slab of at least ``num_bytes`` ahead of its use."""
        page = mmap.PAGESIZE
        slab = _Slab(-(-max(num_bytes, _MIN_SLAB_BYTES) // page) * page)
        self._slabs.append(slab)
        return slab

    def collect(self) -> None:
        """Take back the blocks dropped since the last call."""
        while self._returned:
            slab, offset, size = self._returned.popleft()
            slab.give(offset, size)
            self.used_bytes -= size

    def trim(self) -> None:
        """Unmap the slabs that no block lies on."""
        self.collect()
        self._slabs = [slab for slab in self._slabs if not slab.is_empty]

    def _block(self, slab: _Slab, offset: int, num_bytes: int, size: int) -> HostBlock:
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return HostBlock(slab, offset, num_bytes, size, self._returned)
