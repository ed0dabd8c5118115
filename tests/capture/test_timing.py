"""Ops are timed by the device that runs them; durations measured later replace those of the recording."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from lightning_offload.accelerators import hold
from lightning_offload.capture import timing
from lightning_offload.capture.timing import (
    DeviceClock,
    HostClock,
    OpTimes,
    clock_for,
    empty_launch_seconds,
    empty_mark_seconds,
    record_event,
    retime,
)
from lightning_offload.capture.workspace import OpMemory
from lightning_offload.tensors.op_facts import facts_of
from tests.capture.devices import FakeMemory, FakeStream, LaunchQueue
from tests.graph.building import chain

_FACTS = facts_of(torch.ops.aten.add.Tensor)
GPU = torch.device("cuda", 1)


def times(names: list[str], seconds: list[float], workspaces: list[int] | None = None) -> OpTimes:
    """Times as observed."""
    memory = FakeMemory()
    found = OpTimes(memory=None if workspaces is None else OpMemory(memory))
    for position, (name, duration) in enumerate(zip(names, seconds, strict=True)):
        found.before_op(_FACTS, (), {})
        for num_bytes in workspaces[position : position + 1] if workspaces else []:
            memory.allocate(num_bytes)
            memory.free(num_bytes)
        found.on_op(dataclasses.replace(_FACTS, name=name), (), {}, None, duration)
    return found


def clock(stream: FakeStream, launch_seconds: float = 0.0) -> DeviceClock:
    """A device's clock on a fake stream."""
    return DeviceClock(
        GPU, mark=stream.mark, synchronize=stream.synchronize, launch_seconds=lambda device: launch_seconds
    )


# ---- clocks


def test_host_clock_takes_the_hosts_durations() -> None:
    """On a CPU, and where durations are modelled, an op lasts as long as its call."""
    found = OpTimes(HostClock())
    for duration in (0.5, 0.25):
        found.before_op(_FACTS, (), {})
        found.on_op(_FACTS, (), {}, None, duration)
    assert found.seconds == [0.5, 0.25]
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


def test_device_clock_takes_the_devices_durations() -> None:
    """An op lasts from the mark before it to the one after it; what lies between two ops is in neither."""
    stream = FakeStream(1.0, 1.25, 7.0, 7.5)
    found = OpTimes(clock(stream))
    for _ in range(2):
        found.before_op(_FACTS, (), {})
        found.on_op(_FACTS, (), {}, None, 1e-6)
    assert stream.num_waits == 0
    assert found.seconds == [0.25, 0.5]
    assert stream.devices == {GPU}
    assert isinstance(clock_for(GPU), DeviceClock)


def test_the_launch_is_no_part_of_an_op_that_the_device_waited_for() -> None:
    """What follows a gap was launched meanwhile; what the device had in its queue was not."""
    us = 1e-6
    stream = FakeStream(
        0 * us, 1000 * us,  # the first op: nothing is known of what was before
        1002 * us, 1012 * us,  # from the queue: 10 us in truth
        1062 * us, 1092 * us,  # after a gap: 10 us and its launch
        1200 * us, 2220 * us,  # likewise, 1 ms
        2300 * us, 2315 * us,  # less than a launch
        2315.5 * us, 2316 * us,  # shorter than the least, from the queue
    )  # fmt: skip
    timed = clock(stream, launch_seconds=20 * us)
    for _ in range(6):
        timed.before_op()
        timed.after_op(0.0)
    assert timed.resolve() == pytest.approx([1000 * us, 10 * us, 10 * us, 1000 * us, 1 * us, 0.5 * us])


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> LaunchQueue:
    """A queue by whose host's clock a device's clock goes."""
    made = LaunchQueue()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made.host_seconds)
    return made


