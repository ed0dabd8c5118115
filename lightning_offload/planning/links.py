"""The rates of a device's copy lanes: one FIFO for each direction of each tier.

A copy between device and host takes the link. A copy between device and disk takes the disk's lane, at the lesser
of both rates since its chunks pass through both at once, and on a device with memory of its own it also keeps the
link busy for as long as its bytes alone would. A device that is a CPU has no link on the way to its disk. Whatever
the tier, a copy costs compute what moving its bytes through memory costs, its duration over the link: the rest of
the time that a disk takes is nobody's work.

Simplifications: the link's share of a disk copy is taken as a whole when the copy is issued, and reads and writes
of a disk do not slow each other down.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Tier


class Rates(NamedTuple):
    """Seconds per byte in one direction.

    Attributes:
        link: Over the link.
        disk: To or from the disk; infinite without one.
        link_under_disk: For which a disk copy keeps the link busy.
    """

    link: float
    disk: float
    link_under_disk: float

    def of(self, tier: Tier) -> float:
        """Seconds per byte of a copy to or from a tier that waits for nothing."""
        return self.link if tier == "host" else self.disk


def out_rates(device: DeviceSpec) -> Rates:
    """Rates of copies off the device."""
    return _rates(device, device.d2h_bytes_per_second, device.disk_write_bytes_per_second)


def in_rates(device: DeviceSpec) -> Rates:
    """Rates of copies back."""
    return _rates(device, device.h2d_bytes_per_second, device.disk_read_bytes_per_second)


def _rates(device: DeviceSpec, link: float, disk: float) -> Rates:
    has_link = device.kind != "cpu"
    slower = min(disk, link) if has_link else disk
    return Rates(1 / link, 1 / slower if slower > 0 else float("inf"), 1 / link if has_link else 0.0)
