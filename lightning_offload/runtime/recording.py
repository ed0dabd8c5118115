"""Records the calls that a plan will replay, with the values that they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_offload.runtime.environment import environment_on
from lightning_offload.runtime.replay import Unrecordable, record_call
from lightning_offload.runtime.table import ValueTable
from lightning_offload.runtime.values import Call, Value, witness_of
from lightning_offload.tensors.op_facts import OpFacts, is_at_hand, is_plain


class Recording:
    """Records calls of one step."""

    def __init__(self, device: torch.device, table: ValueTable) -> None:
        self._device = device
        self._table = table
        self._environment = environment_on(device)

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
            value = Value(-1, storage.nbytes())
            value.is_given = True
            value.guards = ((witness_of(tensor), tensor._version),)
            self._table.follow(value, storage)

    def _is_replayable_after_write(self, tensor: Tensor) -> bool:
        """Whether what a tensor holds can be had again once the storage is overwritten."""
        value = self._table.find(tensor.untyped_storage()) if is_plain(tensor) else None
        return value is not None and (value.call is not None or value.block is not None)

    def _value_of(self, tensor: Tensor) -> Value:
        """The value that an argument holds; one from before the step is taken as it is, and owned."""
        if not is_plain(tensor) or not is_at_hand(tensor, self._device):
            raise Unrecordable
        storage = tensor.untyped_storage()
        value = self._table.find(storage)
        if value is None:
            owner = _without_graph(tensor)
            if owner is None:
                raise Unrecordable
            value = Value(-1, storage.nbytes())
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
