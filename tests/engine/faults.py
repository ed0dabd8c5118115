"""What the tests of faults share: what is in force, and a training step that survives an exception."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.engine.harness import Outcome
from tests.engine.live_tracker import LiveStorageTracker
from tests.zoo.case import Case, Job, Scope
from tests.zoo.models.sandwich import body_case, square_loss

FAULTY_STEPS = (0, 1, 4)
"""A step that is recorded, one that is verified, one under the final plan."""


def active() -> list[str]:
    """What is in force on this thread: dispatch modes and saved-tensor hooks."""
    found = []
    for index in range(torch._C._len_torch_dispatch_stack()):
        mode = torch._C._get_dispatch_stack_at(index)
        if not isinstance(mode, LiveStorageTracker):
            found.append(type(mode).__name__)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        found.append("saved-tensor hooks")
    return found


def our_threads() -> list[str]:
    """Names of the runtime's threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-offload")]


@contextmanager
def without_gc() -> Iterator[None]:
    """Let reference counts alone free what is freed inside."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tolerant(job: Job, batch: Any, scope: Scope) -> None:
    """Train for one step; note an interruption, drop the gradients and go on."""
    try:
        with scope.step(batch):
            with scope.forward():
                loss = square_loss(job.model, batch)
            scope.backward(loss)
    except Exception as error:
        scope.record("interrupted", f"{type(error).__name__}: {error}"[:200])
        job.optimizer.zero_grad()
        return
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def tolerant_case(module: Callable[[], nn.Module]) -> Case:
    return body_case("tolerant", module=module, train_step=tolerant, depth=1, steps=8)


def interruption(outcome: Outcome, step: int) -> str:
    return str(outcome.values.get(f"step{step}/interrupted", "not interrupted"))
