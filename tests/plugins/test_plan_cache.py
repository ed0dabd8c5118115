"""From the first step of a shape to its final plan, what makes it start again, and which steps share a plan."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import random
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.testing._internal.two_tensor import TwoTensor

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins import lifecycle
from lightning_offload.plugins.devices import first_device
from lightning_offload.plugins.plan_cache import PlanCache
from lightning_offload.plugins.plan_source import ShapeBucket
from lightning_offload.plugins.shape_families import shape_of
from lightning_offload.plugins.step import DevicePeaks
from tests.plugins.training import attached, middle_budget, net, phases_of, report_of, rows, train_step

BEGIN = ["recording", "verifying", "measuring", "planned"]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """What an earlier test left for the garbage collector is on the device, and would go in the midst of a step."""
    gc.collect()


@pytest.mark.parametrize("policy", ["auto", "keep-all", "all-swap", "all-recompute"])
def test_plan_is_final_from_the_fourth_step_on(policy: str) -> None:
    """Recorded, verified, measured, planned; each step is exact."""
    model, batch = net(), rows()
    expected = train_step(model, batch)
    # A generous budget, so that even a plan that keeps everything is watched.
    with attached(model, policy=policy, budget="64MiB") as memory:
        phases = []
        for _ in range(5):
            assert train_step(model, batch, memory) == expected
            phases.append(memory.report().phase)
        assert phases == [*BEGIN, "planned"]
        assert memory.report().num_steps == 5
        assert memory.report().num_mismatched == 0


@pytest.mark.parametrize("height", [0.0, 0.5])
def test_final_plan_is_within_budget(height: float) -> None:
    """Measured peaks of planned steps are within the budget, at the floor too, and equal the predicted ones."""
    model, batch = net(), rows()
    probe = report_of(model, batch, policy="all-swap")
    assert probe.floor_bytes is not None
    assert probe.plain_peak_bytes is not None
    budget = int(probe.floor_bytes + height * (probe.plain_peak_bytes - probe.floor_bytes))
    report = report_of(model, batch, budget=budget)
    assert report.phase == "planned"
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget == report.budget_bytes
    assert report.swapped_bytes + report.recomputed_bytes > 0
    assert (report.bound_seconds or 0) <= (report.predicted_step_seconds or 0)


def test_below_the_floor_raises_on_entering_the_first_planned_step() -> None:
    """The model is as it was, no hook is left, and a budget of the error's floor works."""
    model, batch = net(), rows()
    with attached(model, budget="1MiB") as memory:
        train_step(model, batch, memory)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(BudgetInfeasibleError) as caught, memory.step(batch):
            pytest.fail("the step must not run")
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert caught.value.budget_bytes == 1 << 20
    assert report_of(model, batch, budget=caught.value.floor_bytes).phase == "planned"


def test_each_shape_has_its_own_life() -> None:
    """A new shape is recorded while others stay planned; all are exact."""
    model, large, small = net(), rows(), rows(128)
    with attached(model, policy="all-swap") as memory:
        assert phases_of(memory, model, large, 4) == BEGIN
        assert phases_of(memory, model, small, 2) == BEGIN[:2]
        assert phases_of(memory, model, large, 1) == ["planned"]
        assert phases_of(memory, model, small, 2) == BEGIN[2:]
        assert train_step(model, small, memory) == train_step(model, small)


