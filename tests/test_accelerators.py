"""The table of device kinds, and what is asked of a device."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from lightning_offload import accelerators
from lightning_offload.accelerators import CUDA, HOST, KINDS, ROCM, Allocated, DeviceKind, DeviceMemory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
STRANGERS = [torch.device(name) for name in ("xpu", "mps", "meta")]


# ---- the table


def test_the_table() -> None:
    """A row for each kind that the package runs on, and what each can do."""
    assert [(name, kind.type) for name, kind in KINDS.items()] == [("cpu", "cpu"), ("cuda", "cuda")]
    able = {name for name, value in dataclasses.asdict(CUDA).items() if value is True}
    assert able == {"has_streams", "counts_memory", "pins_mappings", "captures_graphs", "has_cudnn", "has_nvml"}
    assert (CUDA.block_bytes, "expandable_segments:True" in CUDA.advice) == (512, True)
    assert DeviceKind(type="cpu") == HOST
    assert accelerators.kind_of(CPU) is HOST
    assert accelerators.kind_of(GPU) is KINDS["cuda"]


def test_rocm_is_cuda_without_nvml() -> None:
    """Its devices have CUDA's name, and all that a row says but for NVML; which of both it is, torch's build tells."""
    assert dataclasses.replace(ROCM, has_nvml=True) == CUDA
    assert not ROCM.has_nvml
    assert KINDS["cuda"] is (ROCM if torch.version.hip else CUDA)


@pytest.mark.parametrize("device", STRANGERS, ids=str)
def test_a_kind_without_a_row_can_do_nothing(device: torch.device) -> None:
    """Nor is torch asked for anything of it."""
    assert accelerators.kind_of(device) == DeviceKind(type=device.type)
    assert accelerators.memory_of(device) is None
    assert (accelerators.name_of(device), accelerators.total_bytes_of(device)) == (device.type, None)
    assert accelerators.generator_of(device) is torch.default_generator
    accelerators.synchronize(device)


def test_the_host() -> None:
    """Its memory is the machine's, so it has no limit here, and nothing waits for it."""
    assert accelerators.memory_of(CPU) is None
    assert (accelerators.name_of(CPU), accelerators.total_bytes_of(CPU)) == ("cpu", None)
    assert accelerators.generator_of(CPU) is torch.default_generator
    accelerators.synchronize(CPU)


# ---- what is asked of a device


class FakeModule(types.SimpleNamespace):
    """What torch has of another kind of device, as far as it is asked for."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: 2,
            current_device=lambda: 1,
            default_generators=(torch.Generator(), torch.Generator()),
            get_device_name=lambda device: f"card {device.index}",
            get_device_properties=lambda device: types.SimpleNamespace(total_memory=80 << 30),
            **parts,
        )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """A kind of device that torch has and the table has not, until its row is put there, and nothing else."""
    module = FakeModule()
    before = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda of: module if torch.device(of).type == "xpu" else before(of))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setitem(KINDS, "xpu", DeviceKind(type="xpu", has_streams=True, counts_memory=True))
    return module


def test_a_row_is_all_that_a_kind_needs(card: FakeModule) -> None:
    """What is asked of such a device goes to torch's module of its kind."""
    first, second = torch.device("xpu", 0), torch.device("xpu", 1)
    assert accelerators.accelerators_here() == [first, second]
    assert accelerators.device_in_use() == second
    assert (accelerators.name_of(first), accelerators.total_bytes_of(first)) == ("card 0", 80 << 30)
    assert accelerators.generator_of(first) is card.default_generators[0]
    assert accelerators.generator_of(torch.device("xpu")) is card.default_generators[1]
    assert accelerators.generators_in_use() == [torch.default_generator, *card.default_generators]


def test_memory_is_that_of_one_device(card: FakeModule) -> None:
    """Each figure is the function of torch's that has it, called with the device at that moment."""
    second = torch.device("xpu", 1)
    memory = accelerators.memory_of(second)
    assert isinstance(memory, DeviceMemory)
    told: dict[str, Any] = {}

    def stats(device: torch.device) -> dict[str, Any]:
        assert device == second
        return told

    def tells(value: Any) -> Any:
        return lambda device: value if device == second else None

    resets: list[Any] = []
    card.memory_stats_as_nested_dict = stats
    card.memory_allocated, card.max_memory_allocated, card.memory_reserved = tells(1), tells(2), tells(3)
    card.mem_get_info = tells((4, 5))
    card.reset_peak_memory_stats, card.empty_cache = resets.append, lambda: resets.append("all")
    assert (memory.read(), memory.now(), memory.num_retries()) == ((0, 0), Allocated(), 0)
    told |= {
        "allocated_bytes": {"all": {"current": 10, "peak": 20}},
        "reserved_bytes": {"all": {"current": 30, "peak": 40}},
        "num_alloc_retries": 7,
    }
    assert memory.read() == (10, 20)
    assert memory.now() == Allocated(current_bytes=10, peak_bytes=20, reserved_bytes=30)
    assert memory.num_retries() == 7
    figures = (memory.allocated_bytes(), memory.peak_bytes(), memory.reserved_bytes(), memory.free_bytes())
    assert figures == (1, 2, 3, 4)
    memory.reset_peak()
    memory.give_back()
    assert resets == [second, "all"]


def test_a_device_that_was_not_used_yet(card: FakeModule) -> None:
    """Nothing is in use, though it is there; the CPU's generator always is."""
    card.is_initialized = lambda: False
    card.current_device = lambda: pytest.fail("which would begin to use it")
    assert len(accelerators.accelerators_here()) == 2
    assert accelerators.device_in_use() is None
    assert accelerators.memory_in_use() is None
    assert accelerators.generators_in_use() == [torch.default_generator]


def test_memory_in_use(card: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the current device, where its allocator counts."""
    card.memory_allocated = lambda device: 100 + device.index
    memory = accelerators.memory_in_use()
    assert memory is not None
    assert memory.allocated_bytes() == 101
    monkeypatch.setitem(KINDS, "xpu", DeviceKind(type="xpu"))
    assert accelerators.memory_in_use() is None


def test_captures_are_asked_for_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only of streams that can capture; torch's functions are looked up at each call."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not accelerators.is_capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert accelerators.is_capturing()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not accelerators.is_capturing()


_ASKING = """
import torch
from lightning_offload import accelerators
torch.cuda._lazy_init = torch.cuda.init = None  # calling it would fail
found = accelerators.device_in_use(), accelerators.memory_in_use(), accelerators.is_capturing()
print(found, len(accelerators.generators_in_use()), torch.cuda.is_initialized())
memory = accelerators.memory_of(torch.device("cuda", 0))
print(memory.read(), memory.now() == accelerators.Allocated(), memory.num_retries(), torch.cuda.is_initialized())
"""


def test_asking_begins_nothing() -> None:
    """What is in use, what was allocated, whether there is a capture: none of it initialises CUDA."""
    done = subprocess.run([sys.executable, "-c", _ASKING], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["(None, None, False) 1 False", "(0, 0) True 0 False"]
