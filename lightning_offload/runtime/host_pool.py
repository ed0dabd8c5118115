"""Host memory for swapped tensors: slabs cut into blocks, freed by garbage collection without a lock.

A block returns to the pool when the last reference to it goes; its finalizer only appends to a deque, so it may
run in any thread at any time. The pool itself is used from the thread that packs and unpacks, under the
executor's lock.

Slabs are plain memory mappings, not tensors: no tracker of tensors counts them, they are exactly as large as
asked for (torch's pinned allocator rounds up to powers of two), and they leave the process when they are
trimmed. Once a plan is known, :meth:`HostPool.prepare` makes one *planned slab* of the plan's size, and blocks
lie at the plan's offsets in it; whatever has no place there gets a slab of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections import deque

import torch
from typing_extensions import override

from lightning_offload.runtime.hooks import dynamo_disabled
from lightning_offload.runtime.lanes import Block, Copy, Returned
from lightning_offload.runtime.pinning import Pinning
from lightning_offload.runtime.ranges import Ranges

_log = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes: a cache line, which vectorized copies want
_MIN_SLAB_BYTES = 4 << 20  # page-locking less is all overhead
_MAX_GROWTH_BYTES = 256 << 20  # at once, of a pool that doubles: host memory is not given back
_MAX_WASTE = 1.05  # of the planned slab over what plans need


# Private pages may be huge ones, which are touched and page-locked several times faster.
_PRIVATE: dict[str, int] = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


_OF_PARENTS: list[mmap.mmap] = []


class Slab:
    """One mapping, page-locked where its device's copies need that.

    Args:
        num_bytes: Its size.
        pinning: Page-locks it; by default it stays as it is.
        despite_refusal: Whether to try that although a mapping was refused before: for small ones.

    Attributes:
        address: Where it begins.
        ranges: Which of it is free.
        is_pinned: Whether it is page-locked.
    """

    __slots__ = ("_memory", "_pid", "_pinning", "address", "is_pinned", "ranges")

    def __init__(self, num_bytes: int, pinning: Pinning | None = None, *, despite_refusal: bool = False) -> None:
        self.ranges = Ranges(num_bytes)
        self.is_pinned = False
        self._pid = os.getpid()
        self._pinning = pinning or Pinning()
        self._memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
        self._advise("MADV_HUGEPAGE")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if self._pinning.can_pin and (despite_refusal or not self._pinning.is_refused):
            # A fork must not turn page-locked pages into shared ones: the device would go on with those of the child.
            self._advise("MADV_DONTFORK")
            self.is_pinned = self._pinning.pin(self.address, num_bytes)
            if not self.is_pinned:
                self._advise("MADV_DOFORK")

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.ranges.num_bytes

    def first_bytes(self, num_bytes: int) -> torch.Tensor:
        """What it begins with as a flat tensor, which keeps the mapping alive."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes)

    @dynamo_disabled
    def __del__(self) -> None:
        # The mapping goes after this; __init__ may have failed before there was one.
        if not hasattr(self, "_memory"):
            return
        if os.getpid() != self._pid:
            # In a fork these addresses may be others' by now: the mapping must never be taken down there.
            _OF_PARENTS.append(self._memory)
        elif self.is_pinned:
            self._pinning.unpin(self.address, self.num_bytes)

    def _advise(self, name: str) -> None:
        advice = getattr(mmap, name, None)  # not on every platform
        if advice is not None:
            with contextlib.suppress(OSError):
                self._memory.madvise(advice)


