"""What must happen before a storage is written: its old contents may still be wanted.

Every write that is seen comes here first, from ops under the dispatch mode and from optimizers, and goes to all
steps that mind it, whose calls may be replayed or whose copies left the device, not only to the one it happens in.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_offload.errors import SpillError
from lightning_offload.runtime.hooks import bypass_mode
from lightning_offload.runtime.materialize import Materializer
from lightning_offload.runtime.values import LiveValue, ValueTable
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import OpFacts, is_plain


class WriteBarrier:
    """Settles what needs the old contents of the storages that one step follows.

    Attributes:
        materialized_bytes: Values replayed in backward before a write.
        has_materialized: Whether any were, in backward or before it.
    """

    def __init__(
        self,
        table: ValueTable,
        residence: Materializer,
        lock: contextlib.AbstractContextManager[Any],
        observer: StepObserver | None,
        *,
        minds_others: bool,
    ) -> None:
        self.materialized_bytes = 0
        self.has_materialized = False
        self._table = table
        self._materializer = residence
        self._lock = lock
        self._observer = observer
        self._num_own = int(minds_others)
        if minds_others:
            _MINDING.add(self)
            _count(1)
            weakref.finalize(self, _count, -1).atexit = False

    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, int]]:
        """Settle what needs the old contents of storages about to be written; those made in this step, by identity."""
        written = [t for t in facts.written(args, kwargs) if is_plain(t)]
        return [(tensor, tensor.untyped_storage()._cdata) for tensor in written if self.before_anywhere(tensor)]

    def before_anywhere(self, tensor: Tensor) -> bool:
        """Settle what needs the old contents of a tensor's storage in any step; whether this one made it."""
        for other in list(_MINDING) if len(_MINDING) > self._num_own else ():
            if other is not self:
                other.before(tensor)
        return self.before(tensor)

    def before(self, tensor: Tensor) -> bool:
        """Settle what needs the old contents of a tensor's storage.

        Calls that read it and could not have it again are replayed now. Saved tensors on it follow the storage
        from now on, as they do in plain autograd, which reads it as it then is, or raises.

        Returns:
            Whether the storage was made in this step, so that its next value may leave the device too.
        """
        return self.before_change(tensor.untyped_storage())

    def before_change(self, storage: torch.UntypedStorage) -> bool:
        """Do so for a storage, which may also be about to get another size."""
        value = self._table.find(storage)
        if value is None:
            return False
        with self._lock, bypass_mode:
            with contextlib.suppress(SpillError):  # one that failed leaves the value where it is
                self._materializer.wait(value)
            if value.call is None and value.block is None:
                for wanted in value.wanted_of_readers():
                    self._materialize_before_write(wanted)
            for index in value.hand_over(storage):
                if self._observer is not None:
                    self._observer.on_overwrite(index)
            value.overwritten()
            self._table.drop(storage)
        return not value.is_external

    def _materialize_before_write(self, value: LiveValue) -> None:
        """Replay a value that is still wanted, and keep it; unless one before it had it made as well."""
        if value.call is None:
            return
        if value.live() is None:
            self.has_materialized = True
            if torch._C._current_graph_task_id() != -1:
                self.materialized_bytes += value.num_bytes
        self._materializer.materialize_before_write(value)


_MINDING: weakref.WeakSet[WriteBarrier] = weakref.WeakSet()  # each is notified of the others' writes
_counters: list[Callable[[int], object]] = []


def _count(change: int) -> None:
    for tell in _counters:
        tell(change)


def count_minding(tell: Callable[[int], object]) -> None:
    """Have the native core know how many there are: called with those that there are, and with each change."""
    tell(len(_MINDING))
    _counters.append(tell)


def count_writes(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note an in-place write in version counters: under a mode, the kernels of ``_foreach_`` ops do not."""
    torch.autograd.graph.increment_version(list(facts.written(args, kwargs)))
