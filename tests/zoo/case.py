"""What a zoo case IS: a model, its batches and one training step, with no knowledge of the memory runtime.

A training step talks to its `Scope` only. In the plain run the scope's contexts do nothing. In a planned run
the scope decides which part of the step is wrapped: everything in `Scope.step`, or only what is in
`Scope.forward`::

    with scope.step(batch):
        with scope.forward():
            loss = model(batch)
        scope.backward(loss)
    scope.update(optimizer)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Scope(Protocol):
    """The seam between a training step and whatever manages its memory."""

    def step(self, *inputs: Any) -> AbstractContextManager[None]:
        """Surround one forward and its backward; `inputs` is what the step depends on."""

    def forward(self) -> AbstractContextManager[None]:
        """Surround the forward part of the innermost `step`."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run `loss.backward(**kwargs)`."""

    def backward_scope(self) -> AbstractContextManager[None]:
        """Surround a backward that is not a call of `Tensor.backward`, such as `torch.autograd.grad`."""

    def update(self, *optimizers: Optimizer) -> None:
        """Record the gradients, step the optimizers and set the gradients to None."""

    def record(self, name: str, value: Any) -> None:
        """Add tensors or plain values to the outcome of this training step."""


@dataclass(slots=True, kw_only=True)
class Job:
    """The live objects of one run.

    Attributes:
        model: The model.
        optimizers: Its optimizers.
        index: The number of the step, from 0.
        extras: What the training loop holds besides: copies of the model, a teacher, what it remembers of a step.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    index: int = 0
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer; most cases have only one."""
        return self.optimizers[0]


TrainStep = Callable[[Job, Any, Scope], None]
LossFunction = Callable[[Any, Any], Tensor]


def sgd(model: nn.Module) -> Sequence[Optimizer]:
    """One SGD with momentum over all parameters."""
    return (torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False),)


def adamw(model: nn.Module) -> Sequence[Optimizer]:
    """One AdamW over all parameters."""
    return (torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False),)


def simple(loss: LossFunction) -> TrainStep:
    """Return the usual training step: one forward, one backward, one update."""

    def train_step(job: Job, batch: Any, scope: Scope) -> None:
        with scope.step(batch):
            with scope.forward():
                value = loss(job.model, batch)
            scope.backward(value)
        scope.record("loss", value)
        scope.update(*job.optimizers)

    return train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One entry of the zoo.

    Attributes:
        name: A unique name, used as the test's id.
        build: Makes the model from the global random generator.
        batch: Makes the inputs of a step from its number, without touching the global random generator.
        train_step: Trains for one step.
        optimizers: Makes the optimizers for a model.
        static: Whether every step has the same graph, so that the plan is final from the 4th step on.
        grows: Whether an optimizer's state grows over the first steps.
        hides: Whether it holds memory that measured steps alone show, under each plan another: compiled code does.
        split: Whether forward can be wrapped alone (not where one step holds several forwards and updates).
        steps: How many steps make the case meaningful.
        budgeted: Whether the case's activations are large enough for the budget tests to be meaningful.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    train_step: TrainStep
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] = sgd
    static: bool = True
    grows: bool = False
    hides: bool = False
    split: bool = True
    steps: int = 5
    budgeted: bool = False

    def __str__(self) -> str:
        return self.name


def normal(step: int, *shape: int, salt: int = 0) -> Tensor:
    """Standard normal values that depend on the step alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * salt + step))


def integers(step: int, high: int, *shape: int, salt: int = 1) -> Tensor:
    """Integers in [0, high) that depend on the step alone."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1000 * salt + step))
