"""An emulated CUDA device in a CPU build of torch. Import this before torch; README.md says what is emulated.

`configure(mode, policy, seed)` chooses the schedule: "threads" (a thread for each stream, random delays), "lazy"
(nothing runs before the host waits; then streams get on in a seeded order: "random", "copies_last", "copies_first"),
"eager" (each launch at once). `take_races()` tells which accesses of two streams to the same bytes nothing orders.

What Python sees of CUDA is torch's own `torch.cuda`; what that calls in `torch._C`, and a CPU build has not, is here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

# Registered before torch's module starts: whoever first asks for CUDA's hooks keeps those that are there by then.
if "torch" in sys.modules:
    raise ImportError("import emulated_cuda before torch")


def _load() -> ctypes.CDLL:
    here = Path(__file__).resolve().parent
    if not (here / "libemulated_cuda.so").exists():
        raise ImportError(
            f"{here} holds no libemulated_cuda.so: run `make test-emulated`, or import from the folder it builds into"
        )
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    libraries = Path(spec.origin).parent / "lib"
    # The first must go before torch's: it answers for one of their functions.
    ctypes.CDLL(str(here / "libemulated_cuda_first.so"), mode=ctypes.RTLD_GLOBAL)
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(here / "libemulated_cuda.so"))


_C = _load()
for _name in ("configure", "resize_storage", "take_races", "num_syncs", "num_queued", "elapsed_time"):
    getattr(_C, f"emulated_{_name}").restype = ctypes.c_char_p
for _name in ("num_launched", "most_queued", "capacity"):
    getattr(_C, f"emulated_{_name}").restype = ctypes.c_int64
_C.emulated_configure.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64]
_C.emulated_resize_storage.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_C.emulated_host_register.argtypes = [ctypes.c_size_t, ctypes.c_uint64]
_C.emulated_host_unregister.argtypes = [ctypes.c_size_t]
_C.emulated_set_fraction.argtypes = [ctypes.c_int, ctypes.c_double]
_C.emulated_set_pin_limit.argtypes = [ctypes.c_int64]
_C.emulated_elapsed_time.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
_C.emulated_sleep.argtypes = [ctypes.c_int64]

import torch  # noqa: E402

# ---------------------------------------------------------------- what tests use


def configure(
    mode: str = "threads", policy: str = "random", seed: int = 0, compute_us: int = 0, copy_us: int = 0
) -> None:
    """Wait for all devices, and choose the schedule from here on.

    Args:
        mode: "threads", "lazy" or "eager".
        policy: Of "lazy": "random", "copies_last" or "copies_first".
        seed: Of the dice.
        compute_us: Of "threads": the most that a kernel is delayed.
        copy_us: Likewise, a copy between host and device.
    """
    if mode not in ("threads", "lazy", "eager") or policy not in ("random", "copies_last", "copies_first"):
        raise ValueError(f"no such schedule: {mode!r}, {policy!r}")
    error = _C.emulated_configure(mode.encode(), policy.encode(), seed, compute_us, copy_us).decode()
    if error:
        raise RuntimeError(error)


def take_races() -> list[str]:
    """Races since this was last asked; README.md says how to read one."""
    return _C.emulated_take_races().decode().splitlines()


def syncs() -> dict[str, int]:
    """Ops that had to block the host, and how often."""
    return {name: int(count) for name, count in _counts(_C.emulated_num_syncs())}


def queued() -> dict[tuple[int, int], int]:
    """Launches that have not run, of each stream: its device, and its id there."""
    return {(int(key) // 64, int(key) % 64): int(count) for key, count in _counts(_C.emulated_num_queued())}


def num_launched() -> int:
    """Launches so far."""
    return int(_C.emulated_num_launched())


def most_queued() -> int:
    """The most launches that a stream ever had in its queue."""
    return int(_C.emulated_most_queued())


def set_pin_limit(num_bytes: int) -> None:
    """Let cudaHostRegister refuse more than this in all."""
    _C.emulated_set_pin_limit(num_bytes)


def _counts(text: bytes) -> list[list[str]]:
    return [line.split("\t") for line in text.decode().splitlines()]


# ---------------------------------------------------------------- what torch.cuda asks of torch._C


class _Cudart:
    """The part of the runtime that torch.cuda.cudart() gives."""

    class cudaError(int):
        success = 0

    @staticmethod
    def cudaGetErrorString(error: int) -> str:
        texts = {
            2: "out of memory",
            712: "part or all of the requested memory range is already mapped",
            713: "pointer does not correspond to a registered memory region",
        }
        return texts.get(int(error), f"error {int(error)}")

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        return int(_C.emulated_host_register(address, size))

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return int(_C.emulated_host_unregister(address))

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:
        return torch._C._accelerator_getMemoryInfo(device)


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: torch.Event) -> float:
        milliseconds = ctypes.c_double()
        if not (self.event_id and end_event.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        error = _C.emulated_elapsed_time(self.event_id, end_event.event_id, ctypes.byref(milliseconds)).decode()
        if error:
            raise RuntimeError(error)
        return milliseconds.value

    @property
    def cuda_event(self) -> int:
        return self.event_id


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event


def _data(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _properties(index: int) -> Any:
    return types.SimpleNamespace(
        name="Emulated CUDA", total_memory=int(_C.emulated_capacity(index)), major=8, minor=0, multi_processor_count=1,
        uuid=f"emulated-{index}", is_integrated=0, is_multi_gpu_board=0, L2_cache_size=1 << 20, warp_size=32,
        gcnArchName="", max_threads_per_multi_processor=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, pci_bus_id=index, pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def _set_fraction(fraction: float, device: int) -> None:
    _fractions[device] = fraction
    _C.emulated_set_fraction(device, fraction)


_fractions: dict[int, float] = {}


def _default_generator(index: int) -> torch.Generator:
    _C.emulated_give_default_generator(1)
    try:
        return torch.Generator(torch.device("cuda", index))
    finally:
        _C.emulated_give_default_generator(0)


def _install() -> None:
    core, cuda = torch._C, torch.cuda
    count = int(_C.emulated_num_devices())
    present: dict[str, Any] = {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_getDevice": core._accelerator_getDeviceIndex,
        "_cuda_setDevice": core._accelerator_setDeviceIndex,
        "_cuda_exchangeDevice": core._accelerator_exchangeDevice,
        "_cuda_maybeExchangeDevice": core._accelerator_maybeExchangeDevice,
        "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
        "_cuda_getArchFlags": lambda: "sm_80",
        "_cuda_synchronize": lambda: core._accelerator_synchronizeDevice(core._accelerator_getDeviceIndex()),
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": lambda cycles: _C.emulated_sleep(cycles),  # torch._dynamo wants to hash what is in torch._C
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentStream": lambda index: _data(core._accelerator_getStream(index)),
        "_cuda_getCurrentRawStream": lambda index: core._accelerator_getStream(index).stream_id,
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": lambda stream_id, device_index, device_type: core._accelerator_setStream(
            torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        ),
        "_cuda_emptyCache": core._accelerator_emptyCache,
        "_cuda_memoryStats": core._accelerator_getDeviceStats,
        "_cuda_resetPeakMemoryStats": core._accelerator_resetPeakStats,
        "_cuda_resetAccumulatedMemoryStats": core._accelerator_resetAccumulatedStats,
        "_cuda_setMemoryFraction": _set_fraction,
        "_cuda_getMemoryFraction": lambda device: _fractions.get(device, 1.0),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_clearCublasWorkspaces": lambda: _C.emulated_clear_workspaces(),  # dynamo hashes functions
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
    }
    for name, value in present.items():
        setattr(core, name, value)
    replaced: dict[str, Any] = {  # what torch.cuda looked up in torch._C when it was imported
        "_cudart": _Cudart,
        "_initialized": True,
        "_exchange_device": core._cuda_exchangeDevice,
        "_maybe_exchange_device": core._cuda_maybeExchangeDevice,
        "_get_device_properties": _properties,
        "_device_count_nvml": lambda: count,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "default_generators": tuple(_default_generator(index) for index in range(count)),
        "Stream": Stream,
        "Event": Event,
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.graphs.is_current_stream_capturing = replaced["is_current_stream_capturing"]

    # torch.UntypedStorage(n, device="cuda") is compiled for CUDA builds alone.
    base_new = core.StorageBase.__new__

    def new_storage(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            size = args[0] if args else kwargs.get("size", 0)
            with torch._C._DisableTorchDispatch():
                return torch.empty(int(size), dtype=torch.uint8, device=device).untyped_storage()
        return base_new(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new_storage

    # Likewise its resize_.
    base_resize = core.StorageBase.resize_

    def resize_storage(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return base_resize(storage, size)
        error = _C.emulated_resize_storage(storage._cdata, size).decode()
        if error:
            raise (torch.OutOfMemoryError if "out of memory" in error else RuntimeError)(error)
        return storage

    torch.UntypedStorage.resize_ = resize_storage

    if os.environ.get("EMULATED_CUDA_REPORT"):
        import atexit

        atexit.register(_report)


def _report() -> None:
    for race in take_races():
        sys.stderr.write(f"emulated CUDA: {race}\n")


_install()
