"""The states that trials go back to: that of the start of the fit, and that in which the optimizers were just made.

A trial needs what `configure_optimizers` and `train_dataloader` have set up (the model may keep its optimizers), but
nothing of it may be left when the training begins, which makes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from typing_extensions import override

from lightning_offload.callbacks.tuning.batches import loaders_in
from lightning_offload.plugins.random_states import RandomStates
from lightning_offload.plugins.snapshot import Memento

__all__ = ["Prepared", "Start", "roots_of"]


def roots_of(trainer: Any, module: Any, loaders: Any | None) -> tuple[object, ...]:
    """Whatever a step may change: the model, its data, the loops, and callbacks of the user's own.

    No callback is called in a trial, but hooks of modules that one has registered are.

    Args:
        trainer: At the start of a fit.
        module: The model.
        loaders: Those passed to `fit()`, if any.
    """
    data = [trainer.datamodule] if trainer.datamodule is not None else []
    return (module, trainer.fit_loop, *data, *loaders_in(loaders), *filter(_is_users, trainer.callbacks))


def _is_users(callback: object) -> bool:
    package = type(callback).__module__.partition(".")[0]
    return package not in ("lightning", "pytorch_lightning", "lightning_offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The state that training is to begin from, before Lightning made the optimizers.

    Attributes:
        roots: All that steps may change is below these.
        memento: Of the roots.
        random_states: Of the global generators.
    """

    roots: tuple[object, ...]
    memento: Memento
    random_states: RandomStates

    @classmethod
    def now(cls, roots: Sequence[object]) -> Start:
        """Record the state as it is."""
        return cls(roots=tuple(roots), memento=Memento(roots, keeps_hooks=True), random_states=RandomStates.now())

    def restore(self) -> None:
        """Put all of it back."""
        self.memento.restore()
        self.random_states.restore()


@final
class Prepared(Memento):
    """Which objects there are once the optimizers are made; the contents of tensors are those of the start.

    Args:
        start: The start of the fit, which `restore` goes back to first.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        super().__init__(start.roots, keeps_hooks=True)

    @override
    def restore(self) -> None:
        """Put the contents of the start into the objects of now."""
        self._start.restore()
        super().restore()

    @override
    def _note_tensor(self, tensor: Tensor, *, is_data: bool) -> None:
        """A second copy of the model is not needed."""
