"""Executes one step: decides nothing, does what the program says for each op, pack and unpack.

A :class:`~.follow.Follower` tells the place of each in the program. What has none there, in a step without a program
or one that has left it, is up to :mod:`.fallback`. A plan never decides about correctness: a tensor is recomputed only
through calls recorded in this very step, and a storage is recognised by its live identity, never by its address.

Modes of one executor, chosen by data:

- Ops are seen: recorded for replays, device copies released before them.
- Ops are not seen, under a plan that only keeps and swaps, in steps that nobody observes: device copies are released
  at packs and unpacks. A write is noticed by version counters, and one past them where the program takes
  ``Tensor.data``: what was saved on that memory follows it from then on, and later steps of the kind have their ops
  seen.
- All is kept: a pack is a plain tuple. Left to do are autograd's version check, which hooks switch off, and to notice a
  step of another structure: where there is a budget, what that saves from then on leaves the device. Where steps were
  alike so far, the number of autograd nodes tells that, without hooks.

Threads: ops and packs come from the caller's thread, unpacks perhaps from autograd's device threads; a lock
orders them. Finalizers take no lock.

Note [gradients that are stolen]: a node of the program's own may return a saved tensor as a gradient, as fused losses
do that make it in forward. Autograd takes such a gradient for a parameter's as it is, unless somebody else has that
very tensor: plainly the graph has, until the node has run, and the program, while it does. What is given in place of a
saved tensor is another one on the same memory, which nobody else has. So the handle holds it, as the graph would; and
where somebody has the memory that it lies on as well, so does the step, until another node reads something: autograd
gives parameters their gradients before it comes to that.

What a CUDA graph captures within a step runs as without us: its ops are not seen, what it saves is kept. A graph of a
backward alone is refused where that would need what has left the device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_offload.accelerators import capture_query, kind_of
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.memory_plan import AT_PACK
from lightning_offload.runtime.fallback import OffloadAll, SupersetRule
from lightning_offload.runtime.follow import LEFT, ByForm, Follower, follower_of
from lightning_offload.runtime.hooks import (
    DisableTorchFunction,
    Dispatch,
    bypass_mode,
    dynamo_disabled,
    past_own_mode,
    seeing_user_code,
    within_transform,
)
from lightning_offload.runtime.kernel_keys import call
from lightning_offload.runtime.ledger import Ledger, next_node
from lightning_offload.runtime.materialize import Materializer
from lightning_offload.runtime.program import KEPT_FOR_CALLS, RECORD, Program
from lightning_offload.runtime.sight import seeing_calls, seeing_ops, unseen
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.tracking import PlannedResults, ValueTracker
from lightning_offload.runtime.values import (
    Call,
    Handle,
    LiveValue,
    StepLiveness,
    ValueTable,
    raise_modified,
    seen_through,
)
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.runtime.write_barrier import WriteBarrier, count_writes
from lightning_offload.tensors import compiled_code
from lightning_offload.tensors.geometry import Geometry
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import (
    OpFacts,
    as_saved,
    effects,
    facts_of,
    is_parameter,
    is_plain,
    parts_of,
    plainly_saved,
)
from lightning_offload.tensors.saved_forms import form_of

_log = logging.getLogger(__name__)
_num_function_modes = torch._C._len_torch_function_stack

Held = tuple[Tensor, int, StepLiveness | None, weakref.ref[Tensor]]
"""Of a saved tensor where all is kept: itself, its version, what keeps the step from being over, and what
``torch.utils.swap_tensors`` takes for a user."""


NOT_THERE_FOR_GRAPH = (
    "a CUDA graph of a backward is captured whose forward ran before, and what that saved has left the device: "
    "capture forward and backward together, outside of memory.step() or within one, or use policy='keep-all'"
)


class StepExecutor:
    """The state of one step, from its first op until autograd has dropped its last saved tensor.

    Args:
        device: Where the step runs.
        tiers: Where its tensors may go.
        program: What to do; None for the offload-all fallback.
        observer: Notified of every event; None for nobody.
        verifier: Compares replays with their originals, if they are to be.
        sees_ops: Whether the step's ops go through :meth:`dispatch`; they must unless the program says otherwise.
        persistent: Gives the identities of storages that outlive the step; asked once, if a step that does not see ops
            leaves its program.
        live_scan: The identities of all storages that are there as it begins. None where nobody knows: then what no op
            was seen to make is taken to be among them.
        keeps_all: Whether to keep all that is saved, for as long as the step follows its program.
        packs: Whether saved tensors come by.
        by_mode: Whether a mode must see the ops, though the native core could: under a mode some functions call other
            ops, and a step that is captured elsewhere, with fake tensors, has those.

    Attributes:
        superset: Decides about saves under a plan for another structure; None under others.
        deviation: How the step's structure left the program; "" while it has not.
        num_nodes: Autograd nodes made in the step by the thread that began it; None while it is open.
        on_backward: Called once, when backward begins, at the latest when the first saved tensor is read back.
    """

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
        live_scan: Collection[int] | None = None,
        keeps_all: bool = False,
        packs: bool = True,
        by_mode: bool = False,
    ) -> None:
        assert sees_ops or (program is not None and not program.needs_ops)
        assert not keeps_all or (observer is None and not sees_ops)
        self.sees_ops = sees_ops
        self.program = program
        self.observer = observer
        self.keeps_all, self.packs = keeps_all, packs
        self.deviation = ""
        self._num_packs = self._num_unpacks = 0
        self.num_nodes: int | None = None
        self._shown: list[Tensor] = []
        self._shown_to: Any = None
        self.on_backward: Callable[[], None] | None = None
        self._by_mode = by_mode
        self._live_scan = live_scan
        self._holds = keeps_all
        self._first_node = next_node()
        self._lease: StepLiveness | None = StepLiveness(
            self._num_objects(program) if program is not None and packs else 0
        )
        self._unread = weakref.ref(self._lease)
        self._device = device
        self._can_capture, self._is_capturing = kind_of(device).captures_graphs, capture_query(device)
        self._lanes = tiers.lanes if tiers.lanes.compute_stream() is not None else None
        self._verifier = verifier
        self._has_begun_backward = self._has_read = False
        self._lock = self._new_lock()
        self._table = self._new_table()
        self._tracker = ValueTracker(device, self._table, is_bound=program is not None and program.is_bound)
        decisions = program.decisions if program is not None else {}
        self._materializer = Materializer(device, tiers, self._table, decisions, observer, verifier, make=self._maker())
        minds_writes = program is None or program.minds_writes(sees_ops=sees_ops)
        self._writes = WriteBarrier(self._table, self._materializer, self._lock, observer, minds_others=minds_writes)
        self._fallback = OffloadAll(self._table, self._tracker, self._materializer, persistent, sees_ops=sees_ops)
        follower = follower_of(program) if program is not None else None
        self._follower: Follower | None = follower
        self._follows_ops = follower is not None and follower.follows_ops
        self._op_flags = program.op_flags if program is not None else b""
        self._noop_packs = program.noop_packs if program is not None and observer is None else b""
        self.superset: SupersetRule | None = None
        if program is not None and isinstance(follower, ByForm):
            self.superset = SupersetRule(program, follower, self._fallback, self._new_ledger())

    def _num_objects(self, program: Program) -> int:
        """About how many Python objects the step makes that live until backward."""
        return program.num_objects

    def _new_table(self) -> ValueTable:
        return ValueTable()

    def _new_ledger(self) -> Ledger:
        return Ledger()

    def _new_lock(self) -> contextlib.AbstractContextManager[Any]:
        return threading.RLock()

    def _maker(self) -> Callable[[LiveValue], torch.UntypedStorage] | None:
        """What makes values again; None for replays of the calls that are recorded here."""
        return None

    @property
    def num_packs(self) -> int:
        """Packs so far."""
        return self._num_packs

    @property
    def num_unpacks(self) -> int:
        """Unpacks so far."""
        return self._num_unpacks

    @property
    def has_deviated(self) -> bool:
        """Whether the step's structure left the program."""
        return bool(self.deviation)

    @property
    def swapped_bytes(self) -> int:
        """Saved bytes that left the device without a plan that says so, or under one for another structure."""
        return self._fallback.swapped_bytes

    @property
    def stayed_bytes(self) -> int:
        """Saved bytes that stayed on the device without a plan: there was room for them, or no tier had any."""
        return self._fallback.stayed_bytes

    @property
    def took_data(self) -> bool:
        """Whether the program took ``Tensor.data`` of what the step made, which may be written unseen."""
        return self._fallback.took_data

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
        return self._writes.materialized_bytes

    @property
    def has_materialized(self) -> bool:
        """Whether values were made again before a write, which the plan did not know of."""
        return self._writes.has_materialized

    # ---- ops

    def seeing(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the ops of this thread come by."""
        return seeing_ops(self._device, self.dispatch, self.made, by_mode=self._by_mode)

    def seeing_user_code(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward: the ops of the program's own code in it come by."""
        return self._seeing_user_code(self.dispatch)

    def seeing_writes(self) -> contextlib.AbstractContextManager[None]:
        """Around a backward that may be the step's: what the program's own code writes in it comes by."""
        return self._seeing_user_code(self.dispatch_writes)

    def _seeing_user_code(self, dispatch: Dispatch) -> contextlib.AbstractContextManager[None]:
        see = functools.partial(seeing_calls, self._device, dispatch, self.made, by_mode=self._by_mode)
        return seeing_user_code(dispatch, see)

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """Inside, they do not: around a backward that need not be seen."""
        return unseen(self._device)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of the program, with what the plan asks for around it."""
        if bypass_mode.depth or (self._can_capture and self._is_capturing()):
            return call(func, args, kwargs)
        bypass_mode.depth = 1  # as entering it does, in less time
        try:
            facts = facts_of(func)
            if facts.is_query:
                return func(*args, **kwargs)
            place = LEFT
            if self._follows_ops:
                assert self._follower is not None
                place = self._follower.op(facts.name)
                if place == LEFT:
                    self.deviate(self._follower.refusal)
            is_planned = place >= 0 and self._op_flags[place]
            if place == LEFT or is_planned or facts.mutates or self.observer is not None:
                return self._dispatch(func, facts, args, kwargs, place)
            return call(func, args, kwargs)
        finally:
            bypass_mode.depth = 0

    def dispatch_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op of the program's own code in backward, where only writes matter."""
        facts = facts_of(func)
        if bypass_mode.depth or not facts.mutates or (self._can_capture and self._is_capturing()):
            return call(func, args, kwargs)
        with self.unseen(), bypass_mode:
            with DisableTorchFunction():
                rewritten = self._writes.before_op(facts, args, kwargs)
            out = call(func, args, kwargs)
            with DisableTorchFunction():
                if facts.is_foreach_write:
                    count_writes(facts, args, kwargs)
                self._follow_rewritten(rewritten)
        return out

    def _follow_rewritten(self, rewritten: list[tuple[Tensor, int]]) -> None:
        for tensor, key in rewritten:
            storage = tensor.untyped_storage()
            if storage._cdata == key and self._table.find(storage) is None:
                self._track(tensor)

    def _track(self, tensor: Tensor) -> None:
        self._tracker.new(tensor)

    def _dispatch(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> Any:
        recorded: Call | None = None
        rewritten: list[tuple[Tensor, int]] = []
        planned: PlannedResults | None = None
        is_recorded, releases = False, None
        if place >= 0 and self._op_flags[place]:
            assert self.program is not None
            is_recorded = bool(self._op_flags[place] & RECORD)
            releases = self.program.op_release if place in self.program.op_release else None
            if place in self.program.op_register:
                planned = self.program.op_bytes[place], self.program.op_register[place]
        if facts.mutates or is_recorded or releases is not None:
            with DisableTorchFunction():
                if releases is not None:
                    self._fallback.release(releases, (place,))
                if is_recorded:
                    recorded = self._tracker.record(func, facts, args, kwargs)
                if facts.mutates:
                    rewritten = self._writes.before_op(facts, args, kwargs)
        is_followed = place == LEFT or planned is not None
        observer, did = self.observer, None
        if observer is None:
            out = call(func, args, kwargs)
            if not (is_followed or rewritten or facts.is_foreach_write):
                return out
            seconds = 0.0
        else:
            observer.before_op(facts, args, kwargs)
            start = time.perf_counter()
            try:
                out = call(func, args, kwargs)
            except BaseException:
                observer.on_failed_op()
                raise
            seconds = time.perf_counter() - start
        with DisableTorchFunction():
            if observer is not None:
                did = effects(facts, args, kwargs, out) if is_followed else None
                observer.on_op(facts, args, kwargs, out, seconds, did)
            if facts.is_foreach_write:
                count_writes(facts, args, kwargs)
            how = ""
            if did is not None:
                how = self._tracker.op(facts, did.made, did.num_fresh, planned, recorded)
            elif is_followed:
                how = self._tracker.follow(facts, args, kwargs, out, planned, recorded)
            self._follow_rewritten(rewritten)
            if how:
                self.deviate(how)
        return out

    def made(self, tensors: list[Tensor]) -> None:
        """Hear of tensors that autograd made out of our sight."""
        if self.observer is not None:
            with bypass_mode, DisableTorchFunction():
                self.observer.on_made(tensors)

    def data_escapes(self, storage: torch.UntypedStorage, tensor: Tensor | None) -> None:
        """Hear that the program takes a storage past the version counters of its tensors, and may write it unseen.

        Args:
            storage: The storage.
            tensor: What it was taken from; its own counter notices writes that the other will not; None for a storage.
        """
        with bypass_mode, DisableTorchFunction():
            value = self._table.find(storage)
            if self.is_recomputing and tensor is not None and (value is None or value.is_external):
                self._know(tensor)
            if value is None and self.sees_ops:
                return
            in_backward = torch._C._current_graph_task_id() != -1
            is_seen = self.watches_backward or self.sees_user_code if in_backward else self.sees_ops
            if value is not None and not value.is_external:
                self._fallback.took_data = True
                if not is_seen:
                    self._writes.before_change(storage)
            if not self.sees_ops:
                self._fallback.keep_from_now_on(storage)

    def _know(self, tensor: Tensor) -> None:
        self._tracker.know(tensor)

    def resizes(self, storage: torch.UntypedStorage) -> None:
        """Hear that a storage gets another size, which sharded parameters do to be there for a while only.

        What was saved on it is what it then holds, as in plain autograd.
        """
        if self._holds:  # nothing has left its memory, and what was exposed stays so
            return
        with bypass_mode, DisableTorchFunction():
            self._writes.before_change(storage)

    def resized(self, storage: torch.UntypedStorage, num_bytes_before: int) -> None:
        """Hear that it has got it."""
        if self.observer is not None:
            with bypass_mode, DisableTorchFunction():
                self.observer.on_resized(storage, num_bytes_before)

    def deviate(self, how: str) -> None:
        """Leave the program: this step runs under the offload-all fallback from now on."""
        where = self._follower.where() if self._follower is not None else ""
        self.deviation = f"after {self.num_packs} saved tensors{where} {how}"
        self._follower, self._follows_ops, self._noop_packs = None, False, b""
        _log.debug("the step left its plan: %s", self.deviation)
        self._fallback.begin()

    # ---- saved tensors

    @dynamo_disabled
    def pack(self, tensor: Tensor) -> Handle | Held | Tensor:
        """Take a tensor that autograd saves; what is returned stands for it until it is unpacked."""
        if compiled_code.is_being_traced():
            return tensor.detach()  # the trace's own, with the very ops that make it
        if self._holds:
            return self._hold(tensor)
        index, noop = self._num_packs, self._noop_packs
        if index < len(noop) and noop[index] and not _num_function_modes():
            handle = self._keep_as_planned(index, tensor)
            if handle is not None:
                return handle
        bypass_mode.depth += 1
        try:
            with DisableTorchFunction():
                saved, plain = as_saved(tensor)
                return self._pack(saved, plain, saved is tensor)
        finally:
            bypass_mode.depth -= 1

    def _hold(self, tensor: Tensor) -> Handle | Held | Tensor:
        """Keep a tensor in a step that keeps everything; held itself only without a graph."""
        saved, plain = as_saved(tensor)
        follower = self._follower
        if follower is not None:
            if follower.pack(self.num_packs, saved, is_plain=plain, num_unpacks=0) == LEFT:
                self._holds = False
                self.deviate(follower.refusal)
                return self.pack(tensor)
            self._num_packs += 1
        return saved, saved._version, self._lease, weakref.ref(saved)

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
        value = self._table.find(storage) if self._noop_packs[index] == KEPT_FOR_CALLS else None
        if value is not None and not value.is_external:
            if value.block is not None:
                return None
            self._table.own(value, storage)
        self._num_packs = index + 1
        handle = Handle(None, self._lease, index, kept, is_borrowed=kept is tensor)
        handle.kept, handle.value = kept, value
        if index in program.made_packs:
            self._note_stream(handle, kept)
            self._fallback.may_leave_later(handle)
        return handle

    def _note_stream(self, handle: Handle, tensor: Tensor) -> None:
        """Note who saves: Note [streams and memory]."""
        if self._lanes is not None and tensor.device == self._device:
            handle.stream = self._lanes.compute_stream()
            with bypass_mode, past_own_mode():
                self._lanes.note_use(tensor.untyped_storage())

    def _pack(self, tensor: Tensor, plain: bool, is_borrowed: bool) -> Handle:
        index = self._num_packs
        self._num_packs = index + 1
        handle = Handle(self.observer, self._lease, index, tensor, is_borrowed=is_borrowed)
        is_captured = self._can_capture and self._is_capturing()
        plain = plain and not is_captured
        if plain:
            self._note_stream(handle, tensor)
        if self.observer is not None:
            self.observer.on_pack(index, tensor, plain)
        if self.superset is not None:
            handle.kept = tensor
            if not is_captured:
                place = self.superset.save(handle, tensor, is_plain=plain, num_unpacks=self.num_unpacks)
                self.superset.ledger.note(place, form_of(tensor, is_plain=plain))
            return handle
        place = LEFT
        if self._follower is not None:
            place = self._follower.pack(index, tensor, is_plain=plain, num_unpacks=self.num_unpacks)
            if place == LEFT:
                self.deviate(self._follower.refusal)
        self._save(handle, tensor, plain, place)
        if self._follower is not None and self.program is not None and not self.sees_ops:
            passed = self._follower.passed_packs(index)
            if not is_captured:  # a graph must not wait for copies
                self._fallback.release(self.program.release_at_pack, passed)
        return handle

    def _save(self, handle: Handle, tensor: Tensor, plain: bool, place: int) -> None:
        """Have a handle stand for a saved tensor at a place of the program, or at none: keep it, or let it leave."""
        if not plain or is_parameter(tensor):  # whose memory is the program's: it may lie elsewhere any time
            value = None
        elif self.sees_ops:
            value = self._table.find(tensor.untyped_storage()) or self._unseen_value(place, handle, tensor)
            if value is not None and value.holds_no_longer(tensor):  # a backward in the midst of the step, or a thread
                value = None
        elif self._follower is None:
            handle.kept = tensor
            self._fallback.leave_late(handle, tensor)
            return
        else:
            value = self._value_at(place, handle, tensor)
        handle.value = value
        if value is not None and self._leave(value, tensor):
            self._fallback.let_go(handle, value, tensor)
            return
        handle.kept = tensor
        if plain and place >= 0:
            assert self.program is not None
            if place in self.program.made_packs:
                self._fallback.may_leave_later(handle)
            if value is None and self.program.records_backward:
                self._tracker.know(tensor)

    def _unseen_value(self, place: int, handle: Handle, tensor: Tensor) -> LiveValue | None:
        """The value of memory that no op was seen to make, as compiled code's; None where it is given, or stays."""
        if place >= 0:
            assert self.program is not None
            is_planned = self.program.pack_storages[place] in self.program.decisions
            return self._value_at(place, handle, tensor) if is_planned else None
        if self._live_scan is None or tensor.device != self._device:
            return None
        storage = tensor.untyped_storage()
        is_external = storage._cdata in self._live_scan or not storage.resizable()
        return self._table.new(-1, storage) if not is_external else None

    def _value_at(self, place: int, handle: Handle, tensor: Tensor) -> LiveValue | None:
        """The value that a pack is about, by what the program says of it; None where it stays on the device.

        One that left the device stands for another save of its storage only where nothing was written in between.
        """
        assert self.program is not None
        storage = tensor.untyped_storage()
        index = self.program.pack_storages[place] if place >= 0 else -1
        value = self._table.find(storage)
        if value is not None and value.is_external:  # what exposed it may have come before
            self._fallback.took_data |= index >= 0
            return None
        if value is not None:
            return value if value.is_as_saved(handle) else None
        if index < 0:
            return None
        value = self._table.new(index, storage)
        if not self._leave(value, tensor):
            self._table.drop(storage)
            return None
        handle.watch(value)
        return value

    def _leave(self, value: LiveValue, tensor: Tensor) -> bool:
        """Let a saved value leave the device as the plan says; whether it need not be kept as it is."""
        storage = tensor.untyped_storage()
        if value.is_external or storage.nbytes() == 0 or tensor.device != self._device:
            return False
        if value.block is not None:
            return True
        if self._follower is None:
            return self._fallback.leave(value, storage)
        assert self.program is not None
        decision = self.program.decisions.get(value.index)
        if decision is None:
            self._table.own(value, storage)
            return False
        if decision.action == "recompute":
            return self._leave_to_replay(value, tensor)
        place = self.program.places.get(value.index)
        return self._materializer.swap_out(value, storage, place, release_now=decision.release_op == AT_PACK)

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

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, what this thread saves is packed and unpacked here."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @dynamo_disabled
    def unpack(self, packed: Handle | Held | Tensor) -> Tensor:
        """Give a saved tensor back.

        Raises:
            RuntimeError: It was modified in place since it was saved.
            StaleInputError: It must be recomputed from a tensor that was.
            ReplayError: A replay failed.
        """
        if isinstance(packed, tuple):
            return self._give_back(*packed)
        if isinstance(packed, Tensor):
            return packed
        handle = packed
        with self._lock, DisableTorchFunction():
            kept = handle.kept
            is_sound = kept is not None and handle.version_alias._version == handle.version
            if kept is not None and is_sound and self._noop_packs and self._passes_noop_unpack():
                handle.is_out = True
                self._show_kept(handle)
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
                    elif in_backward and self._follower is not None:
                        self._bring_back(
                            self._follower.passed_unpacks(handle.index, self.num_unpacks - 1), handle.value
                        )
                    return self._read(handle)
            finally:
                bypass_mode.depth -= 1

    def _give_back(self, tensor: Tensor, version: int, *_: object) -> Tensor:
        """Give back what a step has held that keeps everything."""
        if not self.num_unpacks:
            self.backward_begins()
        self._num_unpacks += 1
        if tensor._version != version:
            raise_modified(tensor, tensor.shape, version)
        return tensor

    def _passes_noop_unpack(self) -> bool:
        """Whether this is an unpack, not the first one, at which the program does nothing; then it is counted."""
        assert self.program is not None
        ordinal = self._num_unpacks
        if not ordinal or ordinal in self.program.busy_unpacks or torch._C._current_graph_task_id() == -1:
            return False
        self._num_unpacks = ordinal + 1
        return True

    def _bring_back(self, passed: Sequence[int], value: LiveValue | None) -> None:
        """Begin to bring back what is read now, and what the plan has come back next.

        Args:
            passed: The planned unpacks that are behind with this one, and were not before.
            value: What is read; None where that was kept.
        """
        program = self.program
        assert program is not None
        self._fallback.release(program.release_at_unpack, passed)
        # What is needed now is first in the lane; what is next overlaps with the wait or replay for it.
        if value is not None and value.block is not None:
            self._materializer.fetch(value)
            if self.superset is not None:
                self.superset.fetch_next(value)
        for ordinal in passed:
            if indices := program.prefetch.get(ordinal):
                self._materializer.prefetch(indices)

    def _begin_unpack(self, handle: Handle) -> None:
        if not self._has_read:
            self._has_read = True
            self.backward_begins()
        self._num_unpacks += 1
        if self.observer is not None:
            self.observer.on_unpack(handle.index)

    def _read(self, handle: Handle) -> Tensor:
        """The saved tensor, sharing the version counter of the one that was saved."""
        value = handle.value
        if value is None or handle.geometry is None:
            assert handle.kept is not None
            handle.is_out = True
            self._show_kept(handle)
            return handle.kept
        storage = self._materializer.read(handle, handle.geometry)
        if self.observer is not None:
            self.observer.on_unpacked(handle.index, storage)
        if self.is_recomputing:
            self._table.hand_out(value, storage, handle)
        tensor = seen_through(handle.version_alias, handle.geometry, storage)
        if self._show(tensor, num_own=2):
            handle.shown = tensor
        return tensor

    def _show_kept(self, handle: Handle) -> None:
        """Give a tensor of our own in place of the one that was saved."""
        if handle.borrowed is None and handle.kept is not None:
            self._show(handle.kept, num_own=1 + (handle.value is not None and handle.value.storage is not None))

    def _show(self, tensor: Tensor, *, num_own: int) -> bool:
        """Give a tensor in place of a saved one to a node; whether that is the program's own.

        Args:
            tensor: The tensor.
            num_own: How often its memory is held here.
        """
        node = _own_node()
        if node is not self._shown_to:
            self._shown.clear()
            self._shown_to = node
        if node is None:
            return False
        if is_plain(tensor) and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > num_own:
            self._shown.append(tensor)
        return True

    # ---- backward and the end

    def backward_begins(self) -> None:
        """Tell who wants to know, once: autograd is about to run, or has just begun to."""
        if not (self.watches_backward or within_transform()):  # whose own backward this is
            with self.unseen(), bypass_mode:
                self._table.keep_watch()
        self._tell_of_backward()

    def _tell_of_backward(self) -> None:
        if not self._has_begun_backward:
            self._has_begun_backward = True
            self._check_forward()
        on_backward, self.on_backward = self.on_backward, None
        if on_backward is not None:
            on_backward()

    def backward_ends(self) -> None:
        """Let go of what the last node was given."""
        self._shown.clear()
        self._shown_to = None

    def _check_forward(self) -> None:
        """Notice a forward that lacked what the plan counts on."""
        if self._follower is None or self._holds:
            return
        if self.superset is not None:
            with self._lock, bypass_mode, DisableTorchFunction():
                self.superset.forward_ends()
        elif how := self._follower.lacks(self.num_packs, sees_ops=self.sees_ops):
            with self._lock, bypass_mode, DisableTorchFunction():
                self.deviate(how)
                self._fallback.leave_now()  # no op is under way

    @property
    def is_spent(self) -> bool:
        """Whether the step is closed and autograd has dropped all that it saved, so that no backward is its own."""
        return self._unread() is None

    @property
    def has_begun_backward(self) -> bool:
        """Whether a backward of the step was begun."""
        return self._has_begun_backward

    def reopen(self) -> bool:
        """Have another forward go on with the step; False where autograd has dropped all that the step saved.

        A step that goes without hooks cannot tell: it goes on.
        """
        if not self.packs:
            return True
        if self._lease is None:
            self._lease = self._unread()
        return self._lease is not None

    def close(self) -> None:
        """End the part of the step in which ops are seen; saved tensors stay readable."""
        if self._lease is not None:
            self._lease, self.num_nodes = None, next_node() - self._first_node
        with bypass_mode:
            self._table.close()

    def materialize_readers_of(self, tensors: list[Tensor]) -> None:
        """Before an optimizer updates these tensors: replay now what could not be replayed afterwards."""
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            self._writes.before(part)


def _own_node() -> Any:
    """The node of autograd's graph that runs now, where that is the program's own; None where it is torch's."""
    node = torch._C._current_autograd_node()
    if isinstance(node, torch._C._FunctionBase) or (node is not None and "CppNode" in node.name()):
        return node
    return None


def _check_is_there(handle: Handle) -> None:
    """A saved tensor is needed by a CUDA graph: neither a copy nor a replay may become a part of that.

    Raises:
        UnsupportedError: It is not on the device.
    """
    value = handle.value
    if value is None or handle.geometry is None:
        return
    if value.live() is None or (value.is_ours and value.copy is not None):
        raise UnsupportedError(NOT_THERE_FOR_GRAPH)
