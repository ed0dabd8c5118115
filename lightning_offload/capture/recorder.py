"""Records one step as a :class:`~lightning_offload.graph.StepGraph`, as an observer of the step.

The step runs under the offload-all fallback meanwhile (everything saved is swapped out at once), so that the lifetimes
seen are those of the program's own references, and a step that would not fit can be recorded all the same. A
storage's death is seen through a weak reference to its Python object, which torch keeps for as long as the
storage lives; the same references count the live bytes. What no tier had room for the runtime holds: if it dies as
autograd drops it, the program is taken to have dropped it after its last op before backward read it. Works the same
under FakeTensorMode, with modelled in place of measured times and no workspaces.

Note [lives of a storage]: one that the program resizes has several lives, each a storage of the graph: with a resize
one ends and the next begins. Its memory is the program's to give and to take: what is saved on it is kept, and what was
saved before a resize holds no memory of its own, so it stands in the graph on a storage without bytes. The last life
ends where the storage dies, with whoever holds it, autograd included: nothing on it has left the device.

Note [what no scan knows]: what a live scan found was there when the step began. What it does not know and an op reads
was made out of sight (autograd without a mode, compiled code, C++). If it dies in the step, it was there from where it
was first seen until then. If it lives on it counts from the beginning: it may be older and known to C++ alone, as DDP's
buckets are, or lie on memory that torch did not allocate. What is saved on it stays, but where the process has compiled
code: then that has made it, and it may leave.

On an accelerator an op's duration is the device's, read at the end; its workspace is read off an allocator that
counts: Note [the peak is reset for each op].
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_offload.accelerators import DeviceKind, generator_of, kind_of
from lightning_offload.capture.live import Counted, LiveBytes
from lightning_offload.capture.module_names import ModuleNames
from lightning_offload.capture.timing import HostClock, OpClock, clock_for
from lightning_offload.capture.witness import Witness
from lightning_offload.capture.workspace import OpMemory, Workspaces, tries_algorithms, workspaces_on
from lightning_offload.graph.step_graph import MadeGradient, Op, Phase, Save, StepGraph, Storage, Value
from lightning_offload.tensors import compiled_code, custom_ops
from lightning_offload.tensors.custom_ops import Standing
from lightning_offload.tensors.op_facts import (
    ALL_REDUCE,
    Effects,
    OpFacts,
    effects,
    is_at_hand,
    is_leaf,
    is_plain,
    parts_of,
)
from lightning_offload.tensors.saved_forms import SavedForm, form_of

Price = Callable[[OpFacts, Any, Any, Any], float]
"""Models the duration of a call in seconds from the op, its arguments and its result."""

_ALIVE = -1


class _Row(NamedTuple):
    """What is known of an op before its duration is; a tuple, which costs less than an :class:`Op`."""

    name: str
    module: str
    phase: Phase
    tick: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    replayable: bool
    workspace_bytes: int
    unreplayed: tuple[int, ...]

    def op(self, seconds: float) -> Op:
        return Op(seconds=seconds, **self._asdict())


class _Lifetimes:
    """Sizes and lifetimes of storages as columns of ints: a long step has so many that objects would burden the GC.

    Attributes:
        num_bytes: By storage.
        birth: By storage: the tick that made it; -1 if it was there before the step and is no life that a resize ended.
        death: By storage: the tick at which it died, or :data:`_ALIVE`. That of a storage from before the step does
            not show in the graph.
    """

    __slots__ = ("birth", "death", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes: list[int] = []
        self.birth: list[int] = []
        self.death: list[int] = []

    def add(self, num_bytes: int, birth: int) -> int:
        """Enter a storage; its index."""
        self.num_bytes.append(num_bytes)
        self.birth.append(birth)
        self.death.append(_ALIVE)
        return len(self.birth) - 1


@dataclasses.dataclass(slots=True)
class _Save:
    value: int
    pack_tick: int
    module: str
    must_keep: bool
    is_unsure: bool = False  # kept unless what it is of turns out to be older than the step
    unpack_ticks: list[int] = dataclasses.field(default_factory=list)
    release_tick: int | None = None


class Recorder(LiveBytes):
    """Builds a step graph from the events of one step.

    Args:
        device: Where the step computes; what lies elsewhere, on another device of its type too, does not count.
        module: The model; its parts are named after it.
        price: Models durations; by default they are measured.
        clock: Measures durations; by default the device's own.
        memory: Measures workspaces; by default as there is a way on the device.
        there: The storages that are there when the step begins, for the peaks that :class:`LiveBytes` counts; None
            where nobody looked, so that whatever is read and was not made counts as older than the step.
        kind: The kind of device that the step is recorded for, where its tensors only stand for those of another; by
            default the device's own.

    Attributes:
        leaves: Weak references to the tensors with ``requires_grad`` that the step read and did not make.
        num_unpacks: Unpacks seen so far.
        saved_forms: What each saved tensor looks like, in order.
        open_sizes: Sizes that depended on data.
        custom_ops: What calls of custom ops have shown, by identity.
        draws_numbers: Whether it drew random numbers, from the generator that ops draw from by default.
    """

    def __init__(
        self,
        device: torch.device,
        module: torch.nn.Module | None = None,
        price: Price | None = None,
        *,
        clock: OpClock | None = None,
        memory: Workspaces | None = None,
        there: Iterable[torch.UntypedStorage] | None = None,
        kind: DeviceKind | None = None,
    ) -> None:
        is_real = price is None
        super().__init__(device, there or (), workspaces=memory or (workspaces_on(device) if is_real else None))
        self._has_live_scan = there is not None
        self._unseen: set[int] = set()  # storages that no scan knows
        self._saves_on: dict[int, list[_Save]] = {}
        self._held: set[int] = set()  # storages that the runtime holds
        self._kind = kind or kind_of(self._device)
        self.leaves: dict[int, weakref.ref[Tensor]] = {}
        self.num_unpacks = 0
        self.saved_forms: list[SavedForm] = []
        self.open_sizes: set[int] = set()
        self.custom_ops: dict[str, Standing] = {}
        self.draws_numbers = False
        self._witness: Witness | None = None
        self._is_on_cpu = self._kind.type == "cpu"
        self._price = price
        self._clock = clock or (clock_for(self._device) if is_real else HostClock())
        self._memory = self._workspaces if isinstance(self._workspaces, OpMemory) else None
        self._modules = ModuleNames(module)
        self._ops: list[_Row] = []
        self._storages = _Lifetimes()
        self._latest: list[int] = []
        self._value_storage: list[int] = []
        self._value_producer: list[int] = []
        self._saves: list[_Save] = []
        self._backward_module = ""
        self._external_tensors: dict[int, weakref.ref[Tensor]] = {}  # by storage from before the step: a tensor on it
        self._left: dict[int, int] = {}  # its version, as the last scope left it
        self._made_gradients: dict[int, int] = {}  # by storage: the tick from which on it is a gradient
        self._had_no_gradient: set[int] = set()  # leaves, as backward began
        self._hooks: list[RemovableHandle] = []
        self._forget_hooks = weakref.finalize(self, _remove_all, self._hooks)
        self._closed = False
        self._saw_backward_op = False
        self._random_state: bytes | None = None  # no tensor, which would be on the device beside the step

    # ---- events

    @override
    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._closed:
            return
        self._witness = None
        if facts.custom and self._price is None and custom_ops.is_watched(facts.custom):
            self._witness = Witness(facts, args, kwargs) if Witness.can_watch(args, kwargs) else None
        super().before_op(facts, args, kwargs)
        self._clock.before_op()

    @override
    def on_op(
        self, facts: OpFacts, args: Any, kwargs: Any, out: Any, seconds: float, did: Effects | None = None
    ) -> None:
        if self._closed:
            return
        self._clock.after_op(seconds if self._price is None else self._price(facts, args, kwargs, out))
        workspace_bytes = self._workspaces.after_op() if self._workspaces is not None else 0
        if workspace_bytes and tries_algorithms(facts.name):
            workspace_bytes = 0
        if self._witness is not None:
            self._note_standing(facts.custom, self._witness.judge(out, self._was_there))
            self._witness = None
        read, made, num_fresh, read_from, made_on = did if did is not None else effects(facts, args, kwargs, out)
        if self._dead:
            self._forget_dead()
        if facts.may_make_any_size and facts.makes_any_size(args):
            self.open_sizes.update(size for tensor in made for size in tensor.shape[:1] if isinstance(size, int))
        device = self._device
        is_replayable = facts.replayable if self._is_on_cpu else facts.may_replay(self._kind.type, args)
        if is_replayable and compiled_code.is_in_use() and compiled_code.hides_writes():
            is_replayable = False
        inputs: list[int] = []
        for tensor, read_storage in zip(read, read_from, strict=True):
            is_replayable = is_replayable and not tensor.is_inference()
            if read_storage is not None and tensor.device == device:
                inputs.append(self._value_of(tensor, read_storage))
            elif is_replayable and not is_at_hand(tensor, device):
                is_replayable = False
        for tensor, written_storage in zip(made[num_fresh:], made_on[num_fresh:], strict=True):
            if tensor.device == device:
                self._value_of(tensor, written_storage)  # which may have another size now
        index, tick = len(self._ops), self._tick
        self._tick = tick + 1
        outputs: list[int] = []
        is_only_here = True
        for position, (tensor, made_storage) in enumerate(zip(made, made_on, strict=True)):
            if tensor.device == device:  # and it is plain: others count as made by nobody
                if position < num_fresh:
                    storage = self._enter(made_storage, tick)
                else:
                    storage = self._value_storage[self._value_of(tensor, made_storage)]
                outputs.append(self._new_value(storage, index))
            elif not is_at_hand(tensor, device):
                is_only_here = False
        if workspace_bytes and self._memory is None:
            self._rise(workspace_bytes)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self._saw_backward_op = True
        self._ops.append(
            _Row(
                facts.name,
                self._backward_module if in_backward else self._modules.current(),
                "backward" if in_backward else "forward",
                tick,
                tuple(dict.fromkeys(inputs)) if len(inputs) > 1 else tuple(inputs),  # each once
                tuple(outputs),
                # A number elsewhere (attention's seed) is not made again; those who read it have the first one.
                is_replayable and is_only_here and bool(outputs) == bool(made),
                workspace_bytes,
                tuple(outputs[num_fresh:]) if facts.running_stats else (),
            )
        )

    @override
    def on_made(self, tensors: list[Tensor]) -> None:
        if self._closed:
            return
        tick = self._next_tick()
        for tensor in tensors:
            if self._counts(tensor):
                storage = tensor.untyped_storage()
                if self._find(storage) is None:
                    self._new_value(self._enter(storage, tick), -1)
                else:
                    self._value_of(tensor, storage)

    @override
    def on_pack(self, index: int, tensor: Tensor, is_plain: bool) -> None:
        if self._closed:
            return
        if is_plain and self._counts(tensor):
            storage = tensor.untyped_storage()
            value = self._value_of(tensor, storage)
            is_unsure = self._value_storage[value] in self._unseen
            # A parameter that lies on memory of the step's, as a sharded one may, is the program's: it stays.
            must_keep = self._live[storage._cdata].stays or (
                tensor.__class__ is Parameter and self._storages.birth[self._value_storage[value]] >= 0
            )
            must_keep = must_keep or (is_unsure and not storage.resizable())
        else:
            value, must_keep, is_unsure = self._of_no_size(), True, False
        save = _Save(value, self._next_tick(), self._modules.current(), must_keep=must_keep, is_unsure=is_unsure)
        self._saves_on.setdefault(self._value_storage[value], []).append(save)
        assert index == len(self._saves)
        self._saves.append(save)
        self.saved_forms.append(form_of(tensor, is_plain=is_plain))

    @override
    def on_stay(self, storage: torch.UntypedStorage) -> None:
        if not self._closed and (found := self._find(storage)) is not None and found.index >= 0:
            self._held.add(found.index)

    @override
    def on_overwrite(self, index: int) -> None:
        if not self._closed:
            self._saves[index].must_keep, self._saves[index].is_unsure = True, False

    @override
    def on_unpack(self, index: int) -> None:
        self.num_unpacks += 1
        if not self._closed:
            if self._left:
                self._note_unseen_writes()
            self._saves[index].unpack_ticks.append(self._next_tick())
            self._backward_module = self._saves[index].module

    @override
    def on_unpacked(self, index: int, storage: torch.UntypedStorage) -> None:
        if self._closed:
            return
        found = self._find(storage)
        if found is None:
            found = self._follow(storage, is_older=False)  # its death is not the graph's business
        if found.index < 0:
            found.index = self._value_storage[self._saves[index].value]

    @override
    def on_release(self, index: int) -> None:
        if not self._closed:
            self._saves[index].release_tick = self._tick

    @override
    def on_allocation(self, storage: torch.UntypedStorage) -> None:
        if not self._closed:
            self._follow(storage, is_older=False)

    def watch_gradients(self, trainable: Iterable[Tensor]) -> None:
        """Backward begins: note when it has made the gradient of each leaf that was read, and of some others.

        Of plain tensors, that is: sharded ones have their gradients from elsewhere, lazy ones have none.
        """
        on_made = weakref.WeakMethod(self._on_gradient)

        def hook(leaf: Tensor) -> None:
            if (note := on_made()) is not None:
                note(leaf)

        read = (leaf for leaf in (reference() for reference in self.leaves.values()) if leaf is not None)
        for leaf in {id(leaf): leaf for leaf in (*trainable, *read)}.values():
            if is_plain(leaf) and leaf.requires_grad and is_leaf(leaf):
                if leaf.grad is None and compiled_code.is_in_use():
                    self._had_no_gradient.add(id(leaf))
                self._on_gradient(leaf)  # what reads nothing back comes before anything that does
                self._hooks.append(leaf.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """The step is given up: nothing is noted any more."""
        self._closed = True
        self._forget_hooks()

    def _on_gradient(self, leaf: Tensor) -> None:
        if self._closed or leaf.grad is None:
            return
        for part in filter(self._counts, parts_of(leaf.grad)):
            found = self._find(part.untyped_storage())
            if found is not None and found.index >= 0 and self._storages.birth[found.index] >= 0:
                self._made_gradients[found.index] = self._tick
                if id(leaf) in self._had_no_gradient:
                    self._unseen.discard(found.index)  # what compiled code made in this step, though it lives on

    def begin_scope(self) -> None:
        """A scope of the step begins."""
        self._random_state = self._random_state_now()
        if self._left and not self._closed:
            self._note_unseen_writes()

    @override
    def on_resized(self, storage: torch.UntypedStorage, num_bytes_before: int) -> None:
        super().on_resized(storage, num_bytes_before)
        if not self._closed:
            self._next_tick()

    def end_scope(self) -> None:
        """A scope of the step ends, after which ops are not seen until there is another.

        What was there before the step may be written until backward reads what the step saved: by an optimizer, by an
        average of weights, by whoever fills the batch anew. Calls that read it cannot be replayed from then on.
        """
        if self._random_state is not None:
            before, self._random_state = self._random_state, None
            self.draws_numbers |= before != self._random_state_now()
        self._left = {}
        for storage, reference in self._external_tensors.items():
            tensor = reference()
            if tensor is not None and not tensor.is_inference():
                self._left[storage] = tensor._version

    def _random_state_now(self) -> bytes:
        return generator_of(self._device).get_state().numpy().tobytes()

    def _note_standing(self, op: str, seen: Standing) -> None:
        before = self.custom_ops.get(op)
        self.custom_ops[op] = before.and_seen(seen) if before is not None else seen

    def _was_there(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage was there before the op that has just run."""
        return self._find(storage) is not None

    # ---- identity

    def _note_unseen_writes(self) -> None:
        """What was written since the last scope ended holds another value now."""
        for storage, version in self._left.items():
            tensor = self._external_tensors[storage]()
            if tensor is not None and tensor._version != version:
                self._new_value(storage, -1)
        self._left = {}

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and is_plain(tensor)

    def _next_tick(self) -> int:
        self._forget_dead()  # they died at this tick
        self._tick += 1
        return self._tick - 1

    def _value_of(self, tensor: Tensor, storage: torch.UntypedStorage) -> int:
        """The value a tensor holds; a storage not seen before is older than the step: Note [what no scan knows]."""
        found = self._live.get(storage._cdata)
        if found is None or found() is not storage:
            found = self._follow(storage, is_older=True)
            self._meet(found)
        else:
            if found.index < 0:
                self._meet(found)
            if found.num_bytes != storage.nbytes():
                self._resized(found, storage.nbytes())
        index = found.index
        if found.is_older:
            known = self._external_tensors.get(index)
            if known is None or known() is None:
                self._external_tensors[index] = weakref.ref(tensor)
            if tensor.requires_grad and is_leaf(tensor):
                self.leaves.setdefault(id(tensor), weakref.ref(tensor))
        return self._latest[index]

    def _meet(self, counted: Counted) -> None:
        """Enter a storage that the step did not make in our sight."""
        self._touch(counted)
        known = self.external.get(counted.key)
        is_unseen = self._has_live_scan and (known is None or known[0] is not counted)
        index = self._entered(counted, self._tick if is_unseen else -1)
        if is_unseen:
            counted.stays = not compiled_code.is_in_use()  # else it is taken for what that has made
            self._unseen.add(index)
        self._new_value(index, -1)

    @override
    def _resized(self, found: Counted, num_bytes: int) -> None:
        """Begin another life: Note [lives of a storage]. The tick at which it begins is yet to be taken."""
        if self._closed:
            super()._resized(found, num_bytes)
            return
        if found.index < 0 and found.deaths is None:
            self._meet(found)
        super()._resized(found, num_bytes)
        if found.deaths is not None:
            found.deaths[found.row] = self._tick + 1
        if found.deaths is self._storages.death:
            self._end_life(found.index)
        found.index = found.row = self._new_storage(num_bytes, self._tick)
        found.deaths, found.stays = self._storages.death, True
        self._new_value(found.index, -1)

    def _end_life(self, storage: int) -> None:
        if self._storages.birth[storage] < 0:
            self._storages.birth[storage] = 0
        for save in self._saves_on.pop(storage, ()):
            save.value, save.must_keep = self._of_no_size(), True

    def _of_no_size(self) -> int:
        """A value on a storage of its own without bytes, for what is saved and has no memory that counts."""
        return self._new_value(self._new_storage(0, -1), -1)

    def _enter(self, storage: torch.UntypedStorage, birth: int) -> int:
        """Follow a storage that was not met before; its index."""
        return self._entered(self._follow(storage, is_older=birth < 0), birth)

    def _entered(self, counted: Counted, birth: int) -> int:
        counted.index = counted.row = index = self._new_storage(counted.num_bytes, birth)
        counted.deaths = self._storages.death
        return index

    def _new_storage(self, num_bytes: int, birth: int) -> int:
        self._latest.append(-1)
        return self._storages.add(num_bytes, birth)

    def _new_value(self, storage: int, producer: int) -> int:
        self._latest[storage] = value = len(self._value_storage)
        self._value_storage.append(storage)
        self._value_producer.append(producer)
        return value

    # ---- result

    def persistent_ids(self) -> dict[int, weakref.ref[torch.UntypedStorage]]:
        """The storages from before the step that it touched and that still live, by identity."""
        return {
            key: reference
            for key, reference in self._live.items()
            if reference.index >= 0 and reference() is not None and reference.is_older
        }

    def left_at(self) -> dict[int, int]:
        """The tick at which each was made of the storages that the step made and that still live, by identity."""
        return {
            key: self._storages.birth[counted.index]
            for key, counted in self._live.items()
            if counted.index >= 0 and counted() is not None and self._storages.birth[counted.index] >= 0
        }

    def all_reduced(self) -> dict[int, weakref.ref[torch.UntypedStorage]]:
        """Those of them that backward all-reduces, by identity."""
        ops = [op for op in self._ops if op.phase == "backward" and op.name.startswith(ALL_REDUCE)]
        reduced = {self._value_storage[value] for op in ops for value in op.inputs}
        return {key: self._live[key] for key in self.persistent_ids() if self._live[key].index in reduced}

    @property
    def allocator_peak_bytes(self) -> int | None:
        """The true peak of the device's allocator since the first op, up to now; None where it does not tell.

        Read it when the step's scope ends: what is allocated afterwards, by an optimizer say, counts too.
        """
        return self._memory.peak_bytes if self._memory is not None else None

    def finish(self) -> StepGraph:
        """End the recording and build the graph; later events are ignored. Waits for an accelerator."""
        with _without_collections():
            return self._finished()

    def _finished(self) -> StepGraph:
        self._forget_dead()
        self._closed = True
        self._forget_hooks()
        end, lifetimes = self._tick, self._storages
        for storage in self._unseen:
            if lifetimes.death[storage] == _ALIVE:
                lifetimes.birth[storage] = -1
        for storage, last in self._last_ticks_of_held().items():
            lifetimes.death[storage] = last + 1
        storages = tuple(
            Storage(num_bytes=num_bytes, birth=birth, death=end if death == _ALIVE or birth < 0 else min(death, end))
            for num_bytes, birth, death in zip(lifetimes.num_bytes, lifetimes.birth, lifetimes.death, strict=True)
        )
        saves = tuple(
            Save(
                value=s.value,
                pack_tick=s.pack_tick,
                unpack_ticks=tuple(s.unpack_ticks),
                release_tick=end if s.release_tick is None else s.release_tick,
                module=s.module,
                must_keep=s.must_keep and not (s.is_unsure and lifetimes.birth[self._value_storage[s.value]] < 0),
            )
            for s in self._saves
        )
        leaves = {t.untyped_storage()._cdata: t for t in (r() for r in self.leaves.values()) if t is not None}
        unseen = 0 if self._saw_backward_op else sum(t.untyped_storage().nbytes() for t in leaves.values())
        self._live.clear()
        return StepGraph(
            num_ticks=end,
            ops=tuple(row.op(seconds) for row, seconds in zip(self._ops, self._clock.resolve(), strict=True)),
            storages=storages,
            values=tuple(
                Value(storage=storage, producer=producer)
                for storage, producer in zip(self._value_storage, self._value_producer, strict=True)
            ),
            saves=saves,
            gradient_bytes=unseen,
            block_bytes=self._kind.block_bytes,
            made_gradients=tuple(
                MadeGradient(storage=storage, tick=tick)
                for storage, tick in sorted(self._made_gradients.items(), key=lambda item: item[1])
            ),
        )

    def _last_ticks_of_held(self) -> dict[int, int]:
        """By storage that the runtime alone held at its end: when the program used it last, reading it back aside."""
        last: dict[int, int] = {}
        read_back: dict[int, int] = {}
        for storage in self._held:
            saves = self._saves_on.get(storage, [])
            released = [save.release_tick for save in saves]
            death = self._storages.death[storage]
            if not saves or None in released or death == _ALIVE or death > max(filter(None, released), default=-1) + 1:
                continue
            last[storage] = max(save.pack_tick for save in saves)
            read_back[storage] = min((tick for save in saves for tick in save.unpack_ticks), default=self._tick)
        for row in self._ops if last else ():
            for storage in {self._value_storage[value] for value in (*row.inputs, *row.outputs)} & last.keys():
                if row.tick < read_back[storage]:
                    last[storage] = max(last[storage], row.tick)
        return last


def _remove_all(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector from looking through all objects while so many are made that are no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
