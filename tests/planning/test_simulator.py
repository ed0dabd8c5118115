"""Memory over time and step times, against profiles worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.graph import StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import ON_DEMAND, Simulator, simulate
from tests.graph.building import DEVICE, GraphBuilder, chain, step_graphs

INSTANT = dataclasses.replace(DEVICE, d2h_bytes_per_second=1e15, h2d_bytes_per_second=1e15)

# Ticks of a chain of three: op 0, pack 1, op 2, pack 3, op 4, pack 5 in forward; then unpack 6 and op 7 for the
# third, unpack 8 and op 9 for the second, unpack 10 and op 11 for the first. Gradients are of 10 bytes.
THREE = Problem(chain(20, 30, 40))
KEPT = [120, 120, 150, 150, 190, 190, 190, 200, 160, 170, 130, 140, 100]


def test_everything_kept_by_hand() -> None:
    """Saved bytes pile up in forward and go one by one in backward, beside the gradients."""
    timeline = simulate(THREE, {}, DEVICE)
    assert timeline.memory.tolist() == KEPT
    assert (timeline.peak_bytes, timeline.peak_tick) == (200, 7)
    assert timeline.step_seconds == 6.0
    assert timeline.stall_seconds == 0.0


def test_swapped_storage_is_away_between_death_and_need() -> None:
    """The first result is away from the third op, which no longer reads it, until its own unpack."""
    timeline = simulate(THREE, {1: "swap"}, DEVICE, schedule=ON_DEMAND)
    away = range(4, 10)  # dropped by the program at tick 4, needed at tick 10
    assert timeline.memory.tolist() == [m - 20 * (t in away) for t, m in enumerate(KEPT)]
    assert timeline.release_tick == {1: -1}
    assert timeline.prefetch == {1: -1}


def test_recomputed_storage_is_away_too() -> None:
    """A replayed value takes memory from its replay on, and the replay's time is added to the step."""
    timeline = simulate(THREE, {2: "recompute"}, DEVICE)
    away = range(6, 8)
    assert timeline.memory.tolist() == [m - 30 * (t in away) for t, m in enumerate(KEPT)]
    assert timeline.step_seconds == 7.0


def test_overhead_counts_once_a_replay_and_twice_a_swap() -> None:
    """Host costs are those of the device spec."""
    slow = dataclasses.replace(INSTANT, overhead_seconds=0.125)
    assert simulate(THREE, {2: "recompute"}, slow).step_seconds == 7.125
    assert simulate(THREE, {2: "swap"}, slow).step_seconds == pytest.approx(6.25)


def test_small_copies_take_the_computing_thread_and_large_ones_are_handed_over() -> None:
    """Each costs twice: a small one its duration at the link's rate out, a large one what handing it over takes."""
    host = dataclasses.replace(
        INSTANT, d2h_bytes_per_second=1000.0, overhead_seconds=0.125, handover_bytes=30, handover_seconds=0.5
    )
    assert simulate(THREE, {2: "swap"}, host).step_seconds == pytest.approx(6 + 2 * (0.125 + 30 / 1000))
    assert simulate(THREE, {3: "swap"}, host, schedule=ON_DEMAND).step_seconds == pytest.approx(
        6 + 40 / 1000 + 2 * (0.125 + 0.5)
    )


def test_unhidden_copies_stall_for_their_whole_duration() -> None:
    """Without overlap compute waits for the copy out and for the copy back."""
    timeline = simulate(THREE, {3: "swap"}, DEVICE, schedule=ON_DEMAND)
    assert timeline.stall_seconds == pytest.approx(0.4 + 0.4)
    assert timeline.step_seconds == pytest.approx(6.8)


def test_copies_hidden_by_compute_cost_nothing() -> None:
    """A copy out that ends while the program still holds the tensor, and a prefetch in time, stall nothing."""
    timeline = simulate(THREE, {1: "swap"}, DEVICE)
    assert timeline.stall_seconds == 0.0
    assert timeline.step_seconds == pytest.approx(6.0)


