"""The smallest peak that can be promised, with tiers of any size."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.graph.host_layout import plan_layout
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.floor import peaks_without_plan, swap_everything, swap_what_fits
from lightning_offload.planning.planner import POLICIES, plan
from lightning_offload.planning.problem import Problem, anchors, replay_cost
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import ON_DEMAND, simulate
from tests.graph.building import DEVICE, GraphBuilder, chain, step_graphs, tiered_devices
from tests.shares import examples, is_all

PAGE = 4096
NET = chain(*(PAGE * (1 + i % 3) for i in range(12)))
SWAPPED_BYTES = sum(PAGE * (1 + i % 3) for i in range(12))


def on_host(limit: int | None) -> DeviceSpec:
    """A device whose only tier is a host of this size."""
    return dataclasses.replace(DEVICE, host_memory_bytes=limit)


def floor_bytes(graph: StepGraph, device: DeviceSpec) -> int:
    """The smallest feasible budget."""
    return PlanRequest(Problem(graph), device, None).floor.peak_bytes


def test_host_that_holds_everything_is_as_good_as_one_without_limit() -> None:
    """To the byte: the floor is that of everything swapped."""
    request = PlanRequest(Problem(NET), on_host(SWAPPED_BYTES), None)
    assert request.floor_actions == swap_everything(Problem(NET))
    assert request.floor.peak_bytes == floor_bytes(NET, DEVICE)
    assert not request.lowest.is_host_short


def test_disk_makes_up_for_a_short_host() -> None:
    """With a disk the host's size does not matter to the floor."""
    disk = dataclasses.replace(on_host(0), disk_write_bytes_per_second=1.0, disk_read_bytes_per_second=1.0)
    assert floor_bytes(NET, disk) == floor_bytes(NET, DEVICE)


