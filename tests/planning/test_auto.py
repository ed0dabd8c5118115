"""The planner: feasible down to the floor, deterministic, and never slower than what it gives up for nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.models import MODELS
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import Decision, MemoryPlan, StepGraph
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.memory_plan import AT_PACK, ON_DEMAND
from lightning_offload.planning import auto as module
from lightning_offload.planning import search
from lightning_offload.planning.auto import auto, first_that_fits
from lightning_offload.planning.kernels import is_compilable
from lightning_offload.planning.planner import plan
from lightning_offload.planning.policies import ONLY, PUBLISHED, Policy
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.plugins.fake import record_fake
from tests.graph.building import DEVICE, GraphBuilder, chain, step_graphs

NET = chain(*(100 + 10 * i for i in range(12)))
SHARED = dataclasses.replace(DEVICE, copy_interference=0.5, overhead_seconds=0.01)


def floor_of(graph: StepGraph) -> int:
    """The smallest feasible budget."""
    return PlanRequest(Problem(graph), DEVICE, None).floor.peak_bytes


def plain_peak(graph: StepGraph) -> int:
    """The peak with everything kept."""
    return PlanRequest(Problem(graph), DEVICE, None).plain.peak_bytes


def test_no_budget_keeps_everything() -> None:
    """Without a budget, or with one that is large enough, there is nothing to decide."""
    for budget in (None, plain_peak(NET)):
        found = plan(NET, DEVICE, budget)
        assert found.decisions == ()
        assert found.predicted_peak_bytes == found.plain_peak_bytes == plain_peak(NET)
        assert found.predicted_step_seconds == found.plain_step_seconds == found.bound_seconds
        assert found.budget_bytes == budget


@pytest.mark.parametrize("height", [0.0, 0.1, 0.3, 0.5, 0.8, 0.99])
def test_plan_fits_the_budget(height: float) -> None:
    """Between the floor and the plain peak the predicted peak is within the budget, and the plan is sound."""
    low, high = floor_of(NET), plain_peak(NET)
    budget = int(low + height * (high - low))
    found = plan(NET, SHARED, budget)
    assert found.decisions
    assert found.predicted_peak_bytes <= budget < found.plain_peak_bytes
    assert found.bound_seconds <= found.predicted_step_seconds
    assert (found.floor_bytes, found.policy, found.budget_bytes) == (low, "auto", budget)
    found.check(NET)
    assert MemoryPlan.from_json(found.to_json()) == found


@pytest.mark.skipif(not is_compilable(), reason="without numba fewer choices are tried")
def test_few_large_storages_near_the_floor() -> None:
    """No small change leads from the best start of VGG-19 to a good plan: that ended 1.092 times the bound."""
    card = device_spec("h200", dtype="bfloat16")
    problem = Problem(record_fake(MODELS["vgg19-bn"].step(None, torch.bfloat16), card).on(card))
    free = PlanRequest(problem, card, None)
    low, high = free.floor.peak_bytes, free.plain.peak_bytes
    request = PlanRequest(problem, card, int(low + 0.05 * (high - low)))
    assert auto(request).predicted_step_seconds <= 1.07 * request.bound_seconds


@pytest.mark.parametrize("height", [0.1, 0.3, 0.5, 0.9])
def test_ops_that_take_no_time(height: float) -> None:
    """A step that nobody has timed is planned all the same, though no plan is within a share of no seconds."""
    net = dataclasses.replace(NET, ops=tuple(dataclasses.replace(op, seconds=0.0) for op in NET.ops))
    low, high = floor_of(net), plain_peak(net)
    for device in (DEVICE, SHARED):
        found = plan(net, device, int(low + height * (high - low)))
        assert found.plain_step_seconds == 0.0
        assert found.bound_seconds <= found.predicted_step_seconds
        assert found.predicted_peak_bytes <= low + height * (high - low)


def test_exactly_the_floor_works_and_one_byte_less_does_not() -> None:
    """The error carries the budget, the floor and the op; trying again with its floor succeeds."""
    low = floor_of(NET)
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(NET, DEVICE, low - 1)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (low - 1, low)
    assert str(low) in str(caught.value)
    assert caught.value.op in str(caught.value)
    assert plan(NET, DEVICE, caught.value.floor_bytes).predicted_peak_bytes == low


def test_infeasible_names_the_op_with_the_largest_working_set() -> None:
    """The op in the message is the one that needs the most at once, with its module and phase."""
    b = GraphBuilder()
    x = b.given(10)
    small = b.make(20, x)
    b.pack(small)
    (large,) = b.op((small,), (500,), name="aten.convolution.default", module="layer4.2.conv3")
    b.drop(small)
    b.pack(large)
    (last,) = b.op((large,), (5,), name="aten.sum.default")
    b.drop(large, last)
    b.op()
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(b.build(), DEVICE, 100)
    assert caught.value.op == "aten.convolution.default in `layer4.2.conv3` (forward)"
    assert caught.value.floor_bytes == 10 + 20 + 500


def test_infeasible_without_an_op_names_the_state() -> None:
    """Where persistent state alone exceeds the budget in a step without ops, it is named."""
    b = GraphBuilder()
    b.pack(b.given(100))
    with pytest.raises(BudgetInfeasibleError, match="before the step"):
        plan(b.build(), DEVICE, 50)


def test_kept_modules_raise_the_floor() -> None:
    """What the user keeps is kept, and counts."""
    kept = frozenset({3, 5})
    low = PlanRequest(Problem(NET, kept), DEVICE, None).floor.peak_bytes
    assert low > floor_of(NET)
    found = plan(NET, DEVICE, low, keep=kept)
    assert not kept & {decision.storage for decision in found.decisions}


def test_the_last_result_is_not_moved_in_vain() -> None:
    """What is needed again at once frees nothing at the peak, so it stays."""
    budget = plain_peak(NET) - 1
    found = plan(NET, DEVICE, budget)
    assert 12 not in {decision.storage for decision in found.decisions}


def test_cheap_replays_are_preferred_to_slow_copies_and_the_reverse() -> None:
    """With links of 1 B/s and instant ops everything is replayed; with ops of an hour everything is swapped."""
    budget = (floor_of(NET) + plain_peak(NET)) // 2
    ops = tuple(dataclasses.replace(op, seconds=0.001) for op in NET.ops)
    slow_links = dataclasses.replace(SHARED, d2h_bytes_per_second=1.0, h2d_bytes_per_second=1.0)
    quick = plan(dataclasses.replace(NET, ops=ops), slow_links, budget)
    assert {decision.action for decision in quick.decisions} == {"recompute"}
    ops = tuple(dataclasses.replace(op, seconds=3600.0) for op in NET.ops)
    slow = plan(dataclasses.replace(NET, ops=ops), SHARED, budget)
    assert {decision.action for decision in slow.decisions} == {"swap"}


PAGES = chain(*(4096 * (1 + i % 3) for i in range(12)))
DISK = dataclasses.replace(SHARED, disk_write_bytes_per_second=1000.0, disk_read_bytes_per_second=1000.0)


def test_plan_says_which_tier_each_swap_goes_to() -> None:
    """On a host of three pages those away longest go to disk, and the plan predicts the use of both tiers."""
    budget = floor_of(PAGES)
    found = plan(PAGES, dataclasses.replace(DISK, host_memory_bytes=3 * 4096), budget)
    swapped = {d.storage: d.tier for d in found.decisions if d.action == "swap"}
    assert set(swapped.values()) == {"host", "disk"}
    assert max(s for s in swapped if swapped[s] == "disk") < min(s for s in swapped if swapped[s] == "host")
    assert 0 < found.predicted_host_bytes <= 3 * 4096
    assert found.predicted_disk_bytes > 0
    assert found.predicted_stall_seconds > 0
    assert MemoryPlan.from_json(found.to_json()) == found


def test_disk_is_used_for_all_where_there_is_no_host_memory() -> None:
    """A host of no bytes: every swap goes to disk."""
    found = plan(PAGES, dataclasses.replace(DISK, host_memory_bytes=0), floor_of(PAGES))
    assert {d.tier for d in found.decisions if d.action == "swap"} == {"disk"}
    assert found.predicted_host_bytes == 0


def test_host_without_limit_needs_no_disk() -> None:
    """The plan is the same, disk or not; its bound, too, but for rounding."""
    budget = (floor_of(PAGES) + plain_peak(PAGES)) // 2
    with_disk, without = plan(PAGES, DISK, budget), plan(PAGES, SHARED, budget)
    assert with_disk.bound_seconds == pytest.approx(without.bound_seconds)
    assert dataclasses.replace(with_disk, bound_seconds=without.bound_seconds) == without


def test_slow_disk_is_priced_as_such() -> None:
    """What a quick link would swap is recomputed where all swaps would go to a slow disk, and swapped to a fast one."""
    budget = (floor_of(PAGES) + plain_peak(PAGES)) // 2
    quick = dataclasses.replace(DISK, d2h_bytes_per_second=1e9, h2d_bytes_per_second=1e9, kind="cuda")
    actions = {}
    for rate in (1.0, 1e9):
        disk = dataclasses.replace(
            quick, disk_write_bytes_per_second=rate, disk_read_bytes_per_second=rate, host_memory_bytes=0
        )
        actions[rate] = {d.action for d in plan(PAGES, disk, budget).decisions}
    assert actions == {1.0: {"recompute"}, 1e9: {"swap"}}


def test_short_host_without_disk_mixes() -> None:
    """Where the host has room for little, that is used and the rest recomputed."""
    short = dataclasses.replace(SHARED, host_memory_bytes=6 * 4096, d2h_bytes_per_second=1e9, h2d_bytes_per_second=1e9)
    low = PlanRequest(Problem(PAGES), short, None).floor.peak_bytes
    found = plan(PAGES, short, low)
    assert {d.action for d in found.decisions} == {"swap", "recompute"}
    assert found.predicted_host_bytes <= 6 * 4096


@given(graph=step_graphs(), height=st.floats(0, 1.1))
def test_any_step_is_planned_within_its_budget(graph: StepGraph, height: float) -> None:
    """Feasible whenever the budget is at least the floor; deterministic; consistent with its own graph."""
    request = PlanRequest(Problem(graph), SHARED, None)
    low, high = request.floor.peak_bytes, request.plain.peak_bytes
    budget = int(low + height * (high - low))
    found = plan(graph, SHARED, budget)
    assert found == plan(graph, SHARED, budget)
    assert low <= found.predicted_peak_bytes <= max(budget, low)
    assert found.bound_seconds <= found.predicted_step_seconds * (1 + 1e-9)
    found.check(graph)
    candidates = Problem(graph).candidates
    for decision in found.decisions:
        candidate = candidates[decision.storage]
        assert candidate.can_swap if decision.action == "swap" else candidate.can_recompute
        _check_schedule(graph, decision, candidate.pack_tick)


def _check_schedule(graph: StepGraph, decision: Decision, pack_tick: int) -> None:
    """A release follows the pack, and a copy back is issued after the release."""
    if decision.action != "swap":
        assert (decision.release_op, decision.prefetch_unpack) == (AT_PACK, ON_DEMAND)
        return
    released = pack_tick
    if decision.release_op != AT_PACK:
        released = graph.ops[decision.release_op].tick if decision.release_op < len(graph.ops) else graph.num_ticks
        assert released > pack_tick
    if decision.prefetch_unpack != ON_DEMAND:
        ticks = sorted(tick for save in graph.saves for tick in save.unpack_ticks)
        assert ticks[decision.prefetch_unpack] >= released


@given(graph=step_graphs())
def test_below_the_floor_is_infeasible(graph: StepGraph) -> None:
    """One byte below the floor raises, and the error names that floor."""
    low = floor_of(graph)
    if low < 2:
        return
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(graph, DEVICE, low - 1)
    assert caught.value.floor_bytes == low


@given(st.integers(0, 60), st.integers(0, 61), st.integers(-5, 70))
def test_a_guess_changes_what_a_search_costs_not_what_it_finds(high: int, shortest: int, guess: int) -> None:
    """From any guess the shortest length is found that fits, or none; from a good one after few tries."""
    tried = []

    def fits(length: int) -> int | None:
        tried.append(length)
        return length if length >= shortest else None

    assert first_that_fits(0, high, fits, guess=guess) == first_that_fits(0, high, fits)
    tried.clear()
    if 0 < shortest <= high:
        assert first_that_fits(0, high, fits, guess=shortest) == shortest
        assert sorted(tried) == [shortest - 1, shortest]


@pytest.mark.parametrize("is_slow_to_copy", [False, True])
def test_policies_that_cannot_win_are_not_fitted(monkeypatch: pytest.MonkeyPatch, is_slow_to_copy: bool) -> None:
    """Where copies are slow none that only swaps is, where replays do none that only recomputes; plans are the same."""
    ops = tuple(dataclasses.replace(op, seconds=0.05 if is_slow_to_copy else 50.0) for op in NET.ops)
    graph = dataclasses.replace(NET, ops=ops)
    low, high = floor_of(graph), plain_peak(graph)
    budget = (low + high) // 2
    monkeypatch.setattr(search, "_AS_GOOD", 0.0)
    fitted: list[str] = []

    def noted(name: str, policy: Policy) -> Policy:
        def fit(request: PlanRequest) -> MemoryPlan:
            fitted.append(name)
            return policy(request)

        return fit

    monkeypatch.setattr(module, "PUBLISHED", {name: noted(name, policy) for name, policy in PUBLISHED.items()})
    found = plan(graph, SHARED, budget)
    hopeless = "swap" if is_slow_to_copy else "recompute"
    assert fitted
    assert not [name for name in fitted if ONLY.get(name) == hopeless]
    assert [name for name in fitted if ONLY.get(name) not in (None, hopeless)]
    monkeypatch.setattr(module, "ONLY", {})
    assert plan(graph, SHARED, budget) == found
    assert set(PUBLISHED) - set(fitted) <= {"checkmate", "dtr"}
