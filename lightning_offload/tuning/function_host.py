"""A training function as the host of trials: it is called with a batch size, and its optimizer tells of its steps.

A *step* is one backward, a batch of the trial's size; the clock is read each time that the optimizer which stepped
first has stepped again, and the time is divided by the backwards in between.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_offload.accelerators import device_in_use, synchronize
from lightning_offload.runtime.hooks import watch_backward
from lightning_offload.tuning.runner import StepMeter
from lightning_offload.tuning.snapshot import Restore
from lightning_offload.tuning.trial import Predict, Trial

__all__ = ["FunctionHost"]


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
        self._since = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(watch_backward(self._around_backward))
            self._begin()
            yield

    def _begin(self) -> None:
        self._num_backwards = 0
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
        self._meter.step_took((self._clock() - self._since) / max(1, self._num_backwards))
        self._begin()
