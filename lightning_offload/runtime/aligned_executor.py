"""Executes a step whose structure changes from step to step, under a plan for one that is much like it.

Routing, dropped layers, a regulariser every few steps: what autograd saves is aligned with what the plan has
(:mod:`~lightning_offload.runtime.alignment`). Where the two agree, the plan's decisions hold. A save that is astray,
or larger than planned, follows a local rule: it stays where the plan had more on the device by now than there is, and
leaves it otherwise. After :data:`_MANY_ASTRAY` of them in a row, or fewer that are large, the step is in a part that
the plan knows nothing of, and whose memory nobody foresaw: then what was kept before leaves the device as well.

Nothing is replayed, and no op needs to be seen. As in any step, none of this decides about correctness.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_offload.graph.memory_plan import AT_PACK
from lightning_offload.runtime.alignment import PackCursor
from lightning_offload.runtime.executor import StepExecutor, next_node
from lightning_offload.runtime.hooks import NotSeen, bypass_mode, out_of_compilers_sight
from lightning_offload.runtime.program import Program
from lightning_offload.runtime.values import Handle, LiveValue
from lightning_offload.tensors.op_facts import as_saved, is_parameter
from lightning_offload.tensors.saved_forms import form_of

_MANY_ASTRAY = 4
_MUCH_ASTRAY = 0.05  # of the budget
_TINY_BYTES = 1024  # that stay: copying them costs more than they take


class _Alive:
    """Counts the bytes of what is kept, for as long as autograd holds it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> Callable[[object], None]:
        """Count more; gives what takes them off again."""
        self.num_bytes += num_bytes

        def gone(_: object) -> None:
            self.num_bytes -= num_bytes

        return gone


_Handles = dict[int, weakref.ref[Handle]]


