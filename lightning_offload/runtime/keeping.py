"""Executes a step that keeps everything: hooks that cost almost nothing, and no dispatch mode.

All that is left to do is autograd's version check, which hooks switch off, and to notice a step whose structure
is not the one that was planned.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_offload.graph.memory_plan import Decision
from lightning_offload.runtime.program import Program
from lightning_offload.runtime.values import raise_modified
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import is_plain


class KeepingExecutor:
    """Stands in for :class:`~lightning_offload.runtime.executor.StepExecutor`; the same attributes."""

    is_recomputing = False
    watches_backward = False
    stall_seconds = 0.0
    observer: StepObserver | None = None
    decisions: dict[int, Decision]

    def __init__(self, program: Program) -> None:
        self.program = program
        self.decisions = {}
        self.has_deviated = False
        self.num_unpacks = 0
        self.on_backward: Callable[[], None] | None = None
        self._num_packs = 0

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Take a tensor that autograd saves; never held itself, cf. :mod:`~lightning_offload.runtime.values`."""
        index = self._num_packs
        self._num_packs = index + 1
        tensor = tensor.detach()
        if not self.has_deviated and is_plain(tensor):
            expected = self.program.pack_bytes
            if index >= len(expected) or tensor.untyped_storage().nbytes() != expected[index]:
                self.has_deviated = True
        return tensor, tensor._version

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        """Give a saved tensor back.

        Raises:
            RuntimeError: It was modified in place since it was saved.
        """
        if not self.num_unpacks and self.on_backward is not None:
            on_backward, self.on_backward = self.on_backward, None
            on_backward()
        self.num_unpacks += 1
        tensor, version = packed
        if tensor._version != version:
            raise_modified(tensor, tensor.shape, version)
        return tensor

    def close(self) -> None:
        """Nothing to end."""

    def settle_readers_of(self, tensors: list[Tensor]) -> None:
        """Nothing is replayed."""
