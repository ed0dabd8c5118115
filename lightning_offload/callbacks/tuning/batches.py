"""Dataloaders of a run, and the same of another batch size."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import import_from

__all__ = ["all_resized", "loaders_in", "num_samples", "resized", "sizes_of"]


def loaders_in(loaders: Any) -> list[DataLoader[Any]]:
    """The DataLoaders in a collection of loaders, Lightning's CombinedLoader included, which looks at these alike."""
    iterables = loaders.iterables if _is_combined(loaders) else loaders
    return [each for each in tree_leaves(iterables) if isinstance(each, DataLoader)]


def all_resized(loaders: Any, batch_size: int, package: str) -> Any:
    """The same collection of loaders, each DataLoader in it made again, cf. :func:`resized`."""
    if _is_combined(loaders):
        return type(loaders)(all_resized(loaders.iterables, batch_size, package), loaders._mode)
    return tree_map_only(DataLoader, lambda loader: resized(loader, batch_size, package), loaders)


def _is_combined(loaders: Any) -> bool:
    return type(loaders).__name__ == "CombinedLoader"


def num_samples(loaders: list[DataLoader[Any]], batch_size: int = 1, *, of_shortest: bool = False) -> int | None:
    """Samples that a rank can draw in an epoch; None where a loader does not know its length.

    Of a data set that makes the batches itself an item has as many as a batch.

    Args:
        loaders: The loaders.
        batch_size: Their size.
        of_shortest: Whether to tell how many the shortest has, not the longest.
    """
    lengths = []
    for loader in loaders:
        source: Any = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
        try:
            lengths.append(len(source) * (batch_size if loader.batch_sampler is None else 1))
        except (TypeError, NotImplementedError):
            return None
    return (min if of_shortest else max)(lengths) if lengths else None


def resized(loader: DataLoader[Any], batch_size: int, package: str) -> DataLoader[Any]:
    """Make a DataLoader like a user's, but of another batch size, by the rules of a Lightning package for that.

    Data set, sampler, workers, collation, generator and all else are kept.

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
        # what a hook's loader was given by place, whose names Lightning notes while it asks for loaders
        names = getattr(loader, "__pl_saved_arg_names", ())[: len(args)]
        given = {**dict(zip(names, args, strict=True)), **kwargs} if names else kwargs
        sampler = given.get("batch_sampler")
        changed: dict[str, Any] = {
            "batch_size": batch_size,
            "drop_last": getattr(loader.batch_sampler, "drop_last", loader.drop_last),
        }
        if sampler is not None:
            changed = {"batch_sampler": _resized_sampler(sampler, batch_size)}
        args = tuple(changed.pop(name, value) for name, value in zip(names, args, strict=True)) if names else args
        made: DataLoader[Any] = type(loader)(*args, **{**kwargs, **changed})
    except Exception as error:
        raise TuningError(f"{how} ({error}); {fix}") from error
    return made


def _resized_sampler(sampler: Any, batch_size: int) -> Any:
    """A batch sampler that Lightning made again like the user's: the size is all that differs."""
    if not isinstance(getattr(sampler, "batch_size", None), int):
        raise TypeError(f"its batch sampler {type(sampler).__name__} has no batch_size to set")
    sampler.batch_size = batch_size
    return sampler


def sizes_of(loaders: list[DataLoader[Any]]) -> list[Any]:
    """The batch size of each loader, or of its batch sampler; None where neither tells."""
    return [
        loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
        for loader in loaders
    ]
