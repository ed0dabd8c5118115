"""The simulated copy lanes as plain objects, one copy at a time: what the kernels' clock is held against."""

from __future__ import annotations

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Tier
from lightning_offload.planning.kernels.clock import CLOCK_NOISE
from lightning_offload.planning.links import Rates, in_rates, out_rates


class Direction:
    """The lanes of one direction, going forward in time."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._link_free = self._disk_free = 0.0

    def run(self, num_bytes: int, tier: Tier, now: float, after: float = 0.0) -> float:
        """Issue a copy that must not begin before ``after``; the time of its end."""
        rates = self._rates
        if tier == "host":
            self._link_free = max(now, self._link_free, after) + num_bytes * rates.link
            return self._link_free
        start = max(now, self._disk_free, after)
        if rates.link_under_disk:
            link_start = max(now, self._link_free)
            self._link_free = link_start + num_bytes * rates.link_under_disk
            start = max(start, link_start)
        self._disk_free = start + num_bytes * rates.disk
        return self._disk_free


class Deadlines:
    """The lanes of one direction, going back in time: when a copy must be issued to be there when it is needed."""

    def __init__(self, rates: Rates, overhead_seconds: float) -> None:
        self._rates = rates
        self._overhead = overhead_seconds
        self._link_from = self._disk_from = float("inf")

    def issue_by(self, num_bytes: int, tier: Tier, need: float) -> float:
        """The latest time for a copy, given those that are needed later."""
        rates = self._rates
        if tier == "host":
            self._link_from = min(need, self._link_from) - num_bytes * rates.link - self._overhead
            return self._link_from
        self._disk_from = min(need, self._disk_from) - num_bytes * rates.disk - self._overhead
        if rates.link_under_disk:
            self._link_from = min(need, self._link_from) - num_bytes * rates.link_under_disk
            self._disk_from = min(self._disk_from, self._link_from)
        return self._disk_from


class Lanes:
    """All lanes of a device, with the copies under way.

    Attributes:
        out_end: By storage: when its copy out has ended.
        in_end: By storage: when its copy back has.
        stall_seconds: Time that compute waited for copies.
        copy_seconds: Time that the copies' bytes take over the link.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.out_end: dict[int, float] = {}
        self.in_end: dict[int, float] = {}
        self.stall_seconds = self.copy_seconds = 0.0
        self._out_rates, self._in_rates = out_rates(device), in_rates(device)
        self._out, self._in = Direction(self._out_rates), Direction(self._in_rates)

    def swap_out(self, storage: int, num_bytes: int, tier: Tier, now: float) -> None:
        """Issue a copy out."""
        self.out_end[storage] = self._out.run(num_bytes, tier, now)
        self.copy_seconds += num_bytes * self._out_rates.link

    def swap_in(self, storage: int, num_bytes: int, tier: Tier, now: float) -> None:
        """Issue a copy back, unless that was done."""
        if storage not in self.in_end:
            self.in_end[storage] = self._in.run(num_bytes, tier, now, self.out_end[storage])
            self.copy_seconds += num_bytes * self._in_rates.link

    def wait(self, end: float, now: float) -> float:
        """Compute waits for a copy; the time at which it goes on."""
        self.stall_seconds += end - now if end - now > CLOCK_NOISE else 0.0
        return max(now, end)
