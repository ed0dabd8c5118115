"""Gives the parameter groups the learning rate that goes with a batch size, where the model's own did not reach them.

The rate is set where the model keeps it, and the optimizers are made anew, so that schedulers are built on it. A group
whose rate did not follow (it is written into `configure_optimizers`) is scaled afterwards, with what its scheduler has
derived from it, so that every group keeps its share of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lightning_offload.tuning.learning_rate import scale_optimizer, scale_scheduler

__all__ = ["Place", "base_rates", "first_rate", "scale_groups", "stragglers"]

Place = tuple[int, int]
"""A parameter group: the number of its optimizer, and its own there."""


def base_rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[float]]:
    """The rates of all groups, by optimizer, before any scheduler has changed them."""
    return [[float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups] for optimizer in optimizers]


def first_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """The rate that stands for all: that of the first group, at the top of its schedule."""
    group = optimizers[0].param_groups[0]
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def stragglers(
    optimizers: Sequence[torch.optim.Optimizer], before: list[list[float]], factor: float
) -> tuple[Place, ...]:
    """The groups whose rates did not follow the model's.

    Args:
        optimizers: As they were made after the rate was set.
        before: :func:`base_rates` before the rate was set.
        factor: By which the rate changed.
    """
    if factor == 1.0:
        return ()
    return tuple(
        (number, index)
        for number, (new, old) in enumerate(zip(base_rates(optimizers), before, strict=True))
        for index, (rate, was) in enumerate(zip(new, old, strict=True))
        if was and math.isclose(rate, was, rel_tol=1e-9)
    )


def scale_groups(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any], places: Sequence[Place], factor: float
) -> None:
    """Scale some groups, with what their schedulers have derived from their rates."""
    for number, optimizer in enumerate(optimizers):
        groups = [index for of, index in places if of == number]
        if not groups:
            continue
        scale_optimizer(optimizer, factor, groups)
        for scheduler in schedulers:
            if getattr(scheduler, "optimizer", None) is optimizer:
                scale_scheduler(scheduler, factor, groups)
