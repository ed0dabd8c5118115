"""Where values are: moves them off the device and back, and replays those that are nowhere.

All methods run under the executor's lock. Device memory is allocated here, by the thread that computes.
"""

from __future__ import annotations

import torch

from lightning_offload.errors import ReplayError, SpillError, StaleInputError
from lightning_offload.graph.memory_plan import Decision
from lightning_offload.runtime.movers import storage_bytes
from lightning_offload.runtime.replay import replay
from lightning_offload.runtime.table import ValueTable
from lightning_offload.runtime.tiers import Place, Tiers
from lightning_offload.runtime.values import Value
from lightning_offload.tensors.observer import StepObserver

_STALE = (
    "a tensor that a recomputation reads was modified in place between forward and backward, out of sight of the "
    "step: update it by an optimizer's step() or after backward, or use policy='all-swap'"
)


class Residence:
    """Moves the values of one step.

    Attributes:
        stall_seconds: Time for which threads waited for copies.
    """

    def __init__(
        self,
        device: torch.device,
        tiers: Tiers,
        table: ValueTable,
        decisions: dict[int, Decision],
        observer: StepObserver | None,
    ) -> None:
        self.stall_seconds = 0.0
        self._device = device
        self._tiers = tiers
        self._table = table
        self._decisions = decisions
        self._observer = observer
        self._visitors: list[Value] = []

    def swap_out(self, value: Value, storage: torch.UntypedStorage, place: Place | None, *, release_now: bool) -> bool:
        """Start copying a value to a lower tier; False where there is no room, and it stays."""
        block = self._tiers.allocate(value.num_bytes, place)
        self._table.own(value, storage)
        if block is None:
            return False
        value.block = block
        value.copy = self._tiers.swap_out(storage, block)
        if release_now:
            self.release(value)
        return True

    def release(self, value: Value) -> None:
        """Wait for a value's copy out and drop its device memory; nothing if there is no such copy.

        A copy out that failed leaves the value on the device.
        """
        if value.block is not None and value.copy is not None and value.origin is not None:
            try:
                self._wait(value)
            except SpillError:
                value.block = None
                return
            value.storage = None

    def materialise(self, value: Value) -> torch.UntypedStorage:
        """Device memory that holds a value; it stays for as long as anybody needs the value.

        Raises:
            StaleInputError: A replay would read a tensor that was modified since.
            ReplayError: There is no way to have the value.
        """
        if value.is_stale:
            if value.block is None and value.call is None:
                raise StaleInputError(_STALE)
            value.leave_origin()
        live = value.live()
        if live is not None:
            if value.origin is None or live is not value.origin():
                self._wait(value)
                self._share(value, live)
            return live
        if value.block is not None:
            self._swap_in(value)
            self._wait(value)
            if _has_handle(value):
                value.block = None
            else:
                self._visitors.append(value)
        elif value.call is not None:
            value.storage = replay(value, self.materialise, self._notice, self._stays)
            value.call = value.guard = None
            value.stream = self._tiers.lanes.compute_stream()
            self._dismiss_visitors()
        if value.storage is None:
            raise ReplayError("a saved tensor has neither device memory nor a host copy nor a recorded producer")
        return value.storage

    def _share(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Tell the allocator where memory is read on another compute stream than the one it was allocated on.

        Only a model that computes on several streams of its own comes here; Note [streams and memory].
        """
        if value.stream is None:
            return
        reader = self._tiers.lanes.compute_stream()
        if reader != value.stream:
            storage_bytes(storage).record_stream(reader)

    def prefetch(self, indices: tuple[int, ...]) -> None:
        """Start bringing swapped values back."""
        for index in indices:
            value = self._table.indexed(index)
            if value is not None:
                self.fetch(value)

    def fetch(self, value: Value) -> None:
        """Start bringing a value back if a lower tier has it and the device has not."""
        if value.block is not None and value.live() is None:
            self._swap_in(value)

    def _swap_in(self, value: Value) -> None:
        assert value.block is not None
        self._wait(value)
        value.storage = self._new_storage(value.num_bytes)
        value.stream = self._tiers.lanes.compute_stream()
        value.origin = value.guard = None
        self._notice(value.storage)
        value.copy = self._tiers.swap_in(value.block, value.storage)

    def _new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        if self._device.type == "cpu":  # perhaps a fake one
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device).untyped_storage()
        return torch.UntypedStorage(num_bytes, device=self._device)  # never filled, as deterministic mode fills tensors

    def _stays(self, value: Value) -> bool:
        """Whether a value replayed on the way to another stays for its own later unpack: not one that is swapped."""
        decision = self._decisions.get(value.index)
        return decision is not None and decision.action == "recompute" and decision.memo and _has_handle(value)

    def _dismiss_visitors(self) -> None:
        """Values that came back only for a replay leave again; their host copies stayed."""
        while self._visitors:
            self._visitors.pop().storage = None

    def _wait(self, value: Value) -> None:
        copy, value.copy = value.copy, None
        if copy is not None:
            self.stall_seconds += copy.wait()

    def _notice(self, storage: torch.UntypedStorage) -> None:
        if self._observer is not None:
            self._observer.on_allocation(storage)


def _has_handle(value: Value) -> bool:
    """Whether autograd will read a value itself, not only a replay."""
    return any(handle() is not None for handle in value.handles)
