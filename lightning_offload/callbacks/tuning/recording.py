"""Records steps at a few batch sizes, so that a performance model can be fitted to them.

Under an offload strategy its own memory plugin records, and what it has learned of sizes that are only tried is dropped
afterwards. Under any other strategy a plugin of our own watches a few steps and is taken off before any is timed; where
it cannot (another kind of device, a precision plugin that compiles the step), there is no recording, and no prediction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.memory import MemoryPlugin
from lightning_offload.plugins.predictions import Recorded
from lightning_offload.strategies.precision import graft, ungraft

__all__ = ["NUM_LEARNING_STEPS", "StepRecorder"]

NUM_LEARNING_STEPS = 3
"""Steps of a new shape before its final plan: recorded, verified, measured."""

_NUM_TIMED = 2
_NO_LIMIT = 1 << 50
_log = logging.getLogger(__name__)


class StepRecorder:
    """Lets a memory plugin see steps.

    Args:
        trainer: Its strategy is set up for a fit.
        module: The model.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        memory = getattr(trainer.strategy, "memory", None)
        self.memory: MemoryPlugin | None = memory if isinstance(memory, MemoryPlugin) and memory.enabled else None
        self._trainer, self._module = trainer, module
        self._known = self.memory.step_kinds if self.memory is not None else frozenset[str]()
        self._is_able = True

    @property
    def budget_bytes(self) -> int | None:
        """The strategy's budget; without one what the device has, None where that has no limit."""
        if self.memory is not None:
            return self.memory.budget_bytes
        device: torch.device = self._trainer.strategy.root_device
        return (
            int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_allocated(device))
            if device.type == "cuda"
            else None
        )

    @property
    def policy(self) -> str:
        """Who plans the steps."""
        return self.memory.policy if self.memory is not None else "keep-all"

    def record(self, step: Callable[[], float]) -> Recorded:
        """Run a few steps and return what they showed.

        Args:
            step: Runs one and returns its duration.

        Raises:
            torch.OutOfMemoryError: The device ran out of memory.
            BudgetInfeasibleError: No plan can meet the budget.
        """
        if self.memory is not None:
            return _with_time(self._record(self.memory, step), step)
        if not self._is_able:
            return Recorded(planned=None, peak_bytes=None)
        try:
            with self._watching(step) as memory:
                recorded = self._record(memory, step)
        except (torch.OutOfMemoryError, BudgetInfeasibleError):
            raise
        except Exception as error:
            # the plain steps that follow raise it again where it is the model's and not the recording's
            _log.debug("steps cannot be recorded, the search goes without predictions", exc_info=error)
            self._is_able = False
            return Recorded(planned=None, peak_bytes=None)
        return _with_time(recorded, step)

    def _record(self, memory: MemoryPlugin, step: Callable[[], float]) -> Recorded:
        for _ in range(NUM_LEARNING_STEPS):
            step()
        seconds = step()
        report = memory.report()
        fixed = max(0.0, seconds - (report.measured_step_seconds or seconds))
        return Recorded(planned=report.planned, peak_bytes=report.measured_peak_bytes, fixed_seconds=fixed)

    @contextlib.contextmanager
    def _watching(self, step: Callable[[], float]) -> Iterator[MemoryPlugin]:
        strategy = self._trainer.strategy
        # where memory has no limit a plugin without a budget would have nothing to watch after the first step
        budget = None if strategy.root_device.type == "cuda" else _NO_LIMIT
        memory = MemoryPlugin(budget, policy="keep-all", verify="never")
        memory.attach(self._module, strategy.root_device)
        try:
            step()  # the optimizer makes its state, which the plugin is to know of
            graft(strategy.precision_plugin, memory)
            yield memory
        finally:
            ungraft(strategy.precision_plugin)
            memory.detach()

    def peak_bytes(self) -> int | None:
        """Peak of the steps that ran last, as the strategy's plugin measured it."""
        return self.memory.report().measured_peak_bytes if self.memory is not None else None

    def forget(self) -> None:
        """Drop what the strategy's plugin has learned of the steps that were tried."""
        if self.memory is not None:
            self.memory.forget(keep=self._known)


def _with_time(recorded: Recorded, step: Callable[[], float]) -> Recorded:
    return dataclasses.replace(recorded, step_seconds=min(step() for _ in range(_NUM_TIMED)))
