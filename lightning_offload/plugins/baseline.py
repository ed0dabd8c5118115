"""What is on the device beside the steps: listed seldom, and followed in between.

A *scan* lists the storages of all tensors that Python knows of, which takes a tenth of a second or more on a large
heap. So there are two of them among the first steps, before the first one and before the first that is planned, and
later ones where they take 1% of the time, or, after 256 steps, 3%. In between it is told what is there: the state of
the training (parameters, gradients, optimizers), what this forward and earlier ones were given, and what else the last
scan found and still lives. What a scan found and has died since was replaced, it is taken, by something as large (as a
batch is by the next one), unless a watched step has shown how it went, or it was there before the first step alone; what
such a step left behind is known, too. As unwatched steps leave things as well, a count without a scan lowers none that
was made before.

An accelerator's allocator counts; there scans tell what a recorded step touches.
"""

from __future__ import annotations

import gc
import time
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
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
_FEW = 64  # storages, which may be followed after their death


class There(NamedTuple):
    """What is on the device as a step begins.

    Attributes:
        storages: Those that are known.
        given: Identities of those that the step is given.
        replaced: Those that the last scan found, and that have died: others lie in their place; bytes by identity.
        is_whole: Whether there are no others: a scan listed them.
    """

    storages: Census
    given: Collection[int] = ()
    replaced: Mapping[int, int] = types.MappingProxyType({})
    is_whole: bool = True

    def bytes_but(self, others: Collection[int]) -> int:
        """What lies on the device, but for some storages."""
        replaced = sum(num_bytes for key, num_bytes in self.replaced.items() if key not in others)
        return self.known_bytes_but(others) + replaced

    def known_bytes_but(self, others: Collection[int]) -> int:
        """What of the known lies on the device, but for some storages."""
        return sum(storage.nbytes() for key, storage in self.storages.items() if key not in others)


class _Found(NamedTuple):
    reference: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    is_replaced: bool


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
        self._others: dict[int, _Found] = {}
        self._is_doubtful = False
        self._num_steps = 0
        self._most_others = _FEW
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
        for key, storage in _storages_of(leaves, device).items():
            found = self._others.get(key)
            if found is None or found.reference() is not storage:
                self._follow(storage)
        if len(self._others) > self._most_others:
            self._others = {
                key: found for key, found in self._others.items() if found.is_replaced or found.reference() is not None
            }
            self._most_others = 2 * len(self._others) + _FEW

    @property
    def is_due(self) -> bool:
        """Whether there is time for a scan, or reason."""
        is_late = self._num_steps > _MOST_STEPS and self._clock.is_due(_SHARE_WHERE_LATE)
        return self._is_doubtful or is_late or self._clock.is_due(_SHARE)

    def doubt(self) -> None:
        """A step needed other memory than it should: the next look is a scan."""
        self._is_doubtful = True

    def look(self, device: torch.device, leaves: Iterable[Any], *, is_recorded: bool) -> There:
        """List what is there.

        Args:
            device: The device.
            leaves: What the coming step is given.
            is_recorded: Whether the coming step is recorded.
        """
        must_scan = not (self.num_scans if is_recorded else self._num_planned_scans)
        given = _storages_of(leaves, device)
        if not (must_scan or self.is_due):
            return self._followed(device, given)
        began = time.perf_counter()
        with self._clock:
            if is_recorded and self._clock.is_due(_COLLECTING_SHARE):
                gc.collect()  # what waits for it is no part of the steps to come
            storages = self._state.storages(device)
        self.scan_seconds += time.perf_counter() - began
        self.num_scans += 1
        self._num_planned_scans += not is_recorded
        self._is_doubtful, self._num_steps = False, 0
        known = self._state.known_storages(device).keys()
        left = {key for key, found in self._others.items() if not found.is_replaced and found.reference() is not None}
        self._others = {
            key: _Found(weakref.ref(storage), storage.nbytes(), self.num_scans > 1 and key not in left | given.keys())
            for key, storage in storages.items()
            if key not in known
        }
        return There(storages, given.keys())

    def _followed(self, device: torch.device, given: Census) -> There:
        storages = {**self._state.known_storages(device), **given}
        replaced = {}
        for key, found in list(self._others.items()):
            storage = found.reference()
            if storage is not None:
                storages[key] = storage
            elif found.is_replaced:
                replaced[key] = found.num_bytes
            else:
                del self._others[key]
        return There(storages, given.keys(), replaced, is_whole=False)

    def note_left(self, left: Iterable[torch.UntypedStorage], dropped: Iterable[Dropped] = ()) -> None:
        """A watched step, or an optimizer's, has left what it made behind.

        Args:
            left: What it made, no gradients. As much of that as it dropped is taken to be dropped by the next one in
                turn.
            dropped: What it dropped of what was there.
        """
        dropped_bytes = 0
        for gone in dropped:
            found = self._others.get(gone.key)
            if found is not None and found.reference() is None:
                del self._others[gone.key]
            dropped_bytes += gone.num_bytes
        for storage in left:
            num_bytes = storage.nbytes()
            self._follow(storage, is_replaced=num_bytes <= dropped_bytes)
            dropped_bytes -= min(dropped_bytes, num_bytes)

    def _follow(self, storage: torch.UntypedStorage, *, is_replaced: bool = False) -> None:
        """Know a storage from now on, and the one in whose place it lies no more."""
        num_bytes = storage.nbytes()
        for key, found in self._others.items():
            if found.is_replaced and found.num_bytes == num_bytes and found.reference() is None:
                del self._others[key]
                is_replaced = True
                break
        self._others[storage._cdata] = _Found(weakref.ref(storage), num_bytes, is_replaced)


def _storages_of(leaves: Iterable[Any], device: torch.device) -> Census:
    """The storages of the tensors among some objects."""
    plain = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device == device and is_plain(leaf))
    storages = (tensor.untyped_storage() for tensor in plain)
    return {storage._cdata: storage for storage in storages if storage.resizable()}
