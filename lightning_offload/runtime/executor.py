"""Executes one step: decides nothing, does what the program says for each op, pack and unpack.

Without a program (a step that has no plan yet, or one whose structure left its plan) it follows the *floor
policy*: every saved tensor made in the step is swapped out at once and brought back when it is needed. A plan
never decides about correctness: a tensor is recomputed only through calls recorded in this very step, and a
storage is recognised by its live identity, never by its address.

Threads: ops and packs come from the caller's thread, unpacks perhaps from autograd's device threads; a lock
orders them. Finalizers take no lock.

Under a plan that only keeps and swaps, steps that nobody observes run without a dispatch mode: packs are known by their
ordinals, and device copies are released at packs and unpacks. A write is noticed by version counters, and one past
them where the program takes ``Tensor.data``: what was saved on that memory follows it from then on, and later steps of
the kind have their ops seen.

What a CUDA graph captures within a step runs as without us: its ops are not seen, what it saves is kept. A graph of a
backward alone is refused where that would need what has left the device.

A step that keeps everything has an executor of its own, :mod:`.keeping_executor`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_offload.accelerators import capture_query, kind_of
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.memory_plan import AT_PACK, Decision
from lightning_offload.runtime.given import GivenCursor
from lightning_offload.runtime.hooks import NotSeen, bypass_mode, out_of_compilers_sight, past_own_mode
from lightning_offload.runtime.kernel_keys import call
from lightning_offload.runtime.materialize import Materializer
from lightning_offload.runtime.program import KEPT_FOR_CALLS, OpStep, Program, ProgramCursor
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.tracking import ValueTracker
from lightning_offload.runtime.values import (
    Call,
    Handle,
    LiveValue,
    StepLiveness,
    ValueTable,
    emptied,
    seen_through,
)
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.runtime.write_barrier import WriteBarrier, count_writes
from lightning_offload.tensors.geometry import Geometry
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import OpFacts, as_saved, effects, facts_of, is_parameter, plainly_saved

_log = logging.getLogger(__name__)
_num_function_modes = torch._C._len_torch_function_stack


class StepExecutor:
    """The state of one step, from its first op until autograd has dropped its last saved tensor.

    Args:
        device: Where the step runs.
        tiers: Where its tensors may go.
        program: What to do; None for the floor policy.
        observer: Notified of every event; None for nobody.
        verifier: Compares replays with their originals, if they are to be.
        sees_ops: Whether the step's ops go through :meth:`dispatch`; they must unless the program says otherwise.
        persistent: Gives the identities of storages that outlive the step; asked once, if a step that does not see ops
            leaves its program.
        spare_bytes: How much of what is saved first may stay on the device, in a step without a program.

    Attributes:
        program: What to do; None for the floor policy.
        observer: Notified of every event; None for nobody.
        deviation: How the step's structure left the program; "" while it has not.
        num_unpacks: Unpacks so far.
        on_backward: Called once, when backward begins, at the latest when the first saved tensor is read back.
        swapped_bytes: Saved bytes that left the device under the floor policy.
        stayed_bytes: Saved bytes that stayed under the floor policy: there was room for them, or no tier had any.
        took_data: Whether the program took ``Tensor.data`` of what the step made: a step without a dispatch mode
            could not tell whether it is written.
    """

    hears_of_data = True
    packs = True

    def __init__(
        self,
        *,
        device: torch.device,
        tiers: Tiers,
        program: Program | None,
        observer: StepObserver | None,
        verifier: Verifier | None,
        sees_ops: bool = True,
        persistent: Callable[[], Collection[int]] = frozenset,
        spare_bytes: int = 0,
    ) -> None:
        assert sees_ops or (program is not None and not program.needs_ops)
        self.sees_ops = sees_ops
        self.program = program
        self.observer = observer
        self.deviation = ""
        self.num_unpacks = 0
        self.on_backward: Callable[[], None] | None = None
        self.swapped_bytes = self.stayed_bytes = 0
        self.took_data = False
        self._grants_room, self._spare_bytes = program is None and spare_bytes > 0, spare_bytes
        self._lease: StepLiveness | None = StepLiveness(program.num_objects if program is not None else 0)
        self._unread = weakref.ref(self._lease)
        self._device = device
        self._can_capture, self._is_capturing = kind_of(device).captures_graphs, capture_query(device)
        self._persistent = functools.cache(persistent)
        self._verifier = verifier
        self._cursor = ProgramCursor(program) if program is not None else None
        self._given = GivenCursor.on(program.given) if program is not None else None
        self._num_packs = 0
        self._pack_keys: dict[int, int] = {}
        self._has_begun_backward = False
        self._idle_packs = program.idle_packs if program is not None and observer is None else b""
        self._kept: list[weakref.ref[Handle]] = []
        self._late: list[weakref.ref[Handle]] = []
        self._late_node = 0
        self._lock = threading.RLock()
        self._table = ValueTable()
        self._tracker = ValueTracker(device, self._table, is_bound=program is not None and program.is_bound)
        self._materializer = Materializer(device, tiers, self._table, self.decisions, observer, verifier)
        self._writes = WriteBarrier(
            self._table, self._materializer, self._lock, observer, is_recomputing=self.is_recomputing
        )

    @property
    def has_deviated(self) -> bool:
        """Whether the step's structure left the program."""
        return bool(self.deviation)

    @property
    def decisions(self) -> dict[int, Decision]:
        """The plan's decisions by storage; none under the floor policy."""
        return self.program.decisions if self.program is not None else {}

    @property
    def stall_seconds(self) -> float:
        """Time that compute waited for copies."""
        return self._materializer.stall_seconds

    @property
    def replay_seconds(self) -> float:
        """Host time in which values were made again."""
        return self._materializer.replay_seconds

    @property
    def is_recomputing(self) -> bool:
        """Whether calls of this step may have to be replayed."""
        return self.program is not None and self.program.is_recomputing

    @property
    def watches_backward(self) -> bool:
        """Whether the ops of backward must be seen."""
        is_strict = self.program is not None and self.program.is_strict
        return self.observer is not None or (self.sees_ops and is_strict)

    @property
    def sees_user_code(self) -> bool:
        """Whether what the program's own code does in backward must be seen: where there are replays, or may be."""
        return self.is_recomputing or (self.program is None and self.observer is not None)

    @property
    def unforeseen_bytes(self) -> int:
        """Values made again in backward before a write that the plan did not know of."""
        return self._writes.settled_bytes

    @property
    def has_settled(self) -> bool:
        """Whether values were made again before a write, which the plan did not know of."""
        return self._writes.has_settled

    # ---- ops

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of the program, with what the plan asks for around it."""
        if bypass_mode.depth or (self._can_capture and self._is_capturing()):
            return call(func, args, kwargs)
        bypass_mode.depth = 1  # as entering it does, in less time
        try:
            facts = facts_of(func)
            if facts.is_query:
                return func(*args, **kwargs)
            step = None
            if self._cursor is not None and not self.deviation:
                step = self._cursor.next(facts.name)
                if step is None:
                    self.deviate(f"{facts.name} ran where {self._cursor.expected} was expected")
            if step is None or self.observer is not None or step.is_busy:
                return self._dispatch(func, facts, args, kwargs, step)
            if facts.mutates and not self._writes.is_idle(facts, args):
                return self._dispatch(func, facts, args, kwargs, step)
            return call(func, args, kwargs)
        finally:
            bypass_mode.depth = 0

    def _dispatch(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], step: OpStep | None
    ) -> Any:
        recorded: Call | None = None
        rewritten: list[tuple[Tensor, int]] = []
        if facts.mutates or (step is not None and (step.release or step.record)):
            with NotSeen():
                if step is not None and step.release:
                    self._release(step.release)
                if step is not None and step.record:
                    recorded = self._tracker.record(func, facts, args, kwargs)
                if facts.mutates:
                    rewritten = self._writes.before_op(facts, args, kwargs)
        is_followed = step is None or bool(step.register)
        observer, did = self.observer, None
        if observer is None:
            out = call(func, args, kwargs)
            if not (is_followed or rewritten or facts.is_foreach_write):
                return out
            seconds = 0.0
        else:
            observer.before_op()
            start = time.perf_counter()
            out = call(func, args, kwargs)
            seconds = time.perf_counter() - start
        with NotSeen():
            if observer is not None:
                did = effects(facts, args, kwargs, out) if is_followed else None
                observer.on_op(facts, args, kwargs, out, seconds, did)
            if facts.is_foreach_write:
                count_writes(facts, args, kwargs)
            how = ""
            if did is not None:
                how = self._tracker.op(facts, did.made, did.num_fresh, step, recorded)
            elif is_followed:
                how = self._tracker.follow(facts, args, kwargs, out, step, recorded)
            for tensor, key in rewritten:
                storage = tensor.untyped_storage()
                if storage._cdata == key and self._table.find(storage) is None:
                    self._tracker.new(tensor)
            if how:
                self.deviate(how)
        return out

    def made(self, tensors: list[Tensor]) -> None:
        """Hear of tensors that autograd made out of our sight."""
        if self.observer is not None:
            with bypass_mode, NotSeen():
                self.observer.on_made(tensors)

    def exposes(self, storage: torch.UntypedStorage) -> None:
        """Hear that the program takes a storage past the version counters of its tensors, and may write it unseen."""
        with bypass_mode, NotSeen():
            value = self._table.find(storage)
            if value is None and self.sees_ops:
                return
            in_backward = torch._C._current_graph_task_id() != -1
            is_seen = self.watches_backward or self.sees_user_code if in_backward else self.sees_ops
            if value is not None and not value.is_given:
                self.took_data = True
                if not is_seen:
                    self._writes.before_change(storage)
            if not self.sees_ops:
                self._keep_from_now_on(storage)

    def begin_late(self, how: str, exposed: Iterable[weakref.ref[torch.UntypedStorage]]) -> None:
        """Take over a step that has left its program, of which nothing was seen so far.

        Args:
            how: How it did.
            exposed: Storages that may be written unseen.
        """
        assert not self.sees_ops
        self.deviation, self._idle_packs = how, b""
        for storage in (reference() for reference in exposed):
            if storage is not None:
                self._keep_from_now_on(storage)

    def _keep_from_now_on(self, storage: torch.UntypedStorage) -> None:
        """Let nothing leave that is saved on a storage later: it may be written unseen at any time."""
        value = LiveValue(-1, storage.nbytes())
        value.is_given = True
        self._table.follow(value, storage)

    def resizes(self, storage: torch.UntypedStorage) -> None:
        """Hear that a storage gets another size, which sharded parameters do to be there for a while only.

        What was saved on it is what it then holds, as in plain autograd.
        """
        with bypass_mode, NotSeen():
            self._writes.before_change(storage)

    def deviate(self, how: str) -> None:
        """Leave the program: this step runs under the floor policy from now on.

        Another structure may need more memory than the planned one. So in forward, while memory still grows, what the
        plan kept leaves the device, too.
        """
        where = self._given.where() if self._given is not None else ""
        self.deviation, self._idle_packs = f"after {self._num_packs} saved tensors{where} {how}", b""
        _log.debug("the step left its plan: %s", self.deviation)
        for value in self._table.all_indexed():
            self._materializer.release(value)
        kept, self._kept = self._kept, []
        if torch._C._current_graph_task_id() != -1:
            return
        if self.sees_ops:
            self._give_all_up(kept)
        else:
            self._late, self._late_node = kept, next_node()

    def _may_leave_later(self, handle: Handle) -> None:
        """Note a tensor that leaves the device if the step leaves its program, perhaps at an op.

        Where ops are seen, autograd is past: no tensor made there shares a version counter. So it is made now. A
        parameter stays in any case.
        """
        if is_parameter(handle.version_alias):
            return
        handle.hold_apart()
        self._kept.append(weakref.ref(handle))

    def _give_all_up(self, kept: list[weakref.ref[Handle]]) -> None:
        for handle in (reference() for reference in kept):
            if handle is not None and handle.kept is not None and not handle.is_out:
                self._give_up(handle, handle.kept)

    def _leave_late(self, handle: Handle, tensor: Tensor) -> None:
        """Let what is saved leave the device once the op that saves it has run, where ops are not seen.

        An op may write what it has saved, past any version counter, as ``rrelu`` does its noise: it is done when the
        next node of autograd is made.
        """
        node = next_node()
        if node != self._late_node:
            late, self._late, self._late_node = self._late, [], node
            self._give_all_up(late)
        if tensor.untyped_storage()._cdata not in self._persistent():
            self._late.append(weakref.ref(handle))

    def _give_up(self, handle: Handle, tensor: Tensor) -> None:
        """Let a saved tensor leave the device that was kept; not a parameter, whose memory is the program's."""
        if is_parameter(tensor):
            return
        storage = tensor.untyped_storage()
        value = self._table.find(storage)
        if value is None:
            value = LiveValue(-1, storage.nbytes())
            if not self.sees_ops:
                value.guards = ((handle.own_alias(), handle.version_alias._version),)
            self._table.follow(value, storage)
        if value.is_given or not (self.sees_ops or value.is_as_saved(handle)):
            return
        if value.block is None:
            if not self._materializer.swap_out(value, storage, None, release_now=True):
                self.stayed_bytes += value.num_bytes
                return
            self.swapped_bytes += value.num_bytes
        self._let_go(handle, value, tensor)

    def _let_go(self, handle: Handle, value: LiveValue, tensor: Tensor) -> None:
        handle.value = value
        handle.geometry = self._tracker.geometry_of(tensor)
        handle.kept = None
        emptied(handle.own_alias())
        value.note_handle(handle)

    # ---- saved tensors

    @out_of_compilers_sight
    def pack(self, tensor: Tensor) -> Handle:
        """Take a tensor that autograd saves; what is returned stands for it until it is unpacked."""
        index, idle = self._num_packs, self._idle_packs
        if index < len(idle) and idle[index] and not _num_function_modes():
            handle = self._keep_as_planned(index, tensor)
            if handle is not None:
                return handle
        bypass_mode.depth += 1
        try:
            with NotSeen():
                saved, plain = as_saved(tensor)
                handle = self._pack(saved, plain, saved is tensor)
                if not (self.sees_ops or self.deviation) and self.program is not None:
                    releases = self.program.release_at_pack
                    if self._given is None:
                        released = releases.get(handle.index, ())
                    else:
                        released = tuple(s for place in self._given.take_passed() for s in releases.get(place, ()))
                    # A graph must not wait for copies.
                    if released and not (self._can_capture and self._is_capturing()):
                        self._release(released)
                return handle
        finally:
            bypass_mode.depth -= 1

    def _keep_as_planned(self, index: int, tensor: Tensor) -> Handle | None:
        """Keep a tensor where that is all that the program asks for; None where it is not the one that was planned."""
        program = self.program
        assert program is not None
        kept = plainly_saved(tensor)
        if kept is None or (self._can_capture and self._is_capturing()):
            return None
        storage = kept.untyped_storage()
        if storage.nbytes() != program.pack_bytes[index]:
            return None
        value = self._table.find(storage) if self._idle_packs[index] == KEPT_FOR_CALLS else None
        if value is not None and not value.is_given:
            if value.block is not None:
                return None
            self._table.own(value, storage)
        self._num_packs = index + 1
        handle = Handle(None, self._lease, index, kept, is_borrowed=kept is tensor)
        handle.kept, handle.value = kept, value
        if index in program.made_packs:
            self._may_leave_later(handle)
        return handle

    def _pack(self, tensor: Tensor, plain: bool, is_borrowed: bool) -> Handle:
        index = self._num_packs
        self._num_packs = index + 1
        handle = Handle(self.observer, self._lease, index, tensor, is_borrowed=is_borrowed)
        plain = plain and not (self._can_capture and self._is_capturing())
        if self.observer is not None:
            self.observer.on_pack(index, tensor, plain)
        if self._given is not None:
            place = self._given_place(index, tensor, plain)
        else:
            place = index if plain and self.program is not None and self._is_as_planned(index, tensor) else -1
        if not plain or is_parameter(tensor):  # whose memory is the program's: it may lie elsewhere any time
            value = None
        elif self.deviation and not self.sees_ops:
            handle.kept = tensor
            self._leave_late(handle, tensor)
            return handle
        elif self.sees_ops:
            value = self._table.find(tensor.untyped_storage())
        else:
            value = self._value_by_ordinal(handle, tensor, place)
        handle.value = value
        if value is not None and self._leave(value, tensor):
            self._let_go(handle, value, tensor)
            return handle
        handle.kept = tensor
        if plain and place >= 0 and self.program is not None:
            if place in self.program.made_packs:
                self._may_leave_later(handle)
            if value is None and self.program.records_backward:
                self._tracker.know(tensor)
        return handle

    def _value_by_ordinal(self, handle: Handle, tensor: Tensor, place: int) -> LiveValue | None:
        """The value that a pack is about, by what the program says of it; None where it stays on the device.

        One that left the device stands for another save of its storage only where nothing was written in between.
        """
        assert self.program is not None
        storage = tensor.untyped_storage()
        index = self.program.pack_storages[place] if place >= 0 else -1
        value = self._table.find(storage)
        if value is not None and value.is_given:  # what exposed it may have come before
            self.took_data |= index >= 0
            return None
        if value is not None:
            return value if value.is_as_saved(handle) else None
        if index < 0:
            return None
        value = LiveValue(index, storage.nbytes())
        self._table.follow(value, storage)
        if not self._leave(value, tensor):
            self._table.drop(storage)
            return None
        value.guards = ((handle.own_alias(), handle.version),)
        return value

    def _given_place(self, index: int, tensor: Tensor, plain: bool) -> int:
        """Which pack of a program that was made elsewhere comes now; -1 for none of them."""
        assert self._given is not None
        if self.deviation:
            return -1
        place = self._given.next(index, tensor.untyped_storage().nbytes() if plain else 0)
        if place is None:
            self.deviate(self._given.refusal(tensor.untyped_storage().nbytes()))
            return -1
        return place

    def _is_as_planned(self, index: int, tensor: Tensor) -> bool:
        """Whether the step still follows its program; another tensor saved than the planned one ends that."""
        assert self.program is not None
        if self.deviation:
            return False
        storage = tensor.untyped_storage()
        planned, num_bytes = self.program.pack_bytes, storage.nbytes()
        if not self.program.is_bound and index < len(planned) and planned[index] == num_bytes:
            return True
        if self.program.expects(index, num_bytes):
            if self.program.shares(index, storage._cdata, self._pack_keys):
                return True
            self.deviate("a copy was saved where a tensor was to be saved again")
            return False
        was = f"{planned[index]} were" if index < len(planned) else "nothing was"
        self.deviate(f"one of {num_bytes} bytes was saved where {was} expected")
        return False

    def _leave(self, value: LiveValue, tensor: Tensor) -> bool:
        """Let a saved value leave the device as the plan says; whether it need not be kept as it is."""
        storage = tensor.untyped_storage()
        if value.is_given or storage.nbytes() == 0:
            return False
        if value.block is not None:
            return True
        if self._grants_room and self._may_stay(value, storage):
            return False
        decision = place = None
        if self.program is not None and not self.deviation:
            decision = self.program.decisions.get(value.index)
            if decision is None:
                self._table.own(value, storage)
                return False
            if decision.action == "recompute":
                return self._leave_to_replay(value, tensor)
            place = self.program.places.get(value.index)
        release_now = decision is None or decision.release_op == AT_PACK
        has_left = self._materializer.swap_out(value, storage, place, release_now=release_now)
        if decision is None:
            if has_left:
                self.swapped_bytes += value.num_bytes
            else:
                self.stayed_bytes += value.num_bytes
        return has_left

    def _may_stay(self, value: LiveValue, storage: torch.UntypedStorage) -> bool:
        """Whether a saved value is one of those for which there is room."""
        if value.storage is not None and not value.is_ours:  # it stayed already
            return True
        if value.num_bytes > self._spare_bytes:
            return False
        self._spare_bytes -= value.num_bytes
        self.stayed_bytes += value.num_bytes
        self._table.own(value, storage)
        return True

    def _leave_to_replay(self, value: LiveValue, tensor: Tensor) -> bool:
        """Let a value be recomputed; False where it cannot be, or where that it can was not seen yet and is not now."""
        if value.call is None:
            return False
        verifier = self._verifier
        if verifier is not None and value.original is None and verifier.doubts(value):
            storage = tensor.untyped_storage()
            value.original = verifier.remember(storage)
            if value.original is None and not self._materializer.rehearse(value, storage, Geometry.of(tensor)):
                self._table.own(value, storage)
                return False
        return True

    def _release(self, indices: Iterable[int]) -> None:
        for index in indices:
            value = self._table.indexed(index)
            if value is not None:
                self._materializer.release(value)

    @out_of_compilers_sight
    def unpack(self, handle: Handle) -> Tensor:
        """Give a saved tensor back.

        Raises:
            RuntimeError: It was modified in place since it was saved.
            StaleInputError: It must be recomputed from a tensor that was.
            ReplayError: A replay failed.
        """
        with self._lock, NotSeen():
            kept = handle.kept
            is_sound = kept is not None and handle.version_alias._version == handle.version
            if kept is not None and is_sound and self._idle_packs and self._passes_idly():
                handle.is_out = True
                return kept
            in_backward = torch._C._current_graph_task_id() != -1  # else somebody reads grad_fn._saved_...
            if in_backward:
                self._begin_unpack(handle)
            if handle.version_alias._version != handle.version:
                handle.check_version()
            bypass_mode.depth += 1
            try:
                with past_own_mode():
                    if self._can_capture and self._is_capturing():
                        _check_is_there(handle)
                    elif in_backward and self.program is not None and not self.deviation:
                        self._bring_back(self.program, handle)
                    return self._read(handle)
            finally:
                bypass_mode.depth -= 1

    def _passes_idly(self) -> bool:
        """Whether this is an unpack, not the first one, at which the program does nothing; then it is counted."""
        assert self.program is not None
        ordinal = self.num_unpacks
        if not ordinal or ordinal in self.program.busy_unpacks or torch._C._current_graph_task_id() == -1:
            return False
        self.num_unpacks = ordinal + 1
        return True

    def _bring_back(self, program: Program, handle: Handle) -> None:
        """Begin to bring back what is read now, and what the plan has come back next."""
        # What is needed now is first in the lane; what is next overlaps with the wait or replay for it.
        if self._given is not None:
            ordinals = self._given.passed_by(handle.index)
            released = tuple(s for ordinal in ordinals for s in program.release_at_unpack.get(ordinal, ()))
            indices = tuple(s for ordinal in ordinals for s in program.prefetch.get(ordinal, ()))
        else:
            ordinal = self.num_unpacks - 1
            released = program.release_at_unpack.get(ordinal, ())
            indices = program.prefetch.get(ordinal, ())
        self._release(released)
        if handle.value is not None and handle.value.block is not None:
            self._materializer.fetch(handle.value)
        if indices:
            self._materializer.prefetch(indices)

    def _begin_unpack(self, handle: Handle) -> None:
        if self.num_unpacks == 0:
            self.backward_begins()
            if not self.watches_backward:
                with bypass_mode:
                    self._table.keep_watch()
        self.num_unpacks += 1
        if self.observer is not None:
            self.observer.on_unpack(handle.index)

    def _read(self, handle: Handle) -> Tensor:
        """The saved tensor, sharing the version counter of the one that was saved."""
        value = handle.value
        if value is None or handle.geometry is None:
            assert handle.kept is not None
            handle.is_out = True
            return handle.kept
        storage = self._materializer.read(handle, handle.geometry)
        if self.observer is not None:
            self.observer.on_unpacked(handle.index, storage)
        if self.is_recomputing:
            self._table.hand_out(value, storage, handle)
        return seen_through(handle.version_alias, handle.geometry, storage)

    # ---- backward and the end

    def backward_begins(self) -> None:
        """Tell who wants to know, once: autograd is about to run, or has just begun to."""
        if not self._has_begun_backward:
            self._has_begun_backward = True
            self._check_forward()
        on_backward, self.on_backward = self.on_backward, None
        if on_backward is not None:
            on_backward()

    def _check_forward(self) -> None:
        """Notice a forward that lacked what the plan counts on, where sizes that are bounds could not tell.

        A step of another structure among those of a family keeps what the plan wanted away, op by op a stray one.
        """
        program, cursor, given = self.program, self._cursor, self._given
        if program is None or cursor is None or not (program.is_bound or given is not None) or self.deviation:
            return
        how = ""
        if self.sees_ops and not cursor.is_through(program.num_first_ops):
            how = f"forward ended before {cursor.expected}"
        elif given is not None:
            if not given.is_through(program.num_first_packs):
                how = f"backward began where {given.expected()}"
        elif self._num_packs < program.num_first_packs:
            how = f"backward began where {program.num_first_packs} saved tensors were expected"
        if how:
            with self._lock, bypass_mode, NotSeen():
                self.deviate(how)
                late, self._late = self._late, []
                self._give_all_up(late)  # no op is under way

    @property
    def is_spent(self) -> bool:
        """Whether the step is closed and autograd has dropped all that it saved, so that no backward is its own."""
        return self._unread() is None

    def close(self) -> None:
        """End the part of the step in which ops are seen; saved tensors stay readable."""
        self._lease = None
        with bypass_mode:
            self._table.close()

    def settle_readers_of(self, tensors: list[Tensor]) -> None:
        """Before an optimizer updates these tensors: replay now what could not be replayed afterwards."""
        for tensor in tensors:
            self._writes.before(tensor)


def next_node() -> int:
    """The sequence number of the next node that autograd makes in this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _check_is_there(handle: Handle) -> None:
    """A saved tensor is needed by a CUDA graph: neither a copy nor a replay may become a part of that.

    Raises:
        UnsupportedError: It is not on the device.
    """
    value = handle.value
    if value is None or handle.geometry is None:
        return
    if value.live() is None or (value.is_ours and value.copy is not None):
        raise UnsupportedError(
            "a CUDA graph of a backward is captured whose forward ran before, and what that saved has left the device: "
            "capture forward and backward together, outside of memory.step() or within one, or use policy='keep-all'"
        )
