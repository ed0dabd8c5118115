"""Copies between the device and host memory, off the compute thread: the one seam between runtime and hardware.

A lane takes copies in order and gives a :class:`~.copies.Copy` to wait for. The source of a copy must stay
unchanged until its copy is done, which the executor sees to; device memory is always allocated by the compute
thread. :class:`~.cpu_lanes.CpuLanes` copy in worker threads that hold no GIL, so that every path of the runtime
runs on any machine; :class:`~.stream_lanes.StreamLanes` copy on side streams of an accelerator;
:class:`~.disk_lanes.DiskLanes` go to and from a spill file; :class:`FakeLanes` move nothing and serve FakeTensor
steps.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from typing_extensions import override

from lightning_offload.runtime.copies import DONE, Block, Copy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneTimes:
    """What lanes did since they were last asked.

    Attributes:
        out_bytes: Bytes copied off the device.
        out_seconds: Time that took, waiting in the lane aside.
        in_bytes: Bytes copied to the device.
        in_seconds: Likewise.
        stall_seconds: Time for which compute waited, where the lane itself has to measure it.
    """

    out_bytes: int = 0
    out_seconds: float = 0.0
    in_bytes: int = 0
    in_seconds: float = 0.0
    stall_seconds: float = 0.0


class Lanes(abc.ABC):
    """The two copy directions of a device."""

    @abc.abstractmethod
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        """Start copying a device storage to a block."""

    @abc.abstractmethod
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        """Start copying a block to a device storage."""

    def prepare(self) -> None:  # noqa: B027  (most lanes need nothing)
        """Have what copies need besides both ends, before there is one.

        Raises:
            OSError: The host refused memory for it; MemoryError likewise.
        """

    def compute_stream(self) -> Any:
        """The stream on which the calling thread's ops run now; None on a device without streams."""
        return None

    def tidy(self) -> None:  # noqa: B027  (most lanes hold nothing longer than they must)
        """Let go of the memory of copies that are done by now."""

    def measure(self, is_on: bool) -> None:  # noqa: B027  (most lanes measure at no cost)
        """Whether the copies from now on should be timed, where that costs something."""

    def take_times(self) -> LaneTimes:
        """What the lanes did since this was last asked; waits for what is still under way."""
        return LaneTimes()

    def drain(self) -> None:  # noqa: B027  (most lanes have nothing under way)
        """Wait until no copy is under way and no lane holds memory."""

    def close(self) -> None:  # noqa: B027  (most lanes have nothing to end)
        """End threads; copies asked for later are made by the thread that asks."""


class FakeLanes(Lanes):
    """Lanes for FakeTensor steps, where there is nothing to copy."""

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        return DONE

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        return DONE
