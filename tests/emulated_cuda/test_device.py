"""The emulated device itself, without the runtime: it does what CUDA does where that matters to programs of streams."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

emulated = pytest.importorskip("emulated_cuda", reason="needs the emulated device: make test-emulated")

MIB = 1 << 20
SCHEDULES = (("eager",), ("threads", "random", 0, 300, 300), ("lazy", "random", 1), ("lazy", "copies_last", 2))
pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = kind(32, 24, num_layers=2, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, groups=16), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (8, 32)),
    "convolutional": (convolutional, (8, 3, 16, 16)),
    "transformer": (Transformer, (8, 12, 32)),
    "lstm": (lambda: Recurrent(nn.LSTM), (8, 6, 32)),
    "gru": (lambda: Recurrent(nn.GRU), (8, 6, 32)),
}


def losses_of(name: str, *, device: str = "cuda", dtype: torch.dtype | None = None) -> tuple[float, ...]:
    """Losses of a few steps of training."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    losses = []
    for step in range(3):
        dice = torch.Generator().manual_seed(step)
        x, y = torch.randn(shape, generator=dice).to(device), torch.randint(0, 10, shape[:1], generator=dice).to(device)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


@pytest.fixture(autouse=True)
def lazy() -> Iterator[None]:
    """Nothing runs before the host waits."""
    emulated.configure("lazy")
    yield
    torch.cuda.synchronize()
    emulated.configure("lazy")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_schedule_gives_the_same_bits(name: str, dtype: torch.dtype | None) -> None:
    """Plain training does not depend on when kernels run."""
    found = set()
    for schedule in SCHEDULES:
        emulated.configure(*schedule)
        found.add(losses_of(name, dtype=dtype))
    assert len(found) == 1, found


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrences_are_those_of_the_cpu(name: str) -> None:
    """Their kernels are made of other ops."""
    assert losses_of(name) == pytest.approx(losses_of(name, device="cpu"), abs=1e-5)


def test_complex_numbers_and_evaluation_are_those_of_the_cpu() -> None:
    """Views of complex numbers are views, and batch norm in evaluation makes no statistics that anybody reads."""
    norm, x = nn.BatchNorm1d(4).eval(), torch.randn(6, 4)

    def turned(x: torch.Tensor) -> torch.Tensor:
        value = torch.view_as_complex(x.view(6, 2, 2))
        parts = torch.view_as_real(value * 1j)
        assert parts.shape == (6, 2, 2)
        assert torch.view_as_real(value).data_ptr() == x.data_ptr()
        return parts

    assert torch.equal(turned(x.cuda()).cpu(), turned(x))
    assert torch.equal(norm.cuda()(x.cuda()).cpu(), norm.cpu()(x))


def test_launches_are_queued_and_events_late() -> None:
    """Nothing has run until the host waits, and no time between events is known before."""
    a = torch.randn(64, 64, device="cuda")
    torch.cuda.synchronize()
    b = a
    for _ in range(10):
        b = b @ a
    assert emulated.queued()[0, 0] >= 10
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    after.record()
    with pytest.raises(RuntimeError, match="not ready"):
        before.elapsed_time(after)
    after.synchronize()
    assert before.elapsed_time(after) >= 0
    assert emulated.queued()[0, 0] == 0


