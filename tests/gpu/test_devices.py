"""The runtime serves a device that is not the current one, and leaves the current one alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightning_offload import MemoryPlugin
from lightning_offload.capture.calibrate import measure_device
from lightning_offload.plugins.devices import measure_spec
from lightning_offload.runtime.lanes import storage_bytes
from lightning_offload.runtime.spill import DiskPool
from lightning_offload.runtime.staged_lanes import StagedLanes
from lightning_offload.runtime.stream_lanes import StreamLanes
from lightning_offload.runtime.tiers import tiers_for
from tests.gpu.device import CUDA_MARKS, TOLERANT

pytestmark = [*CUDA_MARKS, TOLERANT]

NUM_BYTES = 4096


@pytest.fixture
def second() -> Iterator[torch.device]:
    """The second device, while the first one is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    before = torch.cuda.current_device()
    torch.cuda.set_device(0)
    yield torch.device("cuda", 1)
    torch.cuda.set_device(before)


def test_copies_leave_the_current_device_and_its_stream_alone(second: torch.device) -> None:
    """Making a stream current makes its device current too: both are put back, in and out."""
    mover = StreamLanes(second)
    host = torch.zeros(NUM_BYTES, dtype=torch.uint8).pin_memory()
    source = torch.full((NUM_BYTES,), 7, dtype=torch.uint8, device=second).untyped_storage()
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=second).untyped_storage()
    stream = torch.cuda.Stream(torch.device("cuda", 0))
    current = []
    with torch.cuda.stream(stream):
        mover.to_host(mover.mark(), source, 0, NUM_BYTES, host.data_ptr()).synchronize()
        current.append((torch.cuda.current_device(), torch.cuda.current_stream()))
        mover.to_device(mover.mark(), target, 0, NUM_BYTES, host.data_ptr()).wait()
        current.append((torch.cuda.current_device(), torch.cuda.current_stream()))
    assert current == [(0, stream)] * 2
    assert mover.compute_stream() == torch.cuda.default_stream(second)
    assert torch.equal(storage_bytes(target).cpu(), storage_bytes(source).cpu())


class Watched(StreamLanes):
    """Notes which device is current as moves are asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.seen: list[int] = []

    @override
    def to_host(self, *args: Any) -> Any:
        self.seen.append(torch.cuda.current_device())
        return super().to_host(*args)

    @override
    def to_device(self, *args: Any) -> Any:
        self.seen.append(torch.cuda.current_device())
        return super().to_device(*args)


def test_threads_of_the_disk_are_on_their_device_from_the_start(second: torch.device, tmp_path: Path) -> None:
    """A thread begins on device 0: whatever it asks for there, an event's order even, would make a context on it."""
    mover, pool = Watched(second), DiskPool(tmp_path)
    lanes = StagedLanes(mover)
    source = torch.full((NUM_BYTES,), 7, dtype=torch.uint8, device=second).untyped_storage()
    target = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=second).untyped_storage()
    block = pool.allocate(NUM_BYTES)
    assert block is not None
    lanes.swap_out(source, block).wait()
    lanes.swap_in(block, target).wait()
    assert torch.equal(storage_bytes(target).cpu(), storage_bytes(source).cpu())
    lanes.close()
    pool.close()
    assert mover.seen == [1, 1]
    assert torch.cuda.current_device() == 0


def test_links_are_measured_by_large_blocks_that_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A small block is over before a fast link is at its rate; a disk's is small; optimizers' peaks are without it."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", "")
    asked: list[tuple[int, int]] = []

    def measure(*args: Any, num_bytes: int, disk_bytes: int, **keywords: Any) -> Any:
        asked.append((num_bytes, disk_bytes))
        return measure_device(*args, num_bytes=num_bytes, disk_bytes=disk_bytes, **keywords)

    monkeypatch.setattr("lightning_offload.plugins.devices.measure_device", measure)
    device = torch.device("cuda", torch.cuda.current_device())
    tiers = tiers_for(device, disk=DiskPool(tmp_path))
    reserved = torch.cuda.memory_reserved(device)
    spec = measure_spec(device, tiers, with_disk=True)
    assert spec.has_disk
    assert asked == [(256 << 20, 32 << 20)]
    assert torch.cuda.memory_reserved(device) <= reserved
    tiers.close()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(8, 64, device=device)
    with MemoryPlugin("3GiB", policy="all-swap", tier="host", module=model) as memory:
        for _ in range(4):
            with memory.step(batch):
                model(batch).sum().backward()
            optimizer.step()
        report = memory.report()
    assert len(asked) == 2
    assert report.optimizer_peak_bytes is not None
    assert report.optimizer_peak_bytes < torch.cuda.memory_allocated(device) + (32 << 20)


def test_links_are_measured_by_small_blocks_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it that little is free, or that less can be had than is free."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", "")
    asked: list[int] = []

    def measure(*args: Any, num_bytes: int, **keywords: Any) -> Any:
        asked.append(num_bytes)
        if num_bytes > 32 << 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure_device(*args, num_bytes=num_bytes, **keywords)

    monkeypatch.setattr("lightning_offload.plugins.devices.measure_device", measure)
    device = torch.device("cuda", torch.cuda.current_device())
    tiers = tiers_for(device)
    measure_spec(device, tiers, with_disk=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    measure_spec(device, tiers, with_disk=False)
    tiers.close()
    assert asked == [256 << 20, 32 << 20, 32 << 20]