def test_floor_rises_as_the_host_shrinks() -> None:
    """Between that of everything swapped and that without any tier, which is still below the plain peak."""
    floors = [floor_bytes(NET, on_host(n * SWAPPED_BYTES // 8)) for n in range(8, -1, -1)]
    assert floors[0] == floor_bytes(NET, DEVICE)
    assert floors == sorted(floors)
    assert floors[0] < floors[-1] < PlanRequest(Problem(NET), DEVICE, None).plain.peak_bytes


def test_what_cannot_be_recomputed_is_swapped_first() -> None:
    """A small opaque result takes the host's only page, and the large one that can be replayed is replayed."""
    b = GraphBuilder()
    x = b.given(1)
    opaque = b.make(PAGE, x, replayable=False)
    saves = [b.pack(opaque)]
    large = b.make(PAGE, x)
    saves.append(b.pack(large))
    b.drop(opaque, large)
    b.drop(b.make(3 * PAGE))
    b.op()
    b.backward()
    for save in reversed(saves):
        b.unpack(save)
        b.op()
        b.release(save)
    request = PlanRequest(Problem(b.build()), on_host(PAGE), None)
    assert request.floor_actions == {1: "swap", 2: "recompute"}
    assert request.lowest.is_host_short


def test_what_saves_most_is_swapped_next() -> None:
    """Of results that can all be replayed the largest that fit are swapped."""
    b = GraphBuilder()
    x = b.given(1)
    values = [b.make(size * PAGE, x) for size in (1, 3, 2)]
    saves = [b.pack(value) for value in values]
    b.drop(*values)
    b.op()
    b.backward()
    for save in reversed(saves):
        b.unpack(save)
        b.op()
        b.release(save)
    request = PlanRequest(Problem(b.build()), on_host(5 * PAGE), None)
    assert request.floor_actions == {1: "recompute", 2: "swap", 3: "swap"}


def test_long_chains_are_broken() -> None:
    """Without any tier some storages of a long net are kept, since replaying all at once would need them all."""
    net = chain(*[PAGE] * 64)
    request = PlanRequest(Problem(net), on_host(0), None)
    assert set(request.floor_actions.values()) == {"recompute"}
    assert 0 < len(request.floor_actions) < 64
    assert request.floor.peak_bytes < 25 * PAGE


def test_swap_what_fits_keeps_the_rest() -> None:
    """The largest first, up to the limit; casts of parameters are cast again."""
    problem = Problem(chain(PAGE, 3 * PAGE, 2 * PAGE))
    assert swap_what_fits(problem, 4 * PAGE) == {1: "swap", 2: "swap"}
    assert swap_what_fits(problem, 5 * PAGE) == {2: "swap", 3: "swap"}
    assert swap_what_fits(problem, 0) == {}
    b = GraphBuilder()
    (cast,) = b.op((b.given(80),), (PAGE,), name="aten._to_copy.default")
    b.pack(cast)
    assert swap_what_fits(Problem(b.build()), 0) == {1: "recompute"}


def test_chain_cost_adds_up_until_it_is_broken() -> None:
    """A replay needs what it reads: bytes of the chain behind it count, seconds of its own op only."""
    problem = Problem(chain(10, 20, 30))
    costs: dict[int, float] = {}
    for c in problem.candidates.values():
        seconds, costs[c.value] = replay_cost(problem, c, costs)
        assert seconds == 1.0
    assert costs == {1: 10, 2: 30, 3: 60}
    assert anchors(problem, 60) == set()
    assert anchors(problem, 59) == {3}
    assert anchors(problem, 29) == {2, 3}
    assert anchors(problem, 5) == {1, 2, 3}


@pytest.mark.parametrize("limit", [0, PAGE, 10 * PAGE])
def test_error_of_a_short_host_names_its_budget(limit: int) -> None:
    """Raising the host budget is one of the ways out, and the floor that the error names works."""
    device = on_host(limit)
    low = floor_bytes(NET, device)
    with pytest.raises(BudgetInfeasibleError, match="raise the host budget") as caught:
        plan(NET, device, low - 1)
    assert caught.value.floor_bytes == low
    assert plan(NET, device, low).predicted_peak_bytes <= low


def test_error_does_not_name_a_host_that_suffices() -> None:
    """Where host memory has no part in it, it is not mentioned."""
    for device in (DEVICE, on_host(SWAPPED_BYTES)):
        with pytest.raises(BudgetInfeasibleError) as caught:
            plan(NET, device, floor_bytes(NET, DEVICE) - 1)
        assert "host" not in str(caught.value)


@settings(max_examples=examples(60))
@given(graph=step_graphs(unit=1000), device=tiered_devices(unit=1000), height=st.floats(0, 1.1))
def test_auto_is_feasible_from_the_floor_up(graph: StepGraph, device: DeviceSpec, height: float) -> None:
    """Whatever the step and the tiers: within the budget, within the host, and on no tier that is not there."""
    request = PlanRequest(Problem(graph), device, None)
    low, high = request.floor.peak_bytes, request.plain.peak_bytes
    assert low <= high
    assert request.floor.overflow_bytes == 0
    budget = int(low + height * (high - low))
    found = plan(graph, device, budget)
    assert not is_all() or found == plan(graph, device, budget)  # as is shown of other devices in `test_auto`
    assert found.predicted_peak_bytes <= max(budget, low)
    assert found.bound_seconds <= found.predicted_step_seconds * (1 + 1e-9)
    assert 0 <= found.predicted_stall_seconds <= found.predicted_step_seconds
    found.check(graph)
    if device.host_memory_bytes is not None:
        assert found.predicted_host_bytes <= device.host_memory_bytes
    tiers = {d.tier for d in found.decisions if d.action == "swap"}
    assert "disk" not in tiers or (device.has_disk and device.host_memory_bytes is not None)


@settings(max_examples=examples(60))
@given(graph=step_graphs(unit=1000), device=tiered_devices(unit=1000), policy=st.sampled_from(list(POLICIES)))
def test_all_policies_respect_the_host(graph: StepGraph, device: DeviceSpec, policy: str) -> None:
    """No policy puts more on the host than it may hold, nor does the layout of its plan."""
    low = floor_bytes(graph, device)
    for budget in (None, low):
        try:
            found = plan(graph, device, budget, policy=policy)
        except BudgetInfeasibleError as error:
            assert policy != "auto"
            assert budget is not None
            found = plan(graph, device, error.floor_bytes, policy=policy)
        if device.host_memory_bytes is not None:
            assert found.predicted_host_bytes <= device.host_memory_bytes
            assert plan_layout(graph, found).tier_bytes["host"] <= device.host_memory_bytes
        assert found.predicted_disk_bytes == 0 or device.has_disk


@given(graph=step_graphs(unit=1000), limit=st.integers(0, 100).map(lambda n: n * 1000))
def test_more_host_memory_never_needs_more_than_everything_kept(graph: StepGraph, limit: int) -> None:
    """The floor lies between that of a host without limit and the plain peak."""
    request = PlanRequest(Problem(graph), on_host(limit), None)
    assert floor_bytes(graph, DEVICE) <= request.floor.peak_bytes <= request.plain.peak_bytes


def test_peaks_without_a_plan() -> None:
    """Those of everything off the device and of everything on it, whatever the host."""
    request = PlanRequest(Problem(NET), DEVICE, None)
    expected = (floor_bytes(NET, DEVICE), request.plain.peak_bytes)
    assert expected[0] < expected[1]
    assert peaks_without_plan(NET, DEVICE) == expected
    assert peaks_without_plan(NET, dataclasses.replace(DEVICE, host_memory_bytes=1)) == expected


@given(step_graphs(max_saves=5, unit=PAGE), st.integers(0, 30))
@settings(max_examples=examples(60))
def test_no_change_of_one_storage_lowers_the_floor(graph: StepGraph, num_pages: int) -> None:
    """Of a step whose host is short, whatever is done with one storage in place of what its floor does."""
    problem, device = Problem(graph), on_host(num_pages * PAGE)
    found = PlanRequest(problem, device, None).lowest
    for storage, candidate in problem.candidates.items():
        rest = {s: action for s, action in found.actions.items() if s != storage}
        others: list[dict[int, Action]] = [rest]
        others += [{**rest, storage: "swap"}] if candidate.can_swap else []
        others += [{**rest, storage: "recompute"}] if candidate.can_recompute else []
        for actions in others if found.is_host_short else ():
            changed = simulate(problem, actions, device, schedule=ON_DEMAND)
            assert changed.overflow_bytes or changed.peak_bytes >= found.timeline.peak_bytes
