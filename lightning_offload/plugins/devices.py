"""Which device a step computes on, and how fast its links are."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_offload.accelerators import KINDS, device_in_use, indexed, memory_of
from lightning_offload.capture import spec_cache
from lightning_offload.capture.calibrate import (
    LinkRates,
    Transfer,
    copy_seconds,
    measure_device,
    measure_transfers,
    spec_of,
)
from lightning_offload.errors import SpillError, UnsupportedError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.plugins.inputs import flatten
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.spill import DiskPool
from lightning_offload.runtime.tiers import Place, Tiers, tiers_for
from lightning_offload.units import format_bytes


def find_device(module: torch.nn.Module | None, inputs: Any) -> torch.device:
    """The device of the module's parameters, else of the inputs, else the accelerator in use, else the CPU."""
    parameter = next(module.parameters(), None) if module is not None else None
    found = parameter.device if parameter is not None else first_device(inputs)
    return found or device_in_use() or torch.device("cpu")


def first_device(inputs: Any) -> torch.device | None:
    """The device of the first tensor among the inputs, one that is not on the CPU where there is any."""
    devices = [leaf.device for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
    return next((d for d in devices if d.type != "cpu"), devices[0] if devices else None)


def supported(device: torch.device | str) -> torch.device:
    """The device, checked.

    Raises:
        UnsupportedError: Its kind has no row in the table of kinds.
    """
    allowed = " or ".join(map(repr, KINDS))
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise UnsupportedError(f"device {device!r} is not known: use {allowed}") from None
    if device.type not in KINDS:
        raise UnsupportedError(f"device {str(device)!r} is not supported: use {allowed}")
    return indexed(device)


_LINK_BLOCK_BYTES = 32 << 20  # that rates of usual links are measured with
_LARGE_LINK_BLOCK_BYTES = 256 << 20  # less is over before a link as fast as a chip's own is at its rate
_SMALL_LINK_BLOCK_BYTES = (8 << 20, 2 << 20)  # on a device that is nearly full
_NOMINAL_RATE = 1e9  # bytes per second of links that could not be measured: too slow, so plans avoid them


class HostRefusedError(SpillError):
    """The host has no memory to measure links with."""


def nominal_spec(device: torch.device) -> DeviceSpec:
    """What is assumed of a device whose links cannot be measured; there is no disk."""
    rates = LinkRates(d2h_bytes_per_second=_NOMINAL_RATE, h2d_bytes_per_second=_NOMINAL_RATE)
    return spec_of(device, rates)


def measure_spec(device: torch.device, tiers: Tiers, *, with_disk: bool) -> DeviceSpec:
    """What a planner needs of a device, measured through its tiers, or remembered from an earlier run.

    Args:
        device: The device.
        tiers: Its lower tiers.
        with_disk: Whether the disk is measured too.

    Raises:
        HostRefusedError: The host has no memory to measure with.
        SpillError: The disk cannot be used.
        torch.OutOfMemoryError: The device has no memory to measure with.
    """
    folder = tiers.disk.folder if with_disk and tiers.disk is not None else None
    is_usual = not tiers.host.is_pinning_refused  # else these rates are no property of the machine
    key = spec_cache.key_for(device, folder)
    spec = spec_cache.load(key) if is_usual else None
    if spec is not None:  # by a version that may have counted otherwise what is not measured
        spec = dataclasses.replace(spec, overhead_seconds=copy_seconds(device))
    else:
        num_bytes, spec = _measured_spec(device, tiers, with_disk=with_disk)
        if is_usual and num_bytes >= _LINK_BLOCK_BYTES:
            spec_cache.store(key, spec)
    return spec


def _measured_spec(device: torch.device, tiers: Tiers, *, with_disk: bool) -> tuple[int, DeviceSpec]:
    """Measure with a block as large as the links need, where there is memory for it, else with smaller ones.

    Returns:
        The bytes of the block, and what was measured with it.
    """
    memory = memory_of(device)
    if memory is not None and memory.free_bytes() >= 8 * _LARGE_LINK_BLOCK_BYTES:
        with contextlib.suppress(torch.OutOfMemoryError, HostRefusedError):
            return _measured_by(device, tiers, _LARGE_LINK_BLOCK_BYTES, with_disk=with_disk)
    *larger, least = (_LINK_BLOCK_BYTES, *_SMALL_LINK_BLOCK_BYTES)
    for num_bytes in larger:
        with contextlib.suppress(torch.OutOfMemoryError):
            return _measured_by(device, tiers, num_bytes, with_disk=with_disk)
    return _measured_by(device, tiers, least, with_disk=with_disk)


def _measured_by(device: torch.device, tiers: Tiers, num_bytes: int, *, with_disk: bool) -> tuple[int, DeviceSpec]:
    disk_bytes = min(num_bytes, _LINK_BLOCK_BYTES)
    try:
        with _transfers(tiers, num_bytes, with_disk=with_disk, disk_bytes=disk_bytes) as transfers:
            return num_bytes, measure_device(device, num_bytes=num_bytes, disk_bytes=disk_bytes, **transfers)
    finally:
        memory = memory_of(device)
        if memory is not None and num_bytes > _LINK_BLOCK_BYTES:
            memory.give_back()  # the allocator would keep it from others of this device


def measure_rates(
    device: torch.device, spill_dir: str | os.PathLike[str] | None = None, *, num_bytes: int = 256 << 20
) -> LinkRates:
    """Measure the links of a device through the lanes that steps use, both directions at once too.

    Args:
        device: The device.
        spill_dir: Folder whose disk is measured too; None for none.
        num_bytes: Bytes of one transfer.

    Raises:
        SpillError: The disk cannot be used.
    """
    tiers = tiers_for(device, disk=DiskPool(spill_dir) if spill_dir is not None else None)
    try:
        with _transfers(tiers, num_bytes, with_disk=spill_dir is not None) as transfers:
            return measure_transfers(device, num_bytes=num_bytes, **transfers)  # type: ignore[arg-type]
    finally:
        tiers.close()


@contextlib.contextmanager
def _transfers(
    tiers: Tiers, num_bytes: int, *, with_disk: bool, disk_bytes: int | None = None
) -> Iterator[dict[str, Transfer]]:
    """Transfers that end when the bytes are there, in blocks that the plugin's own limits do not bind.

    Where the host has no memory for them, those of the disk, if they are of the same size, stand for its links, which
    nothing will use then.
    """
    transfers: dict[str, Transfer] = {}
    disk_bytes = disk_bytes if disk_bytes is not None else num_bytes
    if with_disk and tiers.disk is not None:
        tiers.disk.prepare(disk_bytes)
        disk_block = tiers.allocate(disk_bytes, Place(tier="disk"))
        if disk_block is None:
            raise SpillError(f"no {format_bytes(disk_bytes)} of {tiers.disk.folder!r} could be had to measure it with")
        transfers["disk_write"] = lambda storage: tiers.swap_out(storage, disk_block).synchronize()
        transfers["disk_read"] = lambda storage: tiers.swap_in(disk_block, storage).synchronize()
    host = HostPool(pinning=tiers.host.pinning)
    host.is_refused = tiers.host.is_refused  # what was warned of
    out_block, in_block = host.allocate(num_bytes), host.allocate(num_bytes)
    has_smaller = num_bytes > disk_bytes  # which is tried next
    if not has_smaller:
        tiers.host.is_refused = host.is_refused
    if out_block is not None and in_block is not None:
        transfers["swap_out"] = lambda storage: tiers.swap_out(storage, out_block).synchronize()
        transfers["swap_in"] = lambda storage: tiers.swap_in(in_block, storage).synchronize()
    elif transfers and not has_smaller:
        transfers.update(swap_out=transfers["disk_write"], swap_in=transfers["disk_read"])
    else:
        raise HostRefusedError(f"the host has no {format_bytes(2 * num_bytes)} to measure its links with")
    try:
        yield transfers
    finally:
        tiers.drain()
        tiers.take_times()