def test_a_copy_that_does_not_wait_is_a_race() -> None:
    """With the kernel that writes what it reads; not if the host has waited for that."""
    pinned, side = torch.empty(1000).pin_memory(), torch.cuda.Stream()
    source = torch.arange(1000.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        pinned.copy_(source, non_blocking=True)
    assert not emulated.take_races()
    side.synchronize()
    assert pinned[999] == 999
    changed = source * 2
    with torch.cuda.stream(side):
        pinned.copy_(changed, non_blocking=True)
    races = emulated.take_races()
    assert any("aten::mul" in race and "copy to host" in race for race in races), races


def test_memory_freed_under_a_copy_is_a_race() -> None:
    """The stream that it belongs to may write there from then on."""
    pinned, side = torch.empty(1000).pin_memory(), torch.cuda.Stream()
    changed = torch.arange(1000.0, device="cuda") * 3
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pinned.copy_(changed, non_blocking=True)
    assert not emulated.take_races()
    del changed
    assert any("use after free" in race for race in emulated.take_races())


def test_memory_is_that_of_the_caching_allocator() -> None:
    """Rounding, segments, splitting, remainders, and a retry before it runs out."""
    torch.cuda.empty_cache()
    start = torch.cuda.memory_stats()
    allocated, reserved, retries = (
        start[name] for name in ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries")
    )
    requested = start["requested_bytes.all.current"]
    large = torch.empty(11 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == reserved + 12 * MIB
    assert torch.cuda.memory_allocated() == allocated + 12 * MIB, "a remainder of 1 MiB or less belongs to the block"
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == requested + 11 * MIB
    del large
    small = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == reserved + 12 * MIB, "cut from the block of 12 MiB"
    tiny = torch.empty(1000, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == allocated + 3 * MIB + 1024
    del small, tiny
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.mem_get_info(0) == (total - reserved, total)
    torch.cuda.set_per_process_memory_fraction((reserved + 64 * MIB) / total, 0)
    try:
        kept = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        kept.pop()
        kept.append(torch.empty(22 * MIB, dtype=torch.uint8, device="cuda"))
        assert torch.cuda.memory_stats()["num_alloc_retries"] == retries + 1
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 20\.00 MiB"):
            torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_the_host_cannot_read_device_memory() -> None:
    """A process that tries is ended."""
    address = torch.ones(4, device="cuda").data_ptr()
    pid = os.fork()
    if pid == 0:
        ctypes.string_at(address, 4)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] & 127, "the host has read device memory"


def test_pinning_can_be_refused_and_must_outlive_its_copies() -> None:
    """Memory that stops being page-locked under a copy is reported."""
    host = (ctypes.c_char * 8192)()
    cudart, address = torch.cuda.cudart(), ctypes.addressof(host)
    emulated.set_pin_limit(4096)
    try:
        assert int(cudart.cudaHostRegister(address, 8192, 0)) == 2
    finally:
        emulated.set_pin_limit(1 << 40)
    assert int(cudart.cudaHostRegister(address, 8192, 0)) == 0
    assert int(cudart.cudaHostRegister(address, 8192, 0)) == 712
    source = torch.ones(2048, device="cuda")
    torch.frombuffer(host, dtype=torch.float32).copy_(source, non_blocking=True)
    assert int(cudart.cudaHostUnregister(address)) == 0
    assert any("stops being page-locked" in race for race in emulated.take_races())
    torch.cuda.synchronize()
    assert int(cudart.cudaHostUnregister(address)) == 713


def test_pageable_copies_block_the_host() -> None:
    """And are counted."""
    before = emulated.syncs().get("copy to pageable memory", 0)
    source = torch.ones(4, device="cuda")
    assert torch.empty(4).copy_(source, non_blocking=True).sum() == 4
    assert emulated.syncs()["copy to pageable memory"] == before + 1


@pytest.mark.parametrize(
    "call", [torch.cuda.set_device, lambda device: torch.cuda.set_per_process_memory_fraction(0.5, device)]
)
def test_a_device_without_an_index_is_refused(call: Callable[[torch.device], None]) -> None:
    """As torch.cuda does on CUDA."""
    with pytest.raises(ValueError, match="specified index"):
        call(torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices: EMULATED_CUDA_DEVICES=2")
def test_two_devices_are_apart() -> None:
    """Each has its memory, streams and events; one of them is the current one."""
    x = torch.ones(8, device="cuda:1")
    assert (x.device.index, torch.cuda.current_device()) == (1, 0)
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.empty(2, device="cuda").device.index == 1
        stream = torch.cuda.Stream()
    assert (stream.device.index, torch.cuda.current_device()) == (1, 0)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(8, device="cuda:0")
    torch.cuda.synchronize(1)
    with torch.cuda.stream(stream):
        assert (torch.cuda.current_device(), torch.cuda.current_stream(1)) == (1, stream)
    assert (torch.cuda.current_device(), torch.cuda.current_stream(1).stream_id) == (0, 0)
    torch.accelerator.set_stream(stream)
    assert torch.cuda.current_device() == 1, "torch.accelerator.set_stream changes the device"
    torch.accelerator.set_stream(torch.cuda.default_stream(1))
    torch.cuda.set_device(0)
    moved = (x * 2).to("cuda:0") + 1
    assert moved.device.index == 0
    assert moved.sum() == 24
    assert torch.cuda.memory_allocated(1) > 0
    event = torch.cuda.Event()
    event.record(stream)
    with pytest.raises(RuntimeError, match="does not match"):
        event.record(torch.cuda.default_stream(0))
