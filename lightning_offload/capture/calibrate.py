"""Measures the links of a device: how fast bytes leave it and come back.

Method: a block larger than the caches leaves through the very lanes that the runtime uses, and comes back to
memory allocated anew, as in a step (on a CPU the first touch of new pages costs more than the copy). A transfer is
over when its callable returns, so that must wait for the copy itself, not for its launch; in one direction at a time
the device is awaited before and after it as well. The best of a few is a link's rate, what the others lack is noise
of the machine. A disk's rate is that of all trials together: the fastest of them is a cache's.

Both directions at once: a thread for each repeats its transfer until both have made their trials, so the other
direction is busy throughout what counts.

Where the host computes, a thread that copies takes a part of what compute has. Products of matrices and passes over
memory are timed alone and while a thread swaps one block after another out and in: what they lose, over what as many
copies take alone, is the share of a copy's duration that compute loses.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from lightning_offload.accelerators import kind_of, name_of, synchronize, total_bytes_of
from lightning_offload.graph.device_spec import DeviceSpec

_ASSUMED_INTERFERENCE = 0.5  # of copies by a host that computes, where nothing was measured
_OVERHEAD_SECONDS = 16e-6  # of a copy that Python asks for; measured on a CPU: steps of tiny ops, all swapped
_DRIVER_SECONDS = 14e-6  # of a copy by an engine of its own, beside: some driver calls of 2 to 5 us each
_NUM_TRIALS = 3  # of each link, the fastest of which counts
_NUM_COPIES = 4  # that compute is timed beside, at the least
_PROBE_SECONDS = 0.05  # of compute, at the least
_MOST_PROBE_SECONDS = 0.5  # on a machine that others load
_NUM_ROUNDS = 8  # of compute, by which its speed is known
_PROBE_SIZE, _PROBE_ELEMENTS = 256, 1 << 20  # a product of matrices and a sum: compute, and memory traffic

Transfer = Callable[[torch.UntypedStorage], object]
"""Copies a storage and returns when the copy is complete."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Measured rates of a device's links; None for what was not measured or is not there.

    Attributes:
        d2h_bytes_per_second: Swap-out to the host alone.
        h2d_bytes_per_second: Swap-in from the host alone.
        both_d2h_bytes_per_second: Swap-out while a swap-in is under way.
        both_h2d_bytes_per_second: Swap-in while a swap-out is under way.
        disk_write_bytes_per_second: Swap-out to the disk tier.
        disk_read_bytes_per_second: Swap-in from the disk tier.
    """

    d2h_bytes_per_second: float
    h2d_bytes_per_second: float
    both_d2h_bytes_per_second: float | None = None
    both_h2d_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    disk_read_bytes_per_second: float | None = None


def measure_transfers(
    device: torch.device,
    swap_out: Transfer,
    swap_in: Transfer,
    *,
    disk_write: Transfer | None = None,
    disk_read: Transfer | None = None,
    both_at_once: bool = True,
    num_bytes: int = 32 << 20,
    disk_bytes: int | None = None,
) -> LinkRates:
    """Measure a device's links.

    Args:
        device: The device.
        swap_out: Copies a storage of ``num_bytes`` to the host and waits, on the host, for the copy itself.
        swap_in: Copies it back to a storage allocated anew, and waits.
        disk_write: Copies a storage to the disk tier and waits until it is written.
        disk_read: Copies it back to a storage allocated anew, and waits; only with ``disk_write``.
        both_at_once: Whether to measure both directions at once too; then ``swap_out`` and ``swap_in`` are called
            from two threads and must not share a block.
        num_bytes: Size of the block.
        disk_bytes: How much of it goes to disk; by default all.
    """

    def fill(transfer: Transfer, num_bytes: int = num_bytes) -> Callable[[], object]:
        return lambda: transfer(new_storage(num_bytes, device))

    disk_bytes = disk_bytes if disk_bytes is not None else num_bytes

    # Written, not merely allocated: pages of a CPU that were never written are all one page of zeros.
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
    d2h = num_bytes / min(_trials(lambda: swap_out(source), device))
    h2d = num_bytes / min(_trials(fill(swap_in), device))
    both = _both_seconds(lambda: swap_out(source), fill(swap_in)) if both_at_once else None
    write = _trials(lambda: disk_write(source), device) if disk_write is not None else None
    read = _trials(fill(disk_read, disk_bytes), device) if disk_read is not None else None
    return LinkRates(
        d2h_bytes_per_second=d2h,
        h2d_bytes_per_second=h2d,
        both_d2h_bytes_per_second=num_bytes / both[0] if both is not None else None,
        both_h2d_bytes_per_second=num_bytes / both[1] if both is not None else None,
        disk_write_bytes_per_second=disk_bytes * len(write) / sum(write) if write is not None else None,
        disk_read_bytes_per_second=disk_bytes * len(read) / sum(read) if read is not None else None,
    )


def measure_device(
    device: torch.device,
    swap_out: Transfer,
    swap_in: Transfer,
    *,
    disk_write: Transfer | None = None,
    disk_read: Transfer | None = None,
    num_bytes: int = 32 << 20,
    disk_bytes: int | None = None,
) -> DeviceSpec:
    """Measure what a planner needs of a device; the arguments are those of :func:`measure_transfers`."""
    rates = measure_transfers(
        device,
        swap_out,
        swap_in,
        disk_write=disk_write,
        disk_read=disk_read,
        both_at_once=False,
        num_bytes=num_bytes,
        disk_bytes=disk_bytes,
    )
    if kind_of(device).has_streams:  # and engines that copy
        return spec_of(device, rates)
    num_threads = torch.get_num_threads()
    if num_threads not in _interference:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

        def there_and_back() -> None:
            swap_out(source)
            swap_in(new_storage(num_bytes, device))

        seconds = num_bytes / rates.d2h_bytes_per_second + num_bytes / rates.h2d_bytes_per_second
        _interference[num_threads] = measure_interference(there_and_back, seconds)
    return spec_of(device, rates, copy_interference=_interference[num_threads])


_interference: dict[int, float] = {}
"""By the number of threads that compute: found once in a process, since it takes longer than the links."""


def measure_interference(copy: Callable[[], object], copy_seconds: float) -> float:
    """Share of a copy's duration that the host's compute loses meanwhile, in [0, 1].

    Args:
        copy: Makes a copy and waits for it; called from another thread.
        copy_seconds: What it takes alone.

    Raises:
        Exception: What the copy raised.
    """
    matrix, vector = torch.ones(_PROBE_SIZE, _PROBE_SIZE), torch.ones(_PROBE_ELEMENTS)

    def compute(num_rounds: int) -> tuple[float, int]:
        start, seconds, num_done = time.perf_counter(), 0.0, 0
        while num_done < num_rounds and seconds < _MOST_PROBE_SECONDS:
            torch.mm(matrix, matrix)
            torch.neg(vector)
            seconds, num_done = time.perf_counter() - start, num_done + 1
        return seconds, num_done

    compute(_NUM_ROUNDS)  # the first are cold
    seconds, num_done = compute(_NUM_ROUNDS)
    num_rounds = math.ceil(max(_PROBE_SECONDS, _NUM_COPIES * copy_seconds) * num_done / seconds)

    def overlapped() -> tuple[float, int, int]:
        begun, done = threading.Event(), threading.Event()

        def copy_on() -> int:
            num_copies = 0
            try:
                copy()  # a thread's first one takes longer
            finally:
                begun.set()
            while not done.is_set():
                copy()
                num_copies += 1
            return num_copies

        with ThreadPoolExecutor(1, thread_name_prefix="lightning-offload-links") as pool:
            copies = pool.submit(copy_on)
            begun.wait()
            try:
                seconds, num_done = compute(num_rounds)
            finally:
                done.set()
            return seconds, num_done, copies.result()

    found = []
    for _ in range(_NUM_TRIALS):
        (alone_seconds, num_alone), (overlapped_seconds, num_overlapped, num_copies) = compute(num_rounds), overlapped()
        found.append(
            share_lost(alone_seconds * num_overlapped / num_alone, overlapped_seconds, num_copies * copy_seconds)
        )
    return statistics.median(found)


def share_lost(alone_seconds: float, overlapped_seconds: float, copy_seconds: float) -> float:
    """Share of the copies' duration that compute lost to them, in [0, 1].

    Args:
        alone_seconds: What it takes alone.
        overlapped_seconds: What it took beside the copies.
        copy_seconds: What these take alone.
    """
    lost_seconds = overlapped_seconds - alone_seconds
    return min(max(lost_seconds / copy_seconds, 0.0), 1.0) if copy_seconds > 0 else 0.0


def copy_seconds(device: torch.device) -> float:
    """What a copy costs the host beside its work, where Python asks for it."""
    return _OVERHEAD_SECONDS + (_DRIVER_SECONDS if kind_of(device).has_streams else 0.0)


def spec_of(device: torch.device, rates: LinkRates, *, copy_interference: float | None = None) -> DeviceSpec:
    """What a planner needs of a device whose links were measured: the rates of one direction at a time.

    Args:
        device: The device.
        rates: Of its links.
        copy_interference: Share of a copy's duration that compute loses meanwhile; None where it was not measured.
    """
    if copy_interference is None:
        copy_interference = 0.0 if kind_of(device).has_streams else _ASSUMED_INTERFERENCE
    return DeviceSpec(
        name=name_of(device),
        kind=device.type,
        memory_bytes=total_bytes_of(device),
        d2h_bytes_per_second=rates.d2h_bytes_per_second,
        h2d_bytes_per_second=rates.h2d_bytes_per_second,
        copy_interference=copy_interference,
        overhead_seconds=copy_seconds(device),
        disk_write_bytes_per_second=rates.disk_write_bytes_per_second or 0.0,
        disk_read_bytes_per_second=rates.disk_read_bytes_per_second or 0.0,
    )


def new_storage(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Device memory with undefined contents."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()


def _trials(transfer: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of each trial after one to warm up."""
    seconds = []
    for _ in range(1 + _NUM_TRIALS):
        synchronize(device)
        start = time.perf_counter()
        transfer()
        synchronize(device)
        seconds.append(max(time.perf_counter() - start, 1e-9))
    return seconds[1:]


def _both_seconds(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Mean seconds of each of two transfers while the other is under way.

    Raises:
        Exception: What a transfer raised.
    """
    start = threading.Barrier(2)
    done = (threading.Event(), threading.Event())

    def repeat(transfer: Callable[[], object], mine: threading.Event, other: threading.Event) -> float:
        try:
            start.wait()
            begin = time.perf_counter()
            for _ in range(_NUM_TRIALS):
                transfer()
            seconds = time.perf_counter() - begin
        finally:
            mine.set()  # after a failure too: the other must not wait for this one
        while not other.is_set():
            transfer()
        return max(seconds / _NUM_TRIALS, 1e-9)

    with ThreadPoolExecutor(2, thread_name_prefix="lightning-offload-links") as pool:
        futures = pool.submit(repeat, first, *done), pool.submit(repeat, second, *reversed(done))
        return futures[0].result(), futures[1].result()
