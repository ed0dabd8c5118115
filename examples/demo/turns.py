"""Plain steps and steps within the budget, in turns in one run: the Lightning callback that times them.

A plain step in between is plain Lightning: the precision plugin is its own class again for that long, so that neither a
hook nor a mode is in force. Both kinds train the same weights in the same process, and since a step gives the same bits
either way, it makes no difference to the run which kind a step is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L

from examples.demo.pairs import PairedTimes
from lightning_offload.accelerators import synchronize
from lightning_offload.strategies.precision import graft, ungraft


class StepsInTurns(L.Callback):
    """Times pairs of steps, one plain and one within the budget; which goes first alternates.

    Args:
        first_step: Step, counted from 0, with which the turns begin. It is plain and not timed: the first one of its
            kind after many of the other.
        num_pairs: Pairs to time in the steps after it.
        clock: Tells the time in seconds.

    Attributes:
        num_steps: Steps that the turns take.
    """

    def __init__(self, first_step: int, num_pairs: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_steps = 1 + 2 * num_pairs
        self._first_step = first_step
        self._clock = clock
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._start = 0.0

    @property
    def times(self) -> PairedTimes:
        """The times so far."""
        return PairedTimes(plain_seconds=tuple(self._seconds[True]), other_seconds=tuple(self._seconds[False]))

    def is_plain(self, step: int) -> bool:
        """Whether a step of the turns is plain: plain, ours; ours, plain; plain, ours; ..."""
        pair, second = divmod(step - self._first_step - 1, 2)
        return step == self._first_step or bool(second) == bool(pair % 2)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Give the step to whom it belongs, and start the clock."""
        if trainer.global_step < self._first_step:
            return
        strategy: Any = trainer.strategy
        ungraft(strategy.precision_plugin)
        if not self.is_plain(trainer.global_step):
            graft(strategy.precision_plugin, strategy.memory)
        synchronize(pl_module.device)
        self._start = self._clock()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock."""
        step = trainer.global_step - 1  # the optimizer has stepped
        if step <= self._first_step:
            return
        synchronize(pl_module.device)
        self._seconds[self.is_plain(step)].append(self._clock() - self._start)
