"""Host memory is page-locked once for each slab, let go with it, and refused without harm."""

from __future__ import annotations

import gc
import logging
import mmap
from types import SimpleNamespace

import pytest
import torch

from lightning_offload.runtime import pinning
from lightning_offload.runtime import pinning as numa
from lightning_offload.runtime.host_pool import HostPool, Slab
from lightning_offload.runtime.pinning import CudaPinning, pinning_for

MIB = 1 << 20


class FakeRuntime:
    """Stands in for ``torch.cuda.cudart()``.

    Attributes:
        registered: Bytes by address.
        error: What registering returns.
    """

    def __init__(self, error: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1
        if not self.error:
            assert address not in self.registered
            self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """A CUDA runtime that registers memory."""
    made = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def cuda_pinning() -> CudaPinning:
    """Pinning for a device that errors need not be cleared on."""
    made = CudaPinning(torch.device("cuda", 0))
    made._device = torch.device("cpu")
    return made


def test_slabs_are_registered_with_their_exact_size_and_unregistered_when_trimmed(runtime: FakeRuntime) -> None:
    """The planned slab is page-locked as a whole, without rounding beyond a page, until it goes."""
    pool = HostPool(pinning=cuda_pinning())
    assert pool.prepare(5 * MIB + 1)
    assert list(runtime.registered.values()) == [5 * MIB + mmap.PAGESIZE]
    assert pool.pinned_bytes == pool.slab_bytes == 5 * MIB + mmap.PAGESIZE
    block = pool.allocate(MIB, at=MIB)
    assert block is not None
    assert block.is_pinned
    pool.trim()
    assert len(runtime.registered) == 1
    del block
    pool.trim()
    assert runtime.registered == {}
    assert pool.pinned_bytes == 0


def test_registration_ends_with_the_pool(runtime: FakeRuntime) -> None:
    """A pool that is dropped leaves nothing registered."""
    pool = HostPool(pinning=cuda_pinning())
    pool.prepare(MIB)
    del pool
    gc.collect()
    assert runtime.registered == {}


def test_refused_pinning_warns_once_and_goes_on_with_pageable_memory(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that cannot be page-locked is used all the same; the pool tells, so that links are measured again."""
    runtime.error = 2
    pool = HostPool(pinning=cuda_pinning())
    with caplog.at_level(logging.WARNING):
        blocks = [pool.allocate(5 * MIB) for _ in range(3)]
    assert all(block is not None and not block.is_pinned for block in blocks)
    assert pool.is_pinning_refused
    (record,) = caplog.records
    assert record.message.startswith(f"{5 * MIB} bytes of host memory could not be page-locked (CUDA error 2)")


def test_small_mappings_are_page_locked_after_a_refusal(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    """What copies pass through is, if it can be; that it cannot is said no second time."""
    runtime.error = 2
    made = cuda_pinning()
    with caplog.at_level(logging.WARNING):
        assert not Slab(5 * MIB, made).is_pinned
        assert not Slab(MIB, made, despite_refusal=True).is_pinned
        runtime.error = 0
        assert not Slab(5 * MIB, made).is_pinned
        chunk = Slab(MIB, made, despite_refusal=True)
    assert chunk.is_pinned
    assert list(runtime.registered.values()) == [MIB]
    assert len(caplog.records) == 1
    del chunk
    assert runtime.registered == {}


def test_a_cpu_needs_no_pinning() -> None:
    """Its own lanes copy by address."""
    assert not pinning_for(torch.device("cpu")).can_pin
    assert not HostPool().is_pinning_refused


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("-1\n", None), ("nonsense", None), (None, None)])
def test_node_is_read_from_the_bus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory, content: str | None, node: int | None
) -> None:
    """The kernel tells the memory node next to a device; without an answer there is none."""
    folder = tmp_path / "0000:4b:00.0"  # type: ignore[operator]
    folder.mkdir()
    if content is not None:
        (folder / "numa_node").write_text(content)
    (tmp_path / "node1").mkdir()  # type: ignore[operator]
    monkeypatch.setattr(numa, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert numa.node_of(torch.device("cuda", 0)) == node


def test_single_node_needs_no_binding(monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory) -> None:
    """With one node the device is not asked at all."""
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    assert numa.node_of(torch.device("cuda", 0)) is None


def test_memory_is_bound_where_the_kernel_allows_it() -> None:
    """Binding to the node that every machine has leaves the memory usable; a node that cannot be is refused."""
    memory = mmap.mmap(-1, MIB)
    address = pinning.torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert isinstance(numa.bind_memory(address, MIB, 0), bool)
    memory[:4] = b"used"
    assert memory[:4] == b"used"
    assert not numa.bind_memory(address, MIB, 64)
