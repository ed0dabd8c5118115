"""A training function as the host of trials: it is called with a batch size, and its optimizer tells of its steps.

A *step* is one backward, a batch of the trial's size; the clock is read each time that the optimizer which stepped
first has stepped again, and the time is divided by the backwards in between. Steps of fewer rows than others before
them, as the last ones of an epoch are, do not count. The rows of a step are those of the largest tensor that the model
is given: the first module that is called, in a trial.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_offload.accelerators import device_in_use, synchronize
from lightning_offload.runtime.hooks import watch_backward
from lightning_offload.tuning.runner import StepMeter
from lightning_offload.tuning.shapes import shapes_in
from lightning_offload.tuning.snapshot import Restore
from lightning_offload.tuning.trial import Predict, Trial

__all__ = ["FunctionHost"]

_MOST_SHORT = 2
"""By how many the short steps of a trial may outnumber the others."""


class FunctionHost:
    """Trains by calling a function.

    Args:
        function: Trains with a batch size.
        restores: Put back what it changes.
        clock: Seconds, from any start.
    """

    def __init__(
        self, function: Callable[[int], object], restores: Sequence[Restore], clock: Callable[[], float]
    ) -> None:
        self._function, self._restores, self._clock = function, restores, clock

    def train(self, batch_size: int, meter: StepMeter) -> None:
        """Call the function; it is ended from inside its optimizer's step."""
        with _OptimizerSteps(meter, self._clock).watched():
            self._function(batch_size)

    def restore(self) -> None:
        """Put back what the function changed, and drop what it left behind, in cycles too."""
        gc.collect()
        for restore in self._restores:
            restore()

    def refusal(self, batch_size: int, trials: Sequence[Trial], predict: Predict) -> str:
        """No size is refused."""
        return ""


class _OptimizerSteps:
    """Tells a meter of the steps of whatever trains while it is watched."""

    def __init__(self, meter: StepMeter, clock: Callable[[], float]) -> None:
        self._meter, self._clock = meter, clock
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._num_backwards = 0
        self._num_rows = self._most_rows = self._excess_short = 0
        self._stack = contextlib.ExitStack()
        self._since = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with self._stack as stack, warnings.catch_warnings():
            # of the hook that is gone before anything is compiled
            warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(watch_backward(self._around_backward))
            first_call = register_module_forward_pre_hook(lambda module, _: self._follow(module, first_call))
            stack.callback(first_call.remove)
            self._begin()
            yield

    def _follow(self, module: nn.Module, first_call: Any) -> None:
        """See what the model is given from its next call on; no module in it is called by way of a hook then."""
        first_call.remove()
        self._stack.callback(module.register_forward_pre_hook(self._note_rows, with_kwargs=True).remove)

    def _note_rows(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = (shape[0] for shape in shapes_in((args, kwargs)) if shape)
        self._num_rows = max(self._num_rows, *rows, 0)

    def _begin(self) -> None:
        self._num_backwards = self._num_rows = 0
        self._since = self._clock()

    @contextlib.contextmanager
    def _around_backward(self) -> Iterator[None]:
        if torch._C._current_graph_task_id() == -1:
            self._num_backwards += 1
        yield

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer:
            return  # one of several; a step of all of them is over when the first steps again
        device = device_in_use()
        if device is not None:
            synchronize(device)
        seconds = (self._clock() - self._since) / max(1, self._num_backwards)
        is_short = self._num_rows < self._most_rows
        self._most_rows = max(self._most_rows, self._num_rows)
        self._excess_short += 1 if is_short else -1
        # rows that are lengths, as where these come first, are no samples: most steps are short then
        self._meter.step_took(seconds, counts=not is_short or self._excess_short > _MOST_SHORT)
        self._begin()
