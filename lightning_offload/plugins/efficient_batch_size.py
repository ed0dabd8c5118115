"""Finds the efficiency-optimal batch size of a training function, and then calls the function with it.

    @find_efficient_batch_size(starting_batch_size=64)
    def train(batch_size, model, data):
        ...

    train(model, data)

The decorated function is called without the batch size. It is tried at several sizes, each time until it has made a
few optimizer steps (see :mod:`lightning_offload.plugins.trial_runs`), and is then called once for real, from the very
state in which it was found: what it is given, and what it uses by name, is put back after each trial, and so is the
random state (see :mod:`lightning_offload.plugins.snapshot`). What it makes itself is made anew in each call, so models,
optimizers and dataloaders are best made inside; what it writes before its first optimizer steps (loggers, files) it
writes in each trial.

The size is the smallest whose throughput is within a tolerance of the best, not the largest that fits: see
:mod:`lightning_offload.tuning.search`. A learning rate is not touched. Where a memory plugin watches the steps, a
performance model is fitted to those of the first trials: it predicts throughput and peak of the others, and 12 trials
do in all.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_offload.errors import TuningError, UnsupportedError
from lightning_offload.plugins.data_parallel import num_ranks
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.plugins.snapshot import Restore, take_snapshot
from lightning_offload.plugins.step_meter import TrialSettings
from lightning_offload.plugins.trial_runs import Trials
from lightning_offload.tuning.agreement import Agreement, Alone, ProcessGroup
from lightning_offload.tuning.search import SearchResult, find_batch_size

Remember = Callable[[Sequence[Any]], Restore]
"""Remembers what a framework knows of the objects that a function uses."""

_MAX_TRIALS = 12
_RECORDED_SHARE = 4
"""Of so many trials one goes to a size that the performance model is fitted to."""
_NO_TIME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What :func:`find_efficient_batch_size` was given for its search."""

    starting_batch_size: int
    tolerance: float
    min_size: int
    max_size: int | None
    max_trials: int | None
    max_seconds: float | None


