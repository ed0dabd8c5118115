"""When all optimizers of a model with manual optimization have had their turn.

Such a model decides in `training_step` when an optimizer steps: every fourth batch, or two of them by turns. What one
batch takes on average is only known from a whole round, which ends when each optimizer that ever steps has stepped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_offload.errors import TuningError
from lightning_offload.tuning.learning_rate import has_step_hooks, unwrapped

__all__ = ["OptimizerTurns"]

_MOST = 64
"""Batches of a round at most; whoever has not stepped in so many is not waited for."""


class OptimizerTurns:
    """Watches the steps of optimizers.

    Args:
        optimizers: Of the Trainer. One without hooks around its step is not waited for.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = [unwrapped(each) for each in optimizers if has_step_hooks(each)]
        self._awaited = set(range(len(self._optimizers)))
        self._stepped: set[int] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Rounds take place inside."""
        self.begin()
        with contextlib.ExitStack() as stack:
            for number, optimizer in enumerate(self._optimizers):
                stack.callback(optimizer.register_step_pre_hook(self._noting(number)).remove)
            yield

    def begin(self) -> None:
        """A round begins."""
        self._stepped = set()

    def _noting(self, number: int) -> Any:
        def note(*_: Any) -> None:
            self._stepped.add(number)

        return note

    def are_over(self, num_batches: int) -> bool:
        """Whether the round is.

        Args:
            num_batches: That it has had so far.

        Raises:
            TuningError: No optimizer has stepped in as many batches as a round may have.
        """
        if num_batches >= _MOST:
            if not self._stepped and self._optimizers:
                raise TuningError(
                    f"training_step() made no optimizer step in {num_batches} batches, so what a step takes is not"
                    " known: step at least that often, or leave the accumulation to Trainer(accumulate_grad_batches=)"
                    " with automatic optimization"
                )
            self._awaited = set(self._stepped)
        return num_batches > 0 and self._awaited <= self._stepped
