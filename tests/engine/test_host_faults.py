"""Whatever the host refuses: the documented outcome, never a wrong gradient, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_offload import MemoryPlugin
from lightning_offload.capture.recorder import Recorder
from lightning_offload.errors import BudgetInfeasibleError, SpillError
from lightning_offload.graph import StepGraph
from lightning_offload.plugins import hardware
from lightning_offload.runtime import host_pool, tiers
from lightning_offload.runtime.pinning import CudaPinning
from tests.engine.faults import FAULTY_STEPS, active
from tests.engine.harness import Outcome, run
from tests.engine.tier_runs import (
    CASE,
    MIB,
    STRICT,
    assert_exact,
    assert_uninterrupted,
    assert_usable,
    patched,
    train,
    warned,
)
from tests.zoo.case import Job

AT = pytest.mark.parametrize("step", FAULTY_STEPS)
POLICIES = pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])

# ---- host memory


class _NoMemory(SimpleNamespace):
    """The module ``mmap`` where the system gives no more than some bytes at once."""

    limit = 0
    error: Exception = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def mmap(self, fd: int, num_bytes: int, **keywords: Any) -> mmap.mmap:
        if num_bytes > self.limit:
            raise type(self.error)(*self.error.args)  # one error for all would keep the frames that it went through
        return mmap.mmap(fd, num_bytes, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(mmap, name)


REFUSALS = [OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MemoryError("no memory")]


@AT
@POLICIES
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_host_without_memory(refusal: Exception, policy: str, step: int, caplog: pytest.LogCaptureFixture) -> None:
    """From some step on the host gives nothing: tensors stay or are recomputed, exactly, with one warning."""
    memory = MemoryPlugin(policy=policy, tier="host")

    def on(job: Job) -> None:
        if job.index == step:
            # What is mapped goes as if another kind of step had left it; what comes next is refused.
            memory.detach()
            memory.attach(job.model)
            patch.setattr(host_pool, "mmap", _NoMemory(error=refusal))

    with pytest.MonkeyPatch.context() as patch:
        outcome = run(CASE, memory=memory, after_step=on)
    assert_uninterrupted(outcome)
    assert_exact(outcome)
    assert warned(caplog, "the host refused") <= 1
    assert memory.report().host_bytes == 0
    assert_usable(memory)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
def test_host_without_memory_from_the_start(refusal: Exception, tier: str) -> None:
    """Nothing can be swapped, not even staged for the disk: a SpillError, or plans that swap nothing."""
    memory = MemoryPlugin(policy="all-swap", tier=tier)
    outcome: Outcome | None = None
    with patched(host_pool, "mmap", _NoMemory(error=refusal))(), contextlib.suppress(SpillError):
        outcome = run(STRICT, memory=memory)
    assert active() == []
    if outcome is not None:
        assert_exact(outcome)
    assert_usable(memory)


@pytest.mark.parametrize("tier", ["host", "auto"])
def test_host_with_little_memory(tier: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A host that gives less than the plan wants: what it gave is used, the rest goes to disk or stays."""
    folder = {"spill_dir": tmp_path} if tier == "auto" else {}
    memory = MemoryPlugin(policy="all-swap", tier=tier, **folder)

    def on(job: Job) -> None:
        if job.index == 2:  # links are known
            if tier == "auto":
                memory._steps.hardware.tiers.disk_lanes.prepare()  # the little that copies to disk pass through
            patch.setattr(memory._steps.hardware.tiers.host, "_slabs", [])
            memory._steps.hardware.tiers.host._planned = None
            patch.setattr(host_pool, "mmap", _NoMemory(limit=MIB))

    with pytest.MonkeyPatch.context() as patch:
        outcome = run(CASE, memory=memory, after_step=on)
        report = memory.report()
    assert_uninterrupted(outcome)
    assert_exact(outcome)
    assert warned(caplog, "the host refused") == 1
    assert report.host_bytes <= MIB
    if tier == "auto":
        assert report.disk_peak_bytes > 0


def test_host_budget_too_small_for_the_budget() -> None:
    """Where neither host memory nor recomputation is enough, the error names what would be."""
    with_host = MemoryPlugin(policy="all-swap", tier="host")
    train(with_host)
    floor = with_host.report().floor_bytes
    memory = MemoryPlugin(budget=floor, policy="all-swap", tier="host", host_budget=MIB)
    with pytest.raises(BudgetInfeasibleError, match="smallest feasible budget") as caught:
        run(STRICT, memory=memory)
    assert active() == []
    assert floor is not None
    assert caught.value.floor_bytes > floor


# ---- page locks


class _Refused(CudaPinning):
    """The driver refuses to lock anything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_asked = 0

    @override
    def pin(self, address: int, num_bytes: int) -> bool:
        self.num_asked += 1
        self._refuse(num_bytes, "CUDA error 2")
        return False

    @override
    def unpin(self, address: int) -> None:
        raise AssertionError("nothing was locked")


@POLICIES
def test_pinning_refused(policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, links are measured again as they are now, and training goes on exactly."""
    made: list[_Refused] = []
    measured: list[bool] = []
    measure = hardware.measure_spec

    def pinning_for(device: torch.device) -> _Refused:
        made.append(_Refused(device))
        return made[-1]

    def measure_spec(device: torch.device, below: Any, *, with_disk: bool) -> Any:
        measured.append(below.host.is_pinning_refused)
        return measure(device, below, with_disk=with_disk)

    monkeypatch.setattr(tiers, "pinning_for", pinning_for)
    monkeypatch.setattr(hardware, "measure_spec", measure_spec)
    memory = MemoryPlugin(policy=policy, tier="host")
    assert_exact(train(memory))
    report = memory.report()
    assert (report.phase, report.pinned_bytes) == ("planned", 0)
    assert warned(caplog, "could not be page-locked") == 1
    assert measured[-1], "the plans in force are made for links without page locks"
    assert len(measured) <= 2
    assert all(pinning.num_asked <= 1 for pinning in made)


def _tanh_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])


def _trained(memory: MemoryPlugin | None) -> list[Tensor]:
    model, x = _tanh_net(), torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with memory or contextlib.nullcontext():
        for _ in range(6):
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_what_the_host_refuses_while_a_step_is_recorded_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step is recorded as on a host that takes it all, so that what is recomputed meets the same budgets."""
    expected, graphs = _trained(None), list[StepGraph]()
    finish = Recorder.finish

    def note(recorder: Recorder) -> StepGraph:
        graphs.append(finish(recorder))
        return graphs[-1]

    monkeypatch.setattr(Recorder, "finish", note)
    for host_budget in (None, "4096B", "70000B"):
        memory = MemoryPlugin("1GiB", policy="all-recompute", tier="host", host_budget=host_budget, device="cpu")
        assert all(torch.equal(a, b) for a, b in zip(expected, _trained(memory), strict=True))
    lives = [{save.value: graph.storages[graph.values[save.value].storage] for save in graph.saves} for graph in graphs]
    assert len(lives) == 3
    assert lives[0] == lives[1] == lives[2]
    report = memory.report()
    assert report.plain_peak_bytes is not None
    assert report.floor_bytes is not None
    budget = f"{(report.floor_bytes + report.plain_peak_bytes) // 2}B"
    within = MemoryPlugin(budget, tier="host", host_budget="4096B", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(expected, _trained(within), strict=True))
    assert within.report().recomputed_bytes > 0
