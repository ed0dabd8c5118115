"""Fixed policies, and what all policies share."""

from __future__ import annotations

import dataclasses
import inspect
import random
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import BudgetInfeasibleError, PolicyError
from lightning_offload.graph import Decision, DeviceSpec, MemoryPlan, StepGraph
from lightning_offload.graph.host_layout import Layout, plan_layout
from lightning_offload.planning import planner
from lightning_offload.planning.planner import POLICIES, check_policy, plan, plan_with_margin, plan_without_ops
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest, decisions_of
from lightning_offload.planning.simulator import simulate
from lightning_offload.planning.trace import simulate_plan
from lightning_offload.runtime.program import compile_plan
from tests.graph.building import DEVICE, GraphBuilder, chain, step_graphs, tiered_devices
from tests.planning.step_strategies import SEEDS, odd_step, random_choice
from tests.runtime.executing import plan_of

NET = chain(*(100 + 10 * i for i in range(6)))
NAMES = (
    "auto", "keep-all", "all-swap", "all-recompute", "save-on-cpu", "checkpoint", "checkpoint-sqrt",
    "vdnn-all", "vdnn-conv", "vdnn-dyn", "superneurons", "swap-out-in", "layrub", "layup", "cpu-offload",
    "accudnn", "capuchin", "checkmate", "dtr", "pofo",
)  # fmt: skip


def test_policies_share_one_signature() -> None:
    """Each is a function of a request alone that returns a plan, named as in the table."""
    assert tuple(POLICIES) == NAMES
    for policy in POLICIES.values():
        signature = inspect.signature(policy)
        assert [p.annotation for p in signature.parameters.values()] == ["PlanRequest"]
        assert signature.return_annotation == "MemoryPlan"


def test_unknown_policy_lists_those_there_are(subtests: pytest.Subtests) -> None:
    """The message echoes the name and lists the policies."""
    for name in ["", "Auto", "swap", "keep_all", None, 3, ["auto"], {}]:
        with subtests.test(name=name):
            with pytest.raises(PolicyError, match=", ".join(map(repr, NAMES))) as caught:
                check_policy(name)  # type: ignore[arg-type]
            assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "actions"),
    [("auto", set()), ("keep-all", set()), ("all-swap", {"swap"}), ("all-recompute", {"recompute"})],
)
def test_fixed_policies_do_one_thing(policy: str, actions: set[str]) -> None:
    """Without a budget each does what it is called, to every storage there is a choice about."""
    found = plan(NET, DEVICE, None, policy=policy)
    assert {decision.action for decision in found.decisions} == actions
    assert len(found.decisions) == (6 if actions else 0)
    assert found.policy == policy


def test_all_swap_recomputes_casts_of_parameters() -> None:
    """A cast weight is never swapped, under any policy."""
    b = GraphBuilder()
    (cast,) = b.op((b.given(80),), (40,), name="aten._to_copy.default")
    save = b.pack(cast)
    b.drop(cast)
    b.op()
    b.unpack(save)
    found = plan(b.build(), DEVICE, None, policy="all-swap")
    assert [decision.action for decision in found.decisions] == ["recompute"]


def test_all_recompute_keeps_what_cannot_be_replayed() -> None:
    """An opaque result stays on the device."""
    b = GraphBuilder()
    opaque = b.make(40, b.given(1), replayable=False)
    b.pack(opaque)
    result = b.make(40, opaque)
    b.pack(result)
    found = plan(b.build(), DEVICE, None, policy="all-recompute")
    assert [decision.storage for decision in found.decisions] == [2]


DEPEND_ON_TIMES = {"checkmate", "dtr", "pofo"}
"""Policies whose choices do: they name a budget that works whatever was measured, and may meet a smaller one."""


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "auto"])
def test_fixed_policy_below_its_own_floor_is_infeasible(policy: str) -> None:
    """The error names the smallest budget that this policy can meet, which then works, and says what to do."""
    with pytest.raises(BudgetInfeasibleError, match="use policy='auto'") as caught:
        plan(NET, DEVICE, 1, policy=policy)
    floor = caught.value.floor_bytes
    assert policy in str(caught.value)
    assert plan(NET, DEVICE, floor, policy=policy).predicted_peak_bytes <= floor
    if policy not in DEPEND_ON_TIMES:
        with pytest.raises(BudgetInfeasibleError):
            plan(NET, DEVICE, floor - 1, policy=policy)
    assert plan(NET, DEVICE, floor).predicted_peak_bytes <= floor


