"""What the tests of refusing tiers share: a model, faults that come and go, and what plain training leaves."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from lightning_offload import MemoryPlugin
from tests.engine.faults import active, interruption, our_threads, tolerant
from tests.engine.harness import Outcome, assert_same, run
from tests.zoo.case import Case, Job, Scope
from tests.zoo.models.sandwich import body_case, square_loss

MIB = 1 << 20


def module() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1), nn.GELU(), nn.Sigmoid())


CASE = body_case("tiers", module=module, train_step=tolerant, depth=3, steps=8)
"""Swaps about 4 MiB in tensors of 384 KiB; an exception makes it drop the gradients and go on."""


STRICT = body_case("strict", module=module, steps=8)
"""The same model, but an exception ends the run."""


def _skips(job: Job, batch: Any, scope: Scope, *, step: int) -> None:
    """What :func:`tolerant` does where a step fails."""
    if job.index != step:
        return tolerant(job, batch, scope)
    square_loss(job.model, batch)
    scope.record("interrupted", "on purpose")
    return None


@functools.cache
def expected(skipped: int = -1) -> Outcome:
    """What plain training leaves, one step of which may have been given up after forward."""
    return run(body_case("plain", module=module, train_step=functools.partial(_skips, step=skipped), steps=8))


def assert_exact(outcome: Outcome, *, skipped: int = -1) -> None:
    """Compare with plain training, the messages of exceptions aside."""
    plain = expected(skipped)
    for found in (plain, outcome):
        for key in [key for key in found.values if key.endswith("/interrupted")]:
            found.values[key] = "interrupted"
    assert_same(plain, outcome)
    assert active() == []
    assert our_threads() == []


Change = Callable[[], contextlib.AbstractContextManager[None]]


def train(memory: MemoryPlugin, fault: Change | None = None, step: int = -1, case: Case = CASE) -> Outcome:
    """Train; a fault is there during one step, or for good if none is named."""
    count = iter(range(case.steps))

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        here = next(count) == step or step < 0
        with fault() if fault is not None and here else contextlib.nullcontext():
            yield
            memory.plan()  # finishes the step while the fault is there, or before there is one
        assert active() == []

    return run(case, memory=memory, around=around)


def warned(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """How many of our warnings hold a text."""
    records = [record for record in caplog.records if record.name.startswith("lightning_offload")]
    return sum(text in record.getMessage() for record in records if record.levelno >= logging.WARNING)


def patched(owner: Any, name: str, replacement: Any) -> Change:
    """A fault that puts something else in the place of a name."""

    @contextlib.contextmanager
    def change() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, replacement)
            yield

    return change


def failing(number: int) -> Callable[..., Any]:
    """A call of the system that fails with this error."""

    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def failing_after(call: Callable[..., int], count: int, number: int) -> Callable[..., int]:
    """A call of the system that fails from some call on."""
    left = count

    def fail(*args: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(number, os.strerror(number))
        return call(*args)

    return fail


def assert_usable(memory: MemoryPlugin) -> None:
    """A plugin that met a fault serves another run, exactly."""
    assert_exact(train(memory))
    assert memory.report().phase == "planned"


def assert_uninterrupted(outcome: Outcome) -> None:
    """No step raised anything."""
    assert [interruption(outcome, index) for index in range(CASE.steps)] == ["not interrupted"] * CASE.steps
