"""The relaxation: optima by hand, and what happens where it cannot be solved."""

from __future__ import annotations

import dataclasses

import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning import relaxation
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation import relax
from lightning_offload.planning.relaxation.facts import Case
from lightning_offload.planning.relaxation.knapsack import knapsack
from lightning_offload.planning.relaxation.model import Model
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import ON_DEMAND, Schedule, residency, simulate
from tests.graph.building import DEVICE, GraphBuilder, chain, deep_chains, step_graphs, tiered_devices
from tests.shares import examples

FAST = dataclasses.replace(DEVICE, d2h_bytes_per_second=1e6, h2d_bytes_per_second=1e6)
SLOW = dataclasses.replace(DEVICE, d2h_bytes_per_second=10.0, h2d_bytes_per_second=10.0)


LATE = Schedule(release={1: 3}, prefetch={})
"""Waits for the copy out before the op that needs its room, and copies back on demand."""


def one_large(*, replayable: bool, seconds: float = 1.0) -> Problem:
    """A saved result of 100 bytes that must be away while another one of 100 bytes is there."""
    b = GraphBuilder()
    made = b.make(100, b.given(1), seconds=seconds, replayable=replayable)
    pack = b.pack(made)
    b.drop(made)
    b.op(seconds=1.0)
    b.drop(b.make(100, seconds=1.0))
    b.op(seconds=2.0)
    b.backward()
    b.unpack(pack)
    b.op(seconds=1.0)
    b.release(pack)
    b.op(seconds=1.0)
    return Problem(b.build())


def test_everything_fits_without_a_budget() -> None:
    """No budget, or a large one, takes the plain time, and nothing leaves."""
    problem = Problem(chain(20, 30, 40))
    for budget in (None, 200):
        relaxed = relax(problem, DEVICE, budget)
        assert relaxed == relaxation.Relaxation(seconds=6.0, swap={}, recompute={}, method="plain")


def test_replay_costs_its_time_and_overhead() -> None:
    """On a device without usable links the storage is recomputed: its op's time, and one replay's overhead."""
    problem = one_large(replayable=True, seconds=0.5)
    device = dataclasses.replace(DEVICE, d2h_bytes_per_second=1e-3, h2d_bytes_per_second=1e-3, overhead_seconds=0.125)
    relaxed = relax(problem, device, 101)
    assert relaxed.method == "linear program"
    assert relaxed.recompute == {1: pytest.approx(1.0, abs=1e-4)}
    assert relaxed.seconds == pytest.approx(6.5 + 0.5 + 0.125, abs=1e-3)
    assert simulate(problem, {1: "recompute"}, device).step_seconds == 6.5 + 0.5 + 0.125


def test_copies_out_hide_and_the_first_one_back_does_not() -> None:
    """Two overheads are left, and the copy back: no unpack comes before its need, so it begins there."""
    problem = one_large(replayable=False)
    device = dataclasses.replace(FAST, overhead_seconds=0.125)
    relaxed = relax(problem, device, 101)
    assert relaxed.swap == {1: pytest.approx(1.0)}
    assert relaxed.seconds == pytest.approx(7.0 + 2 * 0.125 + 1e-4, abs=1e-9)


def test_copies_that_cannot_be_hidden_are_waited_for() -> None:
    """Ten seconds out within one of compute, ten back that begin at the need: nineteen seconds more."""
    problem = one_large(replayable=False)
    timeline = simulate(problem, {1: "swap"}, SLOW, schedule=LATE)
    assert timeline.peak_bytes == 101
    assert relax(problem, SLOW, 101).seconds == pytest.approx(timeline.step_seconds) == 7.0 + 9 + 10


def test_copies_take_their_share_of_compute() -> None:
    """Where copies interfere with compute, hidden ones cost that share of their duration, and waits no more."""
    problem = one_large(replayable=False)
    device = dataclasses.replace(FAST, copy_interference=0.5)
    assert relax(problem, device, 101).seconds == pytest.approx(7.0 + 0.5 * 1e-4 + 1e-4, abs=1e-9)


def test_inputs_of_replays_are_paid_for() -> None:
    """Both results of a chain must go, and the second one's replay needs the first: each is replayed once."""
    problem = Problem(chain(50, 50, 10))
    actions = {1: "recompute", 2: "recompute"}
    timeline = simulate(problem, actions, SLOW)  # type: ignore[arg-type]
    relaxed = relax(problem, SLOW, timeline.peak_bytes)
    assert relaxed.seconds <= timeline.step_seconds == 8.0