@given(graph=step_graphs(), policy=st.sampled_from(list(POLICIES)), height=st.floats(0, 1))
def test_each_policy_fits_or_names_a_floor_that_works(graph: StepGraph, policy: str, height: float) -> None:
    """Whatever the step and the budget, a policy returns a plan that fits, or an error whose floor works."""
    request = PlanRequest(Problem(graph), DEVICE, None)
    budget = int(request.floor.peak_bytes + height * (request.plain.peak_bytes - request.floor.peak_bytes))
    try:
        found = plan(graph, DEVICE, budget, policy=policy)
    except BudgetInfeasibleError as error:
        floor = error.floor_bytes
        found = plan(graph, DEVICE, floor, policy=policy)
        is_honest = policy != "auto" and floor > budget
        budget = floor
    else:
        is_honest = True
    assert is_honest
    assert found.predicted_peak_bytes <= budget
    assert found.policy == policy
    compile_plan(graph, found)


@given(graph=step_graphs(unit=1000), device=tiered_devices(unit=4096), policy=st.sampled_from(NAMES))
def test_each_policy_respects_the_tiers_and_what_storages_allow(
    graph: StepGraph, device: DeviceSpec, policy: str
) -> None:
    """On any host, disk or not: only what may be swapped is, within host memory; only what can be is recomputed."""
    found = plan(graph, device, None, policy=policy)
    candidates = Problem(graph).candidates
    for decision in found.decisions:
        candidate = candidates[decision.storage]
        assert candidate.can_swap if decision.action == "swap" else candidate.can_recompute
    if device.host_memory_bytes is not None:
        assert found.predicted_host_bytes <= device.host_memory_bytes
    assert found == plan(graph, device, None, policy=policy)
    compile_plan(graph, found)


def test_all_swap_keeps_what_does_not_fit() -> None:
    """On a host of seven pages without a disk the largest results are swapped, the rest stay on the device."""
    net = chain(*(4096 * size for size in (1, 4, 2, 3)))
    short = dataclasses.replace(DEVICE, host_memory_bytes=7 * 4096)
    found = plan(net, short, None, policy="all-swap")
    decisions = sorted((d.storage, d.action, d.tier) for d in found.decisions)
    assert decisions == [(2, "swap", "host"), (4, "swap", "host")]
    assert found.predicted_host_bytes == 7 * 4096
    disk = dataclasses.replace(short, disk_write_bytes_per_second=1.0, disk_read_bytes_per_second=1.0)
    found = plan(net, disk, None, policy="all-swap")
    tiers = {d.storage: d.tier for d in found.decisions}
    assert tiers == {1: "disk", 2: "disk", 3: "host", 4: "host"}


def test_all_swap_on_a_short_host_names_its_floor() -> None:
    """The error names the host budget, and the smallest budget under this policy, which works."""
    short = dataclasses.replace(DEVICE, host_memory_bytes=4096)
    net = chain(*[4096] * 6)
    with pytest.raises(BudgetInfeasibleError, match=r"raise the host budget .* or use policy='auto'") as caught:
        plan(net, short, 1, policy="all-swap")
    assert (
        plan(net, short, caught.value.floor_bytes, policy="all-swap").predicted_peak_bytes <= caught.value.floor_bytes
    )


def _floor_of(graph: StepGraph, device: DeviceSpec, policy: str) -> int:
    """The smallest budget that a policy can meet."""
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(graph, device, 1, policy=policy)
    return caught.value.floor_bytes


def test_layout_of_a_plan_fits_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stays that do not nest leave gaps: where a plan's layout is larger than the host, another puts less there."""
    net = chain(*[4096] * 6)
    short = dataclasses.replace(DEVICE, host_memory_bytes=4 * 4096)
    first = plan(net, short, None, policy="all-swap")
    assert first.predicted_host_bytes == 4 * 4096

    def wasteful(graph: StepGraph, made: MemoryPlan) -> Layout:
        layout = plan_layout(graph, made)
        return Layout(offsets=layout.offsets, tier_bytes={"host": layout.tier_bytes["host"] + 4096, "disk": 0})

    monkeypatch.setattr(planner, "plan_layout", wasteful)
    assert plan(net, short, None, policy="all-swap").predicted_host_bytes == 3 * 4096
    # Where no plan with less on the host is within the budget, the first one stands: offsets are hints.
    low = _floor_of(net, short, "all-swap")
    assert plan(net, short, low, policy="all-swap").predicted_host_bytes == 4 * 4096


