"""Counts live device bytes where the device itself does not: the peak of a step on a CPU.

Two sources. A live scan lists the storages of all tensors that Python knows of, whoever made them. From there on
storages are counted by live identity: those of the scan until they die, those made in the step from birth to
death, what the runtime itself allocates, and what an op reads that neither of these knows; and while an op runs, what
it allocates within (:mod:`~.workspace`), which is not measured of replays. One that the program gives another size (a
sharded parameter, which is there for a while only) counts for what it has: the program's ``UntypedStorage.resize_`` is
heard, and what other ways have resized shows at the next op that has to do with it. On CUDA the allocator's own figures
are used instead. Memory that torch did not allocate (numpy's, the runtime's own host buffers), and tensors that only
C++ knows of, are in no live scan.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from lightning_offload.accelerators import indexed
from lightning_offload.capture.workspace import Workspaces
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import Effects, OpFacts, effects, is_plain

LiveStorages = dict[int, torch.UntypedStorage]
"""Storages by identity."""


def live_storages(device: torch.device) -> LiveStorages:
    """Scan the live storages: the storages on a device of all tensors that Python knows of.

    Looks through every object that the garbage collector tracks, which takes a tenth of a second in a large process
    (:func:`heap_set_aside` is for many in a row); what ``gc.freeze`` has set aside does not count. A gradient is among
    them once Python has seen it: no tensor is asked for its own here, since another thread's backward may just be
    making it.
    """
    with torch._C.DisableTorchFunction():  # nobody's subclass is to hear of it
        storages = (tensor.untyped_storage() for tensor in live_tensors(device))
        return {storage._cdata: storage for storage in storages}


def live_tensors(device: torch.device) -> Iterator[Tensor]:
    """The tensors on a device that Python knows of, on memory that torch allocated; cf. :func:`live_storages`."""
    device = indexed(device)
    aside = (tensor for tensor in (reference() for reference in _aside) if tensor is not None)
    for item in itertools.chain(_tracked_tensors(), aside):
        is_there = False
        # A wrapper that outlived its transform, or a subclass, may refuse to tell: it ends no training.
        with contextlib.suppress(Exception), torch._C.DisableTorchFunction():
            is_there = item.device == device and is_plain(item) and item.untyped_storage().resizable()
        if is_there:
            yield item


def _tracked_tensors() -> Iterable[Tensor]:
    # Not isinstance: it asks an object's own __class__, which runs code of proxies. There are millions of objects and
    # thousands of types, so each type is looked at once, and no bytecode runs for an object.
    objects = gc.get_objects()
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor) and not issubclass(kind, FakeTensor)}
    return itertools.compress(objects, map(types.__contains__, map(type, objects)))


_aside: list[weakref.ref[Tensor]] = []
"""Tensors among what :func:`heap_set_aside` has frozen."""


@contextlib.contextmanager
def heap_set_aside() -> Iterator[None]:
    """For many short trainings: within it a live scan, and a pass of the garbage collector, takes milliseconds.

    Objects that are alive when it begins are frozen (``gc.freeze``), their tensors remembered: cycles among them that
    are dropped within are collected afterwards. Does nothing where the program has frozen objects of its own.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    with torch._C.DisableTorchFunction():
        _aside.extend(weakref.ref(tensor) for tensor in _tracked_tensors())
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _aside.clear()


class LiveScanClock:
    """Tells when a live scan may begin, so that scans take no more than a share of the time."""

    def __init__(self) -> None:
        self._began = self._ended = 0.0

    def __enter__(self) -> None:
        """Begin a scan."""
        self._began = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        """End it."""
        self._ended = time.perf_counter()

    def is_due(self, share: float) -> bool:
        """Whether the last scan took at most this share of the time since."""
        return (self._ended - self._began) <= share * (time.perf_counter() - self._ended)


