"""What the runtime owes its callers on a device with streams, where only the emulated one is late enough to tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.stream_lanes import StreamLanes

emulated = pytest.importorskip("emulated_cuda", reason="needs the emulated device: make test-emulated")

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices: EMULATED_CUDA_DEVICES=2")
NUM_BYTES = 4096


@pytest.fixture(autouse=True)
def copies_last() -> Iterator[None]:
    """Copies run as late as they may."""
    emulated.configure("lazy", "copies_last")
    yield
    emulated.configure("lazy")


@pytest.fixture
def current_device() -> Iterator[None]:
    """The first device is the current one, before and after."""
    torch.cuda.set_device(0)
    yield
    torch.cuda.synchronize(1)
    torch.cuda.set_device(0)


def ends(device: str) -> tuple[torch.UntypedStorage, torch.Tensor]:
    """Device memory, and as much page-locked host memory."""
    storage = torch.ones(NUM_BYTES, dtype=torch.uint8, device=device).untyped_storage()
    return storage, torch.empty(NUM_BYTES, dtype=torch.uint8).pin_memory()


def test_times_of_late_copies_are_told() -> None:
    """The events that time copies are reached after those that say the copies are done."""
    mover = StreamLanes(torch.device("cuda", 0))
    mover.measure(True)
    storage, host = ends("cuda:0")
    for _ in range(3):
        mover.to_host(mover.mark(), storage, 0, NUM_BYTES, host.data_ptr())
    early = mover.take_times()
    torch.cuda.synchronize()
    late = mover.take_times()
    assert early.out_bytes + late.out_bytes == 3 * NUM_BYTES
    assert early.out_seconds + late.out_seconds > 0


@TWO
@pytest.mark.usefixtures("current_device")
@pytest.mark.parametrize("what", ["streams", "mark", "on_stream", "to_host", "to_device", "wait"])
def test_the_current_device_stays_the_users(what: str) -> None:
    """Whatever is asked of another device's mover."""
    mover = StreamLanes(torch.device("cuda", 1))
    storage, host = ends("cuda:1")
    if what == "mark":
        mover.mark()
    if what == "on_stream":
        with mover.on_stream(mover.out_stream):
            pass
    if what == "to_host":
        mover.to_host(mover.mark(), storage, 0, NUM_BYTES, host.data_ptr())
    if what in ("to_device", "wait"):
        copy = mover.to_device(mover.mark(), storage, 0, NUM_BYTES, host.data_ptr())
        if what == "wait":
            copy.wait()
    assert torch.cuda.current_device() == 0
    mover.drain()


def losses_of(memory: MemoryPlugin | None) -> list[torch.Tensor]:
    """Train a model on the second device while the first is current; the device must be current after each part."""
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())]).to("cuda:1")
    losses = []
    for step in range(6):
        x = torch.full((32, 64), float(step), device="cuda:1")
        if memory is None:
            loss = functional.mse_loss(model(x), x)
            loss.backward()
        else:
            with memory.step(x):
                hidden = model(x)
                assert torch.cuda.current_device() == 0, "after forward"
                loss = functional.mse_loss(hidden, x)
                loss.backward()
            assert torch.cuda.current_device() == 0, "after backward"
        losses.append(loss.detach().cpu())
    return losses


@TWO
@pytest.mark.usefixtures("current_device")
def test_training_on_another_than_the_current_device() -> None:
    """The same losses as plain training, and the current device stays."""
    plain = losses_of(None)
    with MemoryPlugin(budget=None, policy="all-swap", device="cuda:1") as memory:
        found = losses_of(memory)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.fixture
def few_page_locks() -> Iterator[None]:
    """The host page-locks 33 MiB in all: what copies pass through, and nothing that they go to."""
    emulated.set_pin_limit(33 << 20)
    yield
    emulated.set_pin_limit(1 << 40)


def swapping_losses(memory: MemoryPlugin | None, num_steps: int, blocking: list[int]) -> list[torch.Tensor]:
    """Train a model whose saved tensors take several chunks each; notes how often each step blocked the host."""
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(2) for part in (nn.Linear(256, 256), nn.Tanh())]).to("cuda")
    losses = []
    for step in range(num_steps):
        x = torch.full((34 << 10, 256), 0.1 * step, device="cuda")
        with memory.step(x) if memory is not None else contextlib.nullcontext():
            before = sum(emulated.syncs().values())
            loss = functional.mse_loss(model(x), x)
            loss.backward()
            blocking.append(sum(emulated.syncs().values()) - before)
        losses.append(loss.detach().cpu())
        for weight in model.parameters():
            assert weight.grad is not None
            losses.append(weight.grad.clone().cpu())
    return losses


@pytest.mark.usefixtures("few_page_locks")
@pytest.mark.parametrize("schedule", ["lazy random", "lazy copies_last", "lazy copies_first", "threads random"])
def test_memory_that_is_not_page_locked_is_reached_through_chunks(schedule: str) -> None:
    """The same bits, and no copy for which the thread that computes stands by."""
    mode, policy = schedule.split()
    emulated.configure(mode, policy, 1, *((100, 300) if mode == "threads" else ()))
    blocking: list[int] = []
    plain = swapping_losses(None, 6, [])
    with MemoryPlugin(policy="all-swap", tier="host", budget="2GiB") as memory:
        found = swapping_losses(memory, 6, blocking)
        report = memory.report()
        assert memory._steps.hardware is not None
        assert memory._steps.hardware.tiers.host.is_pinning_refused
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert report.phase == "planned"
    assert report.swapped_bytes > 0
    assert report.pinned_bytes == 0
    assert blocking[-1] == 0, blocking


def test_chunks_that_cannot_be_page_locked_do_as_well() -> None:
    """Nothing at all can be: slower, and right."""
    emulated.configure("lazy", "random", 3)
    plain = swapping_losses(None, 5, [])
    emulated.set_pin_limit(0)
    try:
        with MemoryPlugin(policy="all-swap", tier="host", budget="2GiB") as memory:
            found = swapping_losses(memory, 5, [])
    finally:
        emulated.set_pin_limit(1 << 40)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
