"""Replays recorded calls: the exact way to have a value again that was dropped.

A replay runs the calls that lead to a value, in order, from what is still at hand. It runs with autocast and our
dispatch mode off, under the settings and from the generator's state of the original call, both restored afterwards,
and with batch norm's running statistics left out. A call that writes in place gets a copy of the whole storage of every
argument it writes, unless that storage is the replay's own and has no other reader. A call that makes something of
another size or number than it did is an error, as is one that raises.

Note [Rehearsals]: a replay is tried before the original is given up by replaying, from what will still be at hand then,
all that will not be: every value that has a call and no memory of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_offload.accelerators import generator_of
from lightning_offload.errors import OffloadError, ReplayError
from lightning_offload.runtime.environment import Environment
from lightning_offload.runtime.hooks import DisableTorchFunction
from lightning_offload.runtime.kernel_keys import call_unseen
from lightning_offload.runtime.lanes import storage_bytes
from lightning_offload.runtime.values import Blank, Call, LiveValue, Ref
from lightning_offload.tensors import modes
from lightning_offload.tensors.geometry import Geometry
from lightning_offload.tensors.op_facts import OpFacts, effects, is_plain, tensors_in

Have = Callable[[LiveValue], torch.UntypedStorage]
Notice = Callable[[torch.UntypedStorage], None]
Keep = Callable[[LiveValue, torch.UntypedStorage], None]
Inputs = dict[LiveValue, None]
RefOf = Callable[[Tensor, Inputs], Ref]


class Unrecordable(Exception):
    """A call reads something that a replay could not have."""


def record_call(
    func: Any,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ref_of: RefOf,
    *,
    device: torch.device,
    environment: Environment,
    blank: Tensor | None = None,
) -> Call:
    """Record a call that is about to run.

    Args:
        func: The overload.
        facts: Facts about it.
        args: Positional arguments.
        kwargs: Keyword arguments.
        ref_of: Gives what stands for a tensor among the arguments, and notes the value that it holds now, or raises
            ``Unrecordable``.
        device: Where it runs.
        environment: The settings that it runs under.
        blank: The first argument, where it is written without being read.
    """
    args = facts.recorded_args(args)
    drawn = None
    if facts.is_random:
        generator = _generator(args, kwargs)
        drawn = generator, generator.get_state()
    inputs: Inputs = {}
    frozen: list[Any] = []
    if blank is not None:
        frozen.append(Blank(blank.untyped_storage().nbytes(), Geometry.of(blank)))
        args = args[1:]
    is_flat = True
    for item in args:
        kind = item.__class__
        if kind is Tensor or kind is Parameter:
            frozen.append(ref_of(item, inputs))
        elif kind in _ATOMS:
            frozen.append(item)
        else:
            is_flat = is_flat and not _is_nested(item)
            frozen.append(_freeze(item, ref_of, inputs))
    if kwargs:
        is_flat = is_flat and not any(isinstance(item, Tensor) or _is_nested(item) for item in kwargs.values())
        kwargs = {name: _freeze(item, ref_of, inputs) for name, item in kwargs.items()}
    return Call(func, facts, frozen, kwargs, tuple(inputs), device, environment, drawn, is_flat=is_flat)


_ATOMS = frozenset({int, float, bool, type(None)})


def _is_nested(item: Any) -> bool:
    """Whether an argument may have tensors within; sizes have none."""
    return isinstance(item, (list, tuple)) and not (item and item[0].__class__ is int)


def _freeze(item: Any, ref_of: RefOf, inputs: Inputs) -> Any:
    if isinstance(item, Tensor):
        return ref_of(item, inputs)
    if _is_nested(item):
        return type(item)([_freeze(part, ref_of, inputs) for part in item])
    return item


def _memory(num_bytes: int, device: torch.device, notice: Notice | None) -> torch.UntypedStorage:
    storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
    if notice is not None:
        notice(storage)
    return storage


def _generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that a random call draws from: its argument, else the default one of its device."""
    for item in (*args, *kwargs.values()):
        if isinstance(item, torch.Generator):
            return item
    device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
    if device is None:
        device = torch.device(kwargs.get("device") or "cpu")
    return generator_of(device)


