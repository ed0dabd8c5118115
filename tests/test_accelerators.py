"""The table of device kinds, and what is asked of a device."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_offload import MemoryPlugin, OffloadStrategy, UnsupportedError, accelerators, cli
from lightning_offload.accelerators import CUDA, HOST, KINDS, ROCM, Allocated, DeviceKind, DeviceMemory
from lightning_offload.fabric import OffloadStrategy as FabricStrategy
from lightning_offload.plugins.devices import supported
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from lightning_offload.transformers import OffloadCallback
from lightning_offload.tuning.function import find_efficient_batch_size
from tests.gpu.device import IS_EMULATED

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
STRANGERS = [torch.device(name) for name in ("xpu", "mps", "meta")]


# ---- the table


def test_the_table() -> None:
    """A row for each kind that the package runs on, and what each can do."""
    assert [(name, kind.type) for name, kind in KINDS.items()] == [("cpu", "cpu"), ("cuda", "cuda")]
    able = {name for name, value in dataclasses.asdict(CUDA).items() if value is True}
    assert able == {
        "has_streams", "counts_memory", "pins_mappings", "captures_graphs", "can_be_held", "has_cudnn", "has_nvml",
        "runs_core",
    }  # fmt: skip
    assert (CUDA.block_bytes, "expandable_segments:True" in CUDA.advice) == (512, True)
    assert DeviceKind(type="cpu", runs_core=True) == HOST
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


# ---- where devices are named


def fabric_follows(device: torch.device) -> None:
    """Fabric gives its strategy a device, and then a model that is there."""
    strategy = FabricStrategy("1GiB")
    strategy.parallel_devices = [device]
    strategy._memory.follow(torch.nn.Linear(2, 2), device=strategy.root_device)


def transformers_trains(device: torch.device) -> None:
    """The callback is told of the device when a training begins."""
    told = types.SimpleNamespace(device=device, n_gpu=0, deepspeed=None, fsdp=None, torch_compile=False)
    state = types.SimpleNamespace(stateful_callbacks={})
    OffloadCallback("1GiB").on_train_begin(told, state, None, torch.nn.Linear(2, 2))


def tuner_tries(device: torch.device) -> None:
    """A training function that is tuned names it: no size would make it fit."""

    def train(batch_size: int) -> None:
        MemoryPlugin("1GiB", device=device)

    find_efficient_batch_size(train, 4, max_size=8)()


ENTRANCES: list[Callable[[torch.device], object]] = [
    supported,
    lambda device: MemoryPlugin("1GiB", device=device),
    lambda device: MemoryPlugin("1GiB", device=str(device)),
    lambda device: MemoryPlugin("1GiB").attach(torch.nn.Linear(2, 2), device),
    lambda device: ModuleMemoryPlugin("1GiB").follow(torch.nn.Linear(2, 2), device=device),
    fabric_follows,
    transformers_trains,
    tuner_tries,
]


@pytest.mark.parametrize("device", STRANGERS, ids=str)
@pytest.mark.parametrize("enter", ENTRANCES)
def test_the_one_error(enter: Callable[[torch.device], object], device: torch.device) -> None:
    """It names the device and what may be used, wherever a device is given."""
    with pytest.raises(UnsupportedError, match=f"^device '{device}' is not supported: use 'cpu' or 'cuda'$"):
        enter(device)


def test_a_step_on_another_kind_of_device() -> None:
    """Where no device is given, that of the model or of the inputs is looked at."""
    module = torch.nn.Linear(2, 2, device="meta")
    with (
        MemoryPlugin("1GiB", module=module) as memory,
        pytest.raises(UnsupportedError, match="'meta' is not supported: use 'cpu' or 'cuda'"),
        memory.step(torch.ones(2)),
    ):
        pytest.fail("the step began")


@pytest.mark.parametrize("device", STRANGERS, ids=str)
def test_lightning_and_the_commands_say_what_to_do(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """In their own words: the keyword of the Trainer, and one line."""
    strategy = OffloadStrategy("1GiB")
    with pytest.raises(UnsupportedError, match=f"the device '{device}' yet, only cpu and cuda: pass accelerator='cpu'"):
        strategy.parallel_devices = [device]
    assert cli.run(["bench-links", "--device", str(device)]) == 2
    assert capsys.readouterr().err == (
        f"lightning-offload: error: device '{device}' is not supported: use 'cpu' or 'cuda'\n"
    )


NAMED = {
    "accelerators.py": "the table",
    "capture/cuda/programs.py": "programs that name CUDA are recorded on fake CPU tensors",
    "capture/recorder.py": "which ops are exact again is known for CPUs and for CUDA: tensors/op_facts.py",
    "capture/spec_cache.py": "a CPU's rates depend on its threads, others' on a driver",
    "capture/workspace.py": "torch's profiler reports what a CPU's ops allocate",
    "cli/links.py": "a CPU is always there",
    "graph/catalog.py": "data",
    "planning/links.py": "data: the kind that a spec has",
    "planning/planner.py": "data: the kind that a spec has",
    "plugins/fake.py": "which kernels a step calls is known for CUDA: capture/cuda",
    "plugins/devices.py": "inputs on an accelerator come before those on a CPU",
    "plugins/replanning.py": "data: the kind that a spec has",
    "runtime/environment.py": "flags of torch's backends",
    "runtime/materialize.py": "fake tensors are on a CPU",
    "runtime/tracking.py": "which ops are exact again is known for CPUs and for CUDA: tensors/op_facts.py",
    "tensors/op_facts.py": "which ops are exact again is known for CPUs and for CUDA",
    "tuning/snapshot.py": "parts of torch by name; host memory is compared",
}
"""The files that ask by a kind's name, each with its reason."""