def queued(queue: LaunchQueue, *, holds: bool = True) -> DeviceClock:
    """A device's clock on a queue whose marks take no time, or some when they are measured alone."""
    return DeviceClock(
        GPU, mark=queue.mark, synchronize=queue.synchronize, hold=queue.hold if holds else None,
        launch_seconds=lambda device: 20e-6, mark_seconds=lambda device: 1e-6,
    )  # fmt: skip


def timed_ops(
    queue: LaunchQueue, num: int, host_seconds: float, device_seconds: float, *, holds: bool = True, waits: bool = False
) -> list[float]:
    """The durations of ops that are launched one after the other, perhaps each once the one before is done."""
    timed = queued(queue, holds=holds)
    for _ in range(num):
        timed.before_op()
        queue.launch(host_seconds, device_seconds)
        timed.after_op(host_seconds)
        queue.launch(20e-6, 0.0)  # what comes between two ops
        if waits:
            queue.synchronize(GPU)
    return timed.resolve()


@pytest.mark.parametrize("host_seconds", [50e-6, 300e-6, 2e-3], ids=["a planned step", "a recording", "a slow host"])
@pytest.mark.parametrize("device_seconds", [2e-6, 10e-6])
def test_a_held_device_runs_ops_back_to_back(queue: LaunchQueue, host_seconds: float, device_seconds: float) -> None:
    """However long the host needs to launch them, ops are timed as if it did not; what marks take is subtracted."""
    found = timed_ops(queue, 2000, host_seconds, device_seconds)
    expected = device_seconds - 1e-6
    assert min(found) == pytest.approx(expected)
    assert sum(seconds > 1.01 * expected for seconds in found) <= 4  # the device is through before it is held again
    assert queue.num_held <= 2 + 2000 * (host_seconds + 20e-6) / 8e-3
    assert queue.device_seconds < 1.3 * queue.host_seconds + 0.02


def test_a_starved_device_has_launches_subtracted(queue: LaunchQueue) -> None:
    """Where it cannot be held; what is left of a launch is taken for the op's."""
    assert timed_ops(queue, 200, 50e-6, 10e-6, holds=False)[1:] == pytest.approx([40e-6] * 199)
    assert queue.num_held == 0


def test_a_device_that_is_behind_is_not_held(queue: LaunchQueue) -> None:
    """Once the host is ahead of it, it has enough to do by itself."""
    assert timed_ops(queue, 1000, 50e-6, 200e-6) == pytest.approx([199e-6] * 1000)
    assert queue.num_held <= 2


def test_a_device_is_not_held_for_long_in_vain(queue: LaunchQueue) -> None:
    """A program that waits for it after each op never gets ahead: it is held a few times, and then no more."""
    assert len(timed_ops(queue, 300, 50e-6, 10e-6, waits=True)) == 300
    assert 1 < queue.num_held < 12


def test_a_cpu_has_no_launch() -> None:
    """Ops run where they are called."""
    assert empty_launch_seconds(torch.device("cpu")) == 0


@pytest.mark.gpu
def test_a_device_is_held_about_as_long_as_asked() -> None:
    """What comes after is reached later by that; marks alone take a few microseconds."""
    device = torch.device("cuda", torch.cuda.current_device())
    hold(device, 1e-3)  # measures how fast its clock is
    torch.cuda.synchronize()
    before = record_event(device)
    hold(device, 0.02)
    after = record_event(device)
    torch.cuda.synchronize()
    assert 0.01 < before.elapsed_time(after) * 1e-3 < 0.2  # type: ignore[attr-defined]
    assert 0 <= empty_mark_seconds(device) < 1e-3


@pytest.mark.gpu
def test_an_empty_launch_takes_microseconds() -> None:
    """As it is measured, and once for each device."""
    seconds = empty_launch_seconds(torch.device("cuda", torch.cuda.current_device()))
    assert 0 < seconds < 1e-3


