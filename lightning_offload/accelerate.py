"""Hugging Face Accelerate: train prepared models within a memory budget, and find the batch size that pays.

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with prepare_offload(accelerator, model, budget="12GiB") as memory:
        ...  # the loop as it was

Nothing in the loop changes: every training forward of the model begins a step, and the backward that follows, by
``accelerator.backward`` or without it, belongs to it. Plans are saved and loaded with ``accelerator.save_state``
and ``load_state``, in a file of their own, so that checkpoints made without them load too.

    @find_efficient_batch_size(starting_batch_size=64)
    def train(batch_size): ...

``find_efficient_batch_size`` takes the place of accelerate's ``find_executable_batch_size``. It looks for the smallest
size with (nearly) the best throughput instead of one that fits, and all ranks leave with the same one.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_offload.errors import PolicyError, UnsupportedError, check_keywords, type_of
from lightning_offload.graph.files import read_file
from lightning_offload.plugins.module_steps import PLUGIN_KEYWORDS, ModuleMemoryPlugin
from lightning_offload.plugins.settings import Budget
from lightning_offload.tuning.function import find_efficient_batch_size as find
from lightning_offload.tuning.snapshot import Restore, take_snapshot

if TYPE_CHECKING:
    import os

    import torch
    from accelerate import Accelerator

    from lightning_offload.plugins.memory import MemoryPlugin

PLANS_FILE = "lightning_offload_plans.json"
"""Where a checkpoint's plans are."""

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU")
_ATTRIBUTE = "_lightning_offload_memory"


def prepare_offload(
    accelerator: Accelerator,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    budget: Budget = None,
    **keywords: Any,
) -> MemoryPlugin:
    """Have every training forward of a model, with the backward that follows, run within a memory budget.

    Args:
        accelerator: The accelerator that prepared the model.
        model: The model, as ``accelerator.prepare`` returned it, or several that train together.
        budget: Peak bytes of tensors alive on the device in a step, cf. :class:`~lightning_offload.MemoryPlugin`.
        keywords: Its further keywords.

    Returns:
        The memory plugin, attached: it has the ``report()``. It is detached by its ``detach()``, at the end of a
        ``with`` block, by ``accelerator.free_memory()``, and when the models are gone.

    Raises:
        OffloadError: A keyword is wrong, something else than a module was given, or this way of running it is
            not supported; the message says what is.
    """
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    check_keywords("prepare_offload", keywords, PLUGIN_KEYWORDS)
    _check(accelerator, models)
    memory = ModuleMemoryPlugin(budget, **keywords)
    memory.follow(*models, device=accelerator.device)
    if memory.enabled:
        _tie(accelerator, memory)
        if accelerator.is_main_process:
            memory.announce("prepare_offload", "prepare_offload(accelerator, model, budget='4GiB')")
    return memory


def find_efficient_batch_size(
    function: Callable[..., Any] | None = None, starting_batch_size: int = 128, **keywords: Any
) -> Any:
    """Decorate a training function, which takes the batch size first, so that it finds that itself.

    As :func:`lightning_offload.tuning.function.find_efficient_batch_size`, for functions that use an
    Accelerator: it has to be made before the decorated function is called, and what it and Accelerate's shared states
    keep of a training is put back after each trial.

    Args:
        function: The function; None to get a decorator.
        starting_batch_size: The first size that is tried, samples of one rank.
        keywords: Of the function named above: ``tolerance``, ``min_size``, ``max_size``, ``memory`` and others.

    Returns:
        The decorated function, called without the batch size; its ``result`` has every trial.

    Raises:
        TuningError: A number is out of range.
    """
    _import_accelerate()
    from accelerate.utils.memory import should_reduce_batch_size

    return find(
        function, starting_batch_size, remember=_remember, is_out_of_memory=should_reduce_batch_size, **keywords
    )


_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


def _remember(objects: Sequence[Any]) -> Restore:
    """Remember what accelerators among the objects, and the state that all share, keep of a training."""
    from accelerate import Accelerator
    from accelerate.state import GradientState

    found = [each for each in objects if isinstance(each, Accelerator)]
    before = [(each, each.step, [list(getattr(each, name)) for name in _LISTS]) for each in found]
    restore_scalers = take_snapshot([each.scaler for each in found])
    shared = GradientState._shared_state
    gradient_state = {key: list(value) if isinstance(value, list) else value for key, value in shared.items()}

    def restore() -> None:
        for accelerator, step, lists in before:
            accelerator.step = step
            for name, held in zip(_LISTS, lists, strict=True):
                setattr(accelerator, name, list(held))
        restore_scalers()
        shared.clear()  # a dataloader that was left in the middle stays in it as the active one
        shared.update({key: list(value) if isinstance(value, list) else value for key, value in gradient_state.items()})

    return restore


def _import_accelerate() -> None:
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"Accelerate is not installed ({error}): pip install 'lightning-offload[accelerate]'"
        ) from error


def _check(accelerator: Any, models: list[Any]) -> None:
    _import_accelerate()
    from accelerate import Accelerator

    if not isinstance(accelerator, Accelerator):
        raise PolicyError(f"accelerator={accelerator!r} is {type_of(accelerator)}: give an Accelerator")
    if not models:
        raise PolicyError("there is no model: give a torch.nn.Module, or several")
    kind = accelerator.distributed_type.value
    if kind not in _SUPPORTED:
        raise UnsupportedError(f"{kind} is not supported together with prepare_offload: use one of {_SUPPORTED}")
    if getattr(accelerator, _ATTRIBUTE, None) is not None:
        raise UnsupportedError(
            "this Accelerator has a memory plugin already, and one serves a device: give all models in one call, or "
            "detach() the first"
        )


def _tie(accelerator: Any, memory: ModuleMemoryPlugin) -> None:
    """Save and load the plans with the accelerator's state, and detach when it frees its memory."""

    def save(models: Any, weights: Any, folder: str | os.PathLike[str]) -> None:
        if accelerator.is_main_process:
            Path(folder, PLANS_FILE).write_text(json.dumps(memory.state_dict()))

    def load(models: Any, folder: str | os.PathLike[str]) -> None:
        _load_plans(memory, Path(folder, PLANS_FILE))

    def untie() -> None:
        setattr(accelerator, _ATTRIBUTE, None)
        for name in ("free_memory", "log"):
            vars(accelerator).pop(name, None)

    handles = (accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load))
    for handle in handles:
        memory.undo.callback(handle.remove)
    accelerator.free_memory = _detaching_first(memory, accelerator.free_memory)
    accelerator.log = _logging_too(memory, accelerator.log)
    setattr(accelerator, _ATTRIBUTE, memory)
    memory.undo.callback(untie)


def _detaching_first(memory: ModuleMemoryPlugin, free_memory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(free_memory)
    def free(*objects: Any) -> Any:
        memory.detach()
        return free_memory(*objects)

    return free


def _logging_too(memory: MemoryPlugin, log: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(log)
    def log_with_memory(values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ours = memory.report().metrics() if memory.enabled else {}
        return log({**ours, **values}, *args, **kwargs)

    return log_with_memory


def _load_plans(memory: MemoryPlugin, path: Path) -> None:
    if not path.exists():  # a checkpoint of a run without a budget
        return
    try:
        memory.load_state_dict(json.loads(read_file(path)))
    except ValueError as error:
        warnings.warn(f"the memory plans in {path} are not used, new ones are made: {error}", stacklevel=2)