class Changing(nn.Module):
    """Another structure in every step, under the same input shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        for _ in range(80 * (self.step % 5 + 1)):
            x = x.sin() if self.step % 2 else x.sigmoid()
        out: Tensor = self.linear(x)
        return out


def test_steps_of_changing_structure_align(caplog: pytest.LogCaptureFixture) -> None:
    """After two deviations they follow the plan for the widest one, exactly, and nothing is to be told."""
    torch.manual_seed(1)
    model, batch = Changing(), rows(16)
    with attached(model, policy="all-swap") as memory, caplog.at_level(logging.WARNING):
        phases = []
        for _ in range(24):
            found = train_step(model, batch, memory)
            model.step -= 1
            assert train_step(model, batch) == found
            phases.append(memory.report().phase)
        report = memory.report()
    assert phases[0] == "recording"
    assert phases.count("planned") > 12
    assert "unplanned" not in phases
    assert report.num_aligned == phases.count("planned")
    assert report.num_deviations == 2
    assert not caplog.records


def test_a_model_that_is_unfrozen_step_by_step_is_planned_again() -> None:
    """Each stage is another structure; once they have come to an end there is a plan again, and it stays."""
    torch.manual_seed(1)
    model, batch = nn.Sequential(*(nn.Linear(16, 16) for _ in range(7))), torch.randn(16, 16)
    stages = list(model)
    model.requires_grad_(False)
    with attached(model, policy="all-swap") as memory:
        phases = []
        for step in range(110):
            if step < 30 and step % 5 == 0:
                stages.pop().requires_grad_(True)
            found = train_step(model, batch, memory)
            assert train_step(model, batch) == found
            phases.append(memory.report().phase)
        report, kind = memory.report(), memory._steps.cache.entry
    assert "unplanned" not in phases
    assert phases[-8:] == ["planned"] * 8
    assert report.num_aligned
    assert kind.source.follows_ops


def test_forward_alone_ends_unplanned() -> None:
    """Steps without a backward have nothing to plan, and are left alone after three tries."""
    model, batch = net(), rows(16)
    with attached(model, policy="all-swap") as memory:
        phases = []
        for _ in range(6):
            with memory.step(batch):
                model(batch)
            phases.append(memory.report().phase)
    assert phases[:3] == ["recording"] * 3
    assert phases[-1] == "unplanned"


@pytest.mark.parametrize(
    ("retried", "num_plans"), [((), 1), ((6,), 1), ((6, 9), 2), ((6, 25), 1), (range(4, 40), 4)], ids=str
)
def test_reserve_given_back_again_and_again_makes_plans_tighter(
    monkeypatch: pytest.MonkeyPatch, retried: Collection[int], num_plans: int
) -> None:
    """By 5% each time, up to three times; once in a while is no reason."""
    model, batch, steps = net(), rows(), iter(range(40))
    expected = train_step(model, batch)
    monkeypatch.setattr(DevicePeaks, "take_retries", lambda peaks, device: int(next(steps) in retried))
    peaks: list[int] = []
    with attached(model, budget="64MiB") as memory:
        for step in range(40):
            assert train_step(model, batch, memory) == expected
            memory.plan()
            report = memory.report()
            assert report.predicted_peak_bytes is not None
            if step >= len(BEGIN):
                peaks.append(report.predicted_peak_bytes)
        assert report.phase == "planned"
        assert report.measured_peak_bytes is not None
        assert report.measured_peak_bytes <= peaks[-1]
    found = list(dict.fromkeys(peaks))
    assert len(found) == num_plans
    assert all(after <= 0.95 * before for before, after in itertools.pairwise(found))


def test_no_grad_steps_are_no_steps() -> None:
    """Validation changes nothing: no phase, no count, no hooks."""
    model, batch = net(), rows(16)
    with attached(model, policy="all-swap") as memory:
        train_step(model, batch, memory)
        with torch.no_grad(), memory.step(batch):
            assert torch._C._len_torch_dispatch_stack() == 0
            model(batch)
        assert (memory.report().num_steps, memory.report().phase) == (1, "recording")


def test_failed_step_is_forgotten() -> None:
    """An exception in a step takes the hooks off; the next step starts over in the same phase."""
    model, batch = net(), rows(16)
    with attached(model, policy="all-swap") as memory:
        with contextlib.suppress(KeyError), memory.step(batch):
            model(batch)
            raise KeyError("on purpose")
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert phases_of(memory, model, batch, 4) == BEGIN


def test_optimizer_state_is_planned_for() -> None:
    """State that appears with the first optimizer step is part of the final plan's peak."""
    model, batch = net(), rows()
    parameters = sum(p.nbytes for p in model.parameters())
    used = sum(p.nbytes for name, p in model.named_parameters() if "unused" not in name)
    with attached(model, policy="all-recompute") as memory:  # whose peak does not depend on how long things take
        optimizer = Adam(model.parameters())
        peaks = []
        for _ in range(6):
            with memory.step(batch):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(memory.report().predicted_peak_bytes)
        report = memory.report()
    assert report.phase == "planned"
    bare = report_of(net(), batch, policy="all-recompute").predicted_peak_bytes
    assert report.predicted_peak_bytes is not None
    assert bare is not None
    counters = 4 * 16
    assert report.predicted_peak_bytes == bare + 2 * used + counters
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.predicted_peak_bytes
    assert parameters > used