class HostBlock(Block):
    """A range of host memory.

    Attributes:
        address: Where it begins.
    """

    __slots__ = ("address",)

    def __init__(
        self, slab: Slab, offset: int, num_bytes: int, size: int, returned: Returned, after: tuple[Copy, ...]
    ) -> None:
        super().__init__(slab, offset, num_bytes, size, returned, after)
        self.address = slab.address + offset

    @property
    def is_pinned(self) -> bool:
        """Whether its memory is page-locked."""
        return bool(self.owner.is_pinned)

    @override
    def put(self, begin: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(self.address + begin, address, num_bytes)

    @override
    def get(self, begin: int, address: int, num_bytes: int) -> None:
        ctypes.memmove(address, self.address + begin, num_bytes)


class HostPool:
    """Blocks of host memory under an optional budget.

    Args:
        budget_bytes: Most bytes to map; None for no limit.
        pinning: Page-locks slabs, for devices whose copies need it.

    Attributes:
        budget_bytes: Most bytes to map; None for no limit.
        used_bytes: Bytes handed out.
        peak_bytes: The most that were handed out at once, since :meth:`prepare` last changed the slabs.
        pinning: Page-locks slabs, for devices whose copies need it.
        is_refused: Whether the host refused memory: it has no more than what is mapped.
    """

    def __init__(self, budget_bytes: int | None = None, pinning: Pinning | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.is_refused = False
        self.pinning = pinning or Pinning()
        self._planned: Slab | None = None
        self._slabs: list[Slab] = []
        self._returned: Returned = deque()

    @property
    def slab_bytes(self) -> int:
        """Bytes mapped, used or not."""
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes mapped and page-locked."""
        return sum(slab.num_bytes for slab in self._slabs if slab.is_pinned)

    @property
    def is_pinning_refused(self) -> bool:
        """Whether slabs should be page-locked and are not, so that copies are slower than they could be."""
        return self.pinning.is_refused

    @override
    def __repr__(self) -> str:
        return f"HostPool({len(self._slabs)} slabs, {self.slab_bytes} bytes, {self.used_bytes} used)"

    def allocate(self, num_bytes: int, at: int | None = None, *, is_spare: bool = False) -> HostBlock | None:
        """A block, or None where the budget does not allow it or the host has no memory.

        Args:
            num_bytes: Its size.
            at: Its place in the planned slab; taken if it is free, else the block lies elsewhere.
            is_spare: Whether the plan does not know of it, so that it must leave the planned slab's room alone.
        """
        self.collect()
        size = _rounded(max(num_bytes, 1), _ALIGNMENT)
        if size > self._allowance(is_spare=is_spare):
            return None
        if at is not None and self._planned is not None and self._planned.ranges.take_at(at, size):
            return self._block(self._planned, at, num_bytes, size)
        shuns_planned = is_spare or at is not None
        for slab in self._slabs:
            offset = slab.ranges.take(size) if slab is not self._planned or not shuns_planned else None
            if offset is not None:
                return self._block(slab, offset, num_bytes, size)
        grown = self._grow(size, is_spare=is_spare)
        if grown is None:
            return None
        offset = grown.ranges.take(size)
        assert offset is not None
        return self._block(grown, offset, num_bytes, size)

    def _allowance(self, *, is_spare: bool) -> int:
        """The largest block that the budget allows now."""
        if self.budget_bytes is None:
            return 1 << 62
        unused = 0
        if is_spare and self._planned is not None:
            unused = self._planned.num_bytes - self._planned.ranges.used_bytes
        return self.budget_bytes - self.used_bytes - unused

    def prepare(self, num_bytes: int) -> bool:
        """Make the planned slab this large, once nothing lies on the old one; False where that is refused.

        Slabs that are not used any more are given back first, so that old and new need not fit side by side.
        """
        self.collect()
        planned = self._planned
        if self._drop_unused():
            self.peak_bytes = self.used_bytes
        if planned is not None and num_bytes <= planned.num_bytes <= _MAX_WASTE * num_bytes:
            return True
        if planned is not None and not planned.ranges.is_empty:
            return True  # a step that is still alive uses it; the next one makes another
        self._planned = None
        self.trim()
        self.peak_bytes = self.used_bytes
        if num_bytes:
            self._planned = self._map(_rounded(num_bytes, mmap.PAGESIZE))
        return self._planned is not None or not num_bytes

    def collect(self) -> None:
        """Take back the blocks dropped since the last call."""
        while self._returned:
            slab, offset, size, busy = self._returned.popleft()
            slab.ranges.give(offset, size, busy)
            self.used_bytes -= size

    def trim(self) -> None:
        """Unmap the slabs that no block lies on."""
        self.collect()
        if self._planned is not None and self._planned.ranges.is_empty:
            self._planned = None
        self._drop_unused()

    def _drop_unused(self) -> bool:
        """Unmap the slabs that no block lies on, the planned one aside; whether there were any."""
        unused = [slab for slab in self._slabs if slab.ranges.is_empty and slab is not self._planned]
        for slab in unused:
            slab.ranges.settle()
            self._slabs.remove(slab)
        return bool(unused)

    def _grow(self, size: int, *, is_spare: bool) -> Slab | None:
        """A new slab: larger than asked for where many will be needed, but never beyond the budget."""
        wanted = max(size, _MIN_SLAB_BYTES, min(self.slab_bytes // 4, _MAX_GROWTH_BYTES))
        if self._room() < wanted:
            self._drop_unused() if is_spare else self.trim()
        return self._map(_rounded(max(size, min(wanted, self._room())), mmap.PAGESIZE))

    def _room(self) -> int:
        if self.budget_bytes is None:
            return 1 << 62
        return max(0, self.budget_bytes - self.slab_bytes)

    def _map(self, num_bytes: int) -> Slab | None:
        if num_bytes > _rounded(self._room(), mmap.PAGESIZE):
            return None
        try:
            slab = Slab(num_bytes, self.pinning)
        except (OSError, MemoryError, OverflowError, ValueError) as error:
            if not self.is_refused:
                _log.warning("the host refused %d bytes for swapped tensors: %s", num_bytes, str(error))
            self.is_refused = True
            return None
        self._slabs.append(slab)
        return slab

    def _block(self, slab: Slab, offset: int, num_bytes: int, size: int) -> HostBlock:
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return HostBlock(slab, offset, num_bytes, size, self._returned, slab.ranges.users(offset, size))


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
