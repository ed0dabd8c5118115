"""Simulated clusters: closed forms, an independent simulation as reference, and what holds for any step."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale.cluster import Cluster, StepProfile, profile_step, scale, scaling
from benchmarks.scale.collectives import Choice, exchange_cost
from lightning_offload.errors import PlanError
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest, build_plan
from lightning_offload.planning.simulator import ON_DEMAND, simulate
from tests.benchmarks.scale.clusters import clusters, faster, flat, profile, profiles, simulated_end
from tests.graph.building import DEVICE, GraphBuilder, chain

CHOICES: tuple[Choice, ...] = ("auto", "ring", "tree", "binary-tree", "server")


# ---- closed forms


def test_one_device_takes_its_own_time() -> None:
    """Whatever the links: N = 1 is the step itself."""
    (found,) = scaling(profile((10**9, 9.0)), flat(1e-9, 1e9), [1])
    assert (found.step_seconds, found.efficiency, found.samples_per_second) == (10.0, 1.0, 0.4)
    assert (found.exposed_seconds, found.exchange_seconds, found.algorithms) == (0.0, 0.0, ())
    assert (found.num_nodes, found.effective_batch) == (1, 4)


def test_one_bucket_after_backward() -> None:
    """It is exposed as a whole: N b / (T + cost)."""
    found = scale(profile((800, 10.0)), flat(100.0, 0.5), 4, algorithm="ring")
    cost = 2 * 3 / 4 * 8 + 6 * 0.5
    assert (found.exchange_seconds, found.exposed_seconds, found.step_seconds) == (cost, cost, 10.0 + cost)
    assert found.samples_per_second == 4 * 4 / (10.0 + cost)
    assert found.efficiency == 10.0 / (10.0 + cost)


def test_an_exchange_that_is_hidden() -> None:
    """What ends with backward or before it costs nothing."""
    found = scale(profile((100, 1.0), (400, 5.0)), flat(100.0), 2, algorithm="ring")
    assert (found.exchange_seconds, found.exposed_seconds, found.efficiency) == (5.0, 0.0, 1.0)
    assert found.samples_per_second == 2 * 0.4
    just = scale(profile((500, 5.0)), flat(100.0), 2, algorithm="ring")
    assert just.exposed_seconds == 0.0
    assert scale(profile((500, 5.5)), flat(100.0), 2, algorithm="ring").exposed_seconds == 0.5


def test_buckets_go_one_after_another() -> None:
    """The second waits for the first: 6 to 10, then 10 to 11, though it was ready at 7."""
    found = scale(profile((400, 6.0), (100, 7.0), seconds=8.0), flat(100.0), 2, algorithm="ring")
    assert found.exposed_seconds == 3.0


def test_buckets_keep_their_order() -> None:
    """One that is ready early waits for those before it, as in DDP."""
    found = scale(profile((100, 9.0), (400, 0.0)), flat(100.0), 2, algorithm="ring")
    assert found.exposed_seconds == 4.0


def test_without_overlap() -> None:
    """All gradients at once after backward: one latency, everything exposed."""
    step = profile((400, 1.0), (400, 2.0))
    found = scale(step, flat(100.0, 0.5), 8, algorithm="binary-tree", overlap=False)
    assert found.exposed_seconds == found.exchange_seconds == 2 * 3 * (8 + 0.5)
    assert found.algorithms == ("binary-tree",)


def test_micro_batches_exchange_once() -> None:
    """Five micro-batches, one exchange, one update; alone they take as long without the exchange."""
    step = dataclasses.replace(profile((800, 10.0)), update_seconds=2.0)
    found = scale(step, flat(100.0), 2, algorithm="ring", accumulation=5)
    assert (found.step_seconds, found.effective_batch) == (5 * 10.0 + 2.0 + 8.0, 40)
    assert found.efficiency == 52.0 / 60.0
    assert scale(step, flat(100.0), 1).step_seconds == 12.0


def test_nothing_to_exchange() -> None:
    """A model without gradients scales perfectly."""
    for overlap in (True, False):
        found = scale(profile(), flat(1.0, 1.0), 64, overlap=overlap)
        assert (found.efficiency, found.algorithms) == (1.0, ())


# ---- contention


def test_copies_go_first() -> None:
    """An exchange over the link that copies take: 1 s before the copy, pauses from 6 to 9, 3 s after it."""
    cluster = flat(100.0, uses_host_link=True)
    step = profile((400, 5.0), copies=((6.0, 8.0), (7.0, 9.0)), host_rate=100.0)
    assert scale(step, cluster, 2, algorithm="ring").exposed_seconds == 2.0
    assert scale(step, flat(100.0), 2, algorithm="ring").exposed_seconds == 0.0


def test_a_slow_network_hardly_needs_the_link() -> None:
    """4 s of network, but 0.5 s of the link, which is free before the copy: nothing waits."""
    cluster = flat(100.0, uses_host_link=True)
    step = profile((400, 5.0), copies=((5.5, 8.9),), host_rate=800.0)
    assert scale(step, cluster, 2, algorithm="ring").exposed_seconds == 0.0
    crowded = profile((400, 5.0), copies=((5.0, 9.0),), host_rate=800.0)
    assert scale(crowded, cluster, 2, algorithm="ring").exposed_seconds == 0.0
    late = profile((400, 5.0), copies=((5.0, 9.75),), host_rate=800.0)
    assert scale(late, cluster, 2, algorithm="ring").exposed_seconds == 0.25


def test_a_copy_within_another() -> None:
    """Copies both ways at once take the link as long as either does: the exchange starts when the longer one ends."""
    step = profile((400, 5.0), copies=((4.0, 9.0), (5.0, 6.0)), host_rate=100.0)
    assert scale(step, flat(100.0, uses_host_link=True), 2, algorithm="ring").exposed_seconds == 3.0


def test_a_short_exchange_beside_a_copy() -> None:
    """Half a second in the middle of a copy waits for its end, and one before it is done at once."""
    cluster = flat(100.0, uses_host_link=True)
    assert scale(profile((50, 9.5), copies=((0.0, 12.0),), host_rate=100.0), cluster, 2).exposed_seconds == 2.5
    assert scale(profile((50, 9.5), copies=((10.0, 12.0),), host_rate=100.0), cluster, 2).exposed_seconds == 0.0


@settings(max_examples=300)
@given(profiles(), clusters(), st.integers(2, 20), st.sampled_from(CHOICES))
def test_the_reference_agrees(step: StepProfile, cluster: Cluster, num_devices: int, algorithm: Choice) -> None:
    """A simulation that walks from event to event finds the same end."""
    place = cluster.place(num_devices)
    costs = [exchange_cost(bucket.num_bytes, place, algorithm) for bucket in step.buckets]
    rate = step.host_link_bytes_per_second
    told = [(b.ready_seconds, c.seconds, c.link_bytes / rate) for b, c in zip(step.buckets, costs, strict=True)]
    expected = max(0.0, simulated_end(told, step.copies) - step.step_seconds)
    found = scale(step, cluster, num_devices, algorithm=algorithm)
    assert found.exposed_seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ---- what holds for any step


@given(profiles(), clusters(), st.integers(1, 20), st.sampled_from(CHOICES), st.booleans(), st.integers(1, 4))
def test_no_more_than_ideal(
    step: StepProfile, cluster: Cluster, num_devices: int, algorithm: Choice, overlap: bool, accumulation: int
) -> None:
    """Efficiency is in (0, 1], figures fit together, and the exposed part is no more than exchange and copies."""
    found = scale(step, cluster, num_devices, algorithm=algorithm, overlap=overlap, accumulation=accumulation)
    assert 0 < found.efficiency <= 1
    alone = scale(step, cluster, 1, accumulation=accumulation)
    assert found.samples_per_second <= num_devices * alone.samples_per_second * (1 + 1e-12)
    assert found.efficiency == pytest.approx(found.samples_per_second / (num_devices * alone.samples_per_second))
    assert found.step_seconds == pytest.approx(alone.step_seconds + found.exposed_seconds)
    assert found.effective_batch == num_devices * accumulation * step.batch_size
    copying = sum(max(0.0, end - begin) for begin, end in step.copies)
    place = cluster.place(num_devices)
    costs = [exchange_cost(bucket.num_bytes, place, algorithm) for bucket in step.buckets]
    linked = sum(cost.link_bytes for cost in costs) / step.host_link_bytes_per_second
    if overlap:
        assert found.exposed_seconds <= found.exchange_seconds + copying + linked + 1e-9


@given(profiles(), clusters(), st.integers(1, 20), st.sampled_from(CHOICES), st.sampled_from([1.1, 2.0, 30.0]))
def test_faster_links_never_slow_down(
    step: StepProfile, cluster: Cluster, num_devices: int, algorithm: Choice, factor: float
) -> None:
    """With more bandwidth and less latency between devices, or with fewer copies, no step takes longer."""
    found = scale(step, cluster, num_devices, algorithm=algorithm)
    better = scale(step, faster(cluster, factor), num_devices, algorithm=algorithm)
    assert better.step_seconds <= found.step_seconds * (1 + 1e-12)
    quiet = scale(dataclasses.replace(step, copies=step.copies[1:]), cluster, num_devices, algorithm=algorithm)
    assert quiet.step_seconds <= found.step_seconds * (1 + 1e-12)


@given(profiles(), clusters(), st.integers(1, 20), st.sampled_from([0.25, 3.0]))
def test_another_duration_scales_the_step(step: StepProfile, cluster: Cluster, num_devices: int, ratio: float) -> None:
    """A step and links that are slower by one factor scale as before."""
    slower = step.lasting(ratio * step.step_seconds)
    slower = dataclasses.replace(
        slower,
        update_seconds=ratio * step.update_seconds,
        host_link_bytes_per_second=step.host_link_bytes_per_second / ratio,
    )
    before, after = scale(step, cluster, num_devices), scale(slower, faster(cluster, 1 / ratio), num_devices)
    assert after.step_seconds == pytest.approx(ratio * before.step_seconds)
    assert after.efficiency == pytest.approx(before.efficiency)


# ---- profiles of planned steps


def trained(*, gradient_bytes: int = 100) -> GraphBuilder:
    """Three layers of 1 s, saved; then their backward of 2 s each, which leaves a gradient each."""
    b = GraphBuilder()
    weights = [b.given(gradient_bytes) for _ in range(3)]
    values = []
    for weight in weights:
        values.append(b.make(600, weight))
        b.pack(values[-1])
    b.drop(*values)
    b.backward()
    for save in (2, 1, 0):
        b.unpack(save)
        b.make(gradient_bytes, seconds=2.0)
        b.release(save)
    return b


def test_a_plain_step() -> None:
    """Three gradients, ready at 5, 7 and 9 s; a bucket each where a bucket holds no more."""
    graph = trained().build()
    found = profile_step(graph, None, DEVICE, batch_size=4, bucket_bytes=100)
    assert [(b.num_bytes, b.ready_seconds) for b in found.buckets] == [(100, 5.0), (100, 7.0), (100, 9.0)]
    assert (found.step_seconds, found.copies, found.gradient_bytes) == (9.0, (), 300)
    assert found.host_link_bytes_per_second == 100.0
    together = profile_step(graph, None, DEVICE, batch_size=4)
    assert [(b.num_bytes, b.ready_seconds) for b in together.buckets] == [(300, 9.0)]
    assert scale(found, flat(50.0), 2, algorithm="ring").exposed_seconds == 2.0
    assert scale(together, flat(50.0), 2, algorithm="ring").exposed_seconds == 6.0


def test_a_planned_step() -> None:
    """Ready times are those under the plan, which waits for its copies; these are when the link is taken."""
    graph = trained().build()
    problem = Problem(graph)
    first = problem.graph.values[graph.saves[0].value].storage
    timeline = simulate(problem, {first: "swap"}, DEVICE, schedule=ON_DEMAND)
    plan = build_plan(PlanRequest(problem, DEVICE, None), "test", {first: "swap"}, timeline)
    found = profile_step(problem, plan, DEVICE, batch_size=4, bucket_bytes=100)
    assert found.step_seconds == timeline.step_seconds > 9.0
    assert found.buckets[-1].ready_seconds == pytest.approx(found.step_seconds)
    assert len(found.copies) == 2
    assert [end - begin for begin, end in found.copies] == pytest.approx([6.0, 6.0])
    plain = profile_step(graph, None, DEVICE, batch_size=4, bucket_bytes=100)
    assert all(a.ready_seconds >= b.ready_seconds for a, b in zip(found.buckets, plain.buckets, strict=True))


def test_overhead_is_spread_over_the_step() -> None:
    """What copies cost beside stalls has no place in the step; ready times never lie beyond its end."""
    graph, slow = trained().build(), dataclasses.replace(DEVICE, overhead_seconds=0.5)
    problem = Problem(graph)
    first = problem.graph.values[graph.saves[0].value].storage
    plan = build_plan(
        PlanRequest(problem, slow, None), "test", {first: "swap"}, simulate(problem, {first: "swap"}, slow)
    )
    found = profile_step(problem, plan, slow, batch_size=4, bucket_bytes=100)
    assert found.step_seconds == plan.predicted_step_seconds
    assert found.buckets[-1].ready_seconds == pytest.approx(found.step_seconds)


def test_backward_that_was_not_observed() -> None:
    """Gradients are then ready at the end, and all of the exchange is exposed."""
    graph = dataclasses.replace(chain(10, 20), gradient_bytes=500)
    found = profile_step(graph, None, DEVICE, batch_size=1)
    assert found.buckets[-1].ready_seconds == found.step_seconds
    assert found.gradient_bytes >= 500
    assert scale(found, flat(100.0), 2, algorithm="ring").exposed_seconds >= 5.0


def test_impossible_questions() -> None:
    """Each is refused with its value."""
    one = profile((800, 10.0))
    with pytest.raises(PlanError, match="0 micro-batches"):
        scale(one, flat(1.0), 2, accumulation=0)
    with pytest.raises(PlanError, match="-1 devices"):
        scale(one, flat(1.0), -1)
    with pytest.raises(PlanError, match=r"0 samples in 10.0 s"):
        dataclasses.replace(one, batch_size=0)
    with pytest.raises(PlanError, match=r"4 samples in nan s"):
        one.lasting(math.nan)
    with pytest.raises(PlanError, match="sizes and ready times"):
        profile((-1, 1.0))
    with pytest.raises(PlanError, match="update cannot take -1"):
        dataclasses.replace(one, update_seconds=-1.0)