def test_interference_slows_compute_by_its_share_of_the_copies() -> None:
    """Hidden copies of 0.2 s each way cost half of it where they take half of a core."""
    shared = dataclasses.replace(DEVICE, copy_interference=0.5)
    assert simulate(THREE, {1: "swap"}, shared).step_seconds == pytest.approx(6.2)


def test_release_waits_for_a_slow_copy() -> None:
    """Without a limit the device copy stays until its copy out has ended: no stall in forward."""
    slow = dataclasses.replace(INSTANT, d2h_bytes_per_second=20 / 2.5)  # 2.5 s for 20 bytes, from tick 1 at 1 s
    timeline = simulate(THREE, {1: "swap"}, slow)
    assert timeline.release_tick == {1: 9}  # ends at 3.5 s; the next op to start after that is at tick 9
    assert timeline.memory[4:9].tolist() == KEPT[4:9]
    assert timeline.stall_seconds == 0.0


def test_release_is_tightened_under_a_limit() -> None:
    """Where memory is short the release moves to the op that needs the room, and compute waits there."""
    slow = dataclasses.replace(INSTANT, d2h_bytes_per_second=20 / 2.5)
    timeline = simulate(THREE, {1: "swap"}, slow, limit_bytes=180)
    assert timeline.memory[4] == KEPT[4] - 20
    assert timeline.peak_bytes == 180
    assert timeline.stall_seconds == pytest.approx(1.5)  # from 2 s (tick 4) to 3.5 s


def test_a_copy_that_ends_after_its_need_is_waited_for_where_room_is_short() -> None:
    """Of two copies of 5 s the second ends after its need: compute waits for the first, and runs beside the second."""
    problem = Problem(chain(40, 40, 10, 10, 10))
    slow = dataclasses.replace(DEVICE, d2h_bytes_per_second=8.0, h2d_bytes_per_second=1e9)
    timeline = simulate(problem, {1: "swap", 2: "swap"}, slow, limit_bytes=180)
    assert timeline.peak_bytes == 180
    assert timeline.out_seconds == {1: pytest.approx(6.0), 2: pytest.approx(11.0)}
    assert timeline.release_tick == {1: 4, 2: 15}  # the last op before the second one's need begins at 11 s
    assert timeline.stall_seconds == pytest.approx(4.0)  # from 2 s (tick 4) to 6 s


def test_without_a_limit_it_is_waited_for_at_its_death() -> None:
    """Memory is then to be as low as it can be."""
    problem = Problem(chain(40, 40, 10, 10, 10))
    slow = dataclasses.replace(DEVICE, d2h_bytes_per_second=8.0, h2d_bytes_per_second=1e9)
    assert simulate(problem, {2: "swap"}, slow).release_tick == {2: 15}
    assert simulate(problem, {1: "swap", 2: "swap"}, slow).release_tick[2] == 6


def test_prefetch_hides_a_slow_copy_back() -> None:
    """The copy back of 1.5 s is issued two unpacks before it is needed."""
    slow = dataclasses.replace(INSTANT, h2d_bytes_per_second=20 / 1.5)
    timeline = simulate(THREE, {1: "swap"}, slow)
    assert timeline.prefetch == {1: 0}
    assert timeline.stall_seconds == pytest.approx(0.0, abs=1e-9)
    assert timeline.memory[6:10].tolist() == KEPT[6:10]


def test_prefetch_follows_the_release() -> None:
    """The copy back is issued only after the device copy has gone: both are never counted at once."""
    slow = dataclasses.replace(DEVICE, d2h_bytes_per_second=20 / 2.5, h2d_bytes_per_second=20 / 1.5)
    timeline = simulate(THREE, {1: "swap"}, slow)
    issued = int(THREE.unpack_ticks[timeline.prefetch[1]]) if timeline.prefetch[1] >= 0 else 10
    assert issued >= timeline.release_tick[1]
    assert (timeline.memory <= KEPT).all()


