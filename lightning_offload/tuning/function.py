"""Finds the efficiency-optimal batch size of a training function, and then calls the function with it.

    @find_efficient_batch_size(starting_batch_size=64)
    def train(batch_size, model, data):
        ...

    train(model, data)

The decorated function is called without the batch size. It is tried at several sizes, each time until it has made a
few optimizer steps (see :mod:`lightning_offload.tuning.runner`), and is then called once for real, from the very
state in which it was found: what it is given, and what it uses by name, is put back after each trial, and so is the
random state (see :mod:`lightning_offload.tuning.snapshot`). What it makes itself is made anew in each call, so
models, optimizers and dataloaders are best made inside; what it writes before its first optimizer steps (loggers,
files) it writes in each trial.

The size is the smallest whose throughput is within a tolerance of the best, not the largest that fits: see
:mod:`lightning_offload.tuning.search`. A learning rate is not touched. Where a memory plugin watches the steps, a
performance model is fitted to those of the first trials: it predicts throughput and peak of the others, and 12 trials
do in all.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import types
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from lightning_offload.capture.live import heap_set_aside
from lightning_offload.errors import TuningError, UnsupportedError
from lightning_offload.plugins.data_parallel import num_ranks
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.tuning.acquisition import Space
from lightning_offload.tuning.function_host import FunctionHost
from lightning_offload.tuning.ranges import check_ranges
from lightning_offload.tuning.ranks import Coordinator, GlooCoordinator
from lightning_offload.tuning.runner import ENDED_EARLY, TrialRunner, TrialSettings
from lightning_offload.tuning.search import SearchResult
from lightning_offload.tuning.snapshot import Restore, take_snapshot
from lightning_offload.tuning.trial import Trial


def check_function(function: Any) -> None:
    """Check that a call of it can train.

    Raises:
        TuningError: It is no function, or a call of it would only make a generator or a coroutine.
    """
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise TuningError(f"a {kind} cannot be decorated: write @{kind} above the decorator, not below it")
    if not callable(function):
        raise TuningError(
            f"{function!r} is a {type(function).__name__}, not a training function: decorate a function, as in "
            "@find_efficient_batch_size(starting_batch_size=64)"
        )
    called = getattr(function, "__call__", function)  # noqa: B004  # of an object that can be called
    for is_kind, what in (
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isasyncgenfunction, "an asynchronous generator"),
    ):
        if is_kind(function) or is_kind(called):
            raise TuningError(
                f"`{name_of(function)}` does not train when it is called, it makes {what}: decorate a plain function"
            )


def check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that it can be called with a batch size in front of these arguments.

    Raises:
        TypeError: It cannot.
    """
    name = name_of(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a built-in; the call itself will tell
        return
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        takes = "no argument" if first is None else f"`{first}` first, which only a keyword can give"
        raise TypeError(f"`{name}` takes {takes}: its first argument has to be the batch size")
    try:
        signature.bind(0, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"`{name}` cannot be called with these arguments ({error}): leave out the batch size, which is its first "
            "argument and given by the decorator, and give all others"
        ) from None


def name_of(function: Any) -> str:
    """What messages call it."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def variables_of(function: Callable[..., Any]) -> Iterator[Any]:
    """What a function uses by name, what it is bound to, and what the functions that it uses by name use.

    These are followed within the function's own module: what a library does with its variables is its own affair.
    """
    while isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = getattr(function, "__call__", function)  # noqa: B004  # an object that can be called
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield from (owner, *getattr(owner, "__dict__", {}).values())
    waiting = [inspect.unwrap(getattr(function, "__func__", function))]
    known: set[int] = set()
    while waiting:
        found = waiting.pop()
        if not isinstance(found, FunctionType) or id(found) in known:
            continue
        known.add(id(found))
        for value in _named_in(found):
            yield value
            if isinstance(value, FunctionType) and value.__module__ == found.__module__:
                waiting.append(value)


def _named_in(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield function.__globals__[name]


def _names(code: CodeType) -> set[str]:
    """Names in a function's code, and in that of the functions and comprehensions inside it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


Remember = Callable[[Sequence[Any]], Restore]
"""Remembers what a framework knows of the objects that a function uses."""


Find = Callable[[TrialRunner], SearchResult]
"""Searches by trials of a function."""


class EfficientBatchSize:
    """A training function that finds its batch size when it is first called.

    Attributes:
        result: What the search found, None before the first call; later calls use its batch size.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        find: Find,
        settings: TrialSettings,
        remember: Remember,
    ) -> None:
        functools.update_wrapper(self, function)
        self.result: SearchResult | None = None
        self._name = name_of(function)
        self._function = function
        self._find_with = find
        self._settings = settings
        self._remember = remember

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> EfficientBatchSize:
        """The same for a method, which takes the batch size after ``self``: each object finds its own.

        Raises:
            UnsupportedError: The object cannot remember what was found.
        """
        if instance is None:
            return self
        attributes = getattr(instance, "__dict__", None)
        if not isinstance(attributes, dict):
            raise UnsupportedError(
                f"`{self._name}` has nowhere to keep the batch size that it finds: leave the decorator out, and call "
                f"find_efficient_batch_size(....{self._name}), the method of an object or a class, once"
            )
        bound = EfficientBatchSize(
            types.MethodType(self._function, instance), self._find_with, self._settings, self._remember
        )
        attributes[self._name] = bound  # found first from now on
        return bound

    def __repr__(self) -> str:
        """Name the function and what was found."""
        found = f"batch_size={self.result.batch_size}" if self.result is not None else "no batch size yet"
        return f"<EfficientBatchSize of `{self._name}`: {found}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the efficient batch size in front.

        Raises:
            TypeError: The batch size was given.
            TuningError: No size works.
        """
        check_arguments(self._function, args, kwargs)
        if self.result is None:
            self.result = self._find(args, kwargs)
        return self._function(self.result.batch_size, *args, **kwargs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SearchResult:
        used = [*args, *kwargs.values(), *variables_of(self._function)]
        restores = [take_snapshot(used), self._remember(used)]
        host = FunctionHost(lambda size: self._function(size, *args, **kwargs), restores, self._settings.clock)
        with _agreement() as agreement, heap_set_aside():
            runner = TrialRunner(host, self._settings, agreement)
            try:
                return self._find_with(runner)
            except TuningError as error:
                raise self._about_length(runner.done) or error from None

    def _about_length(self, trials: Sequence[Trial]) -> TuningError | None:
        """What to say where no size was too large, but training too short at each."""
        if not trials or any(trial.is_ok or ENDED_EARLY not in trial.reason for trial in trials):
            return None
        shortest = min(trials, key=lambda trial: trial.batch_size)
        return TuningError(
            f"`{self._name}` is too short to find a batch size with: at {shortest.batch_size}, {shortest.reason}; have "
            "it train longer, lower warmup_steps, or set the batch size yourself"
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
        max_seconds: Time after which no further trial begins; None for no limit.
        remember: What else of the objects that the function uses is put back; for adapters.
        is_out_of_memory: Which errors say that a size does not fit, beside torch's own; for adapters.

    Returns:
        The decorated function; its ``result`` has every trial.

    Raises:
        TuningError: A number is out of range.
    """
    check_ranges(
        {
            "starting_batch_size": starting_batch_size, "tolerance": tolerance, "min_size": min_size,
            "max_size": max_size, "steps_per_trial": steps_per_trial, "warmup_steps": warmup_steps,
            "max_trials": max_trials, "max_seconds": max_seconds,
        }
    )  # fmt: skip
    if not min_size <= starting_batch_size <= (max_size or starting_batch_size):
        raise TuningError(
            f"starting_batch_size={starting_batch_size} is not between min_size={min_size} and max_size={max_size}"
        )
    if memory is not None and not isinstance(memory, MemoryPlugin):
        raise TuningError(f"memory={memory!r} is a {type(memory).__name__}: give a MemoryPlugin")
    space = Space(low=min_size, high=max_size, start=starting_batch_size, tolerance=tolerance)
    settings = TrialSettings(
        warmup_steps=warmup_steps, timed_steps=steps_per_trial, memory=memory, is_out_of_memory=is_out_of_memory
    )

    def search(runner: TrialRunner) -> SearchResult:
        end = math.inf if max_seconds is None else settings.clock() + max_seconds
        return runner.find(space, max_trials=max_trials, until=lambda _: end)

    def decorate(function: Callable[..., Any]) -> EfficientBatchSize:
        check_function(function)
        return EfficientBatchSize(function, search, settings, remember)

    return decorate if function is None else decorate(function)


def _agreement() -> Coordinator:
    """Among the ranks of the process group.

    Raises:
        UnsupportedError: There are several ranks, but no process group yet.
    """
    if num_ranks() > 1:
        return GlooCoordinator()
    if not torch.distributed.is_initialized() and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UnsupportedError(
            "the ranks cannot agree on a batch size before they are connected: make the Accelerator, or call "
            "torch.distributed.init_process_group, before the decorated function"
        )
    return Coordinator()


def _nothing() -> None:
    """Put nothing back."""
