"""What is on the device beside the steps: listed seldom, and followed in between.

A *scan* lists the storages of all tensors that Python knows of, which takes a tenth of a second or more on a large
heap. So there are two of them among the first steps, before the first one and before the first that is planned (unless
there is ample room), and later ones where they take 1% of the time, or, after 256 steps, 3%. In between it is told what
is there: the state of the training (parameters, gradients, optimizers), what this forward and earlier ones were given,
and what else the last scan found and still lives. What a scan found and has died since was replaced, it is taken, by
something as large (as a batch is by the next one), unless a watched step has shown how it went, or it was there before
the first step alone; what such a step left behind is known, too. As unwatched steps leave things as well, a count
without a scan lowers none that was made before. No budget is refused on such a guess: a scan comes first.

An accelerator's allocator counts; there scans tell what a recorded step touches.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_offload.capture.departures import Dropped
from lightning_offload.capture.live import Census, CensusClock
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.tensors.op_facts import is_plain

_SHARE, _SHARE_WHERE_LATE = 0.01, 0.03  # of the time may go into scans; into one that is long due
_COLLECTING_SHARE = 0.1  # and into what the garbage collector does before one, where a step is recorded
_MOST_STEPS = 256  # without one


class There(NamedTuple):
    """What is on the device as a step begins.

    Attributes:
        storages: Those that are known.
        given: Identities of those that the step is given.
        replaced: Bytes of those that the last scan found, and that have died: others lie in their place.
        is_whole: Whether there are no others: a scan listed them.
    """

    storages: Census
    given: Collection[int] = ()
    replaced: Sequence[int] = ()
    is_whole: bool = True

    def bytes_but(self, others: Collection[int]) -> int:
        """What lies on the device, but for some storages."""
        known = (storage.nbytes() for key, storage in self.storages.items() if key not in others)
        return sum(known) + sum(self.replaced)


class _Followed(weakref.ref[torch.UntypedStorage]):
    """A storage that is followed; what it was is known after its death, too.

    Args:
        storage: It.
        is_replaced: Whether another one lies in its place after its death.
        dead: Where it goes then.
    """

    __slots__ = ("is_replaced", "key", "num_bytes")

    def __new__(cls, storage: torch.UntypedStorage, is_replaced: bool, dead: deque[Any]) -> _Followed:
        return super().__new__(cls, storage, dead.append)

    def __init__(self, storage: torch.UntypedStorage, is_replaced: bool, dead: deque[Any]) -> None:
        self.key, self.num_bytes, self.is_replaced = storage._cdata, storage.nbytes(), is_replaced


class Baseline:
    """Tells what is on the device as steps begin.

    Args:
        state: The state of the training, which needs no scan.

    Attributes:
        num_scans: Scans so far.
        scan_seconds: What they took.
    """

    def __init__(self, state: PersistentState) -> None:
        self.num_scans = 0
        self.scan_seconds = 0.0
        self._state = state
        self._clock = CensusClock()
        self._others: dict[int, _Followed] = {}
        self._dead: deque[_Followed] = deque()
        self._replaced: dict[int, set[int]] = {}  # by size: identities that dead ones had
        self._is_doubtful = False
        self._num_steps = 0
        self._num_planned_scans = 0

    def begin_step(self) -> None:
        """A step begins."""
        self._num_steps += 1

    def note_given(self, device: torch.device, leaves: Iterable[Any]) -> None:
        """Follow what a forward is given: a later step that is not given it may find it there.

        Args:
            device: The device.
            leaves: What it is given.
        """
        self._bury()
        for key, storage in _storages_of(leaves, device).items():
            found = self._others.get(key)
            if found is None or found() is not storage:
                self._follow(storage)

    @property
    def is_due(self) -> bool:
        """Whether there is time for a scan, or reason."""
        is_late = self._num_steps > _MOST_STEPS and self._clock.is_due(_SHARE_WHERE_LATE)
        return self._is_doubtful or is_late or self._clock.is_due(_SHARE)

    def doubt(self) -> None:
        """A step needed other memory than it should: the next look is a scan."""
        self._is_doubtful = True

    def look(
        self, device: torch.device, leaves: Iterable[Any], *, is_recorded: bool, has_ample_room: bool = False
    ) -> There:
        """List what is there.

        Args:
            device: The device.
            leaves: What the coming step is given.
            is_recorded: Whether the coming step is recorded.
            has_ample_room: Whether there is room for much more than was seen so far.
        """
        must_scan = not (self.num_scans if is_recorded or has_ample_room else self._num_planned_scans)
        given = _storages_of(leaves, device)
        self._bury()
        if not (must_scan or self.is_due):
            return self._listed(device, given)
        began = time.perf_counter()
        with self._clock:
            if is_recorded and self._clock.is_due(_COLLECTING_SHARE):
                gc.collect()  # what waits for it is no part of the steps to come
            storages = self._state.storages(device)
            known = self._state.known_storages(device).keys()
            staying = given.keys() | {key for key, found in self._others.items() if not found.is_replaced}
            others = {key: storage for key, storage in storages.items() if key not in known}
            self._others = {
                key: _Followed(storage, self.num_scans > 0 and key not in staying, self._dead)
                for key, storage in others.items()
            }
            self._replaced.clear()
        self.scan_seconds += time.perf_counter() - began
        self.num_scans += 1
        self._num_planned_scans += not is_recorded
        self._is_doubtful, self._num_steps = False, 0
        return There(storages, given.keys())

    def _listed(self, device: torch.device, given: Census) -> There:
        """What is there as it was followed."""
        storages = {**self._state.known_storages(device), **given}
        for key, found in self._others.items():
            if (storage := found()) is not None:
                storages[key] = storage
        replaced = [num_bytes for num_bytes, keys in self._replaced.items() for _ in keys]
        return There(storages, given.keys(), replaced, is_whole=False)

    def _bury(self) -> None:
        """Follow those no more that have died: in place of some lie others, which nobody saw come."""
        while self._dead:
            found = self._dead.popleft()
            if self._others.get(found.key) is found:
                del self._others[found.key]
                if found.is_replaced:
                    self._replaced.setdefault(found.num_bytes, set()).add(found.key)

    def note_left(self, left: Iterable[torch.UntypedStorage], dropped: Iterable[Dropped] = ()) -> None:
        """A watched step, or an optimizer's, has left what it made behind.

        Args:
            left: What it made, no gradients. As much of that as it dropped is taken to be dropped by the next one in
                turn.
            dropped: What it dropped of what was there.
        """
        self._bury()
        dropped_bytes = 0
        for gone in dropped:
            for keys in self._replaced.values():
                keys.discard(gone.key)
            dropped_bytes += gone.num_bytes
        for storage in left:
            num_bytes = storage.nbytes()
            self._follow(storage, is_replaced=num_bytes <= dropped_bytes)
            dropped_bytes -= min(dropped_bytes, num_bytes)

    def _follow(self, storage: torch.UntypedStorage, *, is_replaced: bool = False) -> None:
        """Know a storage from now on, and one as large in whose place it lies no more."""
        if dead := self._replaced.get(storage.nbytes()):
            dead.pop()
            is_replaced = True
        self._others[storage._cdata] = _Followed(storage, is_replaced, self._dead)


def _storages_of(leaves: Iterable[Any], device: torch.device) -> Census:
    """The storages of the tensors among some objects."""
    found = {}
    with torch._C.DisableTorchFunction():  # nobody's subclass is to hear of it
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                # A wrapper of a transform, or a subclass, may refuse to tell: it ends no training.
                with contextlib.suppress(Exception):
                    if leaf.device == device and is_plain(leaf) and (storage := leaf.untyped_storage()).resizable():
                        found[storage._cdata] = storage
    return found