def test_prefetch_is_limited_by_memory() -> None:
    """It is issued only as early as there is room, and compute waits for the rest."""
    slow = dataclasses.replace(INSTANT, h2d_bytes_per_second=20 / 1.5)
    timeline = simulate(THREE, {1: "swap"}, slow, limit_bytes=180)
    assert timeline.prefetch == {1: 1}
    assert timeline.peak_bytes == 180
    assert timeline.stall_seconds == pytest.approx(0.5)  # issued at 4 s, here at 5.5 s, needed at 5 s


def test_prefetch_is_on_demand_where_there_is_no_room() -> None:
    """With no room before its need the copy back is issued then, and compute waits for all of it."""
    slow = dataclasses.replace(INSTANT, h2d_bytes_per_second=20 / 1.5)
    timeline = simulate(THREE, {1: "swap"}, slow, limit_bytes=150)
    assert timeline.prefetch == {1: -1}
    assert timeline.stall_seconds == pytest.approx(1.5)


def test_copies_queue_on_their_lane() -> None:
    """Two copies out on one lane follow each other: the second waits for the first."""
    slow = dataclasses.replace(INSTANT, d2h_bytes_per_second=10.0)  # 2 s from 1 s on, then 3 s, for two storages
    timeline = simulate(THREE, {1: "swap", 2: "swap"}, slow, schedule=ON_DEMAND)
    assert timeline.stall_seconds == pytest.approx(5.0)
    overlapped = simulate(THREE, {1: "swap", 2: "swap"}, slow)
    assert overlapped.release_tick[1] == 7  # ends at 3 s
    assert overlapped.stall_seconds < timeline.stall_seconds


def test_transients_of_a_replay_count_at_its_tick() -> None:
    """A replay's temporaries raise memory at the unpack alone."""
    b = GraphBuilder()
    temporary = b.make(100, b.given(1))
    value = b.make(10, temporary)
    save = b.pack(value)
    b.drop(temporary, value)
    b.op()
    b.backward()
    b.unpack(save)  # tick 4
    b.op()
    b.release(save)
    memory = simulate(Problem(b.build()), {2: "recompute"}, DEVICE).memory
    assert memory.tolist() == [101, 111, 111, 1, 111, 11, 1]


def test_workspace_counts_while_its_op_runs() -> None:
    """Beside what is alive, in the tick of the op and in no other."""
    ops = tuple(dataclasses.replace(op, workspace_bytes=1000 * (op.tick in (2, 7))) for op in THREE.graph.ops)
    memory = simulate(Problem(dataclasses.replace(THREE.graph, ops=ops)), {}, DEVICE).memory
    assert memory.tolist() == [m + 1000 * (t in (2, 7)) for t, m in enumerate(KEPT)]


def test_workspace_counts_again_in_a_replay() -> None:
    """A replayed op needs its workspace beside its result, at the unpack."""
    ops = tuple(dataclasses.replace(op, workspace_bytes=1000 * (op.tick == 2)) for op in THREE.graph.ops)
    timeline = simulate(Problem(dataclasses.replace(THREE.graph, ops=ops)), {2: "recompute"}, DEVICE)
    away = range(6, 8)
    expected = [m - 30 * (t in away) + 1000 * (t in (2, 8)) for t, m in enumerate(KEPT)]
    assert timeline.memory.tolist() == expected


ON_DISK = dataclasses.replace(
    DEVICE, host_memory_bytes=0, disk_write_bytes_per_second=10.0, disk_read_bytes_per_second=20.0
)
"""All swaps go to a disk, at 10 B/s out and 20 B/s back."""


