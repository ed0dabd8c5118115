"""The data of a run: what Lightning's fit loop is fed in trials, and the sizes that the data allow.

A trial is fed the batches of the run's own dataloaders, epoch after epoch.

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

import contextlib
import copy
import itertools
import math
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_offload.callbacks.tuning.batches import loaders_in, num_samples, sizes_of
from lightning_offload.callbacks.tuning.length import is_number_of_batches
from lightning_offload.callbacks.tuning.objective import Objective
from lightning_offload.callbacks.tuning.targets import Fit
from lightning_offload.callbacks.tuning.trainer_facts import accumulation_of, replaced
from lightning_offload.errors import TuningError
from lightning_offload.tuning.shapes import shapes_in

__all__ = ["Bounds", "Feed", "Look", "TrialData", "end_workers"]

_FEW, _MANY = 8, 256
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

    def note(self, batch_size: int) -> str:
        """What to say of batches that differ, of the configured size; empty where they do not."""
        if not self.is_varied:
            return ""
        if not self.is_padded:
            return f"Batches vary in size: trials have the largest of {len(self.elements)} batches"
        return (
            f"Lengths vary: trials have the longest of {len(self.elements)} batches, by which a mean one with"
            f" {batch_size} is {self.mean_length():.2f} as long"
        )

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
        mean: float = sum(weight * each for weight, each in zip(weights, ordered, strict=True))
        return mean / ordered[-1]

    @classmethod
    def at(cls, batches: Iterable[Any], most: int = _MANY) -> tuple[Look, Any]:
        """Read a few batches of one size, or many where they differ; return the largest too."""
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

    def __init__(self, fetcher: Any, most: int = _MANY) -> None:
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


_ALONE = {"barrier": lambda *_, **__: None, "reduce": lambda tensor, *_, **__: tensor}
"""Methods of a strategy with which a rank does not wait for the others, which may fail: loaders are each rank's own."""

Bounds = tuple[int, int, int]
"""The smallest, the largest and the first size to try."""


