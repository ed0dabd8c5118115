"""Where there is nothing to do, nothing is active: between steps, without gradients, switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_offload import MemoryPlugin
from tests.engine.faults import active, our_threads
from tests.engine.harness import assert_same, run
from tests.zoo.case import Job, Scope
from tests.zoo.models.sandwich import Sandwich, body_case, rows, square_loss


def test_nothing_is_active_between_steps() -> None:
    """Attached but outside a step, nothing is in force; inside it is; after detach no thread is left."""
    memory = MemoryPlugin(budget=None, policy="all-swap")
    model = Sandwich(torch.sin)
    with memory:
        for step in range(5):
            assert active() == []
            with memory.step(rows(step)):
                assert active() != []
                loss = square_loss(model, rows(step))
            assert active() == []
            memory.backward(loss)
            assert active() == []
    assert our_threads() == []
    memory.detach()


def test_nothing_is_active_without_grad() -> None:
    """A step under no_grad or inference_mode, or with the plugin disabled, is left alone."""
    model = Sandwich(torch.sin)
    with MemoryPlugin(budget=None, policy="all-swap") as memory:
        for nothing in (torch.no_grad, torch.inference_mode):
            with nothing(), memory.step(rows(0)):
                assert active() == []
                model(rows(0))
        assert memory.report().num_steps == 0
    with MemoryPlugin(budget=None, policy="all-swap", enabled=False) as memory, memory.step(rows(0)):
        assert active() == []


def test_environment_switches_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LIGHTNING_OFFLOAD=0` makes steps plain."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD", "0")
    with MemoryPlugin(budget=None, policy="all-swap") as memory, memory.step(rows(0)):
        assert active() == []


def test_evaluation_between_steps_changes_nothing() -> None:
    """Validation between training steps neither disturbs the plan nor the bits."""

    def train_step(job: Job, batch: Any, scope: Scope) -> None:
        with scope.step(batch):
            with scope.forward():
                loss = square_loss(job.model, batch)
            scope.backward(loss)
        scope.record("loss", loss)
        scope.update(*job.optimizers)
        job.model.eval()
        with torch.no_grad():
            scope.record("validation", square_loss(job.model, batch[:64]))
        job.model.train()

    case = body_case("validated", module=lambda: nn.Sequential(nn.Dropout(0.1), nn.GELU()), train_step=train_step)
    memory = MemoryPlugin(budget=None, policy="all-recompute")
    phases: list[str] = []
    outcome = run(case, memory=memory, after_step=lambda _: phases.append(memory.report().phase))
    assert_same(run(case), outcome)
    assert phases[-1] == "planned"


def test_steps_are_exact_after_attaching_again() -> None:
    """Detach and attach half way: plans are remembered, nothing is lost."""
    case = body_case("again", torch.sin, steps=8)
    memory = MemoryPlugin(budget=None, policy="all-recompute")

    def after_step(job: Job) -> None:
        if job.index in (3, 5):
            memory.detach()
            memory.detach()
            memory.attach(job.model)

    assert_same(run(case), run(case, memory=memory, after_step=after_step))
    assert memory.report().num_steps == 8