class Counted(weakref.ref[torch.UntypedStorage]):
    """A storage by weak reference, and what it counts for.

    Attributes:
        key: Its identity while it lives.
        num_bytes: Its size, as far as that was seen.
        is_older: Whether it was there before the step, or made out of sight.
        index: Its index in a recording, that of its present life; -1 where that has not met it.
        stays: Whether what is saved on it stays on the device: it was resized, or made out of sight.
        row: Its row among the lifetimes that ``deaths`` belongs to.
        deaths: Where the tick at which it dies is entered; None for nowhere.
    """

    __slots__ = ("deaths", "index", "is_older", "key", "num_bytes", "row", "stays")
    key: int
    num_bytes: int
    is_older: bool
    index: int
    stays: bool
    row: int
    deaths: list[int] | None


class LiveBytes(StepObserver):
    """Peak of live bytes over one step, in total and by phase.

    Args:
        device: The device whose storages count.
        there: The storages that are there when the step begins. Without them each counts from its first use on.
        by_op: Whether to tell the peak by op.
        workspaces: Measures what ops allocate within; None for nobody.
        known_workspaces: By op of the step, in order: what it allocates within, where nobody measures it.

    Attributes:
        there_bytes: What was there when it began.
        peak_bytes: Peak of all storages that are known.
        forward_peak_bytes: The same, in forward alone.
        backward_peak_bytes: The same, in backward alone.
        lap_peak_bytes: The same, since :meth:`begin_lap`.
        by_op: By op of the step, in order: the same, since the op before it; None unless that is asked for.
        made_bytes: Peak of storages made in the step.
        external: Those of the storages that were there when it began that an op of it had to do with: a weak reference
            and bytes by identity.
    """

    def __init__(
        self,
        device: torch.device,
        there: Iterable[torch.UntypedStorage] = (),
        *,
        by_op: bool = False,
        workspaces: Workspaces | None = None,
        known_workspaces: Sequence[int] = (),
    ) -> None:
        self.made_bytes = 0
        self._workspaces = workspaces
        self._known_workspaces = iter(known_workspaces)
        self.by_op: list[int] | None = [] if by_op else None
        self._since_op_bytes = 0
        self._device = indexed(device)
        self._live_bytes = self._older_bytes = 0
        self._tick = 0
        self._live: dict[int, Counted] = {}
        self._dead: deque[Counted] = deque()
        self._untouched: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.external: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        for storage in there:
            counted = self._count(storage, is_older=True)
            self._untouched[counted.key] = (counted, counted.num_bytes)
        self.there_bytes = self._live_bytes
        self.peak_bytes = self.forward_peak_bytes = self.lap_peak_bytes = self._live_bytes
        self.backward_peak_bytes = 0

    def alive(self) -> list[torch.UntypedStorage]:
        """What is known of and lives, as a scan would list it."""
        self._forget_dead()
        found = [counted() for counted in self._live.values()]
        return [storage for storage in found if storage is not None and storage.resizable()]

    def left_behind(self) -> list[torch.UntypedStorage]:
        """What was made so far and still lives."""
        self._forget_dead()
        made = [counted() for counted in self._live.values() if not counted.is_older]
        return [storage for storage in made if storage is not None]

    def begin_lap(self) -> None:
        """Measure the peak of what comes next, too."""
        self._forget_dead()
        self.lap_peak_bytes = self._live_bytes

    @override
    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._workspaces is not None:
            self._workspaces.before_op()

    @override
    def on_failed_op(self) -> None:
        if self._workspaces is not None:
            self._workspaces.op_failed()

    @override
    def on_op(
        self, facts: OpFacts, args: Any, kwargs: Any, out: Any, seconds: float, did: Effects | None = None
    ) -> None:
        workspaces = self._workspaces
        workspace_bytes = workspaces.after_op() if workspaces is not None else next(self._known_workspaces, 0)
        read, made, num_fresh, read_from, made_on = did if did is not None else effects(facts, args, kwargs, out)
        device, live, untouched = self._device, self._live, self._untouched
        for tensor, storage in zip(read, read_from, strict=True):
            if storage is not None and tensor.device == device:
                key = storage._cdata
                known = live.get(key)
                if known is None or key in untouched or known() is not storage or known.num_bytes != storage.nbytes():
                    self._add(storage, is_older=True)
        for position, tensor in enumerate(made):
            if tensor.device == device:
                self._add(made_on[position], is_older=position >= num_fresh)  # what is written was there before
        if workspace_bytes:
            self._rise(workspace_bytes)
        if self.by_op is not None:
            self._forget_dead()
            self.by_op.append(max(self._since_op_bytes, self._live_bytes))
            self._since_op_bytes = 0

    @override
    def on_made(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device == self._device and is_plain(tensor):
                self._add(tensor.untyped_storage(), is_older=False)

    @override
    def on_allocation(self, storage: torch.UntypedStorage) -> None:
        self._add(storage, is_older=False)

    @override
    def on_resized(self, storage: torch.UntypedStorage, num_bytes_before: int) -> None:
        found = self._find(storage)
        if found is None:
            if storage.device != self._device:
                return
            found = self._follow(storage, is_older=True)
            self._take_size(found, num_bytes_before)
        self._touch(found)
        self._resized(found, storage.nbytes())

    def _find(self, storage: torch.UntypedStorage) -> Counted | None:
        found = self._live.get(storage._cdata)
        return found if found is not None and found() is storage else None

    def _add(self, storage: torch.UntypedStorage, *, is_older: bool) -> None:
        found = self._find(storage)
        if found is None:
            self._follow(storage, is_older=is_older)
            return
        self._touch(found)
        if found.num_bytes != storage.nbytes():
            self._resized(found, storage.nbytes())

    def _touch(self, counted: Counted) -> None:
        entry = self._untouched.pop(counted.key, None)
        if entry is not None:
            self.external[counted.key] = entry

    def _follow(self, storage: torch.UntypedStorage, *, is_older: bool) -> Counted:
        """Count a storage from now on."""
        if self._untouched:
            self._untouched.pop(storage._cdata, None)  # died, and its identity is used again
        self._forget_dead()
        counted = self._count(storage, is_older=is_older)
        self._rise(0)
        return counted

    def _resized(self, found: Counted, num_bytes: int) -> None:
        """Count a storage for another size: what it has now is there before what it had goes, of which it is a copy."""
        self._forget_dead()
        before = found.num_bytes
        self._take_size(found, before + num_bytes)
        self._rise(0)
        self._take_size(found, num_bytes)

    def _take_size(self, counted: Counted, num_bytes: int) -> None:
        growth = num_bytes - counted.num_bytes
        counted.num_bytes = num_bytes
        self._live_bytes += growth
        if counted.is_older:
            self._older_bytes += growth

    def _rise(self, more_bytes: int) -> None:
        """Note what is alive, with so much that an op had within."""
        if more_bytes:
            self._forget_dead()
        now = self._live_bytes + more_bytes
        if now > self.peak_bytes:
            self.peak_bytes = now
        if now > self.lap_peak_bytes:
            self.lap_peak_bytes = now
        if now > self._since_op_bytes:
            self._since_op_bytes = now
        if now - self._older_bytes > self.made_bytes:
            self.made_bytes = now - self._older_bytes
        if torch._C._current_graph_task_id() == -1:
            if now > self.forward_peak_bytes:
                self.forward_peak_bytes = now
        elif now > self.backward_peak_bytes:
            self.backward_peak_bytes = now

    def _forget_dead(self) -> None:
        """Take what has died since the last time out of the count."""
        dead = self._dead
        while dead:
            gone = dead.popleft()
            if gone.deaths is not None:
                gone.deaths[gone.row] = self._tick
            self._live_bytes -= gone.num_bytes
            if gone.is_older:
                self._older_bytes -= gone.num_bytes
            if self._live.get(gone.key) is gone:
                del self._live[gone.key]

    def _count(self, storage: torch.UntypedStorage, *, is_older: bool) -> Counted:
        counted = Counted(storage, self._dead.append)
        counted.key, counted.num_bytes, counted.is_older = storage._cdata, storage.nbytes(), is_older
        counted.index, counted.stays, counted.deaths = -1, False, None
        self._live[counted.key] = counted
        self._live_bytes += counted.num_bytes
        if is_older:
            self._older_bytes += counted.num_bytes
        return counted
