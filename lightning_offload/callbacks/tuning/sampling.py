"""What trials are fed: a batch of the run's own dataloader, and the sizes that its data allow."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_offload.callbacks.tuning.accumulation import accumulation_of
from lightning_offload.callbacks.tuning.batches import (
    NotRepeatableError,
    batch_size_of,
    loaders_in,
    map_loaders,
    num_samples,
    resized,
    shapes_in,
)
from lightning_offload.callbacks.tuning.example import Example, longest
from lightning_offload.callbacks.tuning.length import is_number_of_batches
from lightning_offload.callbacks.tuning.lengths import Lengths
from lightning_offload.callbacks.tuning.objective import Objective
from lightning_offload.callbacks.tuning.options import FinderOptions
from lightning_offload.callbacks.tuning.targets import Targets
from lightning_offload.errors import TuningError
from lightning_offload.tuning.ranks import Coordinator

__all__ = ["Bounds", "Sampler", "end_workers"]

Bounds = tuple[int, int, int]
"""The smallest, the largest and the first size to try."""


class Sampler:
    """Draws a batch of the configured size, unless the user makes them, and repeats its samples.

    Batches whose samples cannot be repeated, as graphs and packed sequences, are drawn from loaders of each size.

    Args:
        options: What the user asked for.
        targets: Where the batch size is kept.
        trainer: At the start of a fit.

    Raises:
        TuningError: There is no batch, or it is not of the configured size.
    """

    def __init__(self, options: FinderOptions, targets: Targets, trainer: Any) -> None:
        self._options, self._targets, self._trainer = options, targets, trainer
        loop = trainer.fit_loop
        loop.setup_data()
        if loop._combined_loader is None or loop.max_batches == 0:
            raise TuningError("there is no batch to train on: the train dataloader is empty, or limit_train_batches=0")
        loaders = loaders_in(loop._combined_loader)
        self._loaders = loaders
        self._num_samples = num_samples(loaders, targets.base_size)
        self._check(loaders)
        self._has_batch_norm = False
        self.note = ""
        self.lengths: Lengths | None = None  # where they vary
        self._example: Example | None = None
        if options.make_batch is None:
            if type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
                raise TuningError("training_step(dataloader_iter) draws its own batches: give make_batch=")
            with contextlib.suppress(NotRepeatableError):
                self._example = self._drawn(loop)
        end_workers(loop)

    def _drawn(self, loop: Any) -> Example:
        """The longest of a few batches of the configured size."""
        found = longest(_batches(loop._data_fetcher, loop.max_batches))
        if found is None:
            raise TuningError("there is no batch to train on: the train dataloader is empty")
        if found.is_varied:
            self.note = f"Lengths vary: trials have the longest of {found.num_read} batches"
            self.lengths = Lengths.of(found.lengths, self._targets.base_size)
        return Example(batch=found.batch, size=batch_size_of(found.batch, self._targets.base_size))

    def _check(self, loaders: list[Any]) -> None:
        sizes = set(_sizes(loaders))
        base, size = self._targets.base_size, self._targets.size
        if size is not None and self._targets.loaders is None and sizes and base not in sizes:
            raise TuningError(
                f"`{size.name}` is {base}, but train_dataloader() makes batches of {sorted(sizes)}: build the"
                " DataLoader with that attribute"
            )
        if self._num_samples is None and self._options.lr_warmup_epochs:
            raise TuningError(
                f"lr_warmup_epochs={self._options.lr_warmup_epochs} is not possible: the train dataset has no length,"
                " so the steps of an epoch are not known; define __len__, or leave the warm-up to a scheduler"
            )
        if self._num_samples is None and (self._options.max_val is None or self._trainer.max_steps == -1):
            raise TuningError(
                "the train dataset has no length, so neither the largest batch nor the length of an epoch is known:"
                " give the finder max_val= and the Trainer max_steps=, or define __len__"
            )

    def batches(self) -> Iterator[Any]:
        """Real batches of the configured size, epoch after epoch.

        Raises:
            TuningError: There is none.
        """
        combined = self._trainer.fit_loop._combined_loader
        try:
            while True:
                num = 0
                for batch, _, _ in combined:
                    if self._example is None or any(
                        shape and shape[0] == self._targets.base_size for shape in shapes_in(batch)
                    ):
                        num += 1
                        yield batch
                if num == 0:
                    raise TuningError(f"no batch of the train dataloader has {self._targets.base_size} samples")
        finally:
            combined.reset()  # which ends its workers

    def bounds(self, module: Any, agreement: Coordinator, objective: Objective) -> Bounds:
        """The sizes that can be trained with.

        An epoch has to have enough batches for a window of accumulation, for a validation every so many of them, and
        for a share of them to be one, where an epoch is limited to so many batches within these samples; and an
        effective batch is to be no more than a share of the data set.

        Args:
            module: The model; batch norm needs two samples.
            agreement: Between ranks, which may have different numbers of samples.
            objective: What is searched for.

        Raises:
            TuningError: They leave no size, or the loaders do not follow it.
        """
        options = self._options
        (most,) = agreement.smallest([self._most(objective)])
        largest = int(min(most, options.max_val if options.max_val is not None else math.inf))
        if options.min_val > largest:
            raise TuningError(
                f"min_val={options.min_val} is above the {largest} samples that a rank has for one step: lower min_val"
                f" (max_data_share={options.max_data_share:g} of the data set limits it too)"
            )
        self._has_batch_norm = any(isinstance(part, _BatchNorm) for part in module.modules())
        smallest = min(max(options.min_val, 2 if self._has_batch_norm else 1), largest)
        first = options.init_val if options.init_val is not None else self._targets.base_size
        agreement.together(
            lambda: self._check_following(smallest, largest), "making a dataloader of another batch size"
        )
        return smallest, largest, min(max(first, smallest), largest)

    def _most(self, objective: Objective) -> float:
        """The largest size of which an epoch has enough batches and optimizer steps; the configured one always has."""
        most = math.inf if objective.samples_per_rank is None else objective.samples_per_rank
        if self._num_samples is None:
            return most
        trainer = self._trainer
        limit, interval = trainer.limit_train_batches, trainer.val_check_interval
        needed: int = 1
        if isinstance(interval, int) and trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0:
            needed = interval
        num_samples = self._num_samples
        if is_number_of_batches(limit):  # of the configured size; the epoch stays as many samples
            num_samples = min(num_samples, limit * self._targets.base_size)
        elif limit:
            needed = math.ceil(needed / limit)
        if objective.samples_per_rank is not None:  # as many optimizer steps as there were
            return max(min(num_samples // needed, most), min(self._targets.base_size, num_samples))
        needed = max(needed, accumulation_of(trainer))
        shared = self._num_samples * self._options.max_data_share / accumulation_of(trainer)
        return max(min(num_samples // needed, math.floor(shared)), min(self._targets.base_size, self._num_samples))

    def without_single(self, batch_size: int, smallest: int, sizes: Sequence[int] | None = None) -> int:
        """The size, or the next lower one that does not leave a single sample, which batch norm cannot train on.

        Args:
            batch_size: What was found.
            smallest: What may be chosen.
            sizes: The same, ascending; None for all.
        """
        drops_last = all(getattr(loader.batch_sampler, "drop_last", False) for loader in self._loaders)
        if self._num_samples is None or drops_last or not self._has_batch_norm:
            return batch_size
        allowed = (size for size in range(batch_size, smallest - 1, -1) if sizes is None or size in sizes)
        below = (size for size in allowed if self._num_samples % size != 1)
        return next(below, batch_size)

    def _check_following(self, smallest: int, largest: int) -> None:
        """See that the model's or its data's loaders have the size that is set: some are built before it is."""
        targets, before = self._targets, _sizes(self._loaders)
        other = self._other_size(smallest, largest)
        if other is None:
            return
        targets.set_batch_size(other)
        try:
            made = self._loaders_of(other)
            after = _sizes(loaders_in(made))
            if targets.size is not None and before and after == before:
                raise TuningError(
                    f"`{targets.size.name}` was set to {other}, but train_dataloader() goes on with batches of"
                    f" {sorted(set(after))}: build the DataLoader there, at every call, with that attribute"
                )
            if self._example is not None:
                batch = self._first_of(made)
                try:
                    self._example = Example.of(self._example.batch, targets.base_size, batch, other)
                except NotRepeatableError:
                    self._example = None
            if self._example is None and self._options.make_batch is None and other not in after:
                raise TuningError(
                    "batches whose samples cannot be repeated are drawn from the dataloader, and that tells no batch"
                    f" size of {other}: give make_batch=, a function that makes a batch of a given size"
                )
        finally:
            targets.set_batch_size(targets.base_size)

    def _other_size(self, smallest: int, largest: int) -> int | None:
        """Another size that the data have a batch of; None where there is none."""
        base = self._targets.base_size
        most = largest if self._num_samples is None else max(largest, self._num_samples)
        return next(
            (size for size in (2 * base, base // 2, largest, smallest) if 0 < size <= most and size != base), None
        )

    def _loaders_of(self, batch_size: int) -> Any:
        """The loaders for another size, which is set."""
        targets = self._targets
        loaders = targets.loaders
        if loaders is None:
            loaders = self._trainer.fit_loop._data_source.dataloader()
            if not targets.is_remade:
                return loaders
        return map_loaders(loaders, lambda loader: resized(loader, batch_size, targets.package))

    def _first_of(self, loaders: Any) -> Any:
        """Their first batch, combined as the run's are."""
        combined = self._trainer.fit_loop._combined_loader
        if not isinstance(loaders, type(combined)):
            loaders = type(combined)(loaders, combined._mode)
        try:
            batch, _, _ = next(iter(loaders))
        finally:
            loaders.reset()  # which ends its workers
        return batch

    def __call__(self, batch_size: int) -> Any:
        """Make a batch, on the host."""
        if self._options.make_batch is not None:
            made = self._options.make_batch(batch_size)
            if made is None:
                raise TuningError(f"make_batch({batch_size}) gave None: return the batch, as a dataloader would")
            return made
        if self._example is not None:
            return self._example.sized(batch_size)
        before = self._targets.size.get() if self._targets.size is not None else None
        self._targets.set_batch_size(batch_size)
        try:
            return self._first_of(self._loaders_of(batch_size))
        finally:
            if before is not None:
                self._targets.set_batch_size(before)


def _sizes(loaders: list[Any]) -> list[int]:
    found = (
        loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
        for loader in loaders
    )
    return [size for size in found if size is not None]


def _batches(fetcher: Any, most: float) -> Iterator[Any]:
    """The batches of an epoch, which has begun: another iterator would begin anew."""
    for number in itertools.count(1):
        try:
            batch, _, _ = next(fetcher)
        except StopIteration:
            return
        yield batch
        if number >= most:
            return


def end_workers(loop: Any) -> None:
    """End the workers of a fit loop's dataloaders."""
    fetcher, loop._data_fetcher = loop._data_fetcher, None  # a second teardown would fail
    if fetcher is not None:
        fetcher.teardown()
