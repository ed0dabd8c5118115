"""What Lightning's fit loop is fed in a trial: the batches of the run's own dataloaders, epoch after epoch.

A last batch that is smaller than the first one of its epoch is left out. Where batches of one size differ (lengths,
graphs), the most that training needs is what the largest one needs: a few batches are read, and many where they differ,
and then copies of the largest are fed in the place of those that come. So a memory plan has one shape to learn, steps
are alike, and what loading takes counts all the same.

Where it is lengths that differ, a training has batches of all lengths. A batch is padded to its longest sample, so one
of twice the size is as long as the longer one of two: where a batch of the configured size is no longer than `x` with
probability `F(x)`, one that is `k` times as large is with `F(x)^k`. A step is taken to be as long as its batch, and
samples to be drawn independently: a sampler that puts samples of one length together pads less than this says, so
larger batches look worse than they are.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Size

from lightning_offload.errors import TuningError
from lightning_offload.tuning.shapes import shapes_in

__all__ = ["MANY", "Feed", "Look"]

_FEW, MANY = 8, 256
"""Batches that are read where all are alike; and where they are not, of the configured size."""
_SECONDS = 2.0
"""What reading may take."""


def num_elements(batch: Any) -> int:
    """Elements of all tensors of a batch."""
    return sum(Size(shape).numel() for shape in shapes_in(batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the first batches of an epoch showed.

    Attributes:
        elements: Elements of each one that was read.
        is_varied: Whether their shapes differ.
        is_padded: Whether all tensors have as many rows in each of them, so that it is lengths that differ.
    """

    elements: tuple[int, ...]
    is_varied: bool
    is_padded: bool

    def mean_length(self, times: float = 1.0) -> float:
        """The length of a mean batch by that of the longest; 1 where it is not lengths that differ.

        Args:
            times: How many times as large a batch is as those that were read.
        """
        if not (self.is_varied and self.is_padded):
            return 1.0
        ordered, number = sorted(self.elements), len(self.elements)
        below = [(place / number) ** times for place in range(number + 1)]
        weights = (high - low for low, high in itertools.pairwise(below))
        return sum(weight * each for weight, each in zip(weights, ordered, strict=True)) / ordered[-1]

    @classmethod
    def at(cls, batches: Iterable[Any], most: int = MANY) -> tuple[Look, Any]:
        """Read a few batches of one size, or many where they differ; return the largest too.

        Args:
            batches: As dataloaders make them.
            most: How many are many.
        """
        began = time.perf_counter()
        largest: Any = None
        elements: list[int] = []
        shapes: set[tuple[tuple[int, ...], ...]] = set()
        for batch in batches:
            found = tuple(shapes_in(batch))
            shapes.add(found)
            number = sum(Size(shape).numel() for shape in found)
            if number > max(elements, default=-1):
                largest = batch
            elements.append(number)
            enough = _FEW if len(shapes) == 1 or time.perf_counter() - began > _SECONDS else max(most, _FEW)
            if len(elements) >= enough:
                break
        rows = {tuple(shape[:1] for shape in found) for found in shapes}
        return cls(elements=tuple(elements), is_varied=len(shapes) > 1, is_padded=len(rows) <= 1), largest


class Feed:
    """Stands in for a fit loop's data fetcher; it has no end.

    Args:
        fetcher: Lightning's, its first epoch begun.
        most: Batches that are read at most where they differ; 0 to feed all as they come.

    Attributes:
        look: What the first batches showed; None before they were read, and where all are fed as they come.
        done: False, for the loop: no batch is the last one.
        fetched: For the loop, which counts.
    """

    def __init__(self, fetcher: Any, most: int = MANY) -> None:
        self.look: Look | None = None
        self.done, self.fetched = False, 0
        self._fetcher, self._most = fetcher, most
        self._stream = self._fed()

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        return next(self._stream), 0, 0

    def teardown(self) -> None:
        """End the workers of the dataloaders."""
        self._stream.close()
        self._fetcher.teardown()

    def _fed(self) -> Generator[Any]:
        epoch = self._epoch()
        if self._most:
            self.look, largest = Look.at(epoch, self._most)
            if self.look.is_varied:
                yield _copied(largest)
                for _ in self._epochs(epoch):
                    yield _copied(largest)
            waiting = [largest]
            del largest  # who is fed holds it
            yield waiting.pop()
        yield from self._epochs(epoch)

    def _epochs(self, epoch: Iterator[Any]) -> Iterator[Any]:
        while True:
            yield from epoch
            iter(self._fetcher)
            epoch = self._epoch()

    def _epoch(self) -> Iterator[Any]:
        """The batches of the epoch that is under way, but for a last one that is short."""
        first = -1
        while not self._fetcher.done:
            try:
                batch, _, _ = next(self._fetcher)
            except StopIteration:
                break
            number = num_elements(batch)
            if self._fetcher.done and number < first:
                break
            first = number if first < 0 else first
            yield batch
        if first < 0:
            raise TuningError("there is no batch to train on: the train dataloader is empty, or limit_train_batches=0")


def _copied(batch: Any) -> Any:
    """A copy, since a step may write to its batch; the batch itself where there can be none."""
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch
