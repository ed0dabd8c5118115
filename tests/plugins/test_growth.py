"""What is on the device beside the steps grows while a plan is in force."""

from __future__ import annotations

import contextlib
import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.capture.live import LiveScanClock
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.plugins import plan_source
from tests.plugins.training import attached, middle_budget, net, report_of, rows, train_step

KIB = 1 << 10


@pytest.fixture(autouse=True)
def every_step_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at what is beside every step, as is done where time allows."""
    monkeypatch.setattr(LiveScanClock, "is_due", lambda clock, share: True)


def floor_of_net() -> int:
    """The smallest feasible budget."""
    floor = report_of(net(), rows(), budget="64MiB").floor_bytes
    assert floor is not None
    return floor


def test_a_list_of_losses_ends_no_training_at_the_floor(caplog: pytest.LogCaptureFixture) -> None:
    """Up to 0.1% of the budget is exceeded with one warning that gives the figures."""
    model, batch, budget, kept = net(), rows(), floor_of_net(), []
    expected = train_step(model, batch)
    with attached(model, budget=budget) as memory, caplog.at_level(logging.WARNING):
        for step in range(10):
            assert train_step(model, batch, memory) == expected
            if step >= 2:
                kept.append(torch.ones(32))
        report = memory.report()
    assert report.phase == "planned"
    assert budget < (report.floor_bytes or 0) <= 1.001 * budget
    (warning,) = (record.getMessage() for record in caplog.records if "no plan is within" in record.message)
    assert f"({budget} bytes)" in warning


def test_more_than_that_is_refused_before_the_step() -> None:
    """With what is needed now, which works; hooks are off."""
    model, batch, budget, kept = net(), rows(), floor_of_net(), []
    with attached(model, budget=budget) as memory:
        for _ in range(5):
            train_step(model, batch, memory)
        kept.append(torch.ones(256 * KIB // 4))
        with pytest.raises(BudgetInfeasibleError) as caught:
            train_step(model, batch, memory)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert caught.value.floor_bytes == budget + 256 * KIB


def test_there_is_another_plan_where_there_is_room() -> None:
    """The true peak stays within the budget while the user keeps more and more, until nothing is left to plan."""
    model, batch = net(), rows()
    budget, kept = middle_budget(model, batch), list[Tensor]()
    with attached(model, budget=budget) as memory:
        moved = []
        for step in range(12):
            train_step(model, batch, memory)
            report = memory.report()
            if step >= 3:
                assert (report.predicted_peak_bytes or 0) <= budget
                assert (report.measured_peak_bytes or 0) <= budget
                moved.append(report.swapped_bytes + report.recomputed_bytes)
                kept.append(torch.ones(256 * KIB // 4))
    assert moved == sorted(moved)
    assert moved[-1] > moved[0]


def test_not_every_growth_takes_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new plan leaves free by how much that grew: the next growth has room already."""
    model, batch = net(), rows()
    budget, kept, num_plans = middle_budget(model, batch), list[Tensor](), 0
    make = plan_source.plan_with_margin

    def count(*args: Any, **keywords: Any) -> MemoryPlan:
        nonlocal num_plans
        num_plans += 1
        return make(*args, **keywords)

    with attached(model, budget=budget) as memory:
        for _ in range(6):
            train_step(model, batch, memory)
        monkeypatch.setattr(plan_source, "plan_with_margin", count)
        for _ in range(8):
            kept.append(torch.ones(256 * KIB // 4))
            train_step(model, batch, memory)
    assert 1 <= num_plans <= 5


def test_what_a_plan_leaves_free_is_not_in_the_floor() -> None:
    """The smallest feasible budget grows by what is there, not by what may come; keeping everything needs no less."""
    model, batch, floor = net(), rows(), floor_of_net()
    budget, kept = middle_budget(model, batch), list[Tensor]()
    with attached(model, budget=budget) as memory:
        for _ in range(5):
            train_step(model, batch, memory)
        for num in range(1, 7):
            kept.append(torch.ones(256 * KIB // 4))
            train_step(model, batch, memory)
            report = memory.report()
            assert report.floor_bytes is not None
            assert report.floor_bytes <= floor + num * 256 * KIB
            assert report.floor_bytes <= (report.plain_peak_bytes or 0)


def test_a_plan_made_between_steps_is_that_of_the_next_step() -> None:
    """Where it is asked for; the last batch is gone then, and the coming one is not there yet."""
    model = net()
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    with attached(model, budget=middle_budget(model, rows()) + state_bytes) as memory:
        optimizer = torch.optim.Adam(model.parameters())
        made = []
        for _ in range(6):
            batch = rows()
            with memory.step(batch):
                cache = memory._steps.cache
                assert not made or cache.entry.plan is made[-1]
                model(batch).square().mean().backward()
            del batch
            optimizer.step()
            optimizer.zero_grad()
            memory.plan()
            plan = cache.entry.plan
            assert plan is not None
            made.append(plan)
    assert len({plan.predicted_peak_bytes for plan in made[1:]}) == 1


def test_a_view_that_does_not_tell_ends_no_training() -> None:
    """One of several views whose base was written: autograd refuses it, but a program may keep it, and read it."""
    batch = rows()
    base = torch.ones(4, requires_grad=True) * 1
    view, _ = base.split(2)
    base.mul_(2)

    def train(memory: MemoryPlugin | None, model: nn.Module) -> list[bytes]:
        found = []
        for _ in range(6):
            with memory.step(batch) if memory is not None else contextlib.nullcontext():
                with torch.no_grad():
                    shift = (view * 2).sum()
                (model(batch) + shift).square().mean().backward()
            found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        return found

    expected = train(None, net())
    model = net()
    with attached(model, budget=middle_budget(model, batch)) as memory:
        assert train(memory, model) == expected
        assert memory.report().phase == "planned"


def test_what_comes_and_goes_is_planned_for_a_few_times(subtests: pytest.Subtests) -> None:
    """A copy of the weights in every other step: then plans leave room for it, and are made anew no more."""
    model, batch = net(), rows()
    budget = middle_budget(model, batch)
    for every in (2, 3):
        served = net()
        with subtests.test(every=every), attached(served, budget=budget) as memory:
            for step in range(40):
                beside = torch.empty(512 * KIB, dtype=torch.uint8) if step % every else None
                train_step(served, batch, memory)
                del beside
            assert memory.report().replans.get("baseline", 0) <= 4
            assert memory.report().phase == "planned"


def test_what_is_gone_for_good_is_given_back() -> None:
    """Room that was left for it is used again in the end."""
    model, batch = net(), rows()
    budget = middle_budget(model, batch)
    with attached(model, budget=budget) as memory:
        left = []
        for step in range(40):
            beside = torch.empty(1024 * KIB, dtype=torch.uint8) if step < 12 and step % 2 else None
            train_step(model, batch, memory)
            del beside
            report = memory.report()
            left.append(report.swapped_bytes + report.recomputed_bytes)
    assert left[-1] < max(left[8:12])


def test_garbage_ends_no_training() -> None:
    """Where the collector does not run, or not over what is old, what waits for it is collected before a refusal."""
    model, batch = net(), rows()
    budget = int(1.05 * floor_of_net())
    gc.collect()
    gc.disable()
    try:
        with attached(model, budget=budget) as memory:
            for step in range(10):
                if step > 5:
                    cycle: list[Any] = [torch.empty(1 << 20, dtype=torch.uint8)]
                    cycle.append(cycle)
                    del cycle
                train_step(model, batch, memory)
            assert memory.report().phase == "planned"
    finally:
        gc.enable()
