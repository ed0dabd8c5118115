"""One job, tuned by the callback and by the decorator: the same network, data, optimizer, memory and clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from lightning_offload.tuning import runner
from lightning_offload.tuning.function import find_efficient_batch_size
from lightning_offload.tuning.search import SearchResult
from tests.callbacks.training import NUM_FEATURES, Clock, samples

FIRST, MOST = 8, 64
STEPS = 2


def network() -> nn.Module:
    """The same at every call."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, 3))


class Job(pl.LightningModule):
    """Takes `seconds(size)` for a batch, and has no memory for one above `capacity`.

    Args:
        clock: Moved by each batch.
        seconds: Of a batch, by its size.
        capacity: The largest size that does not run out of memory.
    """

    def __init__(self, clock: Clock, seconds: Callable[[int], float], capacity: int = 10**9) -> None:
        super().__init__()
        self.batch_size, self.net, self.data = FIRST, network(), samples(4 * MOST)
        self.clock, self.seconds, self.capacity = clock, seconds, capacity

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        features, labels = batch
        if len(features) > self.capacity:
            raise torch.OutOfMemoryError("injected")
        self.clock.now += self.seconds(len(features))
        return nn.functional.cross_entropy(self.net(features), labels)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.training_step([features, labels])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def by_decorator(
    job: Job,
    *,
    warmup_steps: int = 0,
    memory: ModuleMemoryPlugin | None = None,
    wrap: Callable[[Job], Any] | None = None,
) -> SearchResult:
    """Tune the job as a training function.

    Args:
        job: A fresh one.
        warmup_steps: Of a trial.
        memory: Watches its steps.
        wrap: Makes of the model what is trained, such as DistributedDataParallel.
    """

    data = job.data

    def train(batch_size: int) -> None:
        model = job if wrap is None else wrap(job)
        optimizer = job.configure_optimizers()
        batch = [tensor.clone() for tensor in data[:batch_size]]
        if memory is not None:
            memory.follow(job)
        try:
            for _ in range(8):
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
        finally:
            if memory is not None:
                memory.detach()

    tuned = find_efficient_batch_size(train, FIRST, max_size=MOST, steps_per_trial=STEPS, warmup_steps=warmup_steps)
    tuned._settings = runner.TrialSettings(warmup_steps=warmup_steps, timed_steps=STEPS, clock=job.clock)
    tuned()
    assert tuned.result is not None
    return tuned.result
