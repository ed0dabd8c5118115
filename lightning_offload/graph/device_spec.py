"""What a planner needs to know of a device and its links; measured by capture, or from a datasheet."""

from __future__ import annotations

import dataclasses

from lightning_offload.errors import PlanError
from lightning_offload.graph import codec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A compute device with its links to host memory.

    Attributes:
        name: What it is called, e.g. "NVIDIA H200" or "cpu".
        kind: Torch device type.
        memory_bytes: Device memory; None where it has no limit of its own (CPU).
        d2h_bytes_per_second: Swap-out bandwidth, device to host.
        h2d_bytes_per_second: Swap-in bandwidth, host to device.
        copy_interference: Share of a copy's duration that compute loses meanwhile, in [0, 1]: 0 with copy
            engines, near 0.5 where copies are made by a core that compute would have used.
        overhead_seconds: Host cost of one swap or replay beside its work.
        flops_per_second: Peak arithmetic rate, for op times that are modelled; 0 where they are measured.
        memory_bytes_per_second: Peak bandwidth of device memory, likewise.
    """

    name: str
    kind: str
    memory_bytes: int | None
    d2h_bytes_per_second: float
    h2d_bytes_per_second: float
    copy_interference: float
    overhead_seconds: float
    flops_per_second: float = 0.0
    memory_bytes_per_second: float = 0.0

    def to_json(self) -> str:
        """Write the device as JSON."""
        return codec.dumps("device_spec", codec.encode(self))

    @classmethod
    def from_json(cls, text: str) -> DeviceSpec:
        """Read a device and check it.

        Raises:
            PlanError: Not a device spec, or a rate that is not positive.
        """
        device = codec.decode(cls, codec.loads("device_spec", text), where="device_spec")
        if min(device.d2h_bytes_per_second, device.h2d_bytes_per_second) <= 0:
            raise PlanError(f"device_spec: bandwidths must be positive, got {device}")
        if device.memory_bytes is not None and device.memory_bytes <= 0:
            raise PlanError(f"device_spec: memory_bytes must be positive or null, got {device.memory_bytes}")
        if not 0 <= device.copy_interference <= 1 or device.overhead_seconds < 0:
            raise PlanError(f"device_spec: copy_interference must lie in [0, 1], overhead_seconds be >= 0: {device}")
        return device
