"""A training function whose time and memory follow a curve, on a clock that only it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Clock:
    """Seconds that pass when they are told to, and with each look at the clock."""

    now: float = 0.0
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass
class Training:
    """Call it with a batch size; it trains one linear layer, and the clock tells what that took.

    Attributes:
        clock: Moved by each batch.
        seconds: Of one batch, by its size.
        capacity: Largest batch size that does not run out of memory.
        num_steps: Optimizer steps until it returns.
        accumulate: Batches of one optimizer step.
        sizes: The batch sizes it was called with.
        num_batches: Batches that it trained on.
        ended: Calls that returned.
    """

    clock: Clock
    seconds: Callable[[int], float] = lambda size: 1.0 + size / 100
    capacity: int = 10**9
    num_steps: int = 20
    accumulate: int = 1
    sizes: list[int] = field(default_factory=list)
    num_batches: int = 0
    ended: list[int] = field(default_factory=list)

    def __call__(self, batch_size: int) -> str:
        self.sizes.append(batch_size)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(self.num_steps):
            for _ in range(self.accumulate):
                self.num_batches += 1
                self.clock.now += self.seconds(batch_size)
                if batch_size > self.capacity:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        self.ended.append(batch_size)
        return f"trained with {batch_size}"
