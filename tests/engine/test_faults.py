"""Exceptions and abandoned outputs leave nothing behind, and training goes on exactly as plain."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from tests.engine.faults import FAULTY_STEPS, active, interruption, our_threads, tolerant_case, without_gc
from tests.engine.harness import Outcome, Wrap, assert_same, run
from tests.engine.live_tracker import LiveStorageTracker
from tests.zoo.case import Case, Job, Scope
from tests.zoo.models.sandwich import Sandwich, body_case, rows, square_loss

WRAPS = pytest.mark.parametrize("wrap", list(Wrap), ids=lambda wrap: wrap.value)


class Interruption(Exception):
    """Raised by the tests' own models."""


class _RaiseInForward(nn.Module):
    """Raises once, half way through forward."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Raise at the chosen call."""
        self.num_calls += 1
        out = x.sin() * x.sigmoid()
        if self.num_calls - 1 == self.call:
            raise Interruption("forward")
        return out.exp().clamp(max=2.0)


class _RaiseInBackward(_RaiseInForward):
    """Raises once, half way through backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Let a gradient hook raise at the chosen call."""
        self.num_calls += 1
        hidden = x.sin() * x.sigmoid()
        if self.num_calls - 1 == self.call:
            hidden.register_hook(_raise)
        return hidden.exp().clamp(max=2.0)


def _raise(_: Tensor) -> None:
    raise Interruption("backward")


RAISING = pytest.mark.parametrize("raising", [_RaiseInForward, _RaiseInBackward])


@WRAPS
@RAISING
@pytest.mark.parametrize("step", FAULTY_STEPS)
@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_exception_leaves_nothing(policy: str, step: int, raising: Any, wrap: Wrap) -> None:
    """After an exception no hook, mode or memory is left, and the following steps are exact."""
    check_exception(policy, step, raising, wrap)


def check_exception(policy: str, step: int, raising: Any, wrap: Wrap) -> None:
    expected, expected_live = _plainly_observed(raising, step)
    assert "Interruption" in interruption(expected, step)
    case = tolerant_case(lambda: raising(step))
    actual, live = _observed(case, MemoryPlugin(budget=None, policy=policy), wrap)
    assert_same(expected, actual)
    assert live == expected_live
    assert our_threads() == []


@functools.cache
def _plainly_observed(raising: Any, step: int) -> tuple[Outcome, list[int]]:
    """Under plain PyTorch, which knows of no wraps."""
    return _observed(tolerant_case(lambda: raising(step)), None, Wrap.WHOLE)


def _observed(case: Case, memory: MemoryPlugin | None, wrap: Wrap) -> tuple[Outcome, list[int]]:
    tracker = LiveStorageTracker()
    live: list[int] = []

    def after_step(_: Job) -> None:
        assert active() == []
        live.append(tracker.live_bytes)

    with without_gc(), tracker:
        outcome = run(
            case,
            memory=memory,
            wrap=wrap,
            after_step=after_step,
            on_start=lambda job: tracker.register(job.model, *job.optimizers),
        )
    return outcome, live


def test_keyboard_interrupt_leaves_nothing() -> None:
    """An exception that is no `Exception` is cleaned up after as well."""
    memory = MemoryPlugin(budget=None, policy="all-swap")
    model = Sandwich(torch.sin)
    memory.attach(model)

    def interrupted() -> None:
        with memory.step(rows(0)):
            model(rows(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert active() == []
    memory.detach()
    assert our_threads() == []


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_outputs_never_backpropagated_leak_nothing(policy: str) -> None:
    """What a forward saved is freed with its outputs, without a backward or the garbage collector."""
    memory = MemoryPlugin(budget=None, policy=policy)
    model = Sandwich(torch.sin)
    tracker = LiveStorageTracker()
    tracker.register(model)
    persistent = tracker.live_bytes
    with without_gc(), tracker:
        memory.attach(model)
        host: list[int] = []
        for step in range(12):
            batch = rows(step)
            with memory.step(batch):
                loss = square_loss(model, batch)
                if step % 3 == 0:
                    loss.backward()
                    model.zero_grad()
            del loss, batch
            assert tracker.live_bytes == persistent, step
            host.append(memory.report().host_peak_bytes)
        assert host[-1] <= max(host[:6])
        memory.detach()


def test_a_graph_outlives_its_step_and_the_plugin() -> None:
    """A backward long after the step, and even after detach, is exact."""
    gradients = []
    for memory in (None, MemoryPlugin(budget=None, policy="all-swap"), MemoryPlugin(policy="all-recompute")):
        torch.manual_seed(0)
        model = Sandwich(torch.sin)
        losses = []
        if memory is not None:
            memory.attach(model)
        for step in range(6):
            with memory.step(rows(step)) if memory is not None else torch.enable_grad():
                losses.append(square_loss(model, rows(step)))
        if memory is not None:
            memory.detach()
        for loss in reversed(losses):
            loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
        assert our_threads() == []
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], found, strict=True))


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_backward_from_another_thread(policy: str) -> None:
    """Autograd may ask for saved tensors on any thread."""

    def in_thread(job: Job, batch: Any, scope: Scope) -> None:
        with scope.step(batch):
            with scope.forward():
                loss = square_loss(job.model, batch)
            thread = threading.Thread(target=scope.backward, args=(loss,))
            thread.start()
            thread.join()
        scope.record("loss", loss)
        scope.update(*job.optimizers)

    case = body_case("threaded", torch.sin, train_step=in_thread)
    assert_same(run(case), run(case, memory=MemoryPlugin(budget=None, policy=policy)))
