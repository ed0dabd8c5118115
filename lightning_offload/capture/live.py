"""Counts live device bytes where the device itself does not: the peak of a step on a CPU.

Counts storages by live identity: those that existed before the step when an op first reads them, those made in
the step from birth to death, and what the runtime itself allocates. On CUDA the allocator's own figures are
used instead.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from typing_extensions import override

from lightning_offload.capture.placement import indexed
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import Effects, OpFacts, is_plain, tensors_in


class LiveBytes(StepObserver):
    """Peak of live bytes over one step, in total and by phase.

    Attributes:
        peak_bytes: Peak of storages made in the step.
        forward_peak_bytes: The same, in forward alone.
        backward_peak_bytes: The same, in backward alone.
        persistent: Storages that the step read and did not make: size by identity.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes = self.forward_peak_bytes = self.backward_peak_bytes = 0
        self.persistent: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._device = indexed(device)
        self._live_bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._dead: deque[tuple[int, weakref.ref[torch.UntypedStorage], int]] = deque()

    @override
    def on_op(
        self, facts: OpFacts, args: Any, kwargs: Any, out: Any, seconds: float, did: Effects | None = None
    ) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.device == self._device and is_plain(tensor):
                self._read(tensor.untyped_storage())
        for tensor in tensors_in(out):
            if tensor.device == self._device and is_plain(tensor):
                self._add(tensor.untyped_storage())

    @override
    def on_allocation(self, storage: torch.UntypedStorage) -> None:
        self._add(storage)

    def persistent_storages(self) -> dict[int, int]:
        """Sizes of the storages from before the step that still live, by identity."""
        return {key: size for key, (reference, size) in self.persistent.items() if reference() is not None}

    def _knows(self, storage: torch.UntypedStorage) -> bool:
        key = storage._cdata
        reference = self._live.get(key)
        if reference is not None and reference() is storage:
            return True
        known = self.persistent.get(key)
        return known is not None and known[0]() is storage

    def _read(self, storage: torch.UntypedStorage) -> None:
        if not self._knows(storage):
            self.persistent[storage._cdata] = (weakref.ref(storage), storage.nbytes())

    def _add(self, storage: torch.UntypedStorage) -> None:
        if self._knows(storage):
            return
        while self._dead:
            key, reference, size = self._dead.popleft()
            self._live_bytes -= size
            if self._live.get(key) is reference:
                del self._live[key]
        size, key, dead = storage.nbytes(), storage._cdata, self._dead
        self._live[key] = weakref.ref(storage, lambda reference: dead.append((key, reference, size)))
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        if torch._C._current_graph_task_id() == -1:
            self.forward_peak_bytes = max(self.forward_peak_bytes, self._live_bytes)
        else:
            self.backward_peak_bytes = max(self.backward_peak_bytes, self._live_bytes)