def test_unhidden_disk_copies_stall_at_the_rates_of_the_disk() -> None:
    """Forty bytes take 4 s out and 2 s back; memory is that of any swap."""
    timeline = simulate(THREE, {3: "swap"}, ON_DISK, schedule=ON_DEMAND)
    assert timeline.tiers == {3: "disk"}
    assert timeline.stall_seconds == pytest.approx(4.0 + 2.0)
    assert timeline.step_seconds == pytest.approx(12.0)
    assert timeline.memory.tolist() == simulate(THREE, {3: "swap"}, DEVICE, schedule=ON_DEMAND).memory.tolist()


def test_disk_is_no_faster_than_the_link_of_a_device() -> None:
    """A disk of 400 B/s behind a link of 100 B/s is one of 100 B/s, but to a CPU, which has no such link."""
    fast = dataclasses.replace(ON_DISK, disk_write_bytes_per_second=400.0, disk_read_bytes_per_second=400.0)
    assert simulate(THREE, {3: "swap"}, fast, schedule=ON_DEMAND).stall_seconds == pytest.approx(0.2)
    fast = dataclasses.replace(fast, kind="cuda")
    assert simulate(THREE, {3: "swap"}, fast, schedule=ON_DEMAND).stall_seconds == pytest.approx(0.8)


PAGES = Problem(chain(4096, 4096, 4096))
"""As ``THREE``, with results of one page each; of the first two the first is away longer."""
MIXED = dataclasses.replace(
    INSTANT,
    d2h_bytes_per_second=4096 / 1.5,
    disk_write_bytes_per_second=4096 / 3,
    disk_read_bytes_per_second=1e15,
    host_memory_bytes=4096,
)
"""The host has room for one page, which takes 1.5 s there and 3 s to disk; copies back take no time."""


@pytest.mark.parametrize(("kind", "stall"), [("cpu", 1.5), ("cuda", 2.0)])
def test_tiers_have_lanes_of_their_own_but_share_a_link(kind: str, stall: float) -> None:
    """The second result goes to the host while the first still goes to disk, and is waited for at tick 4, at 2 s.

    On a CPU its copy runs from 2 s to 3.5 s. On a device the bytes for the disk have the link from 1 s to 2.5 s,
    so that it ends at 4 s. The disk copy ends at 4 s, before the op at tick 9.
    """
    timeline = simulate(PAGES, {1: "swap", 2: "swap"}, dataclasses.replace(MIXED, kind=kind))
    assert timeline.tiers == {1: "disk", 2: "host"}
    assert timeline.release_tick == {1: 9, 2: 4}
    assert timeline.stall_seconds == pytest.approx(stall)


def test_release_waits_for_the_disk() -> None:
    """Without a limit the device copy stays until it is on disk: 2.5 s from 1 s on, so until the op at tick 9."""
    slow = dataclasses.replace(ON_DISK, disk_write_bytes_per_second=20 / 2.5, disk_read_bytes_per_second=1e15)
    timeline = simulate(THREE, {1: "swap"}, slow)
    assert timeline.release_tick == {1: 9}
    assert timeline.stall_seconds == pytest.approx(0.0, abs=1e-9)


def test_prefetch_hides_a_slow_read() -> None:
    """A read of 1.5 s is issued two unpacks before it is needed, and compute waits for none of it."""
    slow = dataclasses.replace(ON_DISK, disk_write_bytes_per_second=1e15, disk_read_bytes_per_second=20 / 1.5)
    timeline = simulate(THREE, {1: "swap"}, slow)
    assert timeline.prefetch == {1: 0}
    assert timeline.stall_seconds == pytest.approx(0.0, abs=1e-9)


def test_disk_copies_cost_compute_what_host_copies_do() -> None:
    """A disk that takes 3 s in all without being waited for slows compute down by its bytes' 0.4 s alone."""
    shared = dataclasses.replace(
        ON_DISK, copy_interference=0.5, disk_write_bytes_per_second=20.0, disk_read_bytes_per_second=10.0
    )
    timeline = simulate(THREE, {1: "swap"}, shared)
    assert timeline.stall_seconds == pytest.approx(0.0, abs=1e-9)
    assert timeline.step_seconds == pytest.approx(6.2)