def test_a_replay_hides_no_copy_before_there_is_room_for_its_result() -> None:
    """Backward begins with an op that needs the room of two results, a swapped and a replayed one: compute waits.

    The replay could be made there already, on the way to the last result, but would have to leave again.
    """
    b = GraphBuilder()
    inner = b.make(100, b.given(1), seconds=2.0)
    last = b.make(10, inner)
    other = b.make(100, b.given(1), replayable=False)
    packs = [b.pack(value) for value in (inner, other, last)]
    b.drop(inner, other, last)
    b.op()
    b.backward()
    b.unpack(packs[2])
    b.drop(b.make(300))
    b.release(packs[2])
    b.op()
    for pack in (packs[1], packs[0]):
        b.unpack(pack)
        b.op()
        b.release(pack)
    problem = Problem(b.build())
    device = dataclasses.replace(FAST, d2h_bytes_per_second=100 / 4)
    timeline = simulate(problem, {1: "recompute", 4: "swap"}, device, limit_bytes=312)
    assert timeline.peak_bytes == 312
    assert timeline.step_seconds == pytest.approx(9 + 2 + 3, abs=1e-3)  # a replay of 2 s, 3 of 4 s of the copy
    assert relax(problem, device, 312).seconds == pytest.approx(timeline.step_seconds, abs=1e-3)


def test_a_swapped_input_is_made_beside_another_output_of_its_producer() -> None:
    """A replay that runs a producer for one output makes the other one, too, and fetches no copy of that.

    A slow op makes two results, of which one is saved and swapped; the third is made from both, and recomputed. Between
    its read and the swapped one's an op needs the room of that one, which is not back: so no second replay is paid.
    """
    b = GraphBuilder()
    unsaved, swapped = b.op((b.given(10),), (10, 10), seconds=10.0)
    packs = [b.pack(swapped)]
    last = b.make(1000, unsaved, swapped, seconds=0.0)
    packs.append(b.pack(last))
    b.drop(unsaved, swapped, last)
    b.op(workspace_bytes=1500)
    b.backward()
    b.unpack(packs[1])
    b.op()
    b.release(packs[1])
    b.op(workspace_bytes=1500)
    b.unpack(packs[0])
    b.op()
    b.release(packs[0])
    b.op()
    problem = Problem(b.build())
    device = dataclasses.replace(DEVICE, d2h_bytes_per_second=10.0, h2d_bytes_per_second=10.0, copy_interference=1.0)
    timeline = simulate(problem, {2: "swap", 3: "recompute"}, device, limit_bytes=1510)
    assert (timeline.peak_bytes, timeline.step_seconds) == (1510, 27.0)
    assert relax(problem, device, 1510).seconds == pytest.approx(26.0)


@settings(max_examples=examples(300))
@given(
    graph=st.one_of(step_graphs(max_saves=8), deep_chains(), deep_chains()),
    device=tiered_devices(),
    height=st.sampled_from([0.0, 0.0, 0.3]),
    data=st.data(),
)
def test_every_plan_is_a_point_of_the_program(
    graph: StepGraph, device: DeviceSpec, height: float, data: st.DataObject
) -> None:
    """With a plan's actions, and its replays where it makes them, the program costs no more than the plan takes."""
    problem = Problem(graph)
    actions: dict[int, Action] = {}
    for storage, candidate in problem.candidates.items():
        allowed: list[Action] = ["keep"]
        allowed += ["swap"] * candidate.can_swap + ["recompute"] * (5 * candidate.can_recompute)
        if (action := data.draw(st.sampled_from(allowed))) != "keep":
            actions[storage] = action
    recomputed = [s for s, action in actions.items() if action == "recompute"]
    no_memo = frozenset(s for s in recomputed if data.draw(st.integers(0, 7)) == 0)
    plain = simulate(problem, {}, device)
    limit = simulate(problem, actions, device, no_memo=no_memo, schedule=ON_DEMAND).peak_bytes
    limit += int(height * max(0, plain.peak_bytes - limit))
    timeline = simulate(problem, actions, device, limit_bytes=limit, no_memo=no_memo)
    if timeline.overflow_bytes or timeline.peak_bytes >= plain.peak_bytes:
        return
    case = Case.of(problem, device, plain, timeline.peak_bytes)
    grid = range(graph.num_ticks)
    model = Model(case, grid)
    made = residency(problem, actions, no_memo)
    for i, item in enumerate(case.items):
        storage, death = item.candidate.storage, item.candidate.death
        is_absent = made.needed_at.get(storage, death) >= death  # else it is made while the program still holds it
        model.program.fix(model.swap[i], float(actions.get(storage) == "swap"))
        model.program.fix(model.recompute[i], float(actions.get(storage) == "recompute" and is_absent))
    clock, unit = model._clock, model._per_second
    replays = [replay + device.overhead_seconds for replay in made.replay_seconds.values()]
    if sum(replays) * unit > 0.99 * model._most:
        return  # longer than the program allows replays to be
    for column, tick in zip(clock.replays, (*grid, graph.num_ticks), strict=True):
        model.program.fix(
            column, unit * sum(r for at, r in zip(made.replay_seconds, replays, strict=True) if at < tick)
        )
    solution = model.solve(None)
    assert solution is not None
    assert model.seconds(solution.value) <= timeline.step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("room", [0, 4096])
