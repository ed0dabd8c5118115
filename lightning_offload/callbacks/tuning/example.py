"""What a trial's batch is made from: one real batch, and a second one of another size that tells its parts apart.

A tensor whose first dimension happens to be the batch size is not for that a batch of samples: weights of classes, a
shared mask, the batch of a second loader. What a part does with the size is seen where there are two sizes of it: one
that grows in proportion is made of samples, and is repeated; one that does not change is left alone; one that grows in
any other way (packed sequences) cannot be made from another batch. Without a second batch the first dimension decides.

Lengths may vary from batch to batch. The most that training needs is what the longest batch needs, so a few batches
are read, and many where their lengths differ, and the longest is the example.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_offload.callbacks.tuning.batches import NotRepeatableError, batch_size_of, is_array, mapped, shapes_in
from lightning_offload.errors import TuningError

__all__ = ["Example", "Longest", "longest"]

_FEW, _MANY = 8, 256
"""Batches that are read where all are of one length, and where they are not."""
_GROWS = 1.25
"""What is this much larger in a batch of twice the size grows with it; less is the scatter of lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """The batch with the most elements.

    Attributes:
        batch: Itself.
        lengths: Elements of a sample in each of the batches that were looked at.
        is_varied: Whether they differ.
    """

    batch: Any
    lengths: tuple[int, ...]
    is_varied: bool

    @property
    def num_read(self) -> int:
        """How many batches were looked at."""
        return len(self.lengths)


