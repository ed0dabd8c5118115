"""The kinds of devices and what each can do: the one place that tells them apart, and that asks torch about a device.

A :class:`DeviceKind` is a row of a table, plain data. Callers ask it for a capability and not for its name, so that
another kind of device is another row: :data:`KINDS`. A device whose kind has no row can do nothing; ``supported`` of
:mod:`~.plugins.devices` refuses it where it is named.

What is asked of a device goes to torch's module of its kind (``torch.cuda``), which has the same names for most kinds;
its functions are looked up at each call. Streams, events and the current device are ``torch.accelerator``'s to tell. It
knows no names of devices, no generators and no captures, and its figures of memory are flattened at each call, which
costs more than most ops.

Note [asking begins nothing]: the first use of a device takes some of its memory for a context, and forked children
cannot use what their parent began to use. So whoever is not given a device asks for the one *in use*, which is None
until something else has begun to use it.

Note [ROCm's devices are called "cuda"]: in a build of torch for ROCm (``torch.version.hip``) ``torch.cuda`` drives AMD
devices. It has the same functions, ``cudart().cudaHostRegister`` among them, which is HIP's. NVML is not there: what it
would tell is not known then. None of it has been run on such a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SLEPT_CYCLES = 20_000_000  # some 10 ms of a GPU
_LEAST_HERTZ, _MOST_HERTZ = 1e8, 4e9  # clocks of a GPU: whatever was measured, nothing is held for minutes
_EXPANDABLE = "where reserved is well above allocated, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """What all devices of a kind can do; by default nothing.

    Attributes:
        type: What torch calls it, e.g. "cuda".
        has_streams: It has memory of its own, runs what it is asked for later and in the order of streams, has events
            that keep time, and copies by itself, beside its ops. Without that, ops are done when they return, memory is
            the host's, and its threads copy.
        counts_memory: Its allocator counts what is alive, the peak since that was reset, and what it holds from the
            device. Without that, the tensors that ops make are counted (:mod:`~.capture.live`).
        block_bytes: What its allocator rounds sizes up to a multiple of. Of a large block it may hand out up to 1 MiB
            more, which depends on what was freed before: that is measured.
        pins_mappings: Host memory that we mapped can be page-locked for it, by ``cudart().cudaHostRegister``.
        captures_graphs: What is asked of a stream can go into a graph, and is not run then.
        can_be_held: It can be made to do nothing for a while, in the order of a stream: :func:`hold`.
        has_cudnn: ``torch.backends.cudnn`` chooses its algorithms.
        has_nvml: NVML tells of its links to others.
        runs_core: The native core was tried on it.
        advice: What helps where its allocator holds far more than is alive; "" for nothing.
    """

    type: str
    has_streams: bool = False
    counts_memory: bool = False
    block_bytes: int = 1
    pins_mappings: bool = False
    captures_graphs: bool = False
    can_be_held: bool = False
    has_cudnn: bool = False
    has_nvml: bool = False
    runs_core: bool = False
    advice: str = ""


HOST = DeviceKind(type="cpu", runs_core=True)
CUDA = DeviceKind(
    type="cuda",
    has_streams=True,
    counts_memory=True,
    block_bytes=512,
    pins_mappings=True,
    captures_graphs=True,
    can_be_held=True,
    has_cudnn=True,
    has_nvml=True,
    runs_core=True,
    advice=_EXPANDABLE,
)
ROCM = dataclasses.replace(CUDA, has_nvml=False)
"""Untested: Note [ROCm's devices are called "cuda"]. ``torch.backends.cudnn`` is MIOpen there."""

KINDS = {kind.type: kind for kind in (HOST, ROCM if torch.version.hip else CUDA)}
"""The kinds of devices that the package runs on, by torch's name."""


def kind_of(device: torch.device) -> DeviceKind:
    """What a device can do; nothing where its kind has no row."""
    return KINDS.get(device.type) or DeviceKind(type=device.type)


# ---- one device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """What an allocator holds.

    Attributes:
        current_bytes: Alive now.
        peak_bytes: Alive at most, since that was last reset.
        reserved_bytes: Had from the device, in use or not.
    """

    current_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0


class DeviceMemory:
    """The memory of one device, as its allocator counts it.

    Args:
        device: A device of a kind that counts: see :func:`memory_of`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch: Any = _module(device)  # its functions are looked up at each call

    def allocated_bytes(self) -> int:
        """Alive now."""
        return int(self._torch.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        """Alive at most, since that was last reset."""
        return int(self._torch.max_memory_allocated(self._device))

    def reserved_bytes(self) -> int:
        """Had from the device, in use or not."""
        return int(self._torch.memory_reserved(self._device))

    def free_bytes(self) -> int:
        """What the device could still give to any process. Begins to use the device."""
        return int(self._torch.mem_get_info(self._device)[0])

    def now(self) -> Allocated:
        """All three figures of one moment; zeros before the device was first used."""
        stats = self._stats()
        if not stats:
            return Allocated()
        allocated = stats["allocated_bytes"]["all"]
        return Allocated(
            current_bytes=allocated["current"],
            peak_bytes=allocated["peak"],
            reserved_bytes=stats["reserved_bytes"]["all"]["current"],
        )

    def read(self) -> tuple[int, int]:
        """Bytes alive now, and at most since the last reset; zeros before the device was first used."""
        allocated = self._stats().get("allocated_bytes")
        return (allocated["all"]["current"], allocated["all"]["peak"]) if allocated else (0, 0)

    def num_retries(self) -> int:
        """How often the allocator has given its reserve back to go on."""
        return int(self._stats().get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        """Let the peak be what is alive now."""
        self._torch.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        """Give what is not in use back, on all devices of the kind."""
        self._torch.empty_cache()

    def _stats(self) -> dict[str, Any]:
        # As a nested dict: flattening it, as memory_stats() does, costs more than most ops.
        stats: dict[str, Any] = self._torch.memory_stats_as_nested_dict(self._device)
        return stats


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device; None where its allocator does not count."""
    return DeviceMemory(device) if kind_of(device).counts_memory else None


def name_of(device: torch.device) -> str:
    """What the device is called, e.g. "NVIDIA H200"; its type where it has no name."""
    return str(_module(device).get_device_name(device)) if _is_accelerator(device) else device.type


def total_bytes_of(device: torch.device) -> int | None:
    """All memory of the device; None for a CPU, whose memory is the host's."""
    return int(properties_of(device).total_memory) if _is_accelerator(device) else None


def properties_of(device: torch.device) -> Any:
    """What torch tells of an accelerator: among others its ``uuid``, and mostly its place on the PCI bus."""
    return _module(device).get_device_properties(device)


def synchronize(device: torch.device) -> None:
    """Block until a device has done all that it was asked for; a CPU has."""
    if kind_of(device).has_streams:
        torch.accelerator.synchronize(device)


def hold(device: torch.device, seconds: float) -> None:
    """Have the current stream of a device do nothing for about so long, while the host goes on to ask for more.

    Without an effect where the device cannot be held, and while its stream is captured.
    """
    if not kind_of(device).can_be_held or is_capturing():
        return
    with _as_current(device):
        _module(device)._sleep(int(seconds * _cycles_a_second(device)))


@functools.cache
def _cycles_a_second(device: torch.device) -> float:
    """How far the clock that ``_sleep`` counts by comes in a second. Waits for the device."""
    torch.accelerator.synchronize(device)
    stream, marks = torch.accelerator.current_stream(device), []
    for num_cycles in (_SLEPT_CYCLES, 0, _SLEPT_CYCLES):  # in the first an idle device comes to its full speed
        _module(device)._sleep(num_cycles)
        marks.append(torch.Event(device, enable_timing=True))
        marks[-1].record(stream)
    torch.accelerator.synchronize(device)
    found = _SLEPT_CYCLES / max(1e-6, marks[1].elapsed_time(marks[2]) * 1e-3)
    return min(max(found, _LEAST_HERTZ), _MOST_HERTZ)  # whatever was measured, nothing is held for minutes


@contextlib.contextmanager
def _as_current(device: torch.device) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    if device.index in (None, before):
        yield
        return
    torch.accelerator.set_device_index(device)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def indexed(device: torch.device) -> torch.device:
    """The device as the tensors on it name it: "cuda" is the current one of several, a CPU has no index."""
    if device.type == HOST.type:
        return torch.device(HOST.type)
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device.index is None else None
    if accelerator is None or accelerator.type != device.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that random ops on a device draw from by default; the CPU's where its kind has no row."""
    if not _is_accelerator(device):
        return torch.default_generator
    module = _module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator


# ---- whatever device there is


def accelerators_here() -> list[torch.device]:
    """All accelerators of this machine that the package runs on, in torch's order."""
    found = []
    for kind in _accelerator_kinds():
        module = torch.get_device_module(kind.type)
        if module.is_available():
            found += [torch.device(kind.type, index) for index in range(module.device_count())]
    return found


def device_in_use() -> torch.device | None:
    """The accelerator that is this thread's current one; None until one was used: Note [asking begins nothing]."""
    for kind in _accelerator_kinds():
        module = torch.get_device_module(kind.type)
        if module.is_initialized():
            return torch.device(kind.type, module.current_device())
    return None


def memory_in_use() -> DeviceMemory | None:
    """The memory of :func:`device_in_use`; None where there is none, or its allocator does not count."""
    device = device_in_use()
    return memory_of(device) if device is not None else None


def generators_in_use() -> list[torch.Generator]:
    """The default generators of the CPU, and of all accelerators once one was used."""
    device = device_in_use()
    return [torch.default_generator, *(_module(device).default_generators if device is not None else ())]


def is_capturing() -> bool:
    """Whether what this thread asks of its device goes into a graph and is not run: nothing may be waited for."""
    return any(module.is_initialized() and module.is_current_stream_capturing() for module in _CAPTURING)


def capture_query(device: torch.device) -> Callable[[], bool]:
    """What :func:`is_capturing` tells, for a device, in less time: it is asked at each op."""
    directly: Callable[[], bool] | None = getattr(torch._C, f"_{device.type}_isCurrentStreamCapturing", None)
    is_in_use = _is_accelerator(device) and _module(device).is_initialized()
    return directly if directly is not None and is_in_use else is_capturing


def _is_accelerator(device: torch.device) -> bool:
    return device.type in KINDS and device.type != HOST.type


def _accelerator_kinds() -> list[DeviceKind]:
    return [kind for kind in KINDS.values() if kind.type != HOST.type]


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


_CAPTURING = [torch.get_device_module(kind.type) for kind in KINDS.values() if kind.captures_graphs]
