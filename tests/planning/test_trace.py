"""A plan followed on the simulated clock: the simulator's figures, and spans worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_offload.errors import BudgetInfeasibleError, PlanError
from lightning_offload.graph import Action, Decision, DeviceSpec, MemoryPlan, StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest, build_plan
from lightning_offload.planning.simulator import ON_DEMAND, Schedule, simulate
from lightning_offload.planning.trace import Span, StepTrace, follow
from lightning_offload.plugins.fake import Step, record_fake_step
from tests.graph.building import DEVICE, GraphBuilder, chain, step_graphs, tiered_devices
from tests.plugins.training import Net

THREE = chain(20, 30, 40)
"""Op 0, pack 1, op 2, pack 3, op 4, pack 5; then unpack 6 and op 7, unpack 8 and op 9, unpack 10 and op 11."""
CARD = dataclasses.replace(
    DEVICE, kind="cuda", d2h_bytes_per_second=5e9, h2d_bytes_per_second=6e9, copy_interference=0.1,
    overhead_seconds=1e-6, flops_per_second=1e12, memory_bytes_per_second=1e11,
)  # fmt: skip
DISK = {"disk_write_bytes_per_second": 1e9, "disk_read_bytes_per_second": 2e9}


def made(
    graph: StepGraph, actions: dict[int, Action], device: DeviceSpec, schedule: Schedule | None = None
) -> MemoryPlan:
    """A plan of these actions as the simulator schedules them."""
    problem = Problem(graph)
    return build_plan(
        PlanRequest(problem, device, None), "test", actions, simulate(problem, actions, device, schedule=schedule)
    )


def check_agrees(found: StepTrace, made: MemoryPlan) -> None:
    """Peak and times are those that the plan predicts."""
    assert found.peak_bytes == made.predicted_peak_bytes
    assert found.step_seconds == pytest.approx(made.predicted_step_seconds, rel=1e-9, abs=1e-12)
    assert found.stall_seconds == pytest.approx(made.predicted_stall_seconds, rel=1e-6, abs=1e-9)


def check_lanes(found: StepTrace) -> None:
    """Spans of a lane follow one another, within the step; compute is never idle but where the spans say stall."""
    for lane in ("compute", "d2h", "h2d", "disk_write", "disk_read"):
        spans = found.of(lane)  # type: ignore[arg-type]
        for one, two in itertools.pairwise(spans):
            assert two.start_seconds >= one.end_seconds - 1e-9, (one, two)
    assert sum(span.seconds for span in found.of("compute")) == pytest.approx(found.step_seconds)
    stalls = sum(span.seconds for span in found.spans if span.kind == "stall")
    assert stalls == pytest.approx(found.stall_seconds, abs=1e-9)
    assert (np.diff(found.tick_seconds) >= -1e-12).all()


def brief(span: Span) -> tuple[str, int, float, float]:
    return span.kind, span.storage, round(span.start_seconds, 9), round(span.end_seconds, 9)


def test_everything_kept_is_ops_alone() -> None:
    """Six ops of a second each, backward from the first unpack on."""
    found = follow(THREE, None, DEVICE)
    assert [brief(span) for span in found.spans] == [("op", -1, float(i), i + 1.0) for i in range(6)]
    assert [span.phase for span in found.spans] == ["forward"] * 3 + ["backward"] * 3
    assert (found.backward_seconds, found.backward_tick) == (3.0, 6)
    assert found.tick_seconds.tolist() == [0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6]
    assert found.memory.tolist() == simulate(Problem(THREE), {}, DEVICE).memory.tolist()


def test_unhidden_swap_by_hand() -> None:
    """Forty bytes: out from 3 s to 3.4 s and back to 3.8 s, and compute stalls for both."""
    found = follow(THREE, made(THREE, {3: "swap"}, DEVICE, schedule=ON_DEMAND), DEVICE)
    assert [brief(span) for span in found.of("d2h")] == [("copy", 3, 3.0, 3.4)]
    assert [brief(span) for span in found.of("h2d")] == [("copy", 3, 3.4, 3.8)]
    stalls = [brief(span) for span in found.spans if span.kind == "stall"]
    assert stalls == [("stall", 3, 3.0, 3.4), ("stall", 3, 3.4, 3.8)]
    assert found.of("d2h")[0].num_bytes == 40
    assert [span.phase for span in (*found.of("d2h"), *found.of("h2d"))] == ["forward", "backward"]


def test_replay_takes_its_place_on_the_compute_lane() -> None:
    """The second result is made again for a second before the op that reads it."""
    found = follow(THREE, made(THREE, {2: "recompute"}, DEVICE), DEVICE)
    assert [brief(span) for span in found.spans if span.kind == "replay"] == [("replay", 2, 4.0, 5.0)]
    assert found.step_seconds == 7.0


def test_ticks_begin_after_waits_for_releases_and_before_waits_for_needs() -> None:
    """The pack at tick 5 waits for its copy out, the unpack at tick 6 for the copy back, before the op at tick 7."""
    found = follow(THREE, made(THREE, {3: "swap"}, DEVICE, schedule=ON_DEMAND), DEVICE)
    assert found.tick_seconds.tolist()[4:] == pytest.approx([2, 3.4, 3.4, 3.8, 4.8, 4.8, 5.8, 5.8, 6.8])


def test_replay_begins_when_what_it_reads_is_back() -> None:
    """The third result is made from the second, which takes 0.3 s each way: back at 3.6 s, made again until 4.6 s."""
    found = follow(THREE, made(THREE, {2: "swap", 3: "recompute"}, DEVICE, schedule=ON_DEMAND), DEVICE)
    back = [brief(span) for span in found.of("compute") if span.tick == 6]
    assert back == [("stall", 2, 3.3, 3.6), ("replay", 3, 3.6, 4.6)]
    check_lanes(found)


def test_results_that_are_not_memoised_are_made_again() -> None:
    """The third result needs the other two; without a memo the second is made a second time, from the first."""
    actions: dict[int, Action] = dict.fromkeys((1, 2, 3), "recompute")
    problem = Problem(THREE)
    for no_memo, replays in ((frozenset[int](), [3.0]), (frozenset({2}), [3.0, 1.0]), (frozenset({1, 2}), [3, 2, 1])):
        timeline = simulate(problem, actions, DEVICE, no_memo=no_memo)
        plan = build_plan(PlanRequest(problem, DEVICE, None), "test", actions, timeline, no_memo)
        found = follow(problem, plan, DEVICE)
        assert [span.seconds for span in found.spans if span.kind == "replay"] == replays
        assert found.memory.tolist() == timeline.memory.tolist()


def test_slowdown_is_one_span_at_the_end() -> None:
    """Two copies of 0.2 s cost half of that, and two swaps' overhead is added."""
    device = dataclasses.replace(DEVICE, copy_interference=0.5, overhead_seconds=0.01)
    found = follow(THREE, made(THREE, {1: "swap"}, device), device)
    assert found.slowdown_seconds == pytest.approx(0.22)
    assert found.spans[-1].kind == "slowdown"
    assert found.spans[-1].end_seconds == found.step_seconds == pytest.approx(6.22)


