"""Tracks the values that ops make, and records the calls that a plan will replay with the values that they read.

All values are tracked under the offload-all fallback, those of the plan otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_offload.runtime.environment import Environment, environment_on
from lightning_offload.runtime.replay import Unrecordable, record_call
from lightning_offload.runtime.values import Call, LiveValue, Ref, ValueTable, share_counter, version_alias_of
from lightning_offload.tensors import modes
from lightning_offload.tensors.geometry import Geometry
from lightning_offload.tensors.op_facts import OpFacts, effects, is_at_hand, is_plain, sole_effect

PlannedResults = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""Of an op: sizes of the storages that it makes values on, and results to follow: (position, storage index)."""

_make_ref: Callable[..., Ref] = tuple.__new__  # a named tuple's own takes longer


class ValueTracker:
    """The values of one step, and the calls that a plan will replay.

    Args:
        device: Values elsewhere are of no interest.
        table: Where they are entered.
        is_bound: Whether the program's sizes are the largest that it is for.
    """

    def __init__(self, device: torch.device, table: ValueTable, *, is_bound: bool = False) -> None:
        self._is_bound = is_bound
        self._device = device
        self._table = table
        self._environment: Environment | None = None  # read where a call is recorded first: that takes long
        self._find = table.find
        self._geometries: dict[Geometry, Geometry] = {}
        self._is_cpu = device.type == "cpu"

    def follow(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        planned: PlannedResults | None,
        call: Call | None,
    ) -> str:
        """Follow the values that an op made, as :meth:`op` does, where nobody has asked yet what it made."""
        found = sole_effect(facts, args, kwargs, out)
        if found is None:
            did = effects(facts, args, kwargs, out)
            found = did.made, did.num_fresh
        return self.op(facts, *found, planned, call)

    def op(
        self,
        facts: OpFacts,
        made: list[Tensor],
        num_fresh: int,
        planned: PlannedResults | None,
        call: Call | None,
    ) -> str:
        """Follow the values that an op made.

        Args:
            facts: The op.
            made: What it made.
            num_fresh: How much of it is on fresh storages.
            planned: What the program has of its results; None without one.
            call: Its recording, if its results may have to be made again.

        Returns:
            How it did not do what the program counts on; "" if it did.
        """
        if planned is None:
            for tensor in made[:num_fresh]:
                self.new(tensor)
            return ""
        device = self._device
        if len(made) != 1 or made[0].device != device:  # attention gives CPU seeds on CUDA
            num_fresh = sum([tensor.device == device for tensor in made[:num_fresh]])
            made = [tensor for tensor in made if tensor.device == device]
        sizes, register = planned
        if len(made) != len(sizes):
            return f"{facts.name} made {len(made)} tensors in place of {len(sizes)}"
        for position, index in register:
            tensor = made[position]
            storage = tensor.untyped_storage()
            num_bytes = storage.nbytes()
            planned_bytes = sizes[position]
            if num_bytes != planned_bytes and not (self._is_bound and num_bytes < planned_bytes):
                return f"{facts.name} made {num_bytes} bytes in place of {planned_bytes}"
            value = LiveValue(index, num_bytes)
            value.wrapper = weakref.ref(tensor)
            if call is not None and position < num_fresh:
                value.fresh_version = tensor._version
            self._table.follow(value, storage)
            if call is not None and facts.remakes(position, num_fresh):
                value.call = call
                call.results[position] = weakref.ref(value)
        return ""

    def new(self, tensor: Tensor) -> None:
        """Follow the value that a tensor holds, of which no plan knows; none on another device."""
        if tensor.device == self._device:
            storage = tensor.untyped_storage()
            value = LiveValue(-1, storage.nbytes())
            value.wrapper = weakref.ref(tensor)
            self._table.follow(value, storage)

    # ---- calls that may be replayed

    def environment(self) -> Environment:
        """The settings as they are."""
        known = self._environment
        self._environment = known.now() if known is not None else environment_on(self._device)
        return self._environment

    def record(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Record a call; None where it cannot be replayed from what it reads."""
        may_replay = facts.replayable if self._is_cpu else facts.may_replay(self._device.type, args)
        if not may_replay or torch.is_inference_mode_enabled() or modes.may_change_ops():
            return None
        blank = facts.made_anew(args) if facts.writes else None
        if facts.writes and blank is None:
            for tensor in facts.written(args, kwargs):
                if not self._is_replayable_after_write(tensor):
                    return None
        try:
            call = record_call(
                func,
                facts,
                args,
                kwargs,
                self._ref,
                device=self._device,
                environment=self.environment(),
                blank=blank,
            )
        except Unrecordable:
            return None
        reader = weakref.ref(call)
        for value in call.inputs:
            value.note_reader(reader)
            if value.call is None and value.storage is None and value.block is None:
                self._table.own(value, value.live())
        return call

    def _is_replayable_after_write(self, tensor: Tensor) -> bool:
        """Whether what a tensor holds can be had again once the storage is overwritten."""
        value = self._table.find(tensor.untyped_storage()) if is_plain(tensor) else None
        return value is not None and (value.call is not None or value.block is not None)

    def _ref(self, tensor: Tensor, inputs: dict[LiveValue, None]) -> Ref:
        """What stands for an argument, whose value is noted; one from before the step is taken as it is, and owned."""
        if not is_plain(tensor) or (tensor.device != self._device and not is_at_hand(tensor, self._device)):
            raise Unrecordable
        if tensor.is_inference():  # nothing tells of what is written there
            raise Unrecordable
        storage = tensor.untyped_storage()
        value, owner = self._find(storage), None
        if value is None:
            owner = _without_graph(tensor)
            if owner is None:
                raise Unrecordable
            value = self._external(storage)
        if not value.is_external and value.holds_no_longer(tensor):  # another thread has written it
            raise Unrecordable
        if value.is_external:
            owner = _without_graph(tensor) if owner is None else owner
            if owner is not None:
                _guard(value, owner, tensor._version)
            if value.storage is None:  # a copy of statistics belongs to nobody else
                self._table.own(value, storage)
        inputs[value] = None
        return _make_ref(Ref, (value, self.geometry_of(tensor)))

    def know(self, tensor: Tensor) -> None:
        """Be able to notice a write through a tensor's own version counter to what was there before the step.

        Of what the step reads behind another counter: through ``Tensor.data``, or, where backward is differentiated
        again, as a view with a graph of its own, of which nothing could be kept that refers to no graph.
        """
        if is_at_hand(tensor, self._device) and not tensor.is_inference():
            storage = tensor.untyped_storage()
            value = self._find(storage)
            if value is None:
                value = self._external(storage)
            if value.is_external:
                _guard(value, version_alias_of(tensor), tensor._version)

    def _external(self, storage: torch.UntypedStorage) -> LiveValue:
        value = LiveValue(-1, storage.nbytes())
        value.is_external = True
        self._table.follow(value, storage)
        return value

    def geometry_of(self, tensor: Tensor) -> Geometry:
        """How a tensor lies; one object for all that lie alike, which the garbage collector has to look through."""
        geometry = Geometry.of(tensor)
        if tensor.__class__ is not Tensor:  # a fake one may have symbols for strides, which have no hash
            return geometry
        return self._geometries.setdefault(geometry, geometry)


def _guard(value: LiveValue, owner: Tensor, version: int) -> None:
    """Have a value watched through one more tensor, unless that has the counter that it was last watched through."""
    if value.guards:
        last, then = value.guards[-1]
        if last is owner or (then == version and share_counter(last, owner)):
            return
    value.guard(owner, version)


def _without_graph(tensor: Tensor) -> Tensor | None:
    """A tensor that shares another's version counter and refers to no autograd graph; None if there is none.

    Below autograd, where ops are seen, ``detach`` makes a tensor with a version counter of its own.
    """
    base = tensor._base if tensor._base is not None else tensor
    return base if base.grad_fn is None else None
