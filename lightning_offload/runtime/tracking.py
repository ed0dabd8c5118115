"""Tracks the values that ops make, and records the calls that a plan will replay with the values that they read.

All values are tracked under the floor policy, those of the plan otherwise.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_offload.runtime.environment import environment_on
from lightning_offload.runtime.program import OpStep
from lightning_offload.runtime.replay import Unrecordable, record_call
from lightning_offload.runtime.values import Call, LiveValue, ValueTable, version_alias_of
from lightning_offload.tensors.op_facts import Effects, OpFacts, is_at_hand, is_plain


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
        self._environment = environment_on(device)

    def op(
        self,
        facts: OpFacts,
        did: Effects,
        step: OpStep | None,
        call: Call | None,
    ) -> str:
        """Follow the values that an op made.

        Args:
            facts: The op.
            did: What it made.
            step: The program's entry for it; None under the floor policy.
            call: Its recording, if its results may have to be made again.

        Returns:
            How it did not do what the program counts on; "" if it did.
        """
        made: list[Tensor] = did.made
        if step is None:
            for tensor in made[: did.num_fresh]:
                self.new(tensor, -1)
            return ""
        num_fresh = did.num_fresh
        if len(made) != 1 or made[0].device != self._device:  # attention gives CPU seeds on CUDA
            num_fresh = sum([tensor.device == self._device for tensor in made[:num_fresh]])
            made = [tensor for tensor in made if tensor.device == self._device]
        if len(made) != len(step.num_bytes):
            return f"{facts.name} made {len(made)} tensors in place of {len(step.num_bytes)}"
        for position, index in step.register:
            tensor = made[position]
            num_bytes = tensor.untyped_storage().nbytes()
            planned_bytes = step.num_bytes[position]
            if num_bytes != planned_bytes and not (self._is_bound and num_bytes < planned_bytes):
                return f"{facts.name} made {num_bytes} bytes in place of {step.num_bytes[position]}"
            value = self.new(tensor, index)
            if value is not None and call is not None and facts.remakes(position, num_fresh):
                value.call = call
                call.results[position] = weakref.ref(value)
        return ""

    def new(self, tensor: Tensor, index: int) -> LiveValue | None:
        """Follow the value that a tensor holds.

        Args:
            tensor: The tensor.
            index: The value's storage in the plan; -1 if the plan has none.

        Returns:
            The value; None on another device.
        """
        if tensor.device != self._device:
            return None
        storage = tensor.untyped_storage()
        value = LiveValue(index, storage.nbytes())
        value.wrapper = weakref.ref(tensor)
        self._table.follow(value, storage)
        return value

    # ---- calls that may be replayed

    def record(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Record a call; None where it cannot be replayed from what it reads."""
        if not facts.may_replay(self._device.type, args) or torch.is_inference_mode_enabled():
            return None
        if facts.writes and facts.made_anew(args) is None:
            for tensor in facts.written(args, kwargs):
                if not self._is_replayable_after_write(tensor):
                    return None
        self._environment = self._environment.now()
        try:
            call = record_call(
                func, facts, args, kwargs, self._value_of, device=self._device, environment=self._environment
            )
        except Unrecordable:
            return None
        for value in call.inputs:
            value.note_reader(call)
            if not value.has_source:
                self._table.own(value, value.live())
        return call

    def know(self, tensor: Tensor) -> None:
        """Know a saved tensor from before the step, or one that no plan follows, before a call in backward reads it.

        Where backward is differentiated again, autograd hands such a tensor to its ops as a view with a graph of its
        own, of which nothing could be kept that notices a write and refers to no graph.
        """
        if is_at_hand(tensor, self._device) and not tensor.is_inference():
            storage = tensor.untyped_storage()
            value = LiveValue(-1, storage.nbytes())
            value.is_given = True
            value.guards = ((version_alias_of(tensor), tensor._version),)
            self._table.follow(value, storage)

    def _is_replayable_after_write(self, tensor: Tensor) -> bool:
        """Whether what a tensor holds can be had again once the storage is overwritten."""
        value = self._table.find(tensor.untyped_storage()) if is_plain(tensor) else None
        return value is not None and (value.call is not None or value.block is not None)

    def _value_of(self, tensor: Tensor) -> LiveValue:
        """The value that an argument holds; one from before the step is taken as it is, and owned."""
        if not is_plain(tensor) or not is_at_hand(tensor, self._device):
            raise Unrecordable
        storage = tensor.untyped_storage()
        value = self._table.find(storage)
        if value is None:
            owner = _without_graph(tensor)
            if owner is None:
                raise Unrecordable
            value = LiveValue(-1, storage.nbytes())
            value.is_given = True
            value.guards = () if tensor.is_inference() else ((owner, tensor._version),)
            self._table.follow(value, storage)
            self._table.own(value, storage)
        return value


def _without_graph(tensor: Tensor) -> Tensor | None:
    """A tensor that shares another's version counter and refers to no autograd graph; None if there is none.

    Below autograd, where ops are seen, ``detach`` makes a tensor with a version counter of its own.
    """
    base = tensor._base if tensor._base is not None else tensor
    return base if base.grad_fn is None else None
