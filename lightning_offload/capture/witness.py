"""Watches one call of a custom op: whether it does what its schema declares, and nothing else.

Before the call the version counters and checksums of what it is given are noted, and the states of the generators;
after it they are compared. An op that

- changed what it does not declare to write, or returned memory that was there before, breaks its schema;
- drew random numbers, or talked to other ranks, keeps to it but is not run again: a replay would draw others, or hang.

Shortfalls: what a kernel does beside its arguments and results shows in neither, nor does what it does in some calls
only, where no recorded step has one of them. Arguments that are no plain tensors are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_offload.accelerators import generator_of
from lightning_offload.tensors.custom_ops import BELIEVED, Standing
from lightning_offload.tensors.op_facts import OpFacts, is_plain, tensors_in

_WIDTH = 4096  # numbers of 8 bytes in a row: sums of rows and of columns are small beside what they are of
_WORD = 8  # bytes

WasThere = Callable[[torch.UntypedStorage], bool]


class Witness:
    """What there was before one call.

    Args:
        facts: The op.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = {id(tensor) for tensor in facts.declared_written(args, kwargs)}
        given = [tensor for tensor in tensors_in((args, kwargs)) if is_plain(tensor)]
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        may_change = {tensor.untyped_storage()._cdata for tensor in given if id(tensor) in written}
        kept = [tensor for tensor in given if tensor.untyped_storage()._cdata not in may_change]
        self._versions = [(tensor, tensor._version) for tensor in kept if not tensor.is_inference()]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in kept}
        self._sums = [(storage, checksum(storage)) for storage in storages.values()]
        self._generators = _generators_for(given)
        self._states = [generator.get_state() for generator in self._generators]
        self._num_exchanged = _num_exchanged()

    @staticmethod
    def can_watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has contents that can be compared: not that of tensors that only stand for others."""
        given = list(tensors_in((args, kwargs)))
        return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in given)

    def judge(self, out: Any, was_there: WasThere) -> Standing:
        """What the call showed, once it has returned.

        Args:
            out: Its result.
            was_there: Tells of a storage whether it was there before the call.
        """
        for tensor in tensors_in((out,)):
            if not is_plain(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in self._given and was_there(storage):
                return _broken("it returned memory that was there before it ran")
        if any(tensor._version != version for tensor, version in self._versions):
            return _broken("it wrote an argument that its schema does not say it writes")
        sums = [(before, checksum(storage)) for storage, before in self._sums]
        if any(not torch.equal(before, after) for before, after in sums):
            return _broken("it changed an argument that its schema does not say it writes")
        drew = any(
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(self._generators, self._states, strict=True)
        )
        if drew:
            return Standing(keeps_to_writes=True, may_replay=False, why="it draws random numbers")
        if _num_exchanged() != self._num_exchanged:
            return Standing(keeps_to_writes=True, may_replay=False, why="it talks to other ranks")
        return BELIEVED


def _broken(why: str) -> Standing:
    return Standing(keeps_to_writes=False, may_replay=False, why=why)


def _generators_for(given: list[Tensor]) -> list[torch.Generator]:
    """The generators that a call draws from which is given these: the host's, and those of their devices."""
    devices = {torch.device("cpu"), *(tensor.device for tensor in given)}
    return list({id(generator): generator for generator in map(generator_of, devices)}.values())


def _num_exchanged() -> list[int]:
    """How many exchanges the groups of this process have begun, each."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    found = []
    for group in torch.distributed.distributed_c10d._world.pg_map:
        try:
            found.append(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except RuntimeError:  # a backend that does not count
            found.append(0)
    return found


def checksum(storage: torch.UntypedStorage) -> Tensor:
    """A checksum of all bytes of a storage, on its device: two numbers that change with what lies where.

    Sums of rows and of columns, each weighed by its place: no write that puts other numbers, or the same in another
    order, leaves both as they are, but by chance.
    """
    num_words = storage.nbytes() // _WORD if storage.data_ptr() % _WORD == 0 else 0
    words = _numbers(storage, torch.int64, 0, num_words)
    tail = _numbers(storage, torch.uint8, num_words * _WORD, storage.nbytes() - num_words * _WORD)
    num_rows = num_words // _WIDTH
    table = words[: num_rows * _WIDTH].view(num_rows, _WIDTH)
    parts = [table.sum(1), table.sum(0), words[num_rows * _WIDTH :]]
    total = torch.stack([(part * _weights(part)).sum() for part in parts])
    of_tail = torch.zeros_like(total[:1])
    for block in tail.split(_WIDTH * _WORD):
        numbers = block.long()
        of_tail = 31 * of_tail + (numbers * _weights(numbers)).sum()
    return torch.cat([total, of_tail])


def _weights(numbers: Tensor) -> Tensor:
    return 2 * torch.arange(numbers.numel(), device=numbers.device) + 1


def _numbers(storage: torch.UntypedStorage, dtype: torch.dtype, first_byte: int, count: int) -> Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, first_byte // dtype.itemsize, (count,), (1,))