@given(graph=step_graphs(), device=tiered_devices(), policy=st.sampled_from(NAMES), height=st.floats(0, 1))
def test_releases_move_to_where_hooks_are_only_for_little(
    graph: StepGraph, device: DeviceSpec, policy: str, height: float
) -> None:
    """Actions and tiers stay; the plan is within the budget, hardly slower, and its figures are its own."""
    request = PlanRequest(Problem(graph), device, None)
    budget = int(request.floor.peak_bytes + height * (request.plain.peak_bytes - request.floor.peak_bytes))
    how: dict[str, Any] = {"usable_bytes": None, "shortfall_bytes": 0, "must_fit": True, "policy": policy}
    try:
        first = plan(graph, device, budget, policy=policy)
    except BudgetInfeasibleError:
        with pytest.raises(BudgetInfeasibleError):
            plan_with_margin(graph, device, budget, **how)
        return
    found = plan_with_margin(graph, device, budget, **how)
    same = [(d.storage, d.action, d.tier) for d in sorted(first.decisions, key=lambda d: d.storage)]
    assert [(d.storage, d.action, d.tier) for d in sorted(found.decisions, key=lambda d: d.storage)] == same
    assert found.predicted_peak_bytes <= budget
    assert found.predicted_step_seconds <= 1.02 * first.predicted_step_seconds
    if device.host_memory_bytes is not None:
        assert found.predicted_host_bytes <= device.host_memory_bytes
    timeline = simulate_plan(Problem(graph), found.decisions, device)
    assert timeline.peak_bytes == found.predicted_peak_bytes
    assert timeline.step_seconds == pytest.approx(found.predicted_step_seconds)
    program = compile_plan(graph, found)
    if found.decisions != first.decisions:
        assert not (program.is_strict if program.is_recomputing else program.needs_ops)


@given(seed=SEEDS)
def test_a_plan_whose_releases_move_is_still_what_its_figures_say(seed: int) -> None:
    """What is not memoised stays so, and memory and time are those of the decisions that are executed."""
    rng = random.Random(seed)
    problem = Problem(odd_step(rng))
    choice = random_choice(problem, rng)
    decisions = decisions_of(
        problem,
        choice.actions,
        simulate(problem, choice.actions, DEVICE, no_memo=choice.no_memo, limit_bytes=choice.limit_bytes),
        choice.no_memo,
    )
    timeline = simulate_plan(problem, decisions, DEVICE)
    made = dataclasses.replace(
        plan_of(problem.graph, *decisions),
        predicted_peak_bytes=timeline.peak_bytes, predicted_step_seconds=timeline.step_seconds,
    )  # fmt: skip
    found = planner.sparing_the_mode(problem, made, DEVICE, None, lambda: None, mode_seconds=1e9)
    assert {d.storage for d in found.decisions if not d.memo} == choice.no_memo
    executed = simulate_plan(problem, found.decisions, DEVICE)
    assert executed.peak_bytes == found.predicted_peak_bytes
    assert executed.step_seconds == pytest.approx(found.predicted_step_seconds)


def test_backward_is_not_seen_for_releases_while_something_is_recomputed() -> None:
    """One that is due between two of its ops comes at an unpack, those of forward stay at their ops."""
    b = GraphBuilder()
    first = b.make(100, b.given(1), seconds=1.0)
    saved = [b.pack(first)]
    second = b.make(100, first, seconds=10.0)
    saved.append(b.pack(second))
    third = b.make(100, second, seconds=10.0)
    saved.append(b.pack(third))
    b.drop(first, second, third)
    b.backward()
    b.unpack(saved[2])
    b.op(seconds=0.6)
    b.op(seconds=50.0)  # no hook comes before it
    b.unpack(saved[1])
    b.op(seconds=50.0)
    b.unpack(saved[0])
    b.op()
    graph = b.build()
    decisions = (
        Decision(storage=1, action="swap", release_op=4),
        Decision(storage=2, action="swap", release_op=2),
        Decision(storage=3, action="recompute"),
    )
    timeline = simulate_plan(Problem(graph), decisions, DEVICE)
    made = dataclasses.replace(
        plan_of(graph, *decisions),
        predicted_peak_bytes=timeline.peak_bytes, predicted_step_seconds=timeline.step_seconds,
    )  # fmt: skip
    assert compile_plan(graph, made).is_strict
    found = planner.sparing_the_mode(Problem(graph), made, DEVICE, None, lambda: None, mode_seconds=1e9)
    program = compile_plan(graph, found)
    assert (program.needs_ops, program.is_strict) == (True, False)
    assert {d.storage: d.action for d in found.decisions} == {d.storage: d.action for d in decisions}
    assert {d.storage: d.release_op for d in found.decisions}[2] == 2


