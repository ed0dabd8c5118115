"""What becomes of a plan one of whose steps is measured above the budget, and whose next one is or is not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.plugins import lifecycle
from tests.plugins.test_growth import floor_of_net
from tests.plugins.training import attached, middle_budget, net, rows, train_step

MORE_BYTES = 64 << 10


@contextlib.contextmanager
def _under_the_final_plan(budget: int) -> Iterator[tuple[MemoryPlugin, nn.Module, Tensor]]:
    model, batch = net(), rows()
    with attached(model, budget=budget) as memory:
        for _ in range(6):
            train_step(model, batch, memory)
        assert memory.report().phase == "planned"
        yield memory, model, batch


def _measured_above(memory: MemoryPlugin, budget: int) -> None:
    """A step was, by so much."""
    kind = memory._steps.cache.entry
    kind.seen.measured_peak_bytes = budget + MORE_BYTES
    lifecycle.check_peak(kind, budget)


def test_a_plan_within_the_budget_is_not_given_up_for_one_step(caplog: pytest.LogCaptureFixture) -> None:
    """Where no plan has room for what a step had more by chance, the plan stays, and the next step is measured."""
    budget = floor_of_net()
    with _under_the_final_plan(budget) as (memory, model, batch), caplog.at_level(logging.WARNING):
        plan = memory._steps.cache.entry.plan
        _measured_above(memory, budget)
        for _ in range(3):
            train_step(model, batch, memory)
            report = memory.report()
            assert memory._steps.cache.entry.plan is plan
            assert report.measured_peak_bytes == report.predicted_peak_bytes == budget
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "the next step is measured again" in warning


def test_one_that_is_above_it_twice_is_made_again_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """With the figures of the smallest budget that would do."""
    budget = floor_of_net()
    with _under_the_final_plan(budget) as (memory, model, batch), caplog.at_level(logging.WARNING):
        for _ in range(2):
            _measured_above(memory, budget)
        train_step(model, batch, memory)
        assert memory.report().predicted_peak_bytes == budget + MORE_BYTES
    _, warning = (record.getMessage() for record in caplog.records)
    assert f"({budget + MORE_BYTES} bytes)" in warning


def test_where_there_is_room_for_a_margin_it_is_made_at_once() -> None:
    """The next plan is within the budget, and leaves it."""
    budget = middle_budget(net(), rows())
    with _under_the_final_plan(budget) as (memory, model, batch):
        kind = memory._steps.cache.entry
        _measured_above(memory, budget)
        assert kind.plan is None
        train_step(model, batch, memory)
        assert kind.shortfall_bytes >= MORE_BYTES
        assert (memory.report().predicted_peak_bytes or 0) <= budget
