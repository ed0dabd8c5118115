"""What trials are fed: one batch of the run's own dataloader, and the sizes that its data allow."""

from __future__ import annotations

import math
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_offload.callbacks.tuning.batches import batch_size_of, loaders_in, num_samples, tiled
from lightning_offload.callbacks.tuning.options import Options
from lightning_offload.callbacks.tuning.targets import Targets
from lightning_offload.errors import TuningError
from lightning_offload.tuning.agreement import Agreement

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

    def __init__(self, options: Options, targets: Targets, trainer: Any) -> None:
        self._options, self._targets, self._trainer = options, targets, trainer
        loop = trainer.fit_loop
        loop.setup_data()
        if loop._combined_loader is None or loop.max_batches == 0:
            raise TuningError("there is no batch to train on: the train dataloader is empty, or limit_train_batches=0")
        loaders = loaders_in(loop._combined_loader)
        self._num_samples = num_samples(loaders)
        self._check(loaders)
        self._batch: Any = None
        self._size = 0
        if options.make_batch is None:
            if type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
                raise TuningError("training_step(dataloader_iter) draws its own batches: give make_batch=")
            self._batch, _, _ = next(loop._data_fetcher)
            self._size = batch_size_of(self._batch, targets.base_size)
        end_workers(loop)

    def _check(self, loaders: list[Any]) -> None:
        sizes = {loader.batch_size for loader in loaders if loader.batch_size is not None}
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

    def bounds(self, module: Any, agreement: Agreement) -> Bounds:
        """The sizes that can be trained with: no window of accumulation is longer than an epoch.

        Args:
            module: The model; batch norm needs two samples.
            agreement: Between ranks, which may have different numbers of samples.

        Raises:
            TuningError: They leave no size.
        """
        options = self._options
        num_accumulated = self._trainer.accumulate_grad_batches
        most = math.inf if self._num_samples is None else max(1, self._num_samples // num_accumulated)
        (most,) = agreement.smallest([most])
        largest = int(min(most, options.max_val if options.max_val is not None else math.inf))
        if options.min_val > largest:
            raise TuningError(
                f"min_val={options.min_val} is above the {largest} samples that a rank has for one step: lower min_val"
            )
        has_batch_norm = any(isinstance(part, _BatchNorm) for part in module.modules())
        smallest = min(max(options.min_val, 2 if has_batch_norm else 1), largest)
        first = options.init_val if options.init_val is not None else self._targets.base_size
        return smallest, largest, min(max(first, smallest), largest)

    def __call__(self, batch_size: int) -> Any:
        """Make a batch, on the host."""
        if self._options.make_batch is not None:
            return self._options.make_batch(batch_size)
        return tiled(self._batch, self._size, batch_size)


def end_workers(loop: Any) -> None:
    """End the workers of a fit loop's dataloaders."""
    fetcher, loop._data_fetcher = loop._data_fetcher, None  # a second teardown would fail
    if fetcher is not None:
        fetcher.teardown()