@given(graph=step_graphs(), data=st.data())
def test_waiting_for_each_copy_is_the_smallest_memory(graph: StepGraph, data: st.DataObject) -> None:
    """At each tick: swapped and waited for takes no more than overlapped, nor that more than kept."""
    problem = Problem(graph)
    chosen = [c for c in problem.candidates if data.draw(st.booleans())]
    tight = simulate(problem, dict.fromkeys(chosen, "swap"), DEVICE, schedule=ON_DEMAND)
    loose = simulate(problem, dict.fromkeys(chosen, "swap"), DEVICE)
    kept = simulate(problem, {}, DEVICE)
    assert (tight.memory <= loose.memory).all()
    assert (loose.memory <= kept.memory).all()
    assert kept.step_seconds == pytest.approx(graph.seconds)


@given(graph=step_graphs(), data=st.data(), limit=st.integers(1, 600))
def test_simulation_is_deterministic_and_consistent(graph: StepGraph, data: st.DataObject, limit: int) -> None:
    """Two runs agree; the peak is the maximum; a limit never costs less time nor takes more memory."""
    problem = Problem(graph)
    options = {s: ["keep", "swap"] + ["recompute"] * c.can_recompute for s, c in problem.candidates.items()}
    drawn = {s: data.draw(st.sampled_from(choices)) for s, choices in options.items()}
    actions = {s: action for s, action in drawn.items() if action != "keep"}
    one, two = (simulate(problem, actions, DEVICE, limit_bytes=limit) for _ in range(2))
    free = simulate(problem, actions, DEVICE)
    assert np.array_equal(one.memory, two.memory)
    assert one.step_seconds == two.step_seconds
    assert one.peak_bytes == one.memory.max() == one.memory[one.peak_tick]
    assert one.peak_bytes <= max(free.peak_bytes, limit)
    assert one.step_seconds >= graph.seconds - 1e-9
    assert (one.memory >= problem.base).all()


def test_search_gets_what_the_timeline_says() -> None:
    """A simulator takes codes by candidate, which translate to actions and back."""
    actions = {1: "swap", 3: "recompute"}
    codes = THREE.codes(actions)  # type: ignore[arg-type]
    assert (codes.tolist(), THREE.actions(codes)) == ([1, 0, 2], actions)
    simulator = Simulator(THREE, DEVICE, 150)
    timeline = simulate(THREE, actions, DEVICE, limit_bytes=150)  # type: ignore[arg-type]
    outcome = simulator.run(codes)
    assert outcome == (timeline.peak_bytes, timeline.step_seconds, timeline.stall_seconds, 0)
    assert codes.tolist() == [1, 0, 2]


def test_search_gives_up_on_long_replays() -> None:
    """Where replays alone make the step longer than asked for; one that just meets it is simulated."""
    simulator = Simulator(THREE, DEVICE)
    codes = np.full(3, 2, dtype=np.int8)
    assert simulator.run(codes).step_seconds == 9.0
    assert simulator.run(codes, max_seconds=9.0).step_seconds == 9.0
    given_up = simulator.run(codes, max_seconds=8.5)
    assert given_up.step_seconds == float("inf")
    assert given_up.peak_bytes > simulator.run(codes).peak_bytes


def test_kept_is_an_action_like_any_other() -> None:
    """Naming it changes nothing."""
    named = simulate(THREE, {1: "keep", 2: "swap"}, DEVICE)
    assert named.memory.tolist() == simulate(THREE, {2: "swap"}, DEVICE).memory.tolist()


def test_storage_without_a_choice_is_refused() -> None:
    """The parameter is no candidate."""
    with pytest.raises(KeyError):
        simulate(THREE, {0: "swap"}, DEVICE)