class EfficientBatchSize:
    """A training function that finds its batch size when it is first called.

    Attributes:
        result: What the search found, None before the first call; later calls use its batch size.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: SearchOptions,
        settings: TrialSettings,
        remember: Remember,
    ) -> None:
        functools.update_wrapper(self, function)
        self.result: SearchResult | None = None
        self._function = function
        self._options = options
        self._settings = settings
        self._remember = remember

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the efficient batch size in front.

        Raises:
            TypeError: The batch size was given.
            TuningError: No size works.
        """
        _check_arguments(self._function, args, kwargs)
        if self.result is None:
            self.result = self._find(args, kwargs)
        return self._function(self.result.batch_size, *args, **kwargs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SearchResult:
        used = [*args, *kwargs.values(), *_variables_of(self._function)]
        restores = [take_snapshot(used), self._remember(used)]
        agreement = _agreement()
        try:
            trials = Trials(lambda size: self._function(size, *args, **kwargs), restores, self._settings, agreement)
            return self._searched(trials, agreement)
        finally:
            if isinstance(agreement, ProcessGroup):
                agreement.close()  # which ends the wait of the others at once, if this rank fails

    def _searched(self, trials: Trials, agreement: Agreement) -> SearchResult:
        options = self._options
        began = time.monotonic()
        predictions = trials.record(
            options.starting_batch_size,
            low=options.min_size,
            high=options.max_size,
            most=max(1, (options.max_trials or _MAX_TRIALS) // _RECORDED_SHARE),
            until=None if options.max_seconds is None else began + options.max_seconds,
        )
        left = None if options.max_seconds is None else began + options.max_seconds - time.monotonic()
        return find_batch_size(
            trials.run,
            init_size=options.starting_batch_size,
            tolerance=options.tolerance,
            min_size=options.min_size,
            max_size=options.max_size,
            max_trials=options.max_trials,
            max_seconds=None if left is None else max(left, _NO_TIME),
            predict=predictions.local if predictions.is_usable else None,
            known=trials.done,
            agreement=agreement,
        )


def find_efficient_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    *,
    tolerance: float = 0.03,
    min_size: int = 1,
    max_size: int | None = None,
    memory: MemoryPlugin | None = None,
    steps_per_trial: int = 5,
    warmup_steps: int = 4,
    max_trials: int | None = None,
    max_seconds: float | None = None,
    remember: Remember = lambda _: _nothing,
    is_out_of_memory: Callable[[Exception], bool] = lambda _: False,
) -> Any:
    """Decorate a training function, which takes the batch size first, so that it finds that itself.

    Args:
        function: The function; None to get a decorator.
        starting_batch_size: The first size that is tried, samples of one rank.
        tolerance: How much of the best throughput may be lost for a smaller size.
        min_size: Smallest size; batch norm needs 2.
        max_size: Largest size, None for what fits.
        memory: A plugin whose peak and budget count; one that is attached in the function counts by itself.
        steps_per_trial: Optimizer steps of a trial that are timed.
        warmup_steps: Optimizer steps before them; a memory plan is in force after 3 steps of a new size.
        max_trials: Most trials.
        max_seconds: Most time for the search.
        remember: What else of the objects that the function uses is put back; for adapters.
        is_out_of_memory: Which errors say that a size does not fit, beside torch's own; for adapters.

    Returns:
        The decorated function; its ``result`` has every trial.

    Raises:
        TuningError: A number is out of range.
    """
    _check_range(starting_batch_size, min_size, max_size)
    for name, count, least in (("steps_per_trial", steps_per_trial, 1), ("warmup_steps", warmup_steps, 0)):
        if not isinstance(count, int) or count < least:
            raise TuningError(f"{name}={count!r} is not possible: give a whole number of {least} or more")
    options = SearchOptions(
        starting_batch_size=starting_batch_size, tolerance=tolerance, min_size=min_size, max_size=max_size,
        max_trials=max_trials, max_seconds=max_seconds,
    )  # fmt: skip
    settings = TrialSettings(
        warmup_steps=warmup_steps, timed_steps=steps_per_trial, memory=memory, is_out_of_memory=is_out_of_memory
    )

    def decorate(function: Callable[..., Any]) -> EfficientBatchSize:
        return EfficientBatchSize(function, options, settings, remember)

    return decorate if function is None else decorate(function)


def _check_range(starting_batch_size: int, min_size: int, max_size: int | None) -> None:
    sizes = {"min_size": min_size, "starting_batch_size": starting_batch_size, "max_size": max_size}
    for name, size in sizes.items():
        if (size is not None or name != "max_size") and (type(size) is not int or size < 1):
            raise TuningError(f"{name}={size!r} is not a batch size: give a whole number of 1 or more")
    if starting_batch_size < min_size or (max_size is not None and starting_batch_size > max_size):
        raise TuningError(
            f"starting_batch_size={starting_batch_size} is not between min_size={min_size} and max_size={max_size}"
        )


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(function, "__name__", "the function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a built-in; the call itself will tell
        return
    first = next(iter(signature.parameters), None)
    if first is None:
        raise TypeError(f"`{name}` takes no argument: its first has to be the batch size")
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"`{name}` cannot be called with these arguments ({error}): leave out the batch size, that is given"
        ) from None


def _variables_of(function: Callable[..., Any]) -> Iterator[Any]:
    """What a function uses by name, and what it is bound to."""
    while isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield from (owner, *getattr(owner, "__dict__", {}).values())
    function = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        yield from (*found.nonlocals.values(), *found.globals.values())


def _agreement() -> Agreement:
    """Among the ranks of the process group.

    Raises:
        UnsupportedError: There are several ranks, but no process group yet.
    """
    if num_ranks() > 1:
        return ProcessGroup()
    if not torch.distributed.is_initialized() and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UnsupportedError(
            "the ranks cannot agree on a batch size before they are connected: make the Accelerator, or call "
            "torch.distributed.init_process_group, before the decorated function"
        )
    return Alone()


def _nothing() -> None:
    """Put nothing back."""
