"""What a planner needs to know of a device and its links; measured by capture, or from a datasheet."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_offload.errors import PlanError
from lightning_offload.graph import codec
from lightning_offload.graph.work_kinds import WorkKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A compute device with its links to host memory and to a disk behind it.

    Attributes:
        name: What it is called, e.g. "NVIDIA H200" or "cpu".
        kind: Torch device type.
        memory_bytes: Device memory; None where it has no limit of its own (CPU).
        d2h_bytes_per_second: Swap-out bandwidth, device to host.
        h2d_bytes_per_second: Swap-in bandwidth, host to device.
        copy_interference: Share of a copy's duration that compute loses meanwhile, in [0, 1]: 0 with copy
            engines, near 0.5 where copies are made by a core that compute would have used.
        overhead_seconds: Host cost of one copy beside its work: a swap makes two. See :meth:`copy_overhead`.
        flops_per_second: Peak arithmetic rate, for op times that are modelled; 0 where they are measured.
        memory_bytes_per_second: Peak bandwidth of device memory, for the same; 0 where op times are measured.
        host_memory_bytes: The most that swapped storages may take of host memory; None for no limit, 0 for none.
        disk_write_bytes_per_second: Bandwidth of the disk tier; 0 where there is none.
        disk_read_bytes_per_second: The same for reading; positive exactly if writing is.
        launch_seconds: What any op takes beside its work, for op times that are modelled.
        convolution_efficiency: Share of ``flops_per_second`` that convolutions reach; above 1 where they need fewer
            operations than are counted (Winograd). This and all shares below are for op times that are modelled.
        depthwise_efficiency: The same for depthwise convolutions.
        matmul_efficiency: The same for matrix products.
        attention_efficiency: The same for fused attention.
        recurrent_efficiency: The same for recurrent layers.
        reduction_bandwidth: Share of ``memory_bytes_per_second`` that reductions and normalizations reach.
        elementwise_bandwidth: The same for everything else.
        replay_overhead_seconds: The same of one replay; None for that of a copy.
        seeing_seconds: What an op of forward costs the host more in steps whose ops are seen.
        compute_capability: Of a GPU of NVIDIA, times ten (80 for 8.0): libraries choose kernels by it. 0 where unknown.
        handover_bytes: Of a host that computes: a copy of at most so many bytes is made by the thread that computes, a
            larger one by another. None where copies are never the host's work.
        handover_seconds: What it costs the host to hand a larger one over.
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
    host_memory_bytes: int | None = dataclasses.field(default=None, metadata=codec.ADDED)
    disk_write_bytes_per_second: float = dataclasses.field(default=0.0, metadata=codec.ADDED)
    disk_read_bytes_per_second: float = dataclasses.field(default=0.0, metadata=codec.ADDED)
    launch_seconds: float = dataclasses.field(default=0.0, metadata=codec.ADDED)
    convolution_efficiency: float = dataclasses.field(default=1.0, metadata=codec.ADDED)
    depthwise_efficiency: float = dataclasses.field(default=1.0, metadata=codec.ADDED)
    matmul_efficiency: float = dataclasses.field(default=1.0, metadata=codec.ADDED)
    attention_efficiency: float = dataclasses.field(default=1.0, metadata=codec.ADDED)
    recurrent_efficiency: float = dataclasses.field(default=1.0, metadata=codec.ADDED)
    reduction_bandwidth: float = dataclasses.field(default=1.0, metadata=codec.ADDED)
    elementwise_bandwidth: float = dataclasses.field(default=1.0, metadata=codec.ADDED)
    compute_capability: int = dataclasses.field(default=0, metadata=codec.ADDED)
    replay_overhead_seconds: float | None = dataclasses.field(default=None, metadata=codec.ADDED)
    seeing_seconds: float = dataclasses.field(default=20e-6, metadata=codec.ADDED)
    handover_bytes: int | None = dataclasses.field(default=None, metadata=codec.ADDED)
    handover_seconds: float = dataclasses.field(default=0.0, metadata=codec.ADDED)

    @property
    def has_disk(self) -> bool:
        """Whether there is a disk tier."""
        return self.disk_write_bytes_per_second > 0 and self.disk_read_bytes_per_second > 0

    @property
    def replay_overhead(self) -> float:
        """Host cost of one replay beside its work, in seconds."""
        return self.overhead_seconds if self.replay_overhead_seconds is None else self.replay_overhead_seconds

    def copy_overhead(self, num_bytes: int) -> float:
        """Host cost of one copy, beside the share of its duration that compute loses, in seconds.

        Small blocks are copied at the link's rate out: on a host that computes the way back is slower for memory that
        is touched for the first time, which small blocks are not.

        Args:
            num_bytes: How much is copied.
        """
        if self.handover_bytes is None:
            return self.overhead_seconds
        if num_bytes > self.handover_bytes:
            return self.overhead_seconds + self.handover_seconds
        return self.overhead_seconds + (1 - self.copy_interference) * num_bytes / self.d2h_bytes_per_second

    def at_peak(self) -> DeviceSpec:
        """The device as its datasheet has it: its peaks reached by all ops, and launching them for nothing."""
        ones: dict[str, Any] = dict.fromkeys(_SHARES, 1.0)
        return dataclasses.replace(self, launch_seconds=0.0, **ones)

    def work_seconds(self, kind: WorkKind, flops: float, num_bytes: float) -> float:
        """Modelled duration of an op: its launch, and its arithmetic or its memory traffic, whichever is longer.

        Args:
            kind: What it does.
            flops: Arithmetic operations.
            num_bytes: Bytes of device memory read and written; an op with neither is no kernel and takes no time.
        """
        if not flops and not num_bytes:
            return 0.0
        efficiency = getattr(self, _EFFICIENCIES[kind]) if kind in _EFFICIENCIES else 1.0
        bandwidth = self.reduction_bandwidth if kind is WorkKind.REDUCTION else self.elementwise_bandwidth
        return self.launch_seconds + max(
            flops / (efficiency * self.flops_per_second), num_bytes / (bandwidth * self.memory_bytes_per_second)
        )

    def derated(self, fraction: float) -> DeviceSpec:
        """The device with all links and the disk at a fraction of their rates, to plan with a margin.

        Raises:
            PlanError: The fraction is not in (0, 1].
        """
        if not 0 < fraction <= 1:
            raise PlanError(f"a device is derated by a fraction in (0, 1], got {fraction}")
        return dataclasses.replace(
            self,
            d2h_bytes_per_second=fraction * self.d2h_bytes_per_second,
            h2d_bytes_per_second=fraction * self.h2d_bytes_per_second,
            disk_write_bytes_per_second=fraction * self.disk_write_bytes_per_second,
            disk_read_bytes_per_second=fraction * self.disk_read_bytes_per_second,
        )

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
        device.check()
        return device

    def check(self) -> None:
        """Check that the figures are possible.

        Raises:
            PlanError: A rate, size or share is not.
        """
        if min(self.d2h_bytes_per_second, self.h2d_bytes_per_second) <= 0:
            raise PlanError(f"device_spec: bandwidths must be positive, got {self}")
        rates = (self.flops_per_second, self.memory_bytes_per_second)
        if not all(rate == 0 or rate >= 1 for rate in rates):
            raise PlanError(
                "device_spec: flops_per_second and memory_bytes_per_second must be at least 1, or 0 where they are not "
                f"known, got {rates}"
            )
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise PlanError(f"device_spec: memory_bytes must be positive or null, got {self.memory_bytes}")
        if not 0 <= self.copy_interference <= 1 or self.overhead_seconds < 0:
            raise PlanError(f"device_spec: copy_interference must lie in [0, 1], overhead_seconds be >= 0: {self}")
        if min(self.replay_overhead, self.seeing_seconds, self.handover_seconds, self.handover_bytes or 0) < 0:
            raise PlanError(
                "device_spec: replay_overhead_seconds, seeing_seconds, handover_bytes and handover_seconds must be >= "
                f"0: {self}"
            )
        if self.host_memory_bytes is not None and self.host_memory_bytes < 0:
            raise PlanError(f"device_spec: host_memory_bytes must be >= 0 or null, got {self.host_memory_bytes}")
        disk = (self.disk_write_bytes_per_second, self.disk_read_bytes_per_second)
        if min(disk) < 0 or (min(disk) == 0) != (max(disk) == 0):
            raise PlanError(f"device_spec: disk bandwidths must both be positive, or both 0 for no disk, got {disk}")
        if self.launch_seconds < 0 or min(getattr(self, share) for share in _SHARES) <= 0:
            raise PlanError(f"device_spec: launch_seconds must be >= 0, efficiencies and bandwidths positive: {self}")


_EFFICIENCIES = {
    WorkKind.CONVOLUTION: "convolution_efficiency",
    WorkKind.DEPTHWISE: "depthwise_efficiency",
    WorkKind.MATMUL: "matmul_efficiency",
    WorkKind.ATTENTION: "attention_efficiency",
    WorkKind.RECURRENT: "recurrent_efficiency",
}
"""The fields of the kinds of work that arithmetic may limit."""

_SHARES = (*_EFFICIENCIES.values(), "reduction_bandwidth", "elementwise_bandwidth")