class TrialData:
    """Feeds the fit loop of a Trainer batches of any size, and looks at them.

    Attributes:
        look: What the first batches of the configured size showed; None where the model draws its batches itself.

    Raises:
        TuningError: There is no batch, or none of the configured size.
    """

    def __init__(self, fit: Fit) -> None:
        self._options, self._targets, self._trainer, self._module = fit.options, fit.targets, fit.trainer, fit.module
        self._agreement = fit.agreement
        self._has_batch_norm = False
        with self.fed(self._targets.base_size) as feed:
            loop = self._trainer.fit_loop
            if loop._combined_loader is None or loop.max_batches == 0:
                raise TuningError(
                    "there is no batch to train on: the train dataloader is empty, or limit_train_batches=0"
                )
            self._loaders = loaders_in(loop._combined_loader)
            is_short = getattr(loop._combined_loader, "_mode", "") == "min_size"  # an epoch ends with the shortest
            self._num_samples = num_samples(self._loaders, self._targets.base_size, of_shortest=is_short)
            self._check()
            self._rows = _rows(feed)
            self.look: Look | None = None if feed is None else feed.look

    @contextlib.contextmanager
    def fed(self, batch_size: int, *, is_repeated: bool = True) -> Iterator[Feed | None]:
        """Inside, the fit loop has loaders of a size, and batches without an end.

        A model that draws from the loader itself is fed by Lightning alone.
        Unless it is repeated, batches that differ are fed as they come, and not the largest of a few.
        """
        loop, targets = self._trainer.fit_loop, self._targets
        end_workers(loop)
        loop._combined_loader = None
        targets.load(self._trainer, batch_size)
        try:
            with warnings.catch_warnings(), replaced(self._trainer.strategy, **_ALONE):
                warnings.simplefilter("ignore")  # of sizes that are only tried; the run says it of its own
                loop.setup_data()
            most = math.ceil(_MANY * targets.base_size / batch_size) if is_repeated else 0
            feed = None
            if loop._data_fetcher is not None and type(loop._data_fetcher).__name__ != "_DataLoaderIterDataFetcher":
                loop._data_fetcher = feed = Feed(loop._data_fetcher, most)
            yield feed
        finally:
            end_workers(loop)
            targets.load(self._trainer, targets.base_size)

    def _check(self) -> None:
        sizes = _known_sizes(self._loaders)
        base, size = self._targets.base_size, self._targets.size
        if size is not None and self._targets.loaders is None and sizes and base not in sizes:
            raise TuningError(
                f"`{size.name}` is {base}, but train_dataloader() makes batches of {sorted(sizes)}: build the"
                " DataLoader with that attribute"
            )
        if self._num_samples is None and (self._options.max_val is None or self._trainer.max_steps == -1):
            raise TuningError(
                "the train dataset has no length, so neither the largest batch nor the length of an epoch is known:"
                " give the finder max_val= and the Trainer max_steps=, or define __len__"
            )

    def bounds(self, objective: Objective) -> Bounds:
        """The sizes that can be trained with.

        An epoch has to have enough batches for a window of accumulation, for a validation every so many of them, and
        for a share of them to be one, where an epoch is limited to so many batches within these samples; and an
        effective batch is to be no more than a share of the data set. Batch norm needs two samples.

        Raises:
            TuningError: They leave no size, or the loaders do not follow it.
        """
        options = self._options
        most = self._agreement.smallest(self._most(objective))
        largest = int(min(most, options.max_val if options.max_val is not None else math.inf))
        if options.min_val > largest:
            raise TuningError(
                f"min_val={options.min_val} is above the {largest} samples that a rank has for one step: lower min_val"
                f" (max_data_share={options.max_data_share:g} of the data set limits it too)"
            )
        self._has_batch_norm = any(isinstance(part, _BatchNorm) for part in self._module.modules())
        smallest = min(max(options.min_val, 2 if self._has_batch_norm else 1), largest)
        first = options.init_val if options.init_val is not None else self._targets.base_size
        self._agreement.together(
            lambda: self._check_following(smallest, largest), "making a dataloader of another batch size"
        )
        return smallest, largest, min(max(first, smallest), largest)

    def _most(self, objective: Objective) -> float:
        """The largest size of which an epoch has enough batches and optimizer steps; the configured one always has."""
        kept = objective.samples_per_rank
        if self._num_samples is None:
            return math.inf if kept is None else kept
        trainer, accumulation = self._trainer, accumulation_of(self._trainer)
        limit, interval = trainer.limit_train_batches, trainer.val_check_interval
        num_samples, needed = self._num_samples, 1
        if isinstance(interval, int) and trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0:
            needed = interval
        if is_number_of_batches(limit):  # of the configured size; the epoch stays as many samples
            num_samples = min(num_samples, limit * self._targets.base_size)
        elif limit:
            needed = math.ceil(needed / limit)
        if kept is None:  # else there are as many optimizer steps as there were
            needed = max(needed, accumulation)
            kept = math.floor(self._num_samples * self._options.max_data_share / accumulation)
        return max(min(num_samples // needed, kept), min(self._targets.base_size, num_samples))

    def without_single(self, batch_size: int, smallest: int, sizes: Sequence[int] | None = None) -> int:
        """The size, or the next lower one that does not leave a single sample, which batch norm cannot train on."""
        drops_last = all(getattr(loader.batch_sampler, "drop_last", False) for loader in self._loaders)
        if self._num_samples is None or drops_last or not self._has_batch_norm:
            return batch_size
        allowed = (size for size in range(batch_size, smallest - 1, -1) if sizes is None or size in sizes)
        below = (size for size in allowed if self._num_samples % size != 1)
        return next(below, batch_size)

    def _check_following(self, smallest: int, largest: int) -> None:
        """See that the loaders have the size that is set: some are built before it is."""
        base, before = self._targets.base_size, _known_sizes(self._loaders)
        most = largest if self._num_samples is None else max(largest, self._num_samples)
        candidates = (size for size in (2 * base, base // 2, largest, smallest) if 0 < size <= most and size != base)
        other = next(candidates, None)
        if other is None:
            return
        with self.fed(other) as feed:
            after, rows = _known_sizes(loaders_in(self._trainer.fit_loop._combined_loader)), _rows(feed)
        name = self._targets.size.name if self._targets.size is not None else "the batch size"
        if before and after == before:
            raise TuningError(
                f"`{name}` was set to {other}, but train_dataloader() goes on with batches of {sorted(after)}:"
                " build the DataLoader there, at every call, with that attribute"
            )
        if rows is not None and rows == self._rows and (rows or other not in after):
            had = f"{base if base in rows else rows[0]} samples" if rows else "what they had"
            raise TuningError(
                f"the batch size was set from {base} to {other}, but the batches go on having {had}: build the"
                " DataLoader, and its batch sampler or data set where that makes the batches, with this size"
            )


def _known_sizes(loaders: list[DataLoader[Any]]) -> set[int]:
    return {size for size in sizes_of(loaders) if size is not None}


def _rows(feed: Feed | None) -> list[int] | None:
    """Rows of each tensor in the first batch; None where the model draws its batches itself."""
    return None if feed is None else [shape[0] for shape in shapes_in(next(feed)[0]) if shape]


def end_workers(loop: Any) -> None:
    """End the workers of a fit loop's dataloaders."""
    fetcher, loop._data_fetcher = loop._data_fetcher, None  # a second teardown would fail
    if fetcher is not None:
        fetcher.teardown()
