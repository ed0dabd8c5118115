"""Measures the links of a device: how fast bytes leave it and come back.

Method: a block larger than the caches leaves through the very lanes that the runtime uses, and comes back to
memory allocated anew, as in a step (on a CPU the first touch of new pages costs more than the copy); the best of
a few is the link's rate, what the others lack is noise of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_offload.graph.device_spec import DeviceSpec

_CPU_INTERFERENCE = 0.5  # a worker thread that copies takes about half of what two compute threads have
_OVERHEAD_SECONDS = 30e-6
_NUM_TRIALS = 3

Transfer = Callable[[torch.UntypedStorage], None]


def measure_device(
    device: torch.device, swap_out: Transfer, swap_in: Transfer, *, num_bytes: int = 32 << 20
) -> DeviceSpec:
    """Measure a device's links.

    Args:
        device: The device.
        swap_out: Copies a storage of ``num_bytes`` to the host and waits for it.
        swap_in: Copies it back to a storage allocated anew, and waits.
        num_bytes: Size of the block.
    """
    storage = new_storage(num_bytes, device)
    is_cpu = device.type == "cpu"
    return DeviceSpec(
        name=device_name(device),
        kind=device.type,
        memory_bytes=device_memory_bytes(device),
        d2h_bytes_per_second=num_bytes / _best_seconds(lambda: swap_out(storage)),
        h2d_bytes_per_second=num_bytes / _best_seconds(lambda: swap_in(new_storage(num_bytes, device))),
        copy_interference=_CPU_INTERFERENCE if is_cpu else 0.0,
        overhead_seconds=_OVERHEAD_SECONDS,
    )


def new_storage(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Device memory with undefined contents."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()


def _best_seconds(transfer: Callable[[], None]) -> float:
    transfer()
    best = float("inf")
    for _ in range(_NUM_TRIALS):
        start = time.perf_counter()
        transfer()
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)


def device_name(device: torch.device) -> str:
    """What the device is called, e.g. "NVIDIA H200"; its type where it has no name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def device_memory_bytes(device: torch.device) -> int | None:
    """Total memory of the device in bytes; None for a CPU, whose memory is the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return None