@pytest.mark.parametrize("height", [0.1, 0.4, 0.7, 0.95])
def test_a_plan_that_recomputes_nothing_takes_no_less_than_its_bytes(height: float) -> None:
    """What is beyond the budget at the plain step's peak goes and comes back: it is not even looked for then."""
    net = chain(*range(1000, 3000, 100), seconds=0.5)
    plain, floor = plan(net, DEVICE, None, policy="keep-all").predicted_peak_bytes, plan(net, DEVICE, None).floor_bytes
    budget = int(floor + height * (plain - floor))
    made = plan(net, DEVICE, budget)
    found = planner._without_recompute(net, DEVICE, budget)
    assert found is not None
    least_seconds = planner.least_quiet_seconds(made, DEVICE, budget)
    assert 0 < least_seconds <= found.predicted_step_seconds
    looked = mock.Mock(return_value=None)
    for price in (least_seconds - made.predicted_step_seconds + more for more in (-0.01, 0.01)):
        planner.sparing_the_mode(Problem(net), made, DEVICE, budget, looked, mode_seconds=price)
    is_worth_more = least_seconds > 1.02 * made.predicted_step_seconds
    assert looked.call_count == int(is_worth_more) or not is_worth_more


@pytest.mark.parametrize(("mode_seconds", "is_quiet"), [(0.0, False), (1e9, True)])
def test_what_steps_have_shown_of_the_mode_decides(mode_seconds: float, is_quiet: bool) -> None:
    """Not what is known of others: at a cost of nothing values are recomputed, at any price they are swapped."""
    net = chain(*[1000] * 12, seconds=0.1)
    budget = plan(net, DEVICE, None).plain_peak_bytes * 6 // 10
    found = plan_with_margin(
        net, DEVICE, budget, usable_bytes=None, shortfall_bytes=0, must_fit=True, mode_seconds=mode_seconds
    )
    assert found.decisions
    assert all(d.action != "recompute" for d in found.decisions) is is_quiet


def test_release_before_an_op_without_a_hook_moves() -> None:
    """It comes earlier where the copy is done by then or little is waited for; where much is, ops are seen."""
    b = GraphBuilder()
    value = b.make(100, b.given(1), seconds=1.0)
    save = b.pack(value)
    other = b.make(10, value, seconds=2.0)
    b.drop(value)
    second = b.pack(other)
    b.make(10, other, seconds=50.0)
    large = b.make(200, other)  # the copy out of 100 bytes ends before it; no hook comes in between
    b.drop(large, other)
    b.backward()
    b.op(seconds=50.0)
    b.unpack(second)
    b.op(seconds=50.0)
    b.unpack(save)
    b.op()
    graph = b.build()
    how: dict[str, Any] = {"usable_bytes": None, "shortfall_bytes": 0, "must_fit": True, "policy": "all-swap"}
    for rate, is_moved in ((100.0, True), (2.0, False)):
        device = dataclasses.replace(DEVICE, d2h_bytes_per_second=rate, h2d_bytes_per_second=100.0)
        program = compile_plan(graph, plan_with_margin(graph, device, None, **how))
        assert program.needs_ops is not is_moved, rate