def longest(batches: Iterable[Any]) -> Longest | None:
    """Find the batch with the most elements among the first few, or among many where lengths differ.

    Args:
        batches: As a dataloader makes them, of one size.

    Returns:
        None where there is no batch.
    """
    best: Any = None
    most = -1
    kinds: set[tuple[tuple[int, ...], ...]] = set()
    lengths: list[int] = []
    for batch in batches:
        shapes = list(shapes_in(batch))
        kinds.add(tuple(shape[1:] for shape in shapes))
        lengths.append(sum(torch.Size(shape[1:]).numel() for shape in shapes))
        num_elements = sum(torch.Size(shape).numel() for shape in shapes)
        if num_elements > most:
            best, most = batch, num_elements
        if len(lengths) >= (_FEW if len(kinds) == 1 else _MANY):
            break
    return Longest(batch=best, lengths=tuple(lengths), is_varied=len(kinds) > 1) if lengths else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A real batch, from which batches of any size are made.

    Attributes:
        batch: Tensors, nested in mappings, sequences and dataclasses.
        size: Samples in it.
        other: Another batch of the same loaders, its shapes alone; None where there is none.
        other_size: Samples in that.
    """

    batch: Any
    size: int
    other: Any = None
    other_size: int = 0

    @classmethod
    def of(cls, batch: Any, size: int, other: Any, other_size: int) -> Example:
        """Make one of two batches, and see that they tell what follows the size.

        Args:
            batch: The first one.
            size: For which it was asked.
            other: The second one.
            other_size: For which that was asked.

        Raises:
            TuningError: The batches stay as they are whatever size is asked for.
            NotRepeatableError: They grow in a way of their own.
        """
        found, found_other = batch_size_of(batch, size), batch_size_of(other, other_size)
        if found == found_other:
            raise TuningError(
                f"the batch size was set from {size} to {other_size}, but the batches go on having {found} samples:"
                " build the DataLoader, and its batch sampler or data set where that makes the batches, with this size"
            )
        example = cls(batch=batch, size=found, other=_outline(other), other_size=found_other)
        example.sized(found_other)  # what cannot be made is an error now
        return example

    def sized(self, batch_size: int) -> Any:
        """Make a batch of a size.

        Raises:
            NotRepeatableError: No part of the batch is made of samples, or one grows in a way of its own.
        """
        maker = _Maker(self, batch_size)
        made = maker.made(self.batch, self.other)
        if not maker.num_sized:
            raise NotRepeatableError(
                f"no tensor in the batch ({type(self.batch).__name__}) has {self.size} samples along its first"
                " dimension: give make_batch=, a function that makes a batch of a given size"
            )
        return made


class _Maker:
    """Walks a batch, and beside it the other one as far as that is built alike."""

    def __init__(self, example: Example, batch_size: int) -> None:
        self._example, self._batch_size = example, batch_size
        self.num_sized = 0

    def made(self, found: Any, other: Any) -> Any:
        if is_array(found):
            return self._array(found, other)
        if isinstance(found, Mapping):
            return mapped(found, lambda key, value: self.made(value, _item(other, key)))
        if isinstance(found, (list, tuple)):
            return self._sequence(found, other)
        if dataclasses.is_dataclass(found) and not isinstance(found, type):
            return self._record(found, other)
        return found

    def _record(self, found: Any, other: Any) -> Any:
        """A dataclass; where it was made of more than its fields, a copy with these: what it was made of is gone."""

        def parts(names: Iterable[str]) -> dict[str, Any]:
            return {n: self.made(getattr(found, n), getattr(other, n, None)) for n in names if hasattr(found, n)}

        fields = dataclasses.fields(found)
        try:
            return dataclasses.replace(found, **parts(field.name for field in fields if field.init))
        except (TypeError, ValueError) as error:
            if "InitVar" not in str(error):
                raise
        made = copy.copy(found)
        for name, part in parts(field.name for field in fields).items():
            object.__setattr__(made, name, part)  # a frozen one, too
        return made

    def _array(self, found: Any, other: Any) -> Any:
        length = int(found.shape[0]) if len(found.shape) else None
        wanted = None if length is None else self._length(length, _length_of(other), str(tuple(found.shape)))
        if length is None or wanted is None:
            return found
        self.num_sized += 1
        index = torch.arange(wanted) % length
        return found[index.to(found.device) if isinstance(found, Tensor) else index.numpy()]

    def _sequence(self, found: Any, other: Any) -> Any:
        is_plain = not hasattr(found, "_fields") and not any(
            is_array(item) or isinstance(item, (Mapping, list)) for item in found
        )
        if is_plain and len(found):
            same = len(other) if isinstance(other, (list, tuple)) else None
            wanted = self._length(len(found), same, f"{type(found).__name__} of {len(found)}")
            if wanted is not None:
                return type(found)(found[i % len(found)] for i in range(wanted))
        items = [self.made(item, _item(other, i)) for i, item in enumerate(found)]
        return type(found)(*items) if hasattr(found, "_fields") else type(found)(items)

    def _length(self, length: int, other: int | None, what: str) -> int | None:
        """How long a part is at the wanted size; None where it does not follow the size.

        Raises:
            NotRepeatableError: It grows with the size, but not in proportion.
        """
        size, other_size = self._example.size, self._example.other_size
        if other is None:
            return self._batch_size if length == size else None
        if length == other:
            return None
        if length * other_size == other * size:
            return max(1, length * self._batch_size // size)
        (small, large) = (length, other) if size < other_size else (other, length)
        if length == size or large < _GROWS * small:
            # a last batch that is short, or one length among others
            return self._batch_size if length == size else None
        raise NotRepeatableError(
            f"a part of the batch ({what}) has {length} entries for {size} samples and {other} for {other_size}, so it"
            " cannot be repeated: give make_batch=, a function that makes a batch of a given size"
        )


def _outline(found: Any) -> Any:
    """The same without contents, which would take memory for as long as trials are made."""
    if is_array(found):
        return torch.empty(tuple(found.shape), device="meta")
    if isinstance(found, Mapping):
        return {key: _outline(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_outline(value) for value in found]
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return types.SimpleNamespace(
            **{field.name: _outline(getattr(found, field.name, None)) for field in dataclasses.fields(found)}
        )
    return None


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError, TypeError):
        return None


def _length_of(found: Any) -> int | None:
    return int(found.shape[0]) if is_array(found) and len(found.shape) else None
