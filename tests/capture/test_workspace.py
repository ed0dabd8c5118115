"""An op's workspace is what it had allocated at once beyond what it found and what it leaves."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._C._autograd import _profiler_enabled

from lightning_offload.capture import workspace
from lightning_offload.capture.workspace import (
    OpMemory,
    ReportedMemory,
    Workspaces,
    op_memory_for,
    tries_algorithms,
    workspaces_on,
)
from tests.capture.devices import FakeMemory
from tests.capture.recording import record

CPU = torch.device("cpu")
MIB = 1 << 20


def test_outputs_are_no_workspace() -> None:
    """What an op leaves behind counts as its outputs, what it had beside them is its workspace."""
    stats = FakeMemory(1000)
    memory = OpMemory(stats)
    memory.before_op()
    stats.allocate(30)  # the output
    stats.allocate(50)
    stats.free(50)
    assert memory.after_op() == 50


def test_workspace_freed_before_the_output_is_made() -> None:
    """Memory used before the output was allocated counts only as far as it exceeds the output."""
    stats = FakeMemory(1000)
    memory = OpMemory(stats)
    memory.before_op()
    stats.allocate(50)
    stats.free(50)
    stats.allocate(30)
    assert memory.after_op() == 20


def test_kept_memory_is_no_workspace() -> None:
    """What a library keeps from its first call on is allocated for good, not for the time of the op."""
    stats = FakeMemory(1000)
    memory = OpMemory(stats)
    memory.before_op()
    stats.allocate(8 << 20)  # kept
    stats.allocate(30)
    assert memory.after_op() == 0
    memory.before_op()
    stats.allocate(5)
    stats.free(5)
    assert memory.after_op() == 5


def test_an_op_that_frees_memory_has_what_it_needed_first() -> None:
    """Where an op leaves less than it found, only what it had beyond the start counts."""
    stats = FakeMemory(1000)
    memory = OpMemory(stats)
    memory.before_op()
    stats.allocate(10)
    stats.free(500)
    assert memory.after_op() == 10


def test_the_steps_peak_survives_the_resets() -> None:
    """The running maximum covers ops, what lies between them, and what came after the last one."""
    stats = FakeMemory(100)
    memory = OpMemory(stats)
    for inside, between in ((10, 70), (40, 5)):
        memory.before_op()
        stats.allocate(inside)
        stats.free(inside)
        memory.after_op()
        stats.allocate(between)
        stats.free(between)
    assert stats.num_resets == 2
    assert memory.peak_bytes == 170
    stats.allocate(300)
    stats.free(300)
    assert memory.peak_bytes == 400


def test_an_op_that_began_unseen_has_no_workspace() -> None:
    """Without a figure from before the op there is nothing to compare with."""
    memory = OpMemory(FakeMemory(100))
    assert memory.after_op() == 0


def test_only_cuda_counts() -> None:
    """A CPU's allocator keeps no figures, and tells of each block; others tell nothing."""
    assert op_memory_for(CPU) is None
    assert isinstance(workspaces_on(CPU), ReportedMemory)
    assert op_memory_for(torch.device("cuda", 1)) is not None
    assert isinstance(workspaces_on(torch.device("cuda", 1)), OpMemory)
    assert workspaces_on(torch.device("meta")) is None


@pytest.fixture
def reported() -> Workspaces:
    """A CPU's."""
    found = workspaces_on(CPU)
    assert found is not None
    return found


def _temporary(num_bytes: int) -> None:
    torch.empty(num_bytes, dtype=torch.uint8)


def test_a_cpus_workspace_is_what_is_gone_after_the_op(reported: Workspaces) -> None:
    """What is left of it, and what was there before, does not count; nor does less than a page."""
    before = torch.empty(MIB)
    reported.before_op()
    _temporary(3 * MIB)
    left = torch.empty(2 * MIB, dtype=torch.uint8)
    _temporary(MIB)
    assert reported.after_op() == MIB
    reported.before_op()
    _temporary(2 * MIB)
    del before, left
    assert reported.after_op() == 2 * MIB
    reported.before_op()
    _temporary(4095)
    assert reported.after_op() == 0
    reported.before_op()
    left = torch.empty(2 * MIB)
    assert reported.after_op() == 0
    assert left.numel() == 2 * MIB


def test_threads_measure_their_own_ops(reported: Workspaces) -> None:
    """What another thread allocates meanwhile is no op's of this one."""
    found: list[int] = []

    def op_of_another() -> None:
        reported.before_op()
        _temporary(2 * MIB)
        found.append(reported.after_op())

    reported.before_op()
    _temporary(MIB)
    thread = threading.Thread(target=op_of_another)
    thread.start()
    thread.join()
    assert (reported.after_op(), found) == (MIB, [2 * MIB])


def test_a_users_profiler_goes_on(reported: Workspaces) -> None:
    """While there is one nothing is measured, and it sees the op."""
    with torch.autograd.profiler.profile() as profile:
        reported.before_op()
        torch.ones(MIB).sin()
        assert reported.after_op() == 0
    assert "aten::sin" in {event.name for event in profile.function_events}


def test_an_op_that_failed_leaves_no_profiler(reported: Workspaces) -> None:
    """Nor does one in a step."""
    reported.before_op()
    reported.op_failed()
    assert not _profiler_enabled()
    reported.op_failed()
    reported.before_op()
    _temporary(MIB)
    assert reported.after_op() == MIB
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        record(lambda: torch.ones(2, 3, requires_grad=True) @ torch.ones(4, 5))
    assert not _profiler_enabled()


def test_without_such_a_profiler_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no part of torch's interface: where it is gone a step is recorded without."""
    monkeypatch.delattr(torch._C._autograd, "_enable_profiler_legacy")
    workspace._profiler.cache_clear()
    try:
        assert workspaces_on(CPU) is None
    finally:
        workspace._profiler.cache_clear()


def test_trial_runs_are_suspected_of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only convolutions try algorithms, and only where the user lets cuDNN do so."""
    names = ["aten.convolution.default", "aten.convolution_backward.default", "aten.addmm.default"]
    assert not any(map(tries_algorithms, names))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert list(map(tries_algorithms, names)) == [True, True, False]


@pytest.mark.gpu
def test_cuda_tells_workspace_from_output() -> None:
    """An op's temporary memory is seen, its result is not counted, and the step's peak covers both."""
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.rand(1 << 20, device=device)
    memory = op_memory_for(device)
    assert memory is not None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    memory.before_op()
    out = x + 1.0
    assert memory.after_op() == 0
    memory.before_op()
    temporary = torch.empty(1 << 24, dtype=torch.uint8, device=device)
    del temporary
    rounding = 2 << 20  # of a large block: the allocator may hand out more than was asked for
    assert 1 << 24 <= memory.after_op() <= (1 << 24) + rounding
    least = before + out.nbytes + (1 << 24)
    assert least <= memory.peak_bytes <= least + 2 * rounding