@given(graph=step_graphs(), height=st.floats(0, 1), mode_seconds=st.sampled_from([0.0, 0.5, 1e9]))
def test_recomputing_is_given_up_for_no_more_than_the_mode_costs(
    graph: StepGraph, height: float, mode_seconds: float
) -> None:
    """Auto's plan takes no longer than the mode's time beyond the best one, within the budget, with the same bounds."""
    request = PlanRequest(Problem(graph), DEVICE, None)
    budget = int(request.floor.peak_bytes + height * (request.plain.peak_bytes - request.floor.peak_bytes))
    first = plan(graph, DEVICE, budget)
    with mock.patch.object(planner, "_mode_seconds", return_value=mode_seconds):
        found = plan_with_margin(graph, DEVICE, budget, usable_bytes=None, shortfall_bytes=0, must_fit=True)
    assert found.predicted_peak_bytes <= budget
    assert found.predicted_step_seconds <= 1.02 * first.predicted_step_seconds + mode_seconds
    for name in ("graph_digest", "floor_bytes", "floor_op", "bound_seconds", "plain_peak_bytes"):
        assert getattr(found, name) == getattr(first, name)
    had_recompute, has_recompute = (any(d.action == "recompute" for d in p.decisions) for p in (first, found))
    program = compile_plan(graph, found)
    if had_recompute and not has_recompute:
        assert mode_seconds > 0
        assert not program.needs_ops
    if has_recompute and found.decisions != first.decisions:
        assert not program.is_strict


@pytest.mark.parametrize("height", [0.0, 0.4, 0.8])
def test_plans_without_ops_recompute_nothing_and_release_at_hooks(height: float) -> None:
    """Whatever the budget; one below their own floor is refused, and the one that is named then works."""
    net = chain(*range(1000, 3000, 100))
    plain = plan(net, DEVICE, None, policy="keep-all").predicted_peak_bytes
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan_without_ops(net, DEVICE, 1)
    floor = caught.value.floor_bytes
    budget = int(floor + height * (plain - floor))
    made = plan_without_ops(net, DEVICE, budget)
    assert made.predicted_peak_bytes <= budget
    assert {decision.action for decision in made.decisions} <= {"keep", "swap"}
    assert not compile_plan(net, made).needs_ops


def test_mode_weighs_where_ops_are_tiny() -> None:
    """On a host its time adds to each op's; a device waits only for what the host takes longer than it."""
    tiny, long = (chain(*[10] * 50, seconds=seconds) for seconds in (1e-6, 1e-3))
    device = dataclasses.replace(DEVICE, kind="cuda")
    assert (
        planner._mode_seconds(Problem(tiny), DEVICE)
        == planner._mode_seconds(Problem(long), DEVICE)
        == pytest.approx(50 * 20e-6)
    )
    assert planner._mode_seconds(Problem(tiny), device) == pytest.approx(50 * 28e-6)
    assert planner._mode_seconds(Problem(long), device) == 0


def test_the_modes_share_of_a_wait() -> None:
    """Not the launches that plain steps have too, nor what the program itself does for long."""
    tiny, long = (chain(*[10] * 50, seconds=seconds) for seconds in (1e-6, 1e-3))
    assert planner.mode_share(tiny, 2e-3) == pytest.approx(2e-3 - 50 * 8e-6)
    assert planner.mode_share(long, 2e-3) == pytest.approx(2e-3)
    assert planner.mode_share(tiny, 1e-4) == 0
    assert planner.mode_share(tiny, 1.0) == pytest.approx(50 * 100e-6)


def test_plain_figures_are_those_of_keep_all() -> None:
    """Every plan carries the peak and time that keeping everything would have."""
    kept = plan(NET, DEVICE, None, policy="keep-all")
    for policy in POLICIES:
        found = plan(NET, DEVICE, None, policy=policy)
        assert found.plain_peak_bytes == kept.predicted_peak_bytes
        assert found.plain_step_seconds == kept.predicted_step_seconds


def test_planning_needs_no_torch() -> None:
    """Planning on a hand-made graph imports no torch: it runs on a laptop for a device that is not there."""
    slower = dataclasses.replace(DEVICE, d2h_bytes_per_second=7.0)
    code = (
        "import sys\n"
        "from lightning_offload.graph import StepGraph, DeviceSpec\n"
        "from lightning_offload.planning.policies import plan\n"
        f"graph, device = StepGraph.from_json({NET.to_json()!r}), DeviceSpec.from_json({slower.to_json()!r})\n"
        "assert plan(graph, device, plan(graph, device, None).floor_bytes).decisions\n"
        "assert not {'torch', 'lightning'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
