"""Which tier swaps go to, and what fits."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.graph.host_layout import Stay, most_bytes, stored_bytes
from lightning_offload.graph.memory_plan import Action, Tier
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import simulate
from lightning_offload.planning.tiers import HostRoom, short_host_bytes
from tests.graph.building import DEVICE, GraphBuilder, chain, step_graphs, tiered_devices

PAGE = 4096
THREE = Problem(chain(PAGE, 2 * PAGE, PAGE))
"""Storage 1 is away longest, then 2, then 3; all are stored at once for a while."""
ALL: dict[int, Action] = {1: "swap", 2: "swap", 3: "swap"}


def device(limit: int | None, *, disk: bool = True, kind: str = "cpu") -> DeviceSpec:
    """A device with links of a page a second, and a disk of half of that."""
    return dataclasses.replace(
        DEVICE,
        kind=kind,
        d2h_bytes_per_second=float(PAGE),
        h2d_bytes_per_second=float(PAGE),
        host_memory_bytes=limit,
        disk_write_bytes_per_second=PAGE / 2 if disk else 0.0,
        disk_read_bytes_per_second=PAGE / 2 if disk else 0.0,
    )


def test_all_goes_to_a_host_without_limit() -> None:
    """A disk is not used where it is not needed."""
    for found in (simulate(THREE, ALL, device(None)), simulate(THREE, ALL, device(4 * PAGE))):
        assert found.tiers == dict.fromkeys(ALL, "host")
        assert (found.host_peak_bytes, found.disk_peak_bytes, found.overflow_bytes) == (4 * PAGE, 0, 0)


@pytest.mark.parametrize(
    ("limit", "on_disk", "host_peak", "disk_peak"),
    [(4, set(), 4, 0), (3, {1}, 3, 1), (2, {1, 2}, 1, 3), (1, {1, 2}, 1, 3), (0, {1, 2, 3}, 0, 4)],
)
def test_what_is_away_longest_goes_to_disk_first(limit: int, on_disk: set[int], host_peak: int, disk_peak: int) -> None:
    """Until the rest fits the host; at a limit of two pages the second storage must leave it too."""
    found = simulate(THREE, ALL, device(limit * PAGE))
    assert {s for s, tier in found.tiers.items() if tier == "disk"} == on_disk
    assert (found.host_peak_bytes, found.disk_peak_bytes) == (host_peak * PAGE, disk_peak * PAGE)
    assert found.overflow_bytes == 0


def test_absence_is_counted_in_seconds() -> None:
    """Of two storages packed one after the other, the one that waits for a long op in between is away longer."""
    b = GraphBuilder()
    x = b.given(1)
    first = b.make(PAGE, x)
    save_first = b.pack(first)
    second = b.make(PAGE, x, seconds=5.0)
    save_second = b.pack(second)
    b.drop(first, second)
    b.op()
    b.backward()
    b.unpack(save_first)
    b.release(save_first)
    b.op(seconds=50.0)
    b.unpack(save_second)
    b.release(save_second)
    found = simulate(Problem(b.build()), {1: "swap", 2: "swap"}, device(PAGE))
    assert found.tiers == {1: "host", 2: "disk"}


def test_too_much_for_a_host_without_disk_overflows() -> None:
    """The choice is simulated all the same, and says by how much the host is too small."""
    found = simulate(THREE, ALL, device(3 * PAGE, disk=False))
    assert found.tiers == dict.fromkeys(ALL, "host")
    assert found.overflow_bytes == PAGE
    assert simulate(THREE, {1: "swap", 2: "swap"}, device(3 * PAGE, disk=False)).overflow_bytes == 0


def test_storages_count_in_pages() -> None:
    """Ten bytes take a page, on the host as on disk."""
    problem = Problem(chain(10, 20, 30))
    assert simulate(problem, ALL, device(None)).host_peak_bytes == 3 * PAGE
    assert simulate(problem, ALL, device(0)).disk_peak_bytes == 3 * PAGE
    assert simulate(problem, ALL, device(PAGE, disk=False)).overflow_bytes == 2 * PAGE


def test_nothing_swapped_uses_no_tier() -> None:
    """Whatever the limits."""
    found = simulate(THREE, {1: "recompute"}, device(0, disk=False))
    assert (found.tiers, found.host_peak_bytes, found.disk_peak_bytes, found.overflow_bytes) == ({}, 0, 0, 0)


def test_a_host_without_disk_is_a_limit() -> None:
    """With a disk everything can be swapped, and without a limit too."""
    assert short_host_bytes(device(0, disk=False)) == 0
    assert short_host_bytes(device(None, disk=False)) is None
    assert short_host_bytes(device(0)) is None


def test_room_is_that_of_the_fullest_moment() -> None:
    """Two storages that are never there together share the room, three at once do not."""
    room = HostRoom(THREE, 3 * PAGE, ())
    assert [room.take(s) for s in (2, 3, 1)] == [True, True, False]
    b = GraphBuilder()
    for _ in range(2):
        value = b.make(PAGE, b.given(1))
        save = b.pack(value)
        b.drop(value)
        b.unpack(save)
        b.release(save)
    room = HostRoom(Problem(b.build()), PAGE, ())
    assert [room.take(s) for s in (1, 3)] == [True, True]


@given(graph=step_graphs(unit=1000), data=st.data(), limit=st.integers(0, 80).map(lambda n: n * 1000))
def test_room_holds_whatever_is_recomputed(graph: StepGraph, data: st.DataObject, limit: int) -> None:
    """What fits beside all that may be recomputed fits beside any part of that."""
    problem = Problem(graph)
    order = data.draw(st.permutations(list(problem.candidates)))
    may_be_recomputed = [s for s, c in problem.candidates.items() if c.can_recompute]
    room = HostRoom(problem, limit, may_be_recomputed)
    taken = [s for s in order if room.take(s)]
    actions: dict[int, Action] = dict.fromkeys(taken, "swap")
    for s in may_be_recomputed:
        if s not in taken and data.draw(st.booleans()):
            actions[s] = "recompute"
    assert simulate(problem, actions, device(limit, disk=False)).overflow_bytes == 0


@given(graph=step_graphs(unit=1000), spec=tiered_devices(unit=1000), data=st.data())
def test_tiers_hold_what_the_timeline_says(graph: StepGraph, spec: DeviceSpec, data: st.DataObject) -> None:
    """Whatever the choice: peaks are those of the stays, the host's within its limit, or the overflow says not."""
    problem = Problem(graph)
    options = {s: ["keep", "swap"] + ["recompute"] * c.can_recompute for s, c in problem.candidates.items()}
    drawn = {s: data.draw(st.sampled_from(choices)) for s, choices in options.items()}
    actions = {s: action for s, action in drawn.items() if action != "keep"}
    found = simulate(problem, actions, spec)
    ends = problem.stays.ends(s for s, action in actions.items() if action == "recompute")
    peaks: dict[Tier, int] = {"host": 0, "disk": 0}
    for tier in peaks:
        peaks[tier] = most_bytes(
            [
                Stay(num_bytes=stored_bytes(graph.storages[s].num_bytes), begin=problem.stays.begin[s], end=ends[s])
                for s in found.tiers
                if found.tiers[s] == tier
            ]
        )
    assert set(found.tiers) == {s for s, action in actions.items() if action == "swap"}
    assert peaks == {"host": found.host_peak_bytes, "disk": found.disk_peak_bytes}
    limit = spec.host_memory_bytes
    excess = 0 if limit is None else max(0, found.host_peak_bytes - limit)
    assert found.overflow_bytes == excess
    assert not (excess and spec.has_disk)
    assert found.disk_peak_bytes == 0 or spec.has_disk


@pytest.mark.parametrize("is_direct", [True, False])
def test_copies_that_a_replay_may_read_lie_there_for_longer(is_direct: bool) -> None:
    """A storage that autograd has dropped shares the host with a later one, while a recomputed one may read it."""
    b = GraphBuilder()
    first = b.make(PAGE, b.given(1))
    saves = [b.pack(first)]
    between = first if is_direct else b.make(1, first)
    second = b.make(PAGE, between)
    late = b.pack(second)
    b.drop(*{first, between}, second)
    b.unpack(saves[0])
    b.release(saves[0])
    third = b.make(PAGE, b.given(1), replayable=False)
    saves.append(b.pack(third))
    b.drop(third)
    b.unpack(saves[1])
    b.release(saves[1])
    b.unpack(late)
    b.release(late)
    problem, host = Problem(b.build()), device(None, disk=False)
    swapped: dict[int, Action] = {s: "swap" for s, c in problem.candidates.items() if c.value in (first, third)}
    recomputed = next(s for s, c in problem.candidates.items() if c.value == second)
    assert simulate(problem, swapped, host).host_peak_bytes == PAGE
    assert simulate(problem, {**swapped, recomputed: "recompute"}, host).host_peak_bytes == 2 * PAGE
