"""What is done of a step where no program says what.

:class:`OffloadAll` is the *offload-all fallback*: every saved tensor made in the step is swapped out at once and
brought back when it is needed. A step runs under it while it is recorded, and from where it has left its plan. Another
structure may need more memory than the planned one: where a plan is left in forward, while memory still grows, what the
plan kept leaves the device, too.

:class:`SupersetRule` is the local rule of a step under a plan for another structure. Where the two agree, the plan's
decisions hold. A save that is unmatched, or larger than planned, stays where the plan had more on the device by now
than there is, and leaves it otherwise. After :data:`_MANY_UNMATCHED` of them in a row, or fewer that are large, the
step is in a part that the plan knows nothing of, and whose memory nobody foresaw: then what was kept before leaves the
device as well.

None of this decides about correctness.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_offload.graph.memory_plan import AT_PACK
from lightning_offload.runtime.follow import TINY_BYTES, ByForm
from lightning_offload.runtime.ledger import Late, Ledger
from lightning_offload.runtime.materialize import Materializer
from lightning_offload.runtime.program import Program
from lightning_offload.runtime.tracking import ValueTracker
from lightning_offload.runtime.values import Handle, LiveValue, ValueTable
from lightning_offload.tensors.op_facts import is_parameter

_MANY_UNMATCHED = 4
_MUCH_UNMATCHED = 0.05  # of the budget


class OffloadAll:
    """The offload-all fallback, and what lets a saved tensor leave that was kept.

    Args:
        table: The values of the step.
        tracker: Follows them.
        materializer: Moves them.
        persistent: Gives the identities of storages that outlive the step.
        sees_ops: Whether the step's ops are seen.

    Attributes:
        swapped_bytes: Saved bytes that left the device.
        stayed_bytes: Saved bytes that stayed: no tier had room.
        took_data: Whether the program took ``Tensor.data`` of what the step made.
    """

    def __init__(
        self,
        table: ValueTable,
        tracker: ValueTracker,
        materializer: Materializer,
        persistent: Callable[[], Collection[int]],
        *,
        sees_ops: bool,
    ) -> None:
        self.swapped_bytes = self.stayed_bytes = 0
        self.took_data = False
        self.table, self.tracker, self.materializer = table, tracker, materializer
        self.sees_ops = sees_ops
        self._persistent = persistent
        self._outliving: Collection[int] | None = None
        self._kept: list[weakref.ref[Handle]] = []
        self._late = Late()

    def leave(self, value: LiveValue, storage: torch.UntypedStorage) -> bool:
        """Let a saved value leave the device; whether it need not be kept as it is."""
        has_left = self.materializer.swap_out(value, storage, None, release_now=True)
        if has_left:
            self.swapped_bytes += value.num_bytes
        else:
            self.stayed_bytes += value.num_bytes
        return has_left

    def outliving(self) -> Collection[int]:
        """The identities of storages that outlive the step."""
        if self._outliving is None:
            self._outliving = self._persistent()
        return self._outliving

    def release(self, column: Mapping[int, Sequence[int]], places: Iterable[int]) -> None:
        """Release the device copies of the storages that a column of the program has at some places."""
        for place in places:
            for index in column.get(place, ()):
                value = self.table.indexed(index)
                if value is not None:
                    self.materializer.release(value)

    def release_all(self) -> None:
        """Release all of them: the plan's moment to do so may be far away, or never come."""
        for value in self.table.all_indexed():
            self.materializer.release(value)

    def let_go(self, handle: Handle, value: LiveValue, tensor: Tensor) -> None:
        """Have a handle read a value in place of the tensor itself."""
        handle.let_go(value, self.tracker.geometry_of(tensor))

    # ---- what leaves a plan

    def may_leave_later(self, handle: Handle) -> None:
        """Note a tensor that leaves the device if the step leaves its program, perhaps at an op.

        A parameter stays in any case.
        """
        if is_parameter(handle.version_alias):
            return
        # Where ops are seen, autograd is past: no tensor made there shares a version counter. So it is made now.
        handle.hold_apart()
        self._kept.append(weakref.ref(handle))

    def keep_for_now(self, handles: Iterable[Handle]) -> None:
        """Note handles of tensors of our own, which leave the device if the step leaves its program."""
        self._kept += map(weakref.ref, handles)

    def begin(self) -> None:
        """The step has left its program."""
        self.release_all()
        kept, self._kept = self._kept, []
        if torch._C._current_graph_task_id() != -1:
            return
        for handle in (reference() for reference in kept):
            if handle is not None:
                self._late.add_late(handle)
        if self.sees_ops:
            self.leave_now()

    def leave_late(self, handle: Handle, tensor: Tensor) -> None:
        """Let what is saved leave the device once the op that saves it has run, where ops are not seen."""
        if self._late.is_due:
            self.leave_now()
        if tensor.untyped_storage()._cdata not in self.outliving():
            self._late.add_late(handle)

    def leave_now(self) -> None:
        """Let leave what was to once an op is done: it is."""
        for handle, _ in self._late.take_late():
            assert handle.kept is not None
            self.give_up(handle, handle.kept)

    def give_up(self, handle: Handle, tensor: Tensor) -> None:
        """Let a saved tensor leave the device that was kept.

        Not a parameter, whose memory is the program's, nor what lies elsewhere, as lengths of sequences do.
        """
        if is_parameter(tensor) or tensor.device != self.materializer.device:
            return
        storage = tensor.untyped_storage()
        value = self.table.find(storage)
        if value is None:
            value = self.table.new(-1, storage)
            if not self.sees_ops:
                handle.watch(value)
        if value.is_external or not (self.sees_ops or value.is_as_saved(handle)):
            return
        if value.block is None:
            self.materializer.come_after(handle)
            if not self.materializer.swap_out(value, storage, None, release_now=True):
                self.stayed_bytes += value.num_bytes
                return
            self.swapped_bytes += value.num_bytes
        self.let_go(handle, value, tensor)

    # ---- exposed memory

    def keep_from_now_on(self, storage: torch.UntypedStorage) -> None:
        """Let nothing leave that is saved on a storage later: it may be written unseen at any time."""
        self.table.new(-1, storage).is_external = True


