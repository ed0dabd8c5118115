"""What trials are fed: one batch of the run's own dataloader, and the sizes that its data allow."""

from __future__ import annotations

import math
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_offload.callbacks.tuning.accumulation import accumulation_of
from lightning_offload.callbacks.tuning.batches import batch_size_of, loaders_in, num_samples, tiled
from lightning_offload.callbacks.tuning.options import FinderOptions
from lightning_offload.callbacks.tuning.targets import Targets
from lightning_offload.errors import TuningError
from lightning_offload.tuning.ranks import Coordinator

__all__ = ["Bounds", "Sampler", "end_workers"]

Bounds = tuple[int, int, int]
"""The smallest, the largest and the first size to try."""


class Sampler:
    """Draws one batch of the configured size, unless the user makes them, and repeats its samples.

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
        self._num_samples = num_samples(loaders)
        self._check(loaders)
        self._has_batch_norm = False
        self._batch: Any = None
        self._size = 0
        if options.make_batch is None:
            if type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
                raise TuningError("training_step(dataloader_iter) draws its own batches: give make_batch=")
            self._batch, _, _ = next(loop._data_fetcher)
            self._size = batch_size_of(self._batch, targets.base_size)
        end_workers(loop)

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

    def bounds(self, module: Any, agreement: Coordinator) -> Bounds:
        """The sizes that can be trained with.

        An epoch has to have enough batches for a window of accumulation, for a validation every so many of them, and
        for a share of them to be one; and an effective batch is to be no more than a share of the data set.

        Args:
            module: The model; batch norm needs two samples.
            agreement: Between ranks, which may have different numbers of samples.

        Raises:
            TuningError: They leave no size, or the loaders do not follow it.
        """
        options = self._options
        (most,) = agreement.smallest([self._most()])
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

    def _most(self) -> float:
        """The largest size of which an epoch has enough batches and optimizer steps; the configured one always has."""
        if self._num_samples is None:
            return math.inf
        trainer = self._trainer
        limit, interval = trainer.limit_train_batches, trainer.val_check_interval
        needed: int = 1
        if isinstance(interval, int) and trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0:
            needed = interval
        if isinstance(limit, float):
            needed = math.ceil(needed / limit)
        needed = max(needed, accumulation_of(trainer))
        shared = self._num_samples * self._options.max_data_share / accumulation_of(trainer)
        return max(
            min(self._num_samples // needed, math.floor(shared)), min(self._targets.base_size, self._num_samples)
        )

    def without_single(self, batch_size: int, smallest: int) -> int:
        """The size, or the next lower one that does not leave a single sample, which batch norm cannot train on.

        Args:
            batch_size: What was found.
            smallest: What may be chosen.
        """
        drops_last = all(getattr(loader.batch_sampler, "drop_last", False) for loader in self._loaders)
        if self._num_samples is None or drops_last or not self._has_batch_norm:
            return batch_size
        below = (size for size in range(batch_size, smallest - 1, -1) if self._num_samples % size != 1)
        return next(below, batch_size)

    def _check_following(self, smallest: int, largest: int) -> None:
        """See that the model's or its data's loaders have the size that is set: some are built before it is."""
        targets, before = self._targets, _sizes(self._loaders)
        other = next((size for size in (largest, smallest) if size != targets.base_size), None)
        if targets.size is None or targets.loaders is not None or not before or other is None:
            return
        targets.set_batch_size(other)
        try:
            after = _sizes(loaders_in(self._trainer.fit_loop._data_source.dataloader()))
        finally:
            targets.set_batch_size(targets.base_size)
        if after == before:
            raise TuningError(
                f"`{targets.size.name}` was set to {other}, but train_dataloader() goes on with batches of"
                f" {sorted(set(after))}: build the DataLoader there, at every call, with that attribute"
            )

    def __call__(self, batch_size: int) -> Any:
        """Make a batch, on the host."""
        if self._options.make_batch is not None:
            made = self._options.make_batch(batch_size)
            if made is None:
                raise TuningError(f"make_batch({batch_size}) gave None: return the batch, as a dataloader would")
            return made
        return tiled(self._batch, self._size, batch_size)


def _sizes(loaders: list[Any]) -> list[int]:
    found = (
        loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
        for loader in loaders
    )
    return [size for size in found if size is not None]


def end_workers(loop: Any) -> None:
    """End the workers of a fit loop's dataloaders."""
    fetcher, loop._data_fetcher = loop._data_fetcher, None  # a second teardown would fail
    if fetcher is not None:
        fetcher.teardown()
