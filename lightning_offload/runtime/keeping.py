"""Executes a step that keeps everything: hooks that cost almost nothing, and no dispatch mode.

All that is left to do is autograd's version check, which hooks switch off, and to notice a step whose structure
is not the one that was planned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_offload.graph.memory_plan import Decision
from lightning_offload.runtime.program import Program
from lightning_offload.runtime.values import Lease, raise_modified
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import as_saved

_Packed = tuple[Tensor, int, Lease | None]


class KeepingExecutor:
    """Stands in for :class:`~lightning_offload.runtime.executor.StepExecutor`; the same attributes."""

    is_recomputing = False
    watches_backward = False
    sees_user_code = False
    unforeseen_bytes = 0
    stall_seconds = 0.0
    observer: StepObserver | None = None
    decisions: dict[int, Decision]

    def __init__(self, program: Program) -> None:
        self.program = program
        self.decisions = {}
        self.deviation = ""
        self.num_unpacks = 0
        self.on_backward: Callable[[], None] | None = None
        self._num_packs = 0
        self._lease: Lease | None = Lease()
        self._unread = weakref.ref(self._lease)

    @property
    def has_deviated(self) -> bool:
        """Whether the step's structure left the program."""
        return bool(self.deviation)

    def backward_begins(self) -> None:
        """Tell who wants to know, once."""
        on_backward, self.on_backward = self.on_backward, None
        if on_backward is not None:
            on_backward()

    @property
    def is_spent(self) -> bool:
        """Whether the step is closed and autograd has dropped all that it saved."""
        return self._unread() is None

    def pack(self, tensor: Tensor) -> _Packed:
        """Take a tensor that autograd saves; never held itself, cf. :mod:`~lightning_offload.runtime.values`."""
        index = self._num_packs
        self._num_packs = index + 1
        tensor, plain = as_saved(tensor)
        if plain and not self.deviation:
            expected, num_bytes = self.program.pack_bytes, tensor.untyped_storage().nbytes()
            if index >= len(expected) or num_bytes != expected[index]:
                planned = f"{expected[index]} were" if index < len(expected) else "nothing was"
                self.deviation = f"saved tensor {index} has {num_bytes} bytes where {planned} expected"
        return tensor, tensor._version, self._lease

    def unpack(self, packed: _Packed) -> Tensor:
        """Give a saved tensor back.

        Raises:
            RuntimeError: It was modified in place since it was saved.
        """
        if not self.num_unpacks:
            self.backward_begins()
        self.num_unpacks += 1
        tensor, version, _ = packed
        if tensor._version != version:
            raise_modified(tensor, tensor.shape, version)
        return tensor

    def close(self) -> None:
        """End the part of the step in which tensors are saved."""
        self._lease = None

    def made(self, tensors: list[Tensor]) -> None:
        """Nobody is told of what autograd makes."""

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of the program."""
        return func(*args, **kwargs)

    def settle_readers_of(self, tensors: list[Tensor]) -> None:
        """Nothing is replayed."""
