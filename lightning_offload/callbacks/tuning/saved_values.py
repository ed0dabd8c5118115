"""What is written about a run beside its result: the hyperparameters of checkpoints, and the CLI's configuration.

A checkpoint's hyperparameters make a model again (`load_from_checkpoint`). A rate that was scaled belongs to the found
batch size: where that is not among the same hyperparameters, the model would come with one and without the other, and
a second tuning would scale the rate once more. Then the configured rate is written. Checkpoints of weights alone have
hyperparameters too, and of those only the model's own hook hears, not a callback's.

LightningCLI writes its configuration before anything is tuned. It is written again with the found values, so that
the file starts the run that took place.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.callbacks.tuning.targets import places_of
from lightning_offload.lightning_packages import rank_zero

__all__ = ["rewrite_configuration", "save_with_its_rate"]

_SECTIONS = ("model", "data")
_HOOK = "on_save_checkpoint"
_HYPERPARAMETERS = "hyper_parameters"  # of a checkpoint


def save_with_its_rate(module: Any, result: TuningResult, *, batch_arg_name: str, lr_arg_name: str | None) -> None:
    """From now on write a rate that goes with the batch size into every checkpoint of a model.

    Args:
        module: The model.
        result: Of its tuning.
        batch_arg_name: As the finder was given it.
        lr_arg_name: As the finder was given that.
    """
    own = getattr(module, _HOOK)
    if isinstance(own, functools.partial) and own.func is _save:  # of an earlier tuning
        own = own.args[0]
    # not an attribute by which a module would look for parameters; it goes with the model to other processes
    object.__setattr__(module, _HOOK, functools.partial(_save, own, result, batch_arg_name, lr_arg_name))


def _save(
    own: Callable[[Any], None],
    result: TuningResult,
    batch_arg_name: str,
    lr_arg_name: str | None,
    checkpoint: dict[str, Any],
) -> None:
    """In place of a model's hook: write the configured rate where the found size is not among the hyperparameters."""
    own(checkpoint)
    found = checkpoint.get(_HYPERPARAMETERS)
    if found is None or lr_arg_name is None or result.lr_factor == 1.0 or result.configured_lr is None:
        return
    if any(place.get() == result.batch_size for place in places_of(found, batch_arg_name)):
        return
    checkpoint[_HYPERPARAMETERS] = made = copy.deepcopy(found)
    for place in places_of(made, lr_arg_name):
        if place.get() == result.lr:
            place.set(result.configured_lr)


def rewrite_configuration(
    trainer: Any, package: str, result: TuningResult, *, batch_arg_name: str, lr_arg_name: str | None
) -> None:
    """Write LightningCLI's configuration again with the found values, where there is one; on rank zero.

    Args:
        trainer: At the start of a fit.
        package: The Lightning package in use.
        result: Of the tuning.
        batch_arg_name: As the finder was given it.
        lr_arg_name: As the finder was given that.
    """
    callback = next(filter(_saves_configuration, trainer.callbacks), None)
    if callback is None or not callback.save_to_log_dir or not trainer.is_global_zero or trainer.log_dir is None:
        return
    path = os.path.join(trainer.log_dir, callback.config_filename)
    config = copy.deepcopy(callback.config)
    values: dict[str, tuple[Any, Any]] = {batch_arg_name: (result.configured_batch_size, result.batch_size)}
    if lr_arg_name is not None:
        values[lr_arg_name] = (result.configured_lr, result.lr)
    places = [
        (place, after)
        for name, (before, after) in values.items()
        for section in _sections(config)
        for place in places_of(section, name.rpartition(".")[2])
        if before != after and place.get() == before
    ]
    if not places or not os.path.exists(path):
        return
    for place, value in places:
        place.set(value)
    try:
        callback.parser.save(config, path, skip_none=False, overwrite=True, multifile=callback.multifile)
    except Exception as error:
        rank_zero(package, "warn", f"{path} has the configured batch size, not the found one: {error}")
        return
    callback.config = config


def _saves_configuration(callback: Any) -> bool:
    return any(cls.__name__ == "SaveConfigCallback" for cls in type(callback).__mro__)


def _sections(config: Any) -> Iterator[Any]:
    members = config if isinstance(config, Mapping) else vars(config)
    for name, value in members.items():
        if name in _SECTIONS and value is not None:
            yield value
        elif name == "fit" and value is not None:  # the subcommand
            yield from _sections(value)