def test_nobody_else_asks_by_name() -> None:
    """No other file has the name of an accelerator, or compares with that of the CPU."""
    package = Path(accelerators.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in ("cuda", "xpu", "mps", "hip"):
                found.add(path.relative_to(package).as_posix())
            if isinstance(node, ast.Compare):
                parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
                if any(isinstance(part, ast.Constant) and part.value == "cpu" for part in parts):
                    found.add(path.relative_to(package).as_posix())
    assert found == set(NAMED)


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


def test_whether_a_graph_is_captured_is_asked_directly_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is not, or where torch has no such function, by way of who asks first whether it is."""
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    assert accelerators.capture_query(GPU) is accelerators.is_capturing
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert accelerators.capture_query(GPU) is torch._C._cuda_isCurrentStreamCapturing
    assert accelerators.capture_query(CPU) is accelerators.is_capturing
    monkeypatch.delattr(torch._C, "_cuda_isCurrentStreamCapturing")
    assert accelerators.capture_query(GPU) is accelerators.is_capturing


_ASKING = """
import torch
from lightning_offload import accelerators
torch.cuda._lazy_init = torch.cuda.init = None  # calling it would fail
found = accelerators.device_in_use(), accelerators.memory_in_use(), accelerators.is_capturing()
print(found, len(accelerators.generators_in_use()), torch.cuda.is_initialized())
memory = accelerators.memory_of(torch.device("cuda", 0))
print(memory.read(), memory.now() == accelerators.Allocated(), memory.num_retries(), torch.cuda.is_initialized())
"""


@pytest.mark.skipif(IS_EMULATED, reason="the emulated device is in use once it is imported")
def test_asking_begins_nothing() -> None:
    """What is in use, what was allocated, whether there is a capture: none of it initialises CUDA."""
    done = subprocess.run([sys.executable, "-c", _ASKING], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["(None, None, False) 1 False", "(0, 0) True 0 False"]


@pytest.mark.parametrize(("milliseconds", "hertz"), [(10.0, 2e9), (0.0, 4e9), (1e6, 1e8)])
def test_a_device_is_held_for_no_longer_than_its_clock_can_be_wrong(
    monkeypatch: pytest.MonkeyPatch, milliseconds: float, hertz: float
) -> None:
    """However long a measured nap took, what is asked for is within what clocks of devices are."""
    slept: list[int] = []
    event = types.SimpleNamespace(record=lambda stream: None, elapsed_time=lambda other: milliseconds)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch, "Event", lambda *_, **__: event)
    for name in ("synchronize", "current_stream", "set_device_index"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    accelerators._cycles_a_second.cache_clear()
    try:
        accelerators.hold(GPU, 0.01)
        accelerators.hold(CPU, 0.01)
    finally:
        accelerators._cycles_a_second.cache_clear()
    assert slept[-1] == pytest.approx(0.01 * hertz)
    assert len(slept) == 4  # three to measure, one to hold


# ---- which of several devices is meant


def test_cpu_has_no_index() -> None:
    """However a CPU is named, it is the device that tensors on it name."""
    for name in ("cpu", "cpu:0"):
        assert accelerators.indexed(torch.device(name)) == torch.ones(1).device == CPU


def test_an_index_stays() -> None:
    """A device that is given with its index is that one; no accelerator is asked."""
    assert accelerators.indexed(GPU) == GPU


def test_an_accelerator_without_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index the current one of several devices is meant; other types than the machine's are left alone."""

    class Fake:
        @staticmethod
        def current_accelerator(*, check_available: bool) -> torch.device:
            assert check_available
            return torch.device("cuda")

        @staticmethod
        def current_device_index() -> int:
            return 3

    monkeypatch.setattr(torch, "accelerator", Fake)
    assert accelerators.indexed(torch.device("cuda")) == torch.device("cuda", 3)
    assert accelerators.indexed(torch.device("xpu")) == torch.device("xpu")
    assert accelerators.indexed(GPU) == GPU
