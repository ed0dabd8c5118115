"""Where values are: moves them off the device and back, and replays those that are nowhere.

All methods run under the executor's lock. Device memory is allocated here, by the thread that computes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import torch

from lightning_offload.errors import ReplayError, SpillError, StaleInputError
from lightning_offload.graph.memory_plan import Decision
from lightning_offload.runtime.lanes import DONE, Block
from lightning_offload.runtime.replay import Replay
from lightning_offload.runtime.tiers import Place, Tiers
from lightning_offload.runtime.values import Handle, LiveValue, ValueTable
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.tensors.geometry import Geometry
from lightning_offload.tensors.observer import StepObserver

_log = logging.getLogger(__name__)
_STALE = (
    "a tensor that a recomputation reads was modified in place after forward had read it, out of sight of the step: "
    "update it by an optimizer's step() or after backward, let a custom backward write to a copy, or use "
    "policy='all-swap'"
)


class Materializer:
    """Moves the values of one step.

    Args:
        device: Where the step runs.
        tiers: Where its values may go.
        table: The values.
        decisions: The plan's, by storage.
        observer: Notified of what is allocated; None for nobody.
        verifier: Compares replays; None where they are trusted.
        make: Makes a value again; None for a replay of the calls that led to it.

    Attributes:
        device: Where the step runs.
        stall_seconds: Time for which threads waited for copies.
        replay_seconds: Host time in which values were made again, waiting aside.
    """

    def __init__(
        self,
        device: torch.device,
        tiers: Tiers,
        table: ValueTable,
        decisions: dict[int, Decision],
        observer: StepObserver | None,
        verifier: Verifier | None,
        *,
        make: Callable[[LiveValue], torch.UntypedStorage] | None = None,
    ) -> None:
        self.stall_seconds = self.replay_seconds = 0.0
        self.device = device
        self._tiers = tiers
        self._table = table
        self._decisions = decisions
        self._observer = observer
        self._verifier = verifier
        self._visitors: list[LiveValue] = []
        notice = self._notice if observer is not None else None
        self._make = make or Replay(self._read_again, notice, self._keep_replayed).make
        self._rehearsal = Replay(self._borrow, notice, self._keep_replayed, is_rehearsal=True)

    def swap_out(
        self, value: LiveValue, storage: torch.UntypedStorage, place: Place | None, *, release_now: bool
    ) -> bool:
        """Start copying a value to a lower tier; False where there is no room, and it stays."""
        block = self._tiers.allocate(value.num_bytes, place)
        self._table.own(value, storage)
        if block is None:
            if self._observer is not None:
                self._observer.on_stay(storage)
            return False
        self.start_out(value, storage, block)
        if release_now:
            self.release(value)
        return True

    def start_out(self, value: LiveValue, storage: torch.UntypedStorage, block: Block) -> None:
        """Start copying a value to a block, which is the value's from then on: one that no copy fills is nobody's."""
        value.copy = self._tiers.swap_out(storage, block)
        value.block = block

    def come_after(self, handle: Handle) -> None:
        """Let what computes now come after the op that saved a tensor, perhaps on another stream."""
        handle.come_after(self._tiers.lanes)

    def release(self, value: LiveValue) -> None:
        """Wait for a value's copy out and drop its device memory; nothing if there is no such copy.

        A copy out that failed leaves the value on the device.
        """
        if value.block is not None and value.copy is not None and value.has_origin:
            with contextlib.suppress(SpillError):
                self.wait(value)
                if (live := value.live()) is not None:
                    self._tiers.lanes.note_use(live)
                value.storage = None

    def read(self, handle: Handle, geometry: Geometry) -> torch.UntypedStorage:
        """Device memory that holds a saved tensor, for autograd to read; compared with the original if that is there.

        Raises:
            StaleInputError: A replay would read a tensor that was modified since.
            ReplayError: There is no way to have the value.
        """
        value = handle.value
        assert value is not None
        live = value.live() if value.is_handed_out else None
        if live is not None:
            if value.is_ours:
                self.make_ready(value, live)
            return live  # as it is now, whoever wrote it: plain autograd reads the same memory
        storage = self.materialize(value)
        if self._verifier is not None and value.original is not None:
            storage = self._verifier.verify(value, storage, geometry)
        return storage

    def materialize(self, value: LiveValue) -> torch.UntypedStorage:
        """Device memory that holds a value; it stays for as long as anybody needs the value.

        Raises:
            StaleInputError: A replay would read a tensor that was modified since.
            ReplayError: There is no way to have the value.
        """
        if value.is_stale:
            if value.block is None and value.call is None:
                raise StaleInputError(_STALE)
            value.leave_origin()
        live = value.storage
        if live is None:
            live = value.live()
        if live is not None:
            if value.is_ours:
                self.make_ready(value, live)
            return live
        if value.block is not None:
            self._bring_back(value, is_visit=not value.has_handle)
        elif value.call is not None:
            self._take(value, self._made(value))
            self.dismiss_visitors()
        if value.storage is None:
            if not value.has_origin:
                raise StaleInputError(_STALE)
            raise ReplayError("a saved tensor has neither device memory nor a host copy nor a recorded producer")
        return value.storage

    def _read_again(self, value: LiveValue) -> torch.UntypedStorage:
        """The same for a replay, of whose reading nobody else knows."""
        storage = self.materialize(value)
        self._tiers.lanes.note_use(storage)
        return storage

    def materialize_before_write(self, value: LiveValue) -> None:
        """Have a value now, since it cannot be replayed any more.

        One that cannot be had any more, because of a write that nobody saw, is lost: who reads it is told, if anybody
        does. The write is the program's, which plainly raises nothing.
        """
        try:
            self._table.own(value, self.materialize(value))
        except StaleInputError:
            return  # it is for ever, and that is what a reader is told
        except ReplayError as error:
            _log.debug("a value that a write made unreplayable is lost: %s", error)
        value.call = None

    def _borrow(self, value: LiveValue) -> torch.UntypedStorage:
        """Device memory that holds a value, for a rehearsal alone: what comes back from the host leaves again."""
        if value.block is None or value.live() is not None:
            return self._read_again(value)
        self._bring_back(value, is_visit=True)
        assert value.storage is not None
        return value.storage

    def _bring_back(self, value: LiveValue, *, is_visit: bool) -> None:
        self._swap_in(value)
        self.wait(value)
        if is_visit:
            self._visitors.append(value)
        else:
            value.block = None

    def _made(self, value: LiveValue) -> torch.UntypedStorage:
        """A value made again; from its original where that is there and the replay fails."""
        begin, waited = time.perf_counter(), self.stall_seconds
        try:
            return self._make(value)
        except (ReplayError, StaleInputError) as error:
            if value.original is None or self._verifier is None:
                raise
            storage = self._new_storage(value.num_bytes)
            self._notice(storage)
            self._verifier.refute(value, storage, error)
            return storage
        finally:
            self.replay_seconds += time.perf_counter() - begin - (self.stall_seconds - waited)

    def rehearse(self, value: LiveValue, storage: torch.UntypedStorage, geometry: Geometry) -> bool:
        """Whether a replay gives the bits of a saved tensor that is still there: Note [Rehearsals]."""
        assert self._verifier is not None
        try:
            replayed = self._rehearsal.make(value)
        except (ReplayError, StaleInputError) as error:
            self._verifier.mismatch(value, geometry, str(error))
            return False
        finally:
            self.dismiss_visitors()
        return self._verifier.compare(value, replayed, storage, geometry)

    def _keep_replayed(self, value: LiveValue, storage: torch.UntypedStorage) -> None:
        """Keep a value replayed on the way to another for its own later unpack: not one that is swapped."""
        decision = self._decisions.get(value.index)
        if decision is not None and decision.action == "recompute" and decision.memo and value.has_handle:
            self._take(value, storage)

    def _take(self, value: LiveValue, storage: torch.UntypedStorage) -> None:
        """Let a value hold the memory that a replay made."""
        value.call = None
        value.owns(storage, self._tiers.lanes.compute_stream())

    def make_ready(self, value: LiveValue, storage: torch.UntypedStorage) -> None:
        """Have memory ready that we allocated, perhaps on another compute stream than the one that reads it now.

        Only a model that computes on several streams of its own comes there: Note [streams and memory].
        """
        if value.copy is not None:
            self.wait(value)
        if value.stream is None:
            return
        if self._tiers.lanes.compute_stream() != value.stream:
            self._tiers.lanes.come_after(value.stream)
            self._tiers.lanes.note_use(storage)

    def prefetch(self, indices: tuple[int, ...]) -> None:
        """Start bringing swapped values back."""
        for index in indices:
            value = self._table.indexed(index)
            if value is not None:
                self.fetch(value)

    def fetch(self, value: LiveValue) -> None:
        """Start bringing a value back if a lower tier has it and the device has not."""
        if value.block is not None and value.live() is None:
            self._swap_in(value)

    def _swap_in(self, value: LiveValue) -> None:
        assert value.block is not None
        self.wait(value)
        storage = self._new_storage(value.num_bytes)
        self._notice(storage)
        copy = self._tiers.swap_in(value.block, storage)
        value.owns(storage, self._tiers.lanes.compute_stream())
        value.copy = copy if copy is not DONE else None

    def _new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        if self.device.type == "cpu" and torch._C._len_torch_dispatch_stack():  # perhaps a fake one
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        return torch.UntypedStorage(num_bytes, device=self.device)  # never filled, as deterministic mode fills tensors

    def dismiss_visitors(self) -> None:
        """Values that came back only for a replay leave again; their host copies stayed."""
        while self._visitors:
            self._visitors.pop().storage = None

    def wait(self, value: LiveValue) -> None:
        """Let compute go on after a value's copy, if one is under way.

        Raises:
            SpillError: It failed. What a copy out was to fill holds nothing, nor does what one back was to fill.
        """
        copy, value.copy = value.copy, None
        if copy is None:
            return
        try:
            self.stall_seconds += copy.wait()
        except SpillError:
            if value.is_ours and not value.has_origin:
                value.storage = None
            else:
                value.block = None
            raise

    def _notice(self, storage: torch.UntypedStorage) -> None:
        if self._observer is not None:
            self._observer.on_allocation(storage)