class AlignedExecutor(StepExecutor):
    """Executes a step under a plan for another structure.

    Args:
        program: What to do; it has a route.
        options: The other arguments of :class:`StepExecutor`.

    Attributes:
        num_astray: Saves that the plan does not have.
        astray_bytes: What those of them take that the step made.
        num_missing: Saves that the plan has and the step did not.
        kept_bytes: What stayed of what the step made and saved, in all.
        fingerprint: Of what was saved: the same in two steps of one structure and the same sizes.
        places_fingerprint: The same whatever the sizes.
    """

    def __init__(self, *, program: Program, **options: Any) -> None:
        super().__init__(program=program, **options)
        assert program.route is not None
        self._program, self._route = program, program.route
        self._cursor = None  # ops are not followed
        self._idle_packs = b""  # what is done at an unpack goes by the place of its pack
        self._packs = PackCursor(program.route)
        self._places: dict[int, int] = {}
        self._next_unpack = 0
        self._num_behind = 0  # unpacks before the last pack
        self._alive = _Alive()
        self._slack_bytes = _slack_bytes(program)
        self._num_bytes_apart = 0  # astray in a row
        self._kept_by_key: _Handles = {}
        self._kept_again: list[weakref.ref[Handle]] = []  # for other saves of the same storages
        self._leaving: _Handles = {}
        self._astray: list[weakref.ref[LiveValue]] = []
        self._planned_late: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self.num_astray = self.astray_bytes = self.kept_bytes = self.num_missing = 0
        self.fingerprint = self.places_fingerprint = 0

    @property
    def num_packs(self) -> int:
        """Saves so far."""
        return self._num_packs

    # ---- packs

    @out_of_compilers_sight
    @override
    def pack(self, tensor: Tensor) -> Handle:
        bypass_mode.depth += 1
        try:
            with NotSeen():
                saved, plain = as_saved(tensor)
                return self._pack(saved, plain, saved is tensor)
        finally:
            bypass_mode.depth -= 1

    @override
    def _pack(self, tensor: Tensor, plain: bool, is_borrowed: bool) -> Handle:
        index = self._num_packs
        self._num_packs = index + 1
        handle = Handle(self.observer, self._lease, index, tensor, is_borrowed=is_borrowed)
        handle.kept = tensor
        is_captured = self._can_capture and self._is_capturing()
        plain = plain and not is_captured
        if self.observer is not None:
            self.observer.on_pack(index, tensor, plain)
        if is_captured:
            return handle
        self._let_late_ones_go()
        form = form_of(tensor, is_plain=plain)
        is_border, self._num_behind = self.num_unpacks > self._num_behind, self.num_unpacks
        before, place = self._packs.place, self._packs.next(form, is_border=is_border)
        self.fingerprint = hash((self.fingerprint, place, form))
        self.places_fingerprint = hash((self.places_fingerprint, place, form.kind))
        if place >= 0:
            self._num_bytes_apart = 0
            self._places[index] = place
            self.num_missing += place - before
            for passed in range(before, place):
                self._release(self._program.release_at_pack.get(passed, ()))
        else:
            self._note_astray()
        if plain:
            self._decide(handle, tensor, place)
        if place >= 0:
            self._release(self._program.release_at_pack.get(place, ()))
        return handle

    def _decide(self, handle: Handle, tensor: Tensor, place: int) -> None:
        """Keep a saved tensor, or let it leave the device; a parameter stays, whose memory is the program's."""
        if is_parameter(tensor):
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        value = self._table.find(storage)
        index = self._route.storages[place] if place >= 0 else -1
        decision = self._program.decisions.get(index)
        if value is not None and value.is_given:  # what exposed it may have come before
            self.took_data |= decision is not None
            return
        if value is not None and value.block is not None:
            if self.sees_ops or value.is_as_saved(handle):
                self._let_go(handle, value, tensor)
            return
        if self._is_given(place, key, value):
            return
        if _is_among(self._kept_by_key, key):
            self._kept_again.append(weakref.ref(handle))
            return
        if _is_among(self._leaving, key):  # for another save by the same op
            self._late.append(weakref.ref(handle))
            return
        if decision is not None and num_bytes:
            self._leaves_late(handle, index)
        elif num_bytes > _TINY_BYTES and num_bytes > self._room(place):
            self.astray_bytes += num_bytes
            self._leaves_late(handle, -1)
            if place < 0:
                self._note_bytes_apart(num_bytes)
        else:
            self._stays(handle, key, num_bytes)

    def _leaves_late(self, handle: Handle, index: int) -> None:
        """Let a saved tensor leave once the op that saves it is done; see :meth:`_leave_late`.

        Also what the plan swaps: the step may have another op there, which writes what it has saved.
        """
        if index >= 0:
            self._planned_late[handle] = index
        assert handle.kept is not None
        self._leaving[handle.kept.untyped_storage()._cdata] = weakref.ref(handle)
        self._late.append(weakref.ref(handle))
        self._late_node = next_node()

    def _stays(self, handle: Handle, key: int, num_bytes: int) -> None:
        self.kept_bytes += num_bytes
        self._kept_by_key[key] = weakref.ref(handle, self._alive.add(num_bytes))

    def _is_given(self, place: int, key: int, value: LiveValue | None) -> bool:
        """Whether a saved storage was there before the step, and stays."""
        if place >= 0 and self._route.is_given[place]:
            return True
        return value is None if self.sees_ops else key in self._persistent()

    def _room(self, place: int) -> int:
        """What may stay beyond what does: what the plan has kept by now, and the step has not."""
        behind = place + 1 if place >= 0 else self._packs.place
        if not behind or self._packs.num_astray >= _MANY_ASTRAY:
            return 0
        return self._route.kept_bytes[behind - 1] - self._alive.num_bytes

    @override
    def _give_up(self, handle: Handle, tensor: Tensor) -> None:
        index = self._planned_late.pop(handle, -1)
        if index < 0:
            super()._give_up(handle, tensor)
            if handle.value is not None and handle.value.index < 0:
                self._astray.append(weakref.ref(handle.value))
        elif handle.version_alias._version != handle.version or not self._leaves_as_planned(handle, tensor, index):
            storage = tensor.untyped_storage()
            self._stays(handle, storage._cdata, storage.nbytes())

    def _leaves_as_planned(self, handle: Handle, tensor: Tensor, index: int) -> bool:
        storage = tensor.untyped_storage()
        value = self._table.find(storage)
        if value is not None and (value.is_given or value.block is not None):
            return False
        if value is None:
            value = LiveValue(index, storage.nbytes())
            self._table.follow(value, storage)
        else:
            self._table.name(value, index)
        is_at_once = self._program.decisions[index].release_op == AT_PACK
        is_due = is_at_once or self._route.releases.get(index, self._packs.place) < self._packs.place
        if not self._materializer.swap_out(value, storage, self._program.places.get(index), release_now=is_due):
            if not self.sees_ops:
                self._table.drop(storage)
            return False
        self.swapped_bytes += value.num_bytes
        if not self.sees_ops:
            value.guards = ((handle.own_alias(), handle.version),)
        self._let_go(handle, value, tensor)
        return True

    def _note_astray(self) -> None:
        """The step has left its plan, for a while at least."""
        self.num_astray += 1
        if self._packs.num_astray == _MANY_ASTRAY:
            self._let_go_of_what_was_kept()

    def _note_bytes_apart(self, num_bytes: int) -> None:
        """What the plan does not have takes so much more: what goes with it may take as much, and nobody counted it."""
        before, self._num_bytes_apart = self._num_bytes_apart, self._num_bytes_apart + num_bytes
        if before <= self._slack_bytes < self._num_bytes_apart and self._packs.num_astray < _MANY_ASTRAY:
            self._let_go_of_what_was_kept()

    def _let_go_of_what_was_kept(self) -> None:
        for value in self._table.all_indexed():  # the plan's moment to do so may be far away
            self._materializer.release(value)
        if torch._C._current_graph_task_id() == -1:
            self._late += (*self._kept_by_key.values(), *self._kept_again)
            self._late_node = next_node()
            self._kept_by_key, self._kept_again, self._alive = {}, [], _Alive()

    def _let_late_ones_go(self) -> None:
        """Let leave what is to once the op that saved it has run; see :meth:`_leave_late`."""
        if self._late and next_node() != self._late_node:
            late, self._late = self._late, []
            self._leaving.clear()
            self._give_all_up(late)

    # ---- unpacks

    @override
    def _check_forward(self) -> None:
        """Backward begins: what forward lacked at its end does not come any more."""
        with self._lock, bypass_mode, NotSeen():
            late, self._late = self._late, []
            self._give_all_up(late)  # no op is under way
            end = self._program.num_first_packs
            for passed in range(self._packs.place, end):
                self._release(self._program.release_at_pack.get(passed, ()))
            self.num_missing += max(0, end - self._packs.place)

    @override
    def _bring_back(self, program: Program, handle: Handle) -> None:
        value = handle.value
        if value is not None:
            self._materializer.fetch(value)
            if value.index < 0:
                self._fetch_next_astray(value)
        ordinals = self._route.unpacks[self._places[handle.index]] if handle.index in self._places else ()
        ordinal = next((ordinal for ordinal in ordinals if ordinal >= self._next_unpack), -1)
        for passed in range(self._next_unpack, ordinal + 1):
            self._release(program.release_at_unpack.get(passed, ()))
            self._materializer.prefetch(program.prefetch.get(passed, ()))
            self._next_unpack = passed + 1

    def _fetch_next_astray(self, value: LiveValue) -> None:
        """Begin to bring back what backward will want after a value that was astray: what was saved before it."""
        while self._astray:
            last = self._astray.pop()()
            if last is not None and last is not value:
                self._materializer.fetch(last)
                self._astray.append(weakref.ref(last))
                break


def _slack_bytes(program: Program) -> int:
    """What may be astray before it matters: what the budget has room for beyond the plan, or a small part of it."""
    budget_bytes = program.plan.budget_bytes
    if budget_bytes is None:
        return sys.maxsize
    return max(budget_bytes - program.plan.predicted_peak_bytes, int(_MUCH_ASTRAY * budget_bytes))


def _is_among(handles: _Handles, key: int) -> bool:
    """Whether one of some handles keeps a storage."""
    reference = handles.get(key)
    handle = reference() if reference is not None else None
    return handle is not None and handle.kept is not None and handle.kept.untyped_storage()._cdata == key