def test_what_does_not_fit_the_host_is_not_swapped(room: int) -> None:
    """A host without room leaves replays; one with a page's room takes the storage."""
    problem = one_large(replayable=True)
    device = dataclasses.replace(FAST, host_memory_bytes=room)
    relaxed = relax(problem, device, 101)
    assert sum(relaxed.swap.values()) == pytest.approx(room / 4096)
    assert sum(relaxed.recompute.values()) == pytest.approx(1 - room / 4096)


def test_the_disks_rate_counts_where_the_host_has_no_room() -> None:
    """With all swaps on a disk of ten bytes a second, each copy takes ten seconds."""
    problem = one_large(replayable=False)
    device = dataclasses.replace(
        FAST, host_memory_bytes=0, disk_write_bytes_per_second=10.0, disk_read_bytes_per_second=10.0
    )
    timeline = simulate(problem, {1: "swap"}, device, schedule=LATE)
    assert relax(problem, device, 101).seconds == pytest.approx(timeline.step_seconds) == 26.0


def fails(*args: object, **kwargs: object) -> None:
    """What a solver might do."""
    raise ValueError("no luck")


def test_a_failing_solver_leaves_the_cheaper_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is logged, and the knapsack's bound returned."""
    monkeypatch.setattr(scipy.optimize, "linprog", fails)
    relaxed = relax(one_large(replayable=True), SLOW, 101)
    assert relaxed.method == "knapsack"
    assert relaxed.seconds == 7.0  # copies cost no compute there
    assert "no luck" in caplog.text


def test_large_steps_have_a_thin_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a number of candidates rows are left out: the bound is lower than that of all, not below the cheap one."""
    graph = chain(*[20, 30, 40] * 6)
    budget = 340
    whole = relax(Problem(graph), SLOW, budget)
    assert whole.method == "linear program"
    case = Case.of(Problem(graph), SLOW, simulate(Problem(graph), {}, SLOW), budget)
    cheap, _, _ = knapsack(case)
    monkeypatch.setattr(relaxation, "MAX_ITEMS", len(case.items) - 1)
    thin = relax(Problem(graph), SLOW, budget)
    assert thin.method == "thin linear program"
    assert cheap * (1 - 1e-9) <= thin.seconds <= whole.seconds * (1 + 1e-9)
    assert thin.seconds > 1.02 * cheap


@settings(max_examples=examples(30))
@given(graph=step_graphs(), device=tiered_devices(), height=st.floats(0, 0.9))
def test_the_thin_program_is_a_bound(graph: StepGraph, device: DeviceSpec, height: float) -> None:
    """No plan is below it, whoever plans and whatever the tiers."""
    problem = Problem(graph)
    request = PlanRequest(problem, device, None)
    low, high = request.floor.peak_bytes, request.plain.peak_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relaxation, "MAX_ITEMS", 0)
        for name in ("auto", "all-swap", "capuchin"):
            try:
                made = plan(graph, device, int(low + height * (high - low)), policy=name)
            except BudgetInfeasibleError:
                continue
            thin = relax(problem, device, made.predicted_peak_bytes).seconds
            assert thin <= made.predicted_step_seconds * (1 + 1e-9), name
            assert made.bound_seconds <= made.predicted_step_seconds * (1 + 1e-9), name


def test_a_budget_below_all_plans_has_a_bound_nevertheless() -> None:
    """Where no fractions fit, the bound is finite and says how it was found."""
    device: DeviceSpec = FAST
    relaxed = relax(Problem(chain(20, 30, 40)), device, 1)
    assert relaxed.method == "knapsack"
    assert 6.0 <= relaxed.seconds < float("inf")


def test_ticks_are_added_where_the_solution_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting from a single tick the program finds the others that count."""
    problem = Problem(chain(*[10, 40, 20, 30] * 4))
    everything = relax(problem, SLOW, 300)
    monkeypatch.setattr(relaxation, "_MAX_TICKS", 1)
    few = relax(problem, SLOW, 300)
    monkeypatch.setattr(relaxation, "_MAX_ROUNDS", 1)
    fewest = relax(problem, SLOW, 300)
    assert fewest.seconds <= few.seconds <= everything.seconds * (1 + 1e-9)
