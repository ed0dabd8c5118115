"""Batches of any size from one real batch, and dataloaders of another batch size.

A trial at size `n` repeats the samples of one real batch until there are `n` of them, so no dataloader is restarted.
That suits batches whose leaves have the samples along their first dimension; for others the user gives `make_batch`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import import_from

__all__ = ["batch_size_of", "loaders_in", "map_loaders", "num_samples", "resized", "tiled"]


def tiled(batch: Any, size: int, batch_size: int) -> Any:
    """Repeat the samples of a batch.

    Args:
        batch: Tensors, nested in mappings, sequences and dataclasses.
        size: Samples in it.
        batch_size: Samples wanted.

    Raises:
        TuningError: Nothing in the batch has `size` samples along its first dimension.
    """
    count = [0]
    index = torch.arange(batch_size) % size

    def of(found: Any) -> Any:
        if _is_array(found) and len(found.shape) and found.shape[0] == size:
            count[0] += 1
            return found[index.to(found.device) if isinstance(found, Tensor) else index.numpy()]
        if isinstance(found, Mapping):
            return _mapped(found, of)
        if isinstance(found, (list, tuple)):
            if len(found) == size and not any(_is_array(item) or isinstance(item, (Mapping, list)) for item in found):
                return type(found)(found[i % size] for i in range(batch_size))
            items = [of(item) for item in found]
            return type(found)(*items) if hasattr(found, "_fields") else type(found)(items)
        if dataclasses.is_dataclass(found) and not isinstance(found, type):
            values = {f.name: of(getattr(found, f.name)) for f in dataclasses.fields(found) if f.init}
            return dataclasses.replace(found, **values)
        return found

    made = of(batch)
    if not count[0]:
        raise TuningError(
            f"no tensor in the batch ({type(batch).__name__}) has {size} samples along its first dimension: give"
            " make_batch=, a function that makes a batch of a given size"
        )
    return made


def _mapped(found: Mapping[Any, Any], of: Callable[[Any], Any]) -> Any:
    if type(found) is dict:
        return {key: of(value) for key, value in found.items()}
    made: Any = copy.copy(found)
    for key, value in list(found.items()):
        made[key] = of(value)
    return made


def _is_array(found: Any) -> bool:
    return isinstance(found, Tensor) or type(found).__module__ == "numpy"


def batch_size_of(batch: Any, expected: int | None) -> int:
    """The number of samples of a batch: the expected one if a tensor has it, else that of the first tensor.

    Raises:
        TuningError: There is no tensor in the batch.
    """
    sizes = list(_first_dimensions(batch))
    if not sizes:
        raise TuningError(
            f"there is no tensor in the batch ({type(batch).__name__}) to read its size from: give make_batch=, a"
            " function that makes a batch of a given size"
        )
    return expected if expected in sizes else sizes[0]


def _first_dimensions(found: Any) -> Iterator[int]:
    if _is_array(found):
        if len(found.shape):
            yield int(found.shape[0])
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _first_dimensions(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from _first_dimensions(value)
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield from _first_dimensions(getattr(found, field.name))


def loaders_in(loaders: Any) -> list[DataLoader[Any]]:
    """The DataLoaders in a collection of loaders, Lightning's CombinedLoader included."""
    found: list[DataLoader[Any]] = []

    def note(loader: DataLoader[Any]) -> DataLoader[Any]:
        found.append(loader)
        return loader

    map_loaders(loaders, note)
    return found


def map_loaders(loaders: Any, change: Callable[[DataLoader[Any]], DataLoader[Any]]) -> Any:
    """The same collection of loaders, each DataLoader in it changed."""
    if isinstance(loaders, DataLoader):
        return change(loaders)
    if isinstance(loaders, Mapping):
        return _mapped(loaders, lambda value: map_loaders(value, change))
    if isinstance(loaders, (list, tuple)):
        return type(loaders)(map_loaders(value, change) for value in loaders)
    if type(loaders).__name__ == "CombinedLoader":
        return type(loaders)(map_loaders(loaders.iterables, change), loaders._mode)
    return loaders


def num_samples(loaders: list[DataLoader[Any]]) -> int | None:
    """Samples that a rank can draw in an epoch; None where a loader does not know its length."""
    lengths = []
    for loader in loaders:
        source: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
        try:
            lengths.append(len(source))
        except (TypeError, NotImplementedError):
            return None
    return max(lengths) if lengths else None


def resized(loader: DataLoader[Any], batch_size: int, package: str) -> DataLoader[Any]:
    """Make a DataLoader like another one, but of another batch size.

    Data set, sampler, workers, collation, generator and all else are kept.

    Args:
        loader: The loader as the user made it.
        batch_size: Of the new one.
        package: The Lightning package whose rules for making loaders again are used.

    Raises:
        TuningError: The loader cannot be made again, or does not batch.
    """
    how = f"the {type(loader).__name__} cannot be given the batch size {batch_size}"
    fix = "build it in train_dataloader() from an attribute, and name that in batch_arg_name="
    if loader.batch_sampler is None:
        raise TuningError(f"{how}: it has batch_size=None, its data set makes the batches; {fix}")
    data = import_from(package, "utilities.data")
    try:
        # a loader that was given a batch sampler knows neither its sampler nor what it does with the last batch
        inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
        args, kwargs = data._get_dataloader_init_args_and_kwargs(loader, inner)
        sampler = kwargs.get("batch_sampler")
        if sampler is not None:
            kwargs["batch_sampler"] = _resized_sampler(sampler, batch_size)
        else:
            kwargs["batch_size"] = batch_size
            kwargs["drop_last"] = getattr(loader.batch_sampler, "drop_last", loader.drop_last)
        made: DataLoader[Any] = type(loader)(*args, **kwargs)
    except Exception as error:
        raise TuningError(f"{how} ({error}); {fix}") from error
    return made


def _resized_sampler(sampler: Any, batch_size: int) -> Any:
    """A batch sampler that Lightning made again like the user's: the size is all that differs."""
    if not isinstance(getattr(sampler, "batch_size", None), int):
        raise TypeError(f"its batch sampler {type(sampler).__name__} has no batch_size to set")
    sampler.batch_size = batch_size
    return sampler
