"""A spill file: bytes on disk that nobody else sees and that nothing is left of.

It is preallocated, so that a full disk is found when space is asked for and not when a step writes; readable by
its owner alone, and without a name, so that nothing is left behind however the process ends. Where the file
system allows it, bytes bypass the page cache: swapped tensors are read once, and what the kernel would cache of
them costs the memory that swapping is to save.

Offsets, sizes and addresses are multiples of :data:`ALIGNMENT`. Reads and writes may be made by any thread and
hold no GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator

from lightning_offload.errors import SpillError
from lightning_offload.units import format_bytes

ALIGNMENT = 4096
"""Bytes; what every device can transfer past the page cache."""

_PREFIX = "lightning-offload-"
_ZEROS_BYTES = 1 << 20  # written at once where a file cannot be allocated
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EISDIR}
"""What a file system says that does not know a flag or a call; kernels before O_TMPFILE say EISDIR."""

_SHORT = {"write": "were taken", "read": "are there"}
_ADVICE = "free some space there, name another spill_dir, or use tier='host'"


class SpillFile:
    """A file without a name in a folder.

    Args:
        folder: Where it lies.

    Attributes:
        folder: Where it lies.
        num_bytes: Its preallocated size.
        is_direct: Whether its bytes bypass the page cache.

    Raises:
        SpillError: There can be no file in the folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._fd = _open(folder)
        self.is_direct = _bypass_cache(self._fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):  # there is none where opening it failed
            self.close()

    def resize(self, num_bytes: int) -> None:
        """Preallocate up to this size, or give back what is beyond it.

        Raises:
            SpillError: There is no room; the size stays.
        """
        assert num_bytes % ALIGNMENT == 0
        self._require_owner()
        with self._using() as fd:
            if num_bytes > self.num_bytes:
                self._grow(fd, num_bytes)
            elif num_bytes < self.num_bytes:
                os.ftruncate(fd, num_bytes)
            self.num_bytes = num_bytes

    def write(self, address: int, num_bytes: int, offset: int) -> None:
        """Copy memory to the file; returns when the file system has it.

        Raises:
            SpillError: It does not take all of it.
        """
        self._require_owner()
        self._transfer("write", os.pwrite, address, num_bytes, offset)

    def read(self, address: int, num_bytes: int, offset: int) -> None:
        """Copy from the file to memory.

        Raises:
            SpillError: It does not give all of it.
        """
        self._require_owner()
        self._transfer("read", _pread, address, num_bytes, offset)

    def _require_owner(self) -> None:
        """A fork shares its parent's file, which the parent goes on to write."""
        if os.getpid() != self._pid:
            raise SpillError(
                f"the spill file in {self.folder!r} belongs to the process that this one was forked from: start "
                "processes by 'spawn', or use tier='host' where a fork trains on"
            )

    def close(self) -> None:
        """Give the space back; a transfer under way ends first."""
        if os.getpid() != self._pid:  # a fork's copy: file and lock are its parent's
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close_if_unused()

    @contextlib.contextmanager
    def _using(self) -> Iterator[int]:
        """The descriptor, kept open meanwhile: a number that was closed may be another file's the next moment."""
        with self._lock:
            if self._is_closed:
                raise SpillError(f"the spill file in {self.folder!r} is closed; nothing swapped there can be read now")
            self._num_users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._num_users -= 1
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._num_users:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)  # forked processes may keep the file open
            os.close(self._fd)

    def _grow(self, fd: int, num_bytes: int) -> None:
        wanted = num_bytes - self.num_bytes
        free = _free_bytes(fd)
        if free is not None and free < wanted:  # asking would fill the disk for a moment
            raise SpillError(f"{self._wants(wanted, free)}; {_ADVICE}")
        try:
            if not _preallocate(fd, self.num_bytes, wanted):
                self._fill(self.num_bytes, num_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self.num_bytes)  # some of it may have been allocated
            raise SpillError(f"{self._wants(wanted, free)}: {error.__cause__ or error}; {_ADVICE}") from error

    def _fill(self, begin: int, end: int) -> None:
        """Write zeros, which allocates space on any file system."""
        zeros = mmap.mmap(-1, _ZEROS_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(zeros))
        for offset in range(begin, end, _ZEROS_BYTES):
            self.write(address, min(_ZEROS_BYTES, end - offset), offset)

    def _wants(self, wanted: int, free: int | None) -> str:
        known = "an unknown number of bytes is" if free is None else f"{format_bytes(free)} are"
        return f"swapped tensors want {format_bytes(wanted)} on disk in {self.folder!r}, where {known} free"

    def _transfer(
        self, verb: str, move: Callable[[int, memoryview, int], int], address: int, num_bytes: int, offset: int
    ) -> None:
        assert not (address | num_bytes | offset) % ALIGNMENT
        memory = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
        done = 0
        with self._using() as fd:
            while done < num_bytes:
                was_direct = self.is_direct
                try:
                    count = move(fd, memory[done:], offset + done)
                except OSError as error:
                    if error.errno == errno.EINVAL and was_direct:
                        self._use_cache(fd)
                        continue
                    raise self._failure(verb, num_bytes, offset, str(error)) from error
                if count <= 0:
                    raise self._failure(verb, num_bytes, offset, f"only {done} of them {_SHORT[verb]}")
                done += count
                if done % ALIGNMENT and was_direct:  # which could not go on from there
                    self._use_cache(fd)

    def _use_cache(self, fd: int) -> None:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
        self.is_direct = False

    def _failure(self, verb: str, num_bytes: int, offset: int, reason: str) -> SpillError:
        what = f"could not {verb} {num_bytes} bytes at offset {offset} of the spill file in {self.folder!r}: {reason}"
        if verb == "write":
            return SpillError(f"{what}; {_ADVICE}")
        return SpillError(
            f"{what}; the tensors there are lost: check the disk, then go on from a checkpoint with another "
            "spill_dir or tier='host'"
        )


def _open(folder: str) -> int:
    if not hasattr(os, "pwrite"):
        raise SpillError(f"spill_dir {folder!r} is of no use: the disk tier needs a POSIX system; use tier='host'")
    try:
        return _open_unnamed(folder)
    except OSError as error:
        raise SpillError(
            f"there can be no spill file in {folder!r}: {error}; name a folder that exists and can be written to "
            "as spill_dir, or use tier='host'"
        ) from error


def _open_unnamed(folder: str) -> int:
    for direct in (_DIRECT, 0) if _UNNAMED else ():
        try:
            return os.open(folder, os.O_RDWR | os.O_EXCL | _UNNAMED | direct, 0o600)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
    fd, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _bypass_cache(fd: int) -> bool:
    """Ask for transfers past the page cache; whether that was granted."""
    import fcntl  # not there on every system

    if hasattr(fcntl, "F_NOCACHE"):  # macOS
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & _DIRECT:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT)
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT)


def _pread(fd: int, memory: memoryview, offset: int) -> int:
    return os.preadv(fd, [memory], offset)


def _free_bytes(fd: int) -> int | None:
    try:
        found = os.fstatvfs(fd)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _preallocate(fd: int, offset: int, num_bytes: int) -> bool:
    """Allocate space; False where the system has no call for that."""
    allocate = getattr(os, "posix_fallocate", None)
    if allocate is None:
        return False
    try:
        allocate(fd, offset, num_bytes)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    return True