def test_disk_copy_takes_its_share_of_the_link() -> None:
    """On a device with memory of its own the bytes for the disk are on the link too, for as long as they take there."""
    slow = dataclasses.replace(
        DEVICE, host_memory_bytes=0, disk_write_bytes_per_second=10.0, disk_read_bytes_per_second=20.0
    )
    for kind, link in (("cpu", []), ("cuda", [("copy", 3, 3.0, 3.4)])):
        device = dataclasses.replace(slow, kind=kind)
        found = follow(THREE, made(THREE, {3: "swap"}, device, schedule=ON_DEMAND), device)
        assert [brief(span) for span in found.of("disk_write")] == [("copy", 3, 3.0, 7.0)]
        assert [brief(span) for span in found.of("disk_read")] == [("copy", 3, 7.0, 9.0)]
        assert [brief(span) for span in found.of("d2h")] == link


@given(graph=step_graphs(), data=st.data(), device=tiered_devices(), schedule=st.sampled_from([None, ON_DEMAND]))
def test_random_choices_agree_with_the_simulator(
    graph: StepGraph, data: st.DataObject, device: DeviceSpec, schedule: Schedule | None
) -> None:
    """Memory tick by tick, end and stalls, whatever is swapped to whatever tier, recomputed or not memoised."""
    problem = Problem(graph)
    options = {s: ["keep", "swap"] + ["recompute"] * c.can_recompute for s, c in problem.candidates.items()}
    drawn = {s: data.draw(st.sampled_from(choices)) for s, choices in options.items()}
    actions: dict[int, Action] = {s: action for s, action in drawn.items() if action != "keep"}  # type: ignore[misc]
    no_memo = frozenset(s for s, action in actions.items() if action == "recompute" and data.draw(st.booleans()))
    limit = data.draw(st.none() | st.integers(1, 600))
    timeline = simulate(problem, actions, device, no_memo=no_memo, limit_bytes=limit, schedule=schedule)
    made = build_plan(PlanRequest(problem, device, None), "test", actions, timeline, no_memo)
    found = follow(graph, made, device)
    assert np.array_equal(found.memory, timeline.memory)
    check_agrees(found, made)
    check_lanes(found)


