"""Blocks of a spill file: the disk tier's memory.

One file for each device, cut into ranges as the plan lays them out, or wherever there is room. A block returns to
its pool when the last reference to it goes, as those of the host pool do: its finalizer only appends to a deque.
The pool itself is used under the executor's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections import deque

from typing_extensions import override

from lightning_offload.errors import SpillError
from lightning_offload.runtime.lanes import Block, Copy, Returned
from lightning_offload.runtime.ranges import Ranges
from lightning_offload.runtime.spill_file import ALIGNMENT, SpillFile

_log = logging.getLogger(__name__)

_MIN_GROWTH_BYTES = 64 << 20  # at once: files that grow in small parts are scattered
_MAX_GROWTH_BYTES = 1 << 30  # at once, of a file that doubles
_MAX_WASTE = 1.05  # of the file over what plans need


class DiskBlock(Block):
    """A range of a spill file; in a fork the file refuses, so copies fail there."""

    __slots__ = ("_pool",)

    def __init__(
        self, pool: DiskPool, file: SpillFile, offset: int, num_bytes: int, size: int, after: tuple[Copy, ...]
    ) -> None:
        super().__init__(file, offset, num_bytes, size, pool.returned, after)
        self._pool = pool

    @override
    def put(self, begin: int, address: int, num_bytes: int) -> None:
        try:
            self.owner.write(address, _rounded(num_bytes), self.offset + begin)
        except SpillError as error:
            self._pool.fail(error)
            raise

    @override
    def get(self, begin: int, address: int, num_bytes: int) -> None:
        self.owner.read(address, _rounded(num_bytes), self.offset + begin)


class DiskPool:
    """Blocks of a spill file, which is opened when it is first needed.

    Args:
        folder: Where the file lies; None for the system's folder of temporary files.

    Attributes:
        folder: Where the file lies; None for the system's folder of temporary files.
        used_bytes: Bytes handed out.
        peak_bytes: The most that were handed out at once, since :meth:`prepare` last changed the file.
        error: Why nothing more is handed out, if so.
        is_refused: Whether the disk had no room for a block once.
        returned: Ranges of dropped blocks; finalizers append to it, in any thread.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = tempfile.gettempdir() if folder is None else os.fspath(folder)
        self.used_bytes = 0
        self.peak_bytes = 0
        self.error: BaseException | None = None
        self.is_refused = False
        self.returned: Returned = deque()
        self._file: SpillFile | None = None
        self._ranges = Ranges(0)
        self._planned_bytes = 0

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self._ranges.num_bytes

    @override
    def __repr__(self) -> str:
        return f"DiskPool({self.folder!r}, {self.file_bytes} bytes, {self.used_bytes} used)"

    def allocate(self, num_bytes: int, at: int | None = None, *, is_spare: bool = False) -> DiskBlock | None:
        """A block, or None where the disk has no room or failed.

        Args:
            num_bytes: Its size.
            at: Its planned offset; taken if it is free, else the block lies elsewhere.
            is_spare: Whether the plan does not know of it, so that it must lie beyond what :meth:`prepare` made.
        """
        self.collect()
        if self.error is not None:
            return None
        size = _rounded(max(num_bytes, 1))
        if at is not None and at % ALIGNMENT == 0 and self._ranges.take_at(at, size):
            return self._block(at, num_bytes, size)
        least = self._planned_bytes if is_spare else 0
        offset = self._ranges.take(size, least)
        if offset is None:
            try:
                self._grow(size, least)
            except SpillError as error:
                if is_spare:
                    return None
                if not self.is_refused:
                    _log.warning("a tensor of %d bytes stays where it is: %s", num_bytes, str(error))
                self.is_refused = True
                return None
            offset = self._ranges.take(size, least)
            assert offset is not None
        return self._block(offset, num_bytes, size)

    def prepare(self, num_bytes: int) -> None:
        """Make the file this large, ahead of its use; a pool that failed stays as it is.

        A file that is much too large, as after a recorded step, gives back the rest once nothing lies on it.

        Raises:
            SpillError: The disk has no room, or there can be no file in the folder.
        """
        self.collect()
        wanted = self._planned_bytes = _rounded(num_bytes)
        if self._file is not None and self.file_bytes > _MAX_WASTE * wanted and self._ranges.is_empty:
            self._file.resize(wanted)  # the same file: its folder may be gone
            self._ranges = Ranges(wanted)
            self.peak_bytes = 0
        missing = wanted - self.file_bytes
        if missing > 0 and self.error is None:
            self._extend(missing)
            self.peak_bytes = self.used_bytes

    def fail(self, error: BaseException) -> None:
        """Hand out nothing more: the disk did not take what was written. Called by lanes' threads."""
        if self.error is None:
            self.error = error
            _log.warning("the disk tier in %r is given up, tensors stay where they are: %s", self.folder, str(error))

    def collect(self) -> None:
        """Take back the blocks dropped since the last call."""
        while self.returned:
            file, offset, size, busy = self.returned.popleft()
            if file is self._file:  # else it was closed, and all of it is gone
                self._ranges.give(offset, size, busy)
                self.used_bytes -= size

    def trim(self) -> None:
        """Give the file back, unless a block lies on it; the next block has a new one."""
        self.collect()
        if self._ranges.is_empty:
            self.close()

    def close(self) -> None:
        """Close the file; blocks that still live cannot be read any more."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._ranges = Ranges(0)
        self.used_bytes = 0
        self.returned.clear()

    def _grow(self, size: int, least: int) -> None:
        """Make room for a block at the end, and for more to come where the disk has it."""
        begin, free = self._ranges.free[-1] if self._ranges.free else (0, 0)
        has_end = begin + free == self.file_bytes
        missing = size - (min(free, max(0, self.file_bytes - least)) if has_end else 0)
        missing += max(0, least - self.file_bytes)
        ample = max(_MIN_GROWTH_BYTES, min(_rounded(self.file_bytes // 4), _MAX_GROWTH_BYTES))
        if ample > missing:
            with contextlib.suppress(SpillError):
                self._extend(ample)
                return
        self._extend(missing)

    def _extend(self, num_bytes: int) -> None:
        if self._file is None:
            self._file = SpillFile(self.folder)
        self._file.resize(self.file_bytes + num_bytes)
        self._ranges.extend(num_bytes)

    def _block(self, offset: int, num_bytes: int, size: int) -> DiskBlock:
        assert self._file is not None
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return DiskBlock(self, self._file, offset, num_bytes, size, self._ranges.users(offset, size))


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
