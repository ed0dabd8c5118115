"""Copies under way, and the blocks of lower tiers that they fill and read.

A :class:`Copy` is waited for in two ways: ``wait`` lets *compute* go on only after it (on a device with streams
that blocks no thread), ``synchronize`` blocks the calling thread until the bytes are there. A :class:`Block` goes
back to its pool when the last reference to it goes, perhaps while a copy still uses its memory: the pool then
hands that copy on to whoever gets the memory next, and lanes order their copies after it.
"""

from __future__ import annotations

import abc
import threading
import time

from typing_extensions import override

from lightning_offload.errors import SpillError


class Copy(abc.ABC):
    """A copy under way."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether the bytes are there; never blocks."""

    @abc.abstractmethod
    def wait(self) -> float:
        """Let what compute does from here on see the copy as done.

        Returns:
            Seconds for which the calling thread was blocked.

        Raises:
            SpillError: The copy failed.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until the copy is done.

        Raises:
            SpillError: The copy failed.
        """


class HostCopy(Copy):
    """A copy that a thread of this process makes.

    Attributes:
        error: Why it failed, if it did.
    """

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the copy as done, or as failed."""
        self.error = error
        self._done.set()

    @property
    @override
    def is_done(self) -> bool:
        return self._done.is_set()

    @override
    def wait(self) -> float:
        if self._done.is_set() and self.error is None:
            return 0.0
        start = time.perf_counter()
        self.synchronize()
        return time.perf_counter() - start

    @override
    def synchronize(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise SpillError(f"a copy between tiers failed: {self.error}") from self.error

    def settle(self) -> None:
        """Block until the copy is done or has failed."""
        self._done.wait()


def without_frames(error: BaseException) -> BaseException:
    """An error that does not keep the storages of the frames it went through."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def done_copy() -> HostCopy:
    """A copy that is done."""
    return failed_copy(None)


def failed_copy(error: BaseException | None) -> HostCopy:
    """A copy that is over, and has failed if there is an error."""
    copy = HostCopy()
    copy.finish(error)
    return copy


DONE = done_copy()
"""A copy that is done; any number of them, since it never changes."""


class Block:
    """A range of a lower tier, of host memory or of a file, that goes back to its pool when it is dropped.

    Attributes:
        num_bytes: Its size as asked for.
        busy: The latest copy that fills or reads it.
        after: Copies of its memory's earlier users that may still be under way.
    """

    __slots__ = ("after", "busy", "num_bytes")

    def __init__(self, num_bytes: int, after: tuple[Copy, ...]) -> None:
        self.num_bytes = num_bytes
        self.after = after
        self.busy: Copy | None = None