def test_the_device_is_awaited_once() -> None:
    """However often durations are read, the device is awaited once for the ops that ran since."""
    stream = FakeStream()
    timed = clock(stream)
    assert timed.resolve() == []
    assert stream.num_waits == 0
    for num_ops in (1, 2):
        timed.before_op()
        timed.after_op(0.0)
        assert timed.resolve() == timed.resolve() == [1.0] * num_ops
        assert stream.num_waits == num_ops


def test_an_op_that_failed_leaves_no_duration() -> None:
    """Only ops that ran count, each from its own mark."""
    stream = FakeStream(1.0, 5.0, 5.5)
    timed = clock(stream)
    timed.before_op()  # raised
    timed.before_op()
    timed.after_op(0.0)
    assert timed.resolve() == [0.5]


def test_marks_without_time_fall_back_to_the_host() -> None:
    """Marks set while a CUDA graph is captured have no time; the launch is all that is known then."""
    timed = clock(FakeStream(1.0, None, 3.0, 4.0))
    for _ in range(2):
        timed.before_op()
        timed.after_op(0.125)
    assert timed.resolve() == [0.125, 1.0]


def test_an_op_that_began_unseen_falls_back_to_the_host() -> None:
    """A clock that was started between an op's two marks has the launch only."""
    timed = clock(FakeStream())
    timed.after_op(0.125)
    assert timed.resolve() == [0.125]


def test_threads_do_not_mix_their_marks() -> None:
    """An op of another thread that runs meanwhile leaves this thread's first mark alone."""
    timed = clock(FakeStream(1.0, 10.0, 10.25, 2.0))

    def other() -> None:
        timed.before_op()
        timed.after_op(0.0)

    timed.before_op()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    timed.after_op(0.0)
    assert timed.resolve() == [0.25, 1.0]


@pytest.mark.gpu
def test_events_keep_the_devices_time() -> None:
    """On a GPU an op takes the time of its kernels, far longer than its launch."""
    device = torch.device("cuda")
    x = torch.ones(4096, 4096, device=device)
    timed = clock_for(device)
    for _ in range(2):
        timed.before_op()
        for _ in range(10):
            x @ x
        timed.after_op(0.0)
    assert min(timed.resolve()) > 1e-4


# ---- times of a later step


def test_times_are_replaced_op_by_op() -> None:
    """Each op takes its new duration if that is the smaller one; nothing else changes."""
    graph = chain(40, 50)
    timed = retime(graph, times([op.name for op in graph.ops], [0.5, 0.25, 1.0, 2.0]))
    assert [op.seconds for op in timed.ops] == [0.5, 0.25, 1.0, 1.0]
    assert timed.digest() == graph.digest()
    assert dataclasses.replace(timed, ops=graph.ops) == graph


def test_workspaces_are_replaced_where_they_were_measured() -> None:
    """The later workspace counts, larger or smaller; one that was not measured again stays."""
    graph = chain(40, 50)
    ops = tuple(dataclasses.replace(op, workspace_bytes=100) for op in graph.ops)
    graph = dataclasses.replace(graph, ops=ops)
    names = [op.name for op in graph.ops]
    assert [op.workspace_bytes for op in retime(graph, times(names, [1.0] * 4)).ops] == [100] * 4
    timed = retime(graph, times(names, [1.0] * 4, [0, 50, 100, 200]))
    assert [op.workspace_bytes for op in timed.ops] == [0, 50, 100, 200]


def test_other_ops_change_nothing() -> None:
    """A step that ran other ops, or another number of them, says nothing about this graph."""
    graph = chain(40, 50)
    names = [op.name for op in graph.ops]
    assert retime(graph, times(names[:-1], [1.0] * 3)) is graph
    assert retime(graph, times(["aten.sin.default", *names[1:]], [9.0] * 4)) is graph


def test_the_peak_is_known_where_memory_is_measured() -> None:
    """Who measures workspaces has the step's peak, since it resets the allocator's own."""
    assert times(["a"], [1.0]).allocator_peak_bytes is None
    assert times(["a", "b"], [1.0] * 2, [50, 20]).allocator_peak_bytes == 50