def small() -> tuple[nn.Module, Step]:
    model = Net(width=512)
    return model, lambda: model(torch.zeros(512, 512)).square().mean().backward()


RECORDED = record_fake_step(small, CARD)


@pytest.mark.parametrize("policy", ["auto", "keep-all", "all-swap", "all-recompute"])
@pytest.mark.parametrize(
    "device",
    [
        CARD,
        dataclasses.replace(CARD, kind="cpu", copy_interference=0.5, **DISK),
        dataclasses.replace(CARD, host_memory_bytes=4 << 20, **DISK),
    ],
    ids=["link", "cpu", "disk"],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_recorded_step_agrees_with_its_plans(policy: str, device: DeviceSpec, share: float) -> None:
    """Each policy's prediction for a recorded net is what following its plan gives."""
    request = PlanRequest(Problem(RECORDED), device, None)
    budget = int(request.floor.peak_bytes + share * (request.plain.peak_bytes - request.floor.peak_bytes))
    try:
        chosen = plan(RECORDED, device, budget, policy=policy)
    except BudgetInfeasibleError as error:
        chosen = plan(RECORDED, device, error.floor_bytes, policy=policy)
    found = follow(RECORDED, chosen, device)
    check_agrees(found, chosen)
    check_lanes(found)
    assert any(span.module.startswith("blocks.") for span in found.spans)


def test_step_without_backward_ends_in_forward() -> None:
    """The boundary is then the end of the step."""
    b = GraphBuilder()
    b.make(10, b.given(1))
    found = follow(b.build(), None, DEVICE)
    assert (found.backward_seconds, found.backward_tick) == (1.0, 1)


def test_plan_of_another_step_is_refused() -> None:
    """Following it would show nonsense."""
    with pytest.raises(PlanError, match="another model"):
        follow(chain(20, 30), made(THREE, {}, DEVICE), DEVICE)


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision(storage=0, action="swap"), "storage 0 cannot be swapped"),
        (Decision(storage=1, action="swap", tier="disk"), "swaps to disk, and device 'paper' has none"),
    ],
)
def test_decision_that_cannot_be_carried_out_is_refused(decision: Decision, message: str) -> None:
    """A weight does not leave the device, and there is no disk where the device spec has none."""
    plan = dataclasses.replace(made(THREE, {}, DEVICE), decisions=(decision,))
    with pytest.raises(PlanError, match=message):
        follow(THREE, plan, DEVICE)
