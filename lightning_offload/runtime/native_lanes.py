"""Lanes whose copies the native core makes: all of an accelerator's, and on a CPU those that the asking thread makes.

The core keeps the rules of the lanes that Python has, :mod:`.stream_lanes` and :mod:`.cpu_lanes`. What it does not
take, a CPU's large copies, stays with them. Its copies have the methods of a :class:`~.lanes.Copy`.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from lightning_offload.runtime.lanes import Block, Copy, CopyLanes, LaneTimes


class NativeLanes(CopyLanes):
    """Lanes in the core, and others in Python.

    Args:
        core: Those of the core.
        others: Those of the same device in Python, which have nothing under way.

    Attributes:
        core: Those of the core.
        small_bytes: As of those in Python.
    """

    def __init__(self, core: Any, others: CopyLanes) -> None:
        self.core = core
        self.small_bytes = others.small_bytes
        self._others = others

    @override
    def in_core(self, core: Any) -> NativeLanes:
        return self

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        if not self.core.takes(block.num_bytes):
            return self._others.swap_out(storage, block)
        copy: Copy = self.core.swap_out(storage, block)
        return copy

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        if not self.core.takes(block.num_bytes):
            return self._others.swap_in(block, storage)
        copy: Copy = self.core.swap_in(block, storage)
        return copy

    @override
    def compute_stream(self) -> Any:
        return self._others.compute_stream()

    @override
    def note_use(self, storage: torch.UntypedStorage) -> None:
        self._others.note_use(storage)

    @override
    def come_after(self, stream: Any) -> None:
        self._others.come_after(stream)

    @override
    def tidy(self) -> None:
        self.core.tidy()
        self._others.tidy()

    @override
    def measure(self, is_on: bool) -> None:
        self.core.measure(is_on)
        self._others.measure(is_on)

    @override
    def take_times(self) -> LaneTimes:
        return LaneTimes(*self.core.take_times()).added(self._others.take_times())

    @override
    def settle(self) -> None:
        self.core.settle()
        self._others.settle()

    @override
    def drain(self) -> None:
        self.core.drain()
        self._others.drain()

    @override
    def close(self) -> None:
        self.core.drain()
        self._others.close()
