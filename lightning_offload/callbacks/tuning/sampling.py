"""The data of a run: what the fit loop is fed in trials, and the sizes that the data allow."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_offload.callbacks.tuning.batches import loaders_in, num_samples, sizes_of
from lightning_offload.callbacks.tuning.feeding import MANY, Feed, Look
from lightning_offload.callbacks.tuning.length import is_number_of_batches
from lightning_offload.callbacks.tuning.objective import Objective
from lightning_offload.callbacks.tuning.options import FinderOptions
from lightning_offload.callbacks.tuning.targets import Targets
from lightning_offload.callbacks.tuning.trainer_facts import accumulation_of, replaced
from lightning_offload.errors import TuningError
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.tuning.shapes import shapes_in

__all__ = ["Bounds", "TrialData", "end_workers"]

_ALONE = {"barrier": lambda *_, **__: None, "reduce": lambda tensor, *_, **__: tensor}
"""Methods of a strategy with which a rank does not wait for the others, which may fail: loaders are each rank's own."""

Bounds = tuple[int, int, int]
"""The smallest, the largest and the first size to try."""


class TrialData:
    """Feeds the fit loop of a Trainer batches of any size, and looks at them.

    Args:
        options: What the user asked for.
        targets: Where the batch size is kept.
        trainer: At the start of a fit.

    Attributes:
        note: What to say of batches that differ; empty where they do not.
        look: What the first batches of the configured size showed; None where the model draws its batches itself.

    Raises:
        TuningError: There is no batch, or none of the configured size.
    """

    def __init__(self, options: FinderOptions, targets: Targets, trainer: Any) -> None:
        self._options, self._targets, self._trainer = options, targets, trainer
        self._has_batch_norm = False
        self.note = ""
        base = targets.base_size
        with self.fed(base):
            loop = trainer.fit_loop
            if loop._combined_loader is None or loop.max_batches == 0:
                raise TuningError(
                    "there is no batch to train on: the train dataloader is empty, or limit_train_batches=0"
                )
            self._loaders = loaders_in(loop._combined_loader)
            self._num_samples = num_samples(self._loaders, base)
            self._check()
            self._rows = self._rows_fed()
            fetcher = trainer.fit_loop._data_fetcher
            self.look: Look | None = fetcher.look if isinstance(fetcher, Feed) else None
        if self.look is not None and self.look.is_varied:
            what, kind = ("Lengths vary", "longest") if self.look.is_padded else ("Batches vary in size", "largest")
            self.note = f"{what}: trials have the {kind} of {len(self.look.elements)} batches"
            if self.look.is_padded:
                self.note += f", by which a mean one with {base} is {self.look.mean_length():.2f} as long"

    @contextlib.contextmanager
    def fed(self, batch_size: int, *, is_repeated: bool = True) -> Iterator[None]:
        """Inside, the fit loop has loaders of a size, and batches without an end.

        Args:
            batch_size: Samples of a batch.
            is_repeated: Whether the largest of a few batches is fed again and again where they differ.
        """
        loop, targets = self._trainer.fit_loop, self._targets
        end_workers(loop)
        loop._combined_loader = None
        targets.load(self._trainer, batch_size)
        try:
            with warnings.catch_warnings(), replaced(self._trainer.strategy, **_ALONE):
                warnings.simplefilter("ignore")  # of sizes that are only tried; the run says it of its own
                loop.setup_data()
            most = math.ceil(MANY * targets.base_size / batch_size) if is_repeated else 0
            # one that draws from the loader itself is fed by Lightning alone
            if loop._data_fetcher is not None and type(loop._data_fetcher).__name__ != "_DataLoaderIterDataFetcher":
                loop._data_fetcher = Feed(loop._data_fetcher, most)
            yield
        finally:
            end_workers(loop)
            targets.load(self._trainer, targets.base_size)

    def _rows_fed(self) -> list[int] | None:
        """Rows of each tensor in the first batch that the loop is fed; None where it draws from the loader itself."""
        fetcher = self._trainer.fit_loop._data_fetcher
        if not isinstance(fetcher, Feed):
            return None
        batch, _, _ = next(fetcher)
        return [shape[0] for shape in shapes_in(batch) if shape]

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
        most = agreement.smallest(self._most(objective))
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
        """See that the loaders have the size that is set: some are built before it is."""
        base, before = self._targets.base_size, _known_sizes(self._loaders)
        most = largest if self._num_samples is None else max(largest, self._num_samples)
        candidates = (size for size in (2 * base, base // 2, largest, smallest) if 0 < size <= most and size != base)
        other = next(candidates, None)
        if other is None:
            return
        with self.fed(other):
            after, rows = _known_sizes(loaders_in(self._trainer.fit_loop._combined_loader)), self._rows_fed()
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


def end_workers(loop: Any) -> None:
    """End the workers of a fit loop's dataloaders."""
    fetcher, loop._data_fetcher = loop._data_fetcher, None  # a second teardown would fail
    if fetcher is not None:
        fetcher.teardown()
