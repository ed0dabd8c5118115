"""Training steps that the zoo does not have: half precision with a scaler, backward from another thread."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.gpu.device import DEVICE
from tests.zoo.case import Case, Job, Scope, integers, normal
from tests.zoo.models.resnet import ResNet
from tests.zoo.models.sandwich import body_case, square_loss

SKIPPED_STEPS = (2, 5)
"""In which a loss is infinite, so that the scaler skips the update: one of them under the final plan."""


class _Scaled(nn.Module):
    """A small network with dropout and its gradient scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet((2, 1), bottleneck=True, width=8, num_classes=10)
        self.drop = nn.Dropout(0.2)
        self.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        scores: Tensor = self.net(self.drop(x))
        return scores


def _scaled_step(job: Job, batch: tuple[Tensor, Tensor], scope: Scope) -> None:
    """The usual half-precision step; what the scaler did is part of the outcome."""
    assert isinstance(job.model, _Scaled)
    scaler = job.model.scaler
    factor = float("inf") if job.index in SKIPPED_STEPS else 1.0
    with scope.step(*batch):
        with scope.forward():
            with torch.autocast(batch[0].device.type, dtype=torch.float16):
                loss = functional.cross_entropy(job.model(batch[0]), batch[1])
            loss = loss * factor
        scope.backward(scaler.scale(loss))
    scope.record("loss", loss)
    for name, weight in job.model.named_parameters():
        scope.record(f"grad/{name}", weight.grad)
    scaler.step(job.optimizer)
    scaler.update()
    scope.record("scaler", {name: float(value) for name, value in scaler.state_dict().items()})
    job.optimizer.zero_grad(set_to_none=True)


def _labelled_images(step: int) -> tuple[Tensor, Tensor]:
    return normal(step, 16, 3, 32, 32), integers(step, 10, 16)


def _wave(x: Tensor) -> Tensor:
    return x.sin() * x.exp().clamp(max=2.0)


def _from_a_thread(job: Job, batch: Any, scope: Scope) -> None:
    """Backward is called by a thread that did not run forward, on the stream that did."""
    with scope.step(batch):
        with scope.forward():
            loss = square_loss(job.model, batch)
        thread = threading.Thread(target=scope.backward, args=(loss,))
        thread.start()
        thread.join()
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _accumulate_four(job: Job, batch: Any, scope: Scope) -> None:
    """Four micro-batches under autocast for one update."""
    for part in batch.chunk(4):
        with scope.step(part):
            with scope.forward(), torch.autocast(part.device.type, dtype=torch.bfloat16):
                loss = square_loss(job.model, part) / 4
            scope.backward(loss)
        scope.record("loss", loss)
    scope.update(*job.optimizers)


SCALED = Case(name="fp16-scaler", build=_Scaled, batch=_labelled_images, train_step=_scaled_step, steps=8)
THREADED = body_case("backward-from-a-thread", _wave, train_step=_from_a_thread)
ACCUMULATED = body_case("accumulation-bf16", _wave, train_step=_accumulate_four, steps=4)