def test_optimizer_peak_is_state_and_gradients() -> None:
    """On a CPU the optimizer's figure is exactly what exists then: state, batch, and gradients."""
    model, batch = net(), rows()
    with attached(model, policy="all-swap") as memory:
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            with memory.step(batch):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = memory.report()
    used = sum(p.nbytes for name, p in model.named_parameters() if "unused" not in name)
    unused = sum(p.nbytes for p in model.unused.parameters())
    assert report.optimizer_peak_bytes == 2 * used + unused + batch.nbytes


def test_accumulated_gradients_are_planned_for() -> None:
    """Micro-batches that accumulate stay within the budget, and are exact."""
    model, batch = net(), rows()
    budget = middle_budget(model, batch)

    def epoch(memory: MemoryPlugin | None) -> list[bytes]:
        found: list[bytes] = []
        for _ in range(3):
            for _ in range(3):
                if memory is None:
                    model(batch).square().mean().backward()
                    continue
                with memory.step(batch):
                    model(batch).square().mean().backward()
            found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        return found

    expected = epoch(None)
    with attached(model, budget=budget + 4 * (1 << 20)) as memory:
        assert epoch(memory) == expected
        report = memory.report()
    assert report.phase == "planned"
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= budget + 4 * (1 << 20)


def test_split_backwards_are_measured() -> None:
    """``step`` around forward alone, with ``memory.backward`` or a bare backward, goes through the same phases."""
    model, batch = net(), rows()
    expected = train_step(model, batch)
    for bare in (False, True):
        with attached(model, policy="all-swap") as memory:
            phases = []
            for _ in range(4):
                with memory.step(batch):
                    loss = model(batch).square().mean()
                loss.backward() if bare else memory.backward(loss)
                found = [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
                assert found == expected
                model.zero_grad()
                phases.append(memory.report().phase)
            assert phases == BEGIN
            assert memory.report().backward_peak_bytes is not None


X = torch.zeros(4, 6)


def signature(inputs: Any) -> str:
    return shape_of(inputs).signature


def test_kinds_of_step() -> None:
    """Shape, dtype, strides, requires_grad, layout and structure tell steps apart; what tensors hold does not."""
    others = {
        "columns": torch.zeros(4, 7), "rows": torch.zeros(6, 4), "dtype": torch.zeros(4, 6, dtype=torch.float64),
        "strides": torch.zeros(6, 4).t(), "grad": torch.zeros(4, 6, requires_grad=True), "flat": torch.zeros(24),
        "sparse": X.to_sparse(), "list": [X], "pair": (X, X), "dict": {"x": X}, "none": None,
    }  # fmt: skip
    for name, other in others.items():
        assert signature(X) != signature(other), name
    assert signature((X, 3, "train")) == signature((torch.ones(4, 6), 4, "again"))
    assert signature({"x": X, "index": 1}) == signature({"x": X + 1, "index": 2})
    assert signature((X, 3)) != signature((X, 3.0))
    assert len(signature((X,))) == 32  # it can be a key in a file


def test_a_step_that_is_recorded_after_all_is_known_by_what_it_is_given() -> None:
    """Its structure, resized, may serve others: by the shapes of its inputs."""
    cache, shape = PlanCache(), shape_of(((torch.zeros(2, 3),), {}))
    assert cache.record(shape).input_shapes == ((2, 3),)
    assert cache.entry is cache.entries[shape.signature]


def test_autocast_is_another_kind_of_step() -> None:
    """The same inputs under autocast, or under another dtype of it, are other steps."""
    plain = signature(X)
    with torch.autocast("cpu", torch.bfloat16):
        low = signature(X)
    with torch.autocast("cpu", torch.float16):
        half = signature(X)
    assert len({plain, low, half}) == 3
    assert signature(X) == plain


@pytest.mark.filterwarnings("ignore:.*in prototype stage:UserWarning")
def test_tensors_of_other_kinds_have_a_signature() -> None:
    """Nested tensors, whose sizes cannot be asked for, and subclasses that wrap others are inputs as well."""
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
        assert signature(nested) == signature(nested), layout
        assert signature(nested) != signature(X), layout
    assert signature(TwoTensor(X, X)) == signature(TwoTensor(X + 1, X))


def test_first_device() -> None:
    """The first tensor that is not on the CPU decides, else the first one, else nothing does."""
    assert first_device((1, {"x": X})) == torch.device("cpu")
    assert first_device((X, torch.zeros(2, device="meta"))) == torch.device("meta")
    assert first_device((1, "a", None)) is None


def test_a_plan_that_was_given_up_last_is_shown_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step may show that links are slower; nobody plans any more, and the report still tells of that plan."""
    compare = lifecycle.compare
    monkeypatch.setattr(lifecycle, "compare", lambda *_, **__: None)  # no plan is given up for how long it took
    model, batch = net(), rows()
    with attached(model, policy="all-swap") as memory:
        for _ in range(5):
            with memory.step(batch):
                model(batch).square().mean().backward()
            model.zero_grad()
        planned = memory.report()
        kind = memory._steps.cache.entry
        compare(kind, 2.0, 1.0, links="slower")
        assert kind.program is None
    after = memory.report()
    assert after.floor_bytes == planned.floor_bytes
    assert after.swapped_bytes == planned.swapped_bytes > 0
    with memory, memory.step(batch):
        model(batch).square().mean().backward()
    assert kind.program is not None
    assert not kind.made.is_last_right


class Rarely(nn.Module):
    """Goes wider in the steps that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.widths = [2]

    def forward(self, x: Tensor) -> Tensor:
        """Through the layer, several times beside one another."""
        width = self.widths.pop(0) if len(self.widths) > 1 else self.widths[0]
        return self.linear(x).repeat(1, width).tanh().exp()


def test_a_rare_step_that_does_not_fit_ends_no_training() -> None:
    """Where it is recorded since it is wider than what was planned for: the others go on as they did."""
    torch.manual_seed(1)
    batch, model = torch.randn(128, 64), Rarely()
    floor = report_of(model, batch).floor_bytes
    assert floor is not None
    small = int(1.5 * floor)
    model.widths = [2, 1, 2, 1, 2, 1, 2, 1, 16, 16, *[2, 1] * 12, 2]  # the second wide one is recorded
    with attached(model, budget=f"{small}B") as memory:
        phases = []
        for _ in range(30):
            with memory.step(batch):
                model(batch).square().mean().backward()
            model.zero_grad()
            phases.append(memory.report().phase)
        report = memory.report()
    assert phases[9] == "recording"
    assert phases[10:] == ["planned"] * 20
    assert report.predicted_peak_bytes is not None
    assert report.predicted_peak_bytes <= small


def test_steps_without_a_backward_at_first_are_planned_in_the_end() -> None:
    """Three recordings that came to nothing are not for good."""
    model, batch = net(), rows(16)
    with attached(model, policy="all-swap") as memory:
        phases = []
        for step in range(45):
            with memory.step(batch):
                out = model(batch)
                if step >= 4:
                    out.square().mean().backward()
            del out
            model.zero_grad()
            phases.append(memory.report().phase)
    assert phases[4] == "unplanned"
    assert phases[-3:] == ["planned"] * 3


class Skipping(nn.Module):
    """Leaves layers out, of inputs of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.skipped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        """Through the layers that are not left out."""
        for index, layer in enumerate(self.layers):
            if index not in self.skipped:
                x = x + layer(x).tanh()
        return x


def _skipping_steps(memory: MemoryPlugin, model: Skipping, num_steps: int) -> list[str]:
    rng, phases = random.Random(2), []
    for _ in range(num_steps):
        model.skipped = {index for index in range(5) if rng.random() < 0.3}
        with memory.step(x := torch.randn(2, rng.randrange(8, 65), 32)):
            model(x).square().mean().backward()
        model.zero_grad()
        phases.append(memory.report().phase)
    return phases


def test_structures_that_change_along_with_shapes_share_what_was_recorded() -> None:
    """A few recorded steps serve all sizes; kinds are as many as sizes that are told apart, not as shapes."""
    model = Skipping()
    with attached(model, policy="all-swap", budget="1GiB") as memory:
        phases = _skipping_steps(memory, model, 120)
        cache, report = memory._steps.cache, memory.report()
        (family,) = cache.families.values()
        assert family.changes.aligns
        assert phases.count("recording") < 20
        assert phases[40:].count("planned") > 75
        assert report.num_shapes > 40
        assert report.num_aligned > 70
        assert sum(kind.spans_sizes for kind in cache.entries.values()) < 20
        assert not any(plan["signature"].count("up to") for plan in memory.state_dict()["plans"])
        memory.forget()
        assert not family.changes.aligns
        assert _skipping_steps(memory, model, 1) == ["recording"]


def test_a_size_that_has_no_plan_is_planned_by_itself() -> None:
    """Where the next bucket is beyond the budget; where the size itself is, too, such steps alone have no plan."""
    torch.manual_seed(0)
    model = Skipping()
    seen = report_of(model, torch.randn(2, 64, 32))
    assert seen.floor_bytes is not None
    with attached(model, budget=f"{int(0.93 * seen.floor_bytes)}B") as memory:
        phases = _skipping_steps(memory, model, 120)
        (family,) = memory._steps.cache.families.values()
        assert any(map(family.is_too_large, memory._steps.cache.entries))
    assert {"planned", "unplanned"} <= set(phases[40:])
    assert phases[40:].count("planned") > 40


def test_a_recorded_shape_that_others_predict_is_planned_by_itself_once_that_pays() -> None:
    """Steps under the plan of its family lose what one of its own would spare, until that is what planning takes."""
    model = net()
    with attached(model, policy="all-swap", budget="1GiB") as memory:
        phases = []
        for step, size in enumerate((8, 64, *[32] * 8)):
            if step == 3:
                (family,) = memory._steps.cache.families.values()
                family.changes.search_seconds = 1000.0
            if step == 6:
                family.changes.search_seconds = 0.0
            train_step(model, rows(size), memory)
            phases.append(memory.report().phase)
    assert phases == [*["recording"] * 3, *["planned"] * 3, "verifying", "measuring", "planned", "planned"]


def test_a_shape_is_planned_for_as_larger_ones_are_until_a_plan_of_its_own_pays() -> None:
    """With the same bits under each; a step that takes long beside planning has its own at once."""
    model = net()
    expected = {size: train_step(model, rows(size)) for size in (8, 33, 64, 35, 32)}
    with attached(model, budget="1GiB", policy="all-swap") as memory:

        def point(size: int) -> tuple[int, ...]:
            assert train_step(model, rows(size), memory) == expected[size]
            source = memory._steps.cache.entry.source
            assert isinstance(source, ShapeBucket)
            assert source.extrapolated.actual == (size,)
            return source.extrapolated.point

        for size in (8, 64, 32):
            train_step(model, rows(size), memory)
        (family,) = memory._steps.cache.families.values()
        assert family.hasty_seconds is None
        assert point(35) == (36,)
        assert family.hasty_seconds is not None
        family.hasty_seconds = 1000.0
        assert point(33) == point(33) == (36,)  # there is a plan for up to 36
        memory.forget(keep=[key for key in memory.step_kinds if memory._steps.cache.entries[key].source.is_own])
        assert point(33) == point(33) == point(35) == (48,)
        (lost,) = family.lost_seconds.values()
        assert lost > 0
        family.hasty_seconds = 0.05 * lost
        assert point(33) == (36,)


def test_larger_ones_that_have_no_plan_stand_for_none() -> None:
    """A budget that only the shape itself fits is kept, and the larger ones are not tried again."""
    model = net()
    with attached(model, budget="1GiB", policy="all-swap") as memory:
        for size in (8, 64, 32):
            train_step(model, rows(size), memory)
        train_step(model, rows(40), memory)
        floor = memory.report(of_last=True).floor_bytes
    assert floor is not None
    with attached(model, budget=f"{floor}B") as memory:
        for size in (8, 44, 24):
            train_step(model, rows(size), memory)
        (family,) = memory._steps.cache.families.values()
        family.hasty_seconds = 1000.0
        found = []
        for size in (40, 40, 39):
            train_step(model, rows(size), memory)
            source = memory._steps.cache.entry.source
            assert isinstance(source, ShapeBucket)
            found.append(source.extrapolated.point)
        assert len(list(filter(family.is_too_large, memory._steps.cache.entries))) == 1
    assert found == [(40,)] * 3
