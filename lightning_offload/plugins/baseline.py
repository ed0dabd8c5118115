"""What is on the device beside the steps: listed seldom, and followed in between.

A *scan* lists the storages of all tensors that Python knows of, which takes a tenth of a second or more on a large
heap. So there are two of them among the first steps, before the first one and before the first that is planned (unless
there is ample room), and later ones where they take 1% of the time, or, after 256 steps, 3%. In between it is told what
is there: the state of the training (parameters, gradients, optimizers), what this forward and earlier ones were given,
and what else the last scan found and still lives. What a scan found and has died since was replaced, it is taken, by
something as large, unless a watched step has shown how it went, or it was there before the first step alone; what such
a step left behind is known, too. What is given next to a forward that is alike takes a batch's place, and what the next
such step leaves an output's: both are followed from then on. As unwatched steps leave things as well, a count
without a scan lowers none that was made before. No budget is refused on such a guess: a scan comes first.

An accelerator's allocator counts; there scans tell what a recorded step touches.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_offload.capture.departures import Dropped
from lightning_offload.capture.live import LiveScanClock, LiveStorages
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.tensors.op_facts import is_plain

_SHARE, _SHARE_WHERE_LATE = 0.01, 0.03  # of the time may go into scans; into one that is long due
_COLLECTING_SHARE = 0.1  # and into what the garbage collector does before one, where a step is recorded
_MOST_ALIKE = 256  # forwards, and steps, that are told apart
_MOST_STEPS = 256  # without one


class There(NamedTuple):
    """What is on the device as a step begins.

    Attributes:
        storages: Those that are known.
        state: Identities of those that belong to the training.
        was_other_bytes: What of that, or of earlier such, was counted before it was known to.
        inputs: Identities of those that the step is given.
        replaced: Bytes of those that the last scan found, and that have died: others lie in their place.
        is_whole: Whether there are no others: a scan listed them.
    """

    storages: LiveStorages
    state: Collection[int] = ()
    was_other_bytes: int = 0
    inputs: Collection[int] = ()
    replaced: Sequence[int] = ()
    is_whole: bool = True

    def state_bytes_but(self, gradients: Collection[int]) -> int:
        """What of that was not counted before, but for gradients: it grows by what is new on the device."""
        return sum(self.storages[key].nbytes() for key in self.state if key not in gradients) - self.was_other_bytes

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
        self._clock = LiveScanClock()
        self._others: dict[int, _Followed] = {}
        self._dead: deque[_Followed] = deque()
        self._replaced: dict[int, _Followed] = {}  # dead, by their own identities
        self._inputs: dict[str, list[_Followed]] = {}  # by what is alike: what the last one was given
        self._left: dict[str, list[_Followed]] = {}  # by the same: what the last watched one left behind
        self._was_other_bytes = 0
        self._is_doubtful = False
        self._num_steps = 0
        self._num_planned_scans = 0

    def begin_step(self) -> None:
        """A step begins."""
        self._num_steps += 1

    def note_inputs(self, device: torch.device, leaves: Iterable[Any], like: str) -> None:
        """Follow what a forward is given: a later step that is not given it may find it there.

        Args:
            device: The device.
            leaves: What it is given.
            like: Forwards of the same are given the next one of each.
        """
        self._bury()
        inputs, before = _storages_of(leaves, device), self._inputs.get(like, [])
        now: list[_Followed] = []
        for (key, storage), last in itertools.zip_longest(inputs.items(), before[: len(inputs)]):
            found = self._others.get(key)
            if found is None or found() is not storage:
                found = self._follow(storage, is_replaced=last is not None and last.is_replaced)
                if last is not None:
                    self._replaced.pop(id(last), None)
            now.append(found)
        _remember(self._inputs, like, now)

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
        inputs = _storages_of(leaves, device)
        self._bury()
        if not (must_scan or self.is_due):
            return self._listed(device, inputs)
        began = time.perf_counter()
        with self._clock:
            if is_recorded and self._clock.is_due(_COLLECTING_SHARE):
                gc.collect()  # what waits for it is no part of the steps to come
            storages = {**self._state.storages(device), **inputs}  # which may have been set aside (``gc.freeze``)
            known = self._known(device).keys()
            others = {key: storage for key, storage in storages.items() if key not in known}
            before, are_replaced = self._others, self.num_scans > 0
            self._others, new = {}, dict[int, list[_Followed]]()
            for key, storage in others.items():
                found = before.get(key)
                if found is None or found() is not storage:
                    found = _Followed(storage, are_replaced and key not in inputs, self._dead)
                    if found.is_replaced:
                        new.setdefault(found.num_bytes, []).append(found)
                self._others[key] = found
            for left in self._left.values():  # what stood for what unwatched ones left is this
                left[:] = [
                    new[last.num_bytes].pop() if id(last) in self._replaced and new.get(last.num_bytes) else last
                    for last in left
                ]
            self._replaced.clear()
        self.scan_seconds += time.perf_counter() - began
        self.num_scans += 1
        self._num_planned_scans += not is_recorded
        self._is_doubtful, self._num_steps = False, 0
        return There(storages, known & storages.keys(), self._was_other_bytes, inputs.keys())

    def _known(self, device: torch.device) -> LiveStorages:
        """What belongs to the training: other things may have been found to, which were counted before."""
        state = self._state.known_storages(device)
        for key in self._others.keys() & state.keys():
            if self._others.pop(key)() is state[key]:
                self._was_other_bytes += state[key].nbytes()
        return state

    def _listed(self, device: torch.device, inputs: LiveStorages) -> There:
        """What is there as it was followed."""
        state = self._known(device)
        storages = {**state, **inputs}
        for key, found in self._others.items():
            if (storage := found()) is not None:
                storages[key] = storage
        replaced = [found.num_bytes for found in self._replaced.values()]
        return There(storages, state.keys(), self._was_other_bytes, inputs.keys(), replaced, is_whole=False)

    def _bury(self) -> None:
        """Follow those no more that have died: in place of some lie others, which nobody saw come."""
        while self._dead:
            found = self._dead.popleft()
            if self._others.get(found.key) is found:
                del self._others[found.key]
                if found.is_replaced:
                    self._replaced[id(found)] = found

    def note_left(
        self, left: Iterable[torch.UntypedStorage], dropped: Iterable[Dropped] = (), like: str | None = None
    ) -> None:
        """A watched step, or an optimizer's, has left what it made behind.

        Args:
            left: What it made, no gradients. As much of that as it dropped is taken to be dropped by the next one in
                turn.
            dropped: What it dropped of what was there.
            like: Steps of the same hold what they leave in one another's place; None for an optimizer's.
        """
        self._bury()
        for last in self._left.pop(like, ()) if like is not None else ():
            last.is_replaced = False
            self._replaced.pop(id(last), None)
        gone = {storage.key: storage.num_bytes for storage in dropped}
        if gone:
            self._replaced = {key: found for key, found in self._replaced.items() if found.key not in gone}
        dropped_bytes = sum(gone.values())
        now: list[_Followed] = []
        for storage in left:
            num_bytes = storage.nbytes()
            now.append(self._follow(storage, is_replaced=num_bytes <= dropped_bytes))
            dropped_bytes -= min(dropped_bytes, num_bytes)
        if like is not None and now:
            _remember(self._left, like, now)

    def note_unwatched(self, like: str) -> None:
        """A step has run that nobody watched: it left what takes the place of what the last one left."""
        for last in self._left.get(like, ()):
            last.is_replaced |= self._others.get(last.key) is last  # it was there as that step began

    def _follow(self, storage: torch.UntypedStorage, *, is_replaced: bool) -> _Followed:
        """Know a storage from now on."""
        self._others[storage._cdata] = found = _Followed(storage, is_replaced, self._dead)
        return found


def _remember(known: dict[str, list[_Followed]], key: str, found: list[_Followed]) -> None:
    known.pop(key, None)
    known[key] = found
    while len(known) > _MOST_ALIKE:
        del known[next(iter(known))]


def _storages_of(leaves: Iterable[Any], device: torch.device) -> LiveStorages:
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
