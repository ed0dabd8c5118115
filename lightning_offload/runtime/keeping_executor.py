"""Executes a step that keeps everything: hooks that cost little, and no dispatch mode.

All that is left to do is autograd's version check, which hooks switch off, and to notice a step whose structure is not
the one that was planned: where there is a budget, what that saves from then on leaves the device. Where steps were
alike so far, the number of autograd nodes tells that, without hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_offload.graph.memory_plan import Decision
from lightning_offload.runtime.executor import StepExecutor, next_node
from lightning_offload.runtime.given import GivenCursor
from lightning_offload.runtime.hooks import out_of_compilers_sight
from lightning_offload.runtime.program import Program
from lightning_offload.runtime.values import Handle, StepLiveness, raise_modified
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import as_saved

# A tensor, its version, what keeps the step from being over, and what ``torch.utils.swap_tensors`` takes for a user.
_Packed = tuple[Tensor, int, StepLiveness | None, weakref.ref[Tensor]]


class KeepingExecutor:
    """Executes a step that keeps everything; the other attributes are those of :class:`StepExecutor`.

    Args:
        program: What was planned.
        packs: Whether saved tensors come by.
        make_rest: Makes what executes the rest of a step that leaves its program; None where all may stay.

    Attributes:
        packs: Whether saved tensors come by.
        hears_of_data: Whether it must know what the program's code has got past the version counters of.
        num_nodes: Autograd nodes made in the step by the thread that began it; None while it is open.
    """

    is_recomputing = False
    sees_ops = False
    watches_backward = False
    sees_user_code = False
    unforeseen_bytes = 0
    has_settled = False
    observer: StepObserver | None = None
    decisions: dict[int, Decision]

    def __init__(
        self, program: Program, *, packs: bool = True, make_rest: Callable[[], StepExecutor] | None = None
    ) -> None:
        self.program = program
        self.packs = packs
        self.hears_of_data = packs and make_rest is not None
        self._make_rest = make_rest
        self._rest: StepExecutor | None = None
        self._exposed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.num_nodes: int | None = None
        self._given = GivenCursor.on(program.given)
        self._first_node = next_node()
        self.decisions = {}
        self.deviation = ""
        self.num_unpacks = 0
        self.on_backward: Callable[[], None] | None = None
        self._num_packs = 0
        self._pack_keys: dict[int, int] = {}
        self._lease: StepLiveness | None = StepLiveness(program.num_objects if packs else 0)
        self._unread = weakref.ref(self._lease)

    @property
    def has_deviated(self) -> bool:
        """Whether the step's structure left the program."""
        return bool(self.deviation)

    @property
    def stall_seconds(self) -> float:
        """Time that compute waited for copies."""
        return self._rest.stall_seconds if self._rest is not None else 0.0

    @property
    def replay_seconds(self) -> float:
        """Host time in which values were made again."""
        return self._rest.replay_seconds if self._rest is not None else 0.0

    def backward_begins(self) -> None:
        """Tell who wants to know, once."""
        on_backward, self.on_backward = self.on_backward, None
        if on_backward is not None:
            on_backward()

    @property
    def is_spent(self) -> bool:
        """Whether the step is closed and autograd has dropped all that it saved."""
        return self._unread() is None and (self._rest is None or self._rest.is_spent)

    @out_of_compilers_sight
    def pack(self, tensor: Tensor) -> _Packed | Handle:
        """Take a tensor that autograd saves; held itself only without a graph."""
        if self._rest is not None:
            return self._rest.pack(tensor)
        index = self._num_packs
        self._num_packs = index + 1
        tensor, plain = as_saved(tensor)
        if self._given is not None and not self.deviation:
            if self._given.next(index, tensor.untyped_storage().nbytes() if plain else 0) is None:
                return self._leave_program(self._given.refusal(tensor.untyped_storage().nbytes()), tensor)
        elif plain and not self.deviation:
            storage = tensor.untyped_storage()
            expected, num_bytes = self.program.pack_bytes, storage.nbytes()
            is_as_planned = self.program.expects(index, num_bytes)
            if not (is_as_planned and self.program.shares(index, storage._cdata, self._pack_keys)):
                planned = f"{expected[index]} were" if index < len(expected) else "nothing was"
                return self._leave_program(f"one of {num_bytes} bytes was saved where {planned} expected", tensor)
        return tensor, tensor._version, self._lease, weakref.ref(tensor)

    def _leave_program(self, how: str, tensor: Tensor) -> _Packed | Handle:
        """End the program at a tensor that it does not have; what that saves from then on may leave the device."""
        where = self._given.where() if self._given is not None else ""
        self.deviation = f"after {self._num_packs - 1} saved tensors{where} {how}"
        if self._make_rest is None:
            return tensor, tensor._version, self._lease, weakref.ref(tensor)
        self._rest = self._make_rest()
        self._rest.begin_late(self.deviation, self._exposed.values())
        return self._rest.pack(tensor)

    @out_of_compilers_sight
    def unpack(self, packed: _Packed | Handle) -> Tensor:
        """Give a saved tensor back.

        Raises:
            RuntimeError: It was modified in place since it was saved.
        """
        if not self.num_unpacks:
            self.backward_begins()
        self.num_unpacks += 1
        if isinstance(packed, Handle):
            assert self._rest is not None
            return self._rest.unpack(packed)
        tensor, version, *_ = packed
        if tensor._version != version:
            raise_modified(tensor, tensor.shape, version)
        return tensor

    def close(self) -> None:
        """End the part of the step in which tensors are saved."""
        if self._lease is not None:
            self._lease, self.num_nodes = None, next_node() - self._first_node
        if self._rest is not None:
            self._rest.close()

    def made(self, tensors: list[Tensor]) -> None:
        """Nobody is notified of what autograd makes."""

    def exposes(self, storage: torch.UntypedStorage) -> None:
        """Remember what may be written unseen: if the step leaves its program, that must not leave its memory."""
        if self._rest is not None:
            self._rest.exposes(storage)
        else:
            self._exposed[storage._cdata] = weakref.ref(storage)

    def resizes(self, storage: torch.UntypedStorage) -> None:
        """Nothing has left its memory, unless the step has left its program."""
        if self._rest is not None:
            self._rest.resizes(storage)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of the program."""
        return func(*args, **kwargs)

    def settle_readers_of(self, tensors: list[Tensor]) -> None:
        """Nothing is replayed."""


Executor = StepExecutor | KeepingExecutor
"""What executes a step."""
