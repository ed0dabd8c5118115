"""An op's workspace is what it had allocated at once beyond what it found and what it leaves."""

from __future__ import annotations

import pytest
import torch

from lightning_offload.capture.workspace import OpMemory, op_memory_for, tries_algorithms
from tests.capture.devices import FakeMemory


def test_outputs_are_no_workspace() -> None:
    """What an op leaves behind counts as its outputs, what it had beside them is its workspace."""
    stats = FakeMemory(1000)
    memory = OpMemory(stats)
    memory.before_op()
    stats.allocate(30)  # the output
    stats.allocate(50)
    stats.free(50)
    assert memory.after_op() == 50
    assert memory.allocated_bytes == 1030


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
    assert memory.allocated_bytes == 100


def test_only_cuda_tells() -> None:
    """A CPU's allocator keeps no figures."""
    assert op_memory_for(torch.device("cpu")) is None
    assert op_memory_for(torch.device("cuda", 1)) is not None


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