class SupersetRule:
    """Decides about the saves of a step under a plan for another structure.

    Args:
        program: The plan's.
        follower: Where the step is in it.
        policy: Lets leave what is to.
        ledger: What stays, and what leaves late.

    Attributes:
        num_unmatched: Saves that the plan does not have.
        num_missing: Saves that the plan has and the step did not.
    """

    def __init__(self, program: Program, follower: ByForm, policy: OffloadAll, ledger: Ledger) -> None:
        self.num_unmatched = self.num_missing = 0
        self.ledger = ledger
        self._program, self._follower, self._policy, self._table = program, follower, policy, policy.table
        self._slack_bytes = _slack_bytes(program)
        self._num_bytes_apart = 0  # unmatched in a row
        self._unmatched: list[weakref.ref[Handle]] = []  # that have left

    def save(self, handle: Handle, tensor: Tensor, *, is_plain: bool, num_unpacks: int) -> int:
        """Decide about what a handle keeps; the place of its pack in the plan, or -1.

        Args:
            handle: The handle.
            tensor: What it keeps.
            is_plain: Whether that has a storage of its own that the plan may be about.
            num_unpacks: Unpacks so far.
        """
        if self.ledger.is_due:
            self.let_late_ones_go()
        follower = self._follower
        before = follower.place
        place = follower.pack(handle.index, tensor, is_plain=is_plain, num_unpacks=num_unpacks)
        if place >= 0:
            self._num_bytes_apart = 0
            self.num_missing += place - before
            self._policy.release(self._program.release_at_pack, range(before, place))
        else:
            self.num_unmatched += 1
            if follower.num_unmatched == _MANY_UNMATCHED:
                self._let_go_of_what_was_kept()
        if is_plain and not is_parameter(tensor):  # whose memory is the program's
            self._decide(handle, tensor, place)
        if place >= 0:
            self._policy.release(self._program.release_at_pack, (place,))
        return place

    def _decide(self, handle: Handle, tensor: Tensor, place: int) -> None:
        storage, ledger = tensor.untyped_storage(), self.ledger
        num_bytes, value = storage.nbytes(), self._table.find(storage)
        index = self._follower.route.storages[place] if place >= 0 else -1
        decision = self._program.decisions.get(index)
        if value is not None and value.is_external:  # what exposed it may have come before
            self._policy.took_data |= decision is not None
        elif value is not None and value.block is not None:
            if self._policy.sees_ops or value.is_as_saved(handle):
                self._policy.let_go(handle, value, tensor)
        elif self._is_external(place, storage, value):
            pass
        elif ledger.is_staying(storage):
            ledger.stays_too(handle)
        elif ledger.is_late(storage):  # for another save by the same op
            ledger.add_late(handle)
        elif decision is not None and num_bytes:
            ledger.add_late(handle, index)  # the step may have another op there, which writes what it has saved
        elif num_bytes > TINY_BYTES and num_bytes > self._room(place):  # copying less costs more than it takes
            ledger.astray_bytes += num_bytes
            ledger.add_late(handle)
            if place < 0:
                self._note_bytes_apart(num_bytes)
        else:
            ledger.stays(handle, storage)

    def _is_external(self, place: int, storage: torch.UntypedStorage, value: LiveValue | None) -> bool:
        """Whether a saved storage was there before the step, and stays."""
        if place >= 0 and place not in self._program.made_packs:
            return True
        return value is None if self._policy.sees_ops else storage._cdata in self._policy.outliving()

    def _room(self, place: int) -> int:
        """What may stay beyond what does: what the plan has kept by now, and the step has not."""
        behind = place + 1 if place >= 0 else self._follower.place
        if not behind or self._follower.num_unmatched >= _MANY_UNMATCHED:
            return 0
        return self._follower.route.kept_bytes[behind - 1] - self.ledger.alive_bytes

    def _note_bytes_apart(self, num_bytes: int) -> None:
        """What the plan does not have takes so much more: what goes with it may take as much, and nobody counted it."""
        before, self._num_bytes_apart = self._num_bytes_apart, self._num_bytes_apart + num_bytes
        if before <= self._slack_bytes < self._num_bytes_apart and self._follower.num_unmatched < _MANY_UNMATCHED:
            self._let_go_of_what_was_kept()

    def _let_go_of_what_was_kept(self) -> None:
        self._policy.release_all()
        if torch._C._current_graph_task_id() == -1:
            self.ledger.let_all_go()

    def let_late_ones_go(self) -> None:
        """Let leave what was to once an op is done: it is."""
        for handle, index in self.ledger.take_late():
            tensor = handle.kept
            assert tensor is not None
            if index < 0:
                self._policy.give_up(handle, tensor)
                if handle.value is not None and handle.value.index < 0:
                    self._unmatched.append(weakref.ref(handle))
            elif handle.was_written or not self._leaves_as_planned(handle, tensor, index):
                self.ledger.stays(handle, tensor.untyped_storage())

    def _leaves_as_planned(self, handle: Handle, tensor: Tensor, index: int) -> bool:
        policy, follower = self._policy, self._follower
        if tensor.device != policy.materializer.device:
            return False
        storage = tensor.untyped_storage()
        value = self._table.find(storage)
        if value is not None and (value.is_external or value.block is not None):
            return False
        if value is None:
            value = self._table.new(index, storage)
        else:
            self._table.name(value, index)
        policy.materializer.come_after(handle)
        is_at_once = self._program.decisions[index].release_op == AT_PACK
        is_due = is_at_once or follower.route.releases.get(index, follower.place) < follower.place
        if not policy.materializer.swap_out(value, storage, self._program.places.get(index), release_now=is_due):
            if not policy.sees_ops:
                self._table.drop(storage)
            return False
        policy.swapped_bytes += value.num_bytes
        if not policy.sees_ops:
            handle.watch(value)
        policy.let_go(handle, value, tensor)
        return True

    def forward_ends(self) -> None:
        """Backward begins: what forward lacked at its end does not come any more."""
        self.let_late_ones_go()  # no op is under way
        missing = range(self._follower.place, self._program.num_first_packs)
        self._policy.release(self._program.release_at_pack, missing)
        self.num_missing += len(missing)

    def fetch_next(self, value: LiveValue) -> None:
        """Begin to bring back what backward will want after a value that was unmatched: what was saved before it."""
        if value.index >= 0:
            return
        while self._unmatched:
            handle = self._unmatched.pop()()
            last = handle.value if handle is not None else None
            if handle is not None and last is not None and last is not value:
                self._policy.materializer.fetch(last)
                self._unmatched.append(weakref.ref(handle))
                break


def _slack_bytes(program: Program) -> int:
    """What may be unmatched before it matters: what the budget has room for beyond the plan, or a small part of it."""
    budget_bytes = program.plan.budget_bytes
    if budget_bytes is None:
        return sys.maxsize
    return max(budget_bytes - program.plan.predicted_peak_bytes, int(_MUCH_UNMATCHED * budget_bytes))
