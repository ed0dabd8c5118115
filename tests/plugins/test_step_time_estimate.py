"""What planned steps take on a host that computes is told by those that ran."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import Op, Phase, StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.planning.trace import follow
from lightning_offload.plugins import lifecycle
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.step_time_estimate import Expected, Halves, LaunchTimes, StepTimeEstimate, StepTimes
from tests.graph.building import DEVICE, chain
from tests.plugins.training import attached, net, rows, train_step

NET = chain(*(100 + 10 * i for i in range(12)))
FULL = plan(NET, DEVICE, None)
PLAN = plan(NET, DEVICE, FULL.plain_peak_bytes * 3 // 4)


def test_a_plan_is_believed_until_three_steps_ran_under_it() -> None:
    """One step that was slow decides nothing."""
    estimate = StepTimeEstimate()
    believed = Expected(PLAN.predicted_step_seconds, PLAN.plain_step_seconds)
    assert estimate.expected(PLAN, NET, DEVICE) == believed
    for _ in range(2):
        estimate.note(StepTimes(100.0, 0.0, 0.0))
        assert estimate.expected(PLAN, NET, DEVICE) == believed
    estimate.note(StepTimes(100.0, 0.0, 0.0))
    assert estimate.expected(PLAN, NET, DEVICE).step == 100.0


def test_a_plain_step_is_what_replays_copies_and_waiting_leave() -> None:
    """The median of the last steps, so that neither one that stood still nor those of an hour ago count."""
    estimate, slowdown = StepTimeEstimate(), follow(NET, PLAN, DEVICE).slowdown_seconds
    for step in [900.0] * 9 + [50.0] * 4 + [51.0, 3000.0] + [50.0] * 3:
        estimate.note(StepTimes(step, 2.0, 3.0))
    step, plain = estimate.expected(PLAN, NET, DEVICE)
    assert step == 50.0
    assert plain == pytest.approx(45.0 - slowdown)


def test_a_plan_that_keeps_everything_takes_what_its_steps_took() -> None:
    """There the step is the plain one."""
    estimate = StepTimeEstimate()
    for step in (7.0, 8.0, 9.0):
        estimate.note(StepTimes(step, 0.0, 0.0))
    assert estimate.expected(FULL, NET, DEVICE) == Expected(8.0, 8.0)


FORWARD = [op.seconds for op in NET.ops if op.phase == "forward"]
CALM = dataclasses.replace(PLAN, predicted_stall_seconds=0.0)
SECONDS = Halves(sum(FORWARD), CALM.predicted_step_seconds - sum(FORWARD))


def waits(
    forward: float,
    backward: float = 0.0,
    device: Halves | None = None,
    plan: MemoryPlan = CALM,
    net: StepGraph = NET,
    *,
    is_one: bool = True,
    stall: float = 0.0,
) -> Halves:
    """What a device waited whose host took so long; it takes what launching late explains, unless that is given."""
    host = Halves(forward, backward)
    took = device or Halves(_launched(FORWARD, forward / len(FORWARD)), max(SECONDS.backward, backward))
    return LaunchTimes(host, took, is_one).waits(net, plan, stall)


def test_what_an_accelerator_waits_for_its_host_is_what_it_does_not_compute_meanwhile() -> None:
    """In each half of the step: what the host took beyond it, if it took longer, and the last op comes after that."""
    assert waits(SECONDS.forward + 2.0, SECONDS.backward - 1.0).forward == pytest.approx(2.0 + FORWARD[-1])
    assert waits(0.5 * SECONDS.forward).forward == pytest.approx(0.5 * FORWARD[0])
    assert waits(SECONDS.forward, SECONDS.backward + 3.0).backward >= 3.0


def test_a_lead_from_forward_is_no_wait_in_backward() -> None:
    """The host that was through with forward long before launches the ops of backward that much sooner."""
    lead = 0.75 * SECONDS.forward
    launching = SECONDS.backward + lead
    ahead = waits(SECONDS.forward - lead, launching, device=Halves(SECONDS.forward, launching))
    assert (
        ahead.backward
        < waits(SECONDS.forward, launching, device=Halves(SECONDS.forward, launching)).backward - 0.9 * lead
    )


def test_a_device_that_waits_at_first_and_computes_long_at_last_has_waited() -> None:
    """By when the host was through it was behind; all the same nothing but launching kept it."""
    forward = [1e-3] * 99 + [0.2]
    net = dataclasses.replace(NET, ops=tuple(_op("forward", seconds) for seconds in forward))
    plan = dataclasses.replace(CALM, predicted_step_seconds=sum(forward))
    took = _launched(forward, 3e-3)
    assert took == pytest.approx(0.5)
    found = waits(0.3, device=Halves(took, 0.0), plan=plan, net=net).forward
    assert found == pytest.approx(took - sum(forward), rel=0.01)


def test_what_ops_take_longer_than_thought_is_no_wait() -> None:
    """Where all take twice as long the host may have waited for them, not they for it: most of that is seen."""
    for launching in (0.5, 1.0, 1.5):
        took = Halves(2.0 * SECONDS.forward + FORWARD[-1], 2.0 * SECONDS.backward)
        found = waits(launching * SECONDS.forward, 0.5 * SECONDS.backward, device=took)
        assert took.forward - found.forward > 1.8 * SECONDS.forward
        assert found.backward == 0


def test_what_a_program_does_before_backward_ends_the_lead() -> None:
    """It may have read the loss: the device has nothing left to do then when the host begins to launch."""
    took = Halves(SECONDS.forward, 1.5 * SECONDS.backward)
    ahead, apart = (
        waits(0.2 * SECONDS.forward, 1.5 * SECONDS.backward, device=took, is_one=is_one) for is_one in (True, False)
    )
    assert apart.backward == pytest.approx(0.5 * SECONDS.backward)
    assert ahead.backward == 0


def test_late_copies_are_no_slow_ops() -> None:
    """What they made compute wait leaves what was waited for the host as it is."""
    took = Halves(SECONDS.forward, 1.3 * SECONDS.backward + 6.0)
    host = 1.3 * SECONDS.backward
    calm = waits(SECONDS.forward, host, device=took, stall=6.0)
    assert calm.backward == pytest.approx(0.3 * SECONDS.backward + 1.0)
    assert waits(SECONDS.forward, host, device=took).backward < calm.backward


@given(
    st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=40),
    st.floats(0.0, 1e-2),
    st.floats(0.5, 2.0),
)
def test_waits_are_those_of_a_device_that_was_watched(seconds: list[float], launch: float, factor: float) -> None:
    """A device that computes what is launched when it is there waits for just that; another for no longer."""
    net = dataclasses.replace(NET, ops=tuple(_op("forward", s) for s in seconds))
    plan = dataclasses.replace(CALM, predicted_step_seconds=sum(seconds))
    took = _launched(seconds, launch)
    found = waits(launch * len(seconds), device=Halves(took, 0.0), plan=plan, net=net)
    assert found.forward == pytest.approx(took - sum(seconds), abs=1e-9)
    another = waits(launch * len(seconds), device=Halves(factor * took, 0.0), plan=plan, net=net)
    assert 0 <= another.forward <= min(found.forward, max(0.0, factor * took - sum(seconds))) + 1e-9


def _op(phase: Phase, seconds: float) -> Op:
    return dataclasses.replace(NET.ops[0], phase=phase, seconds=seconds, name="aten.add.Tensor")


def _launched(ops: list[float], launch: float) -> float:
    """When a device is through with ops that are launched one after the other."""
    now = 0.0
    for i, seconds in enumerate(ops):
        now = max(now, launch * (i + 1)) + seconds
    return now


@pytest.mark.parametrize(("at", "is_told"), [(0, True), (8, False)])
def test_a_host_that_reads_late_has_waited_itself(at: int, is_told: bool) -> None:
    """It is behind the device then whatever the device takes; what it reads at the beginning holds nothing up."""
    ops = list(NET.ops)
    ops[0] = dataclasses.replace(ops[0], seconds=0.01)
    ops[at] = dataclasses.replace(ops[at], name="aten._local_scalar_dense.default")
    assert (waits(1000.0, net=dataclasses.replace(NET, ops=tuple(ops))).forward > 0) is is_told


def test_a_copy_to_the_host_is_read() -> None:
    """It makes nothing on the device; a cast does."""
    last = max(i for i, op in enumerate(NET.ops) if op.phase == "forward")
    for outputs, is_told in ((NET.ops[last].outputs, True), ((), False)):
        ops = list(NET.ops)
        ops[last] = dataclasses.replace(ops[last], name="aten._to_copy.default", outputs=outputs)
        assert (waits(1000.0, net=dataclasses.replace(NET, ops=tuple(ops))).forward > 0) is is_told


def test_predicted_stalls_are_no_waits_for_the_host() -> None:
    """A host that reads the loss stands by during them."""
    stalling = dataclasses.replace(PLAN, predicted_stall_seconds=3.0)
    assert waits(SECONDS.forward + 2.0 - FORWARD[-1], plan=stalling).forward == 0
    assert waits(SECONDS.forward + 5.0 - FORWARD[-1], plan=stalling).forward == pytest.approx(2.0)


def test_waits_for_the_host_lengthen_what_is_expected() -> None:
    """The least that was seen, since a step that stood still once tells nothing of others."""
    estimate = StepTimeEstimate()
    for seconds in (5.0, 2.0, 3.0):
        estimate.note_waits(seconds)
    assert estimate.expected(PLAN, NET, DEVICE) == Expected(PLAN.predicted_step_seconds + 2.0, PLAN.plain_step_seconds)


def test_steps_under_another_plan_tell_nothing_of_the_next_one() -> None:
    """It is believed until steps have run under it."""
    kind = PlanEntry(graph=NET)
    for _ in range(2):
        lifecycle.make_plan(kind, DEVICE, None, "auto", ())
        assert kind.plan is not None
        believed = Expected(kind.plan.predicted_step_seconds, kind.plan.plain_step_seconds)
        assert kind.expected == believed
        for _ in range(3):
            kind.seen.step_time_estimate.note(StepTimes(100.0, 0.0, 0.0))
        assert kind.expected == Expected(100.0, 100.0)


def test_the_report_predicts_by_the_steps_that_ran() -> None:
    """A planned step's figure is the median of the last; what replays took is no part of a plain one."""
    model, batch, seen = net(), rows(), list[float]()
    with attached(model, budget="1TiB", policy="all-recompute") as memory:
        while len(seen) < 12:
            train_step(model, batch, memory)
            report = memory.report()
            if report.phase == "planned":
                assert report.measured_step_seconds is not None
                seen.append(report.measured_step_seconds)
    assert report.planned is not None
    assert report.recomputed_bytes > 0
    assert report.predicted_step_seconds is not None
    assert report.plain_step_seconds is not None
    assert report.predicted_step_seconds != report.planned.plan.predicted_step_seconds
    assert min(seen) <= report.predicted_step_seconds <= max(seen)
    assert report.plain_step_seconds < report.predicted_step_seconds
