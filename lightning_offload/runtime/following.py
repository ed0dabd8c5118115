"""Follows the values that ops make: all of them under the floor policy, those of the plan otherwise."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lightning_offload.runtime.program import OpStep
from lightning_offload.runtime.table import ValueTable
from lightning_offload.runtime.values import Call, Value
from lightning_offload.tensors.op_facts import Effects, OpFacts


class Following:
    """See the module's docstring.

    Args:
        device: Values elsewhere are of no interest.
        table: Where they are entered.
    """

    def __init__(self, device: torch.device, table: ValueTable) -> None:
        self._device = device
        self._table = table

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
            if num_bytes != step.num_bytes[position]:
                return f"{facts.name} made {num_bytes} bytes in place of {step.num_bytes[position]}"
            value = self.new(tensor, index)
            if value is not None and call is not None and facts.remakes(position, num_fresh):
                value.call = call
                call.results[position] = weakref.ref(value)
        return ""

    def new(self, tensor: Tensor, index: int) -> Value | None:
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
        value = Value(index, storage.nbytes())
        value.wrapper = weakref.ref(tensor)
        self._table.follow(value, storage)
        return value