def chain_to(value: LiveValue, must_replay: Callable[[LiveValue], bool]) -> list[Call]:
    """The calls to replay for a value, in order; depth first from what is at hand."""
    order: list[Call] = []
    done: set[Call | None] = {None}
    stack: list[tuple[Call | None, bool]] = [(value.call, False)]
    while stack:
        call, expanded = stack.pop()
        if call is None or call in done:
            continue
        if expanded:
            done.add(call)
            order.append(call)
            continue
        stack.append((call, True))
        for v in reversed(call.inputs):
            if v.call not in done and must_replay(v):
                stack.append((v.call, False))
    return order


def _is_gone(value: LiveValue) -> bool:
    return value.block is None and (value.live() is None or value.is_stale)


def _may_be_gone(value: LiveValue) -> bool:
    return value.call is not None and value.block is None and value.storage is None


class _Memory(dict[LiveValue, torch.UntypedStorage]):
    """By value: the memory that holds it, for as long as a replay needs that.

    Attributes:
        readers: By value: how many calls of the chain are still to read it.
        made: Those that the replay made itself.
    """

    def __init__(self, calls: list[Call], wanted: LiveValue) -> None:
        super().__init__()
        self.made: set[LiveValue] = set()
        self.readers = readers = {wanted: 1}
        for call in calls:
            for v in call.inputs:
                readers[v] = readers.get(v, 0) + 1

    def is_spare(self, value: LiveValue) -> bool:
        """Whether a call may write it: the replay's own, and nobody reads it later."""
        return value in self.made and not self.readers[value] and value.live() is None


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """Makes values again by replaying the calls that made them, under the settings that those ran under.

    Attributes:
        have: Provides a value that need not be replayed.
        notice: Told of every storage that a replay allocates; None for nobody.
        keep: Told of every value made on the way to another, and its memory; may let it stay resident.
        is_rehearsal: Whether to replay what is still at hand and will not be, and to keep nothing.
    """

    have: Have
    notice: Notice | None
    keep: Keep
    is_rehearsal: bool = False

    def make(self, value: LiveValue) -> torch.UntypedStorage:
        """Make a value again.

        Args:
            value: What is wanted; it has a call, and no memory.

        Returns:
            Device memory with the value, owned by nobody yet.

        Raises:
            ReplayError: The value cannot be made again, or came out otherwise.
            StaleInputError: What a call reads was written since.
        """
        calls = chain_to(value, _may_be_gone if self.is_rehearsal else _is_gone)
        if not calls:
            raise ReplayError("a saved tensor was to be recomputed but its producer was not recorded in this step")
        memory = _Memory(calls, value)
        before = current = calls[0].environment.now()
        hidden = modes.take_off()
        try:
            with torch._C._DisableAutocast(), DisableTorchFunction():
                for call in calls:
                    if call.environment is not current:
                        call.environment.put(current)
                        current = call.environment
                    self._run(call, memory)
        finally:
            modes.put_back(hidden)
            if current is not before:
                before.put(current)
        storage = memory.get(value, value.storage)
        if storage is None:
            raise ReplayError(f"{calls[-1].facts.name} did not give on replay what it gave at first")
        return storage

    def _run(self, call: Call, memory: _Memory) -> None:
        """Run a call again. What no later call reads is held by its arguments alone meanwhile, and then by nobody."""
        readers = memory.readers
        for v in call.inputs:
            readers[v] -= 1
        copies = self._written_copies(call, memory) if call.facts.mutates else {}
        args = [item if item.__class__ in _ATOMS else self._thaw(item, memory, copies) for item in call.args]
        kwargs = call.kwargs and {name: self._thaw(item, memory, copies) for name, item in call.kwargs.items()}
        for v in call.inputs:
            if not readers[v]:
                memory.pop(v, None)
        made = self._made_by(call, args, kwargs)
        for position, reference in call.results.items():
            result = reference()
            if result is None or not (self.is_rehearsal or result.live() is None or result.is_stale):
                continue
            tensor = made[position] if position < len(made) else None
            storage = tensor.untyped_storage() if tensor is not None else None
            if tensor is None or storage is None or storage.nbytes() != result.num_bytes:
                size = "nothing" if storage is None else f"{storage.nbytes()} bytes"
                raise ReplayError(f"{call.facts.name} gave {size} on replay in place of {result.num_bytes} bytes")
            if not self.is_rehearsal:
                self.keep(result, storage)
            if readers.get(result):
                memory[result] = storage
                memory.made.add(result)

    def _storage(self, value: LiveValue, memory: _Memory) -> torch.UntypedStorage:
        """What holds a value now."""
        storage = memory.get(value)
        if storage is None:
            storage = self.have(value)
            if memory.readers[value]:
                memory[value] = storage
        return storage

    def _written_copies(self, call: Call, memory: _Memory) -> _Copies:
        """A copy for the call alone of each storage that it writes and that is not the replay's own to write."""
        copies: _Copies = {}
        for ref in _written_refs(call):
            value = ref.value
            if value not in copies and not memory.is_spare(value):
                original = self._storage(value, memory)
                copy = copies[value] = _memory(original.nbytes(), original.device, self.notice)
                storage_bytes(copy).copy_(storage_bytes(original))
        return copies

    def _thaw(self, item: Any, memory: _Memory, copies: _Copies) -> Any:
        if isinstance(item, Ref):
            value, geometry = item
            return geometry.view(copies[value] if value in copies else self._storage(value, memory))
        if isinstance(item, Blank):
            return item.geometry.view(_memory(item.num_bytes, item.geometry.device, self.notice))
        if _is_nested(item):
            return type(item)([self._thaw(part, memory, copies) for part in item])
        return item

    def _made_by(self, call: Call, args: list[Any], kwargs: Any) -> list[Tensor]:
        """Run a call; what it makes on its device, in order. Numbers that it gives elsewhere are not asked for."""
        try:
            if call.generator is None:
                out = call_unseen(call.func, args, kwargs)
            else:
                generator, state = call.generator
                current = generator.get_state()
                generator.set_state(state)
                try:
                    out = call_unseen(call.func, args, kwargs)
                finally:
                    generator.set_state(current)
        except (OffloadError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ReplayError(f"{call.facts.name} could not be run again: {error}") from error
        if self.notice is None and call.is_flat and out.__class__ is Tensor and out.device == call.device:
            if call.facts.mutates:
                if call.facts.writes_first_alone and out is args[0]:
                    return [out]
            elif is_plain(out) and _is_apart(out.untyped_storage(), args):
                return [out]
        did = effects(call.facts, args, kwargs, out)
        made: list[Tensor] = []
        for position, (tensor, storage) in enumerate(zip(did.made, did.made_on, strict=True)):
            if tensor.device == call.device:
                made.append(tensor)
                if self.notice is not None and position < did.num_fresh:
                    self.notice(storage)
        return made


def _is_apart(storage: torch.UntypedStorage, args: list[Any]) -> bool:
    """Whether no argument lies on a storage."""
    for item in args:  # noqa: SIM110  (asked for each call that is replayed)
        if item.__class__ is Tensor and item.untyped_storage() is storage:
            return False
    return True


_Copies = dict[LiveValue, torch.UntypedStorage]


def _written_refs(call: Call) -> Iterator[Ref]:
    found: list[Any] = []
    for position, name in call.facts.writes:
        found.append(call.args[position] if position < len(call.args) else call.kwargs.get(name))
    while found:
        item = found.pop()
        if isinstance(item, Ref):
            yield item
        elif isinstance(item, (list, tuple)):
            found.extend(item)
