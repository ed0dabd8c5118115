"""The device that a memory plugin serves: the tiers below it, and what is known of its links.

Links are measured once, through the very lanes that steps use, and kept per machine; what measured steps show of
them is merged in. When something changes that plans depend on (a link is slower than it was, page-locking or the
disk was refused, the host has less memory), :attr:`Hardware.version` grows and plans are made again.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import torch

from lightning_offload.errors import SpillError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.host_layout import Layout
from lightning_offload.graph.memory_plan import MemoryPlan, Tier
from lightning_offload.plugins.data_parallel import num_local_ranks
from lightning_offload.plugins.devices import HostRefusedError, measure_spec, nominal_spec
from lightning_offload.plugins.link_rates import LanesDid, updated
from lightning_offload.plugins.replanning import Links
from lightning_offload.plugins.settings import Settings, budget_bytes_on
from lightning_offload.runtime.cpu_lanes import HANDOVER_SECONDS
from lightning_offload.runtime.lanes import LaneTimes
from lightning_offload.runtime.sight import core_on
from lightning_offload.runtime.spill import DiskPool
from lightning_offload.runtime.tiers import Tiers, tiers_for

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def available_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int | None:
    """Host memory that can be had without swapping, in bytes; None where the platform does not tell."""
    try:
        free = int(psutil.virtual_memory().available)
    except (OSError, RuntimeError):
        return None
    limits = [_bytes_left(folder) for folder in _cgroup_folders(cgroups, own)]
    return min([free, *(limit for limit in limits if limit is not None)])


def _cgroup_folders(cgroups: Path, own: Path) -> Iterator[Path]:
    """Those that limit this process's memory: of a container, a job or a service, and all that it lies in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in ["0::/", *lines]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        root = cgroups if not controllers else cgroups / "memory"  # version 2, or 1
        if not controllers or "memory" in controllers.split(","):
            folder = root / path.strip("/")
            yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(root)))


def _bytes_left(cgroup: Path) -> int | None:
    """What the limit of a control group leaves, page cache aside; None without one."""
    for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            limit = (cgroup / names[0]).read_text().strip()
            used = int((cgroup / names[1]).read_text())
            statistics = (cgroup / "memory.stat").read_text().split()
            cached = int(statistics[statistics.index("inactive_file") + 1])
            return None if limit == "max" else max(0, int(limit) - used + cached)
        except (OSError, ValueError, IndexError):
            continue
    return None


_log = logging.getLogger(__name__)
_LINK_FRACTION = 0.8  # of a measured link that plans count on: too fast a link costs most of all wrong guesses
_HOST_FRACTION = 0.8  # of the host memory that is free when a device is first used, where no host_budget is given
_MUCH_SLOWER, _MUCH_FASTER = 0.95, 1.1  # ratios of a link to what plans count on: worth other plans
_MUCH_LESS = 0.98  # of the budget: worth other plans

# What plans count on where the native core executes them, in seconds of the host: a replay's own cost, recording
# included, that of an op that is seen, and by how much a copy costs less than Python's do. Measured on a CPU: steps of
# tiny ops, all recomputed, all passed, and all swapped.
_REPLAY_SECONDS_IN_THE_CORE, _SEEING_SECONDS_IN_THE_CORE, _COPY_SECONDS_LESS_IN_THE_CORE = 3e-6, 2e-6, 10e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """How much of the lower tiers is in use.

    Attributes:
        host_bytes: Host memory mapped for swapped tensors.
        host_peak_bytes: The most of it that held tensors at once.
        pinned_bytes: How much of it is page-locked.
        disk_bytes: Size of the spill file.
        disk_peak_bytes: The most of it that held tensors at once.
    """

    host_bytes: int = 0
    host_peak_bytes: int = 0
    pinned_bytes: int = 0
    disk_bytes: int = 0
    disk_peak_bytes: int = 0


class Hardware:
    """The device of a memory plugin, its tiers, and the rates of its links.

    Args:
        device: The compute device.
        settings: Which tiers may be used.

    Attributes:
        device: The compute device.
        tiers: The tiers below it.
        version: Grows when plans should be made again.
        budget_bytes: The budget on this device. Where none was given, it is what there was when the device was first
            used, or a recorded step showed that there is less.
    """

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.device = device
        self.version = self._first_version = 0
        self.budget_bytes = budget_bytes_on(settings, device)
        self._settings = settings
        self._tier = settings.tier
        self._host_bytes = _host_limit(settings)
        disk = DiskPool(settings.spill_dir) if settings.tier != "host" else None
        self.tiers: Tiers = tiers_for(device, host_budget_bytes=self._host_bytes, disk=disk)
        self._spec: DeviceSpec | None = None
        self._did: LanesDid | None = None
        self._knew_pinning_refused = False
        self._has_adapted = False
        self._refusals = self._refused_now()
        self._refused_demand: tuple[int, int] | None = None
        self._wanted: weakref.WeakKeyDictionary[object, Mapping[Tier, int]] = weakref.WeakKeyDictionary()

    def go_on_from(self, earlier: Hardware) -> None:
        """Serve the plans that were made for an earlier use of this device, which may have changed since it began.

        Where no budget was given, and there is about as much as there was, that stays.
        """
        before, now = earlier.budget_bytes, self.budget_bytes
        if self._settings.budget is None and before and now and now >= _MUCH_LESS * before:
            self.budget_bytes = before
        has_changed = earlier.version != earlier._first_version or self.budget_bytes != before
        self.version = self._first_version = earlier.version + has_changed

    def read_budget_again(self, slack_bytes: int) -> None:
        """See how much memory there is once a step has run: kernels and libraries were loaded, memory is in pieces.

        Args:
            slack_bytes: What the device's allocator came to hold beyond what was alive.
        """
        if self.budget_bytes is None or self._settings.budget is not None:
            return
        now = budget_bytes_on(self._settings, self.device, slack_bytes)
        if now is not None and now < _MUCH_LESS * self.budget_bytes:
            self.budget_bytes = now
            self.version += 1

    def planning_spec(self, saved_bytes: int) -> DeviceSpec:
        """What plans are made for: the device with its tiers, at a prudent share of its links' rates.

        Args:
            saved_bytes: All that a step could put on the host.
        """
        limit = self._host_limit_now()
        if limit is not None and saved_bytes <= limit:
            limit = None
        spec = self._measured(with_disk=limit is not None and self._has_disk()).derated(_LINK_FRACTION)
        if limit is None or not self._has_disk():
            spec = dataclasses.replace(spec, disk_write_bytes_per_second=0.0, disk_read_bytes_per_second=0.0)
        spec = dataclasses.replace(spec, host_memory_bytes=limit)
        small_bytes = self.tiers.lanes.small_bytes
        if small_bytes is not None:
            spec = dataclasses.replace(spec, handover_bytes=small_bytes, handover_seconds=HANDOVER_SECONDS)
        if core_on(self.device) is None:
            return spec
        return dataclasses.replace(
            spec,
            overhead_seconds=max(0.0, spec.overhead_seconds - _COPY_SECONDS_LESS_IN_THE_CORE),
            replay_overhead_seconds=_REPLAY_SECONDS_IN_THE_CORE,
            seeing_seconds=_SEEING_SECONDS_IN_THE_CORE,
        )

    def adapted(self, plan: MemoryPlan) -> MemoryPlan:
        """A given plan with host memory in place of a disk tier that the settings do not allow."""
        if self.tiers.disk is not None or all(d.tier != "disk" for d in plan.decisions):
            return plan
        if not self._has_adapted:
            self._has_adapted = True
            _log.warning(
                "the given plan swaps to disk, which tier='host' does not allow: it swaps to host memory instead"
            )
        return dataclasses.replace(
            plan, decisions=tuple(dataclasses.replace(decision, tier="host") for decision in plan.decisions)
        )

    def _host_limit_now(self) -> int | None:
        """Most host memory that there is for swapped tensors, after what the host refused."""
        if not self.tiers.host.is_refused:
            return self._host_bytes
        mapped = self.tiers.host.slab_bytes
        return mapped if self._host_bytes is None else min(mapped, self._host_bytes)

    def _has_disk(self) -> bool:
        return self.tiers.disk is not None and self.tiers.disk.error is None

    def refresh(self) -> None:
        """Ask for other plans if a tier was refused since the last step."""
        refused = self._refused_now()
        self.version += refused != self._refusals
        self._refusals = refused

    def _refused_now(self) -> tuple[bool, ...]:
        host = self.tiers.host
        return (host.is_pinning_refused, host.is_refused, self._has_disk())

    def prepare(self, source: object, layout: Layout) -> bool:
        """Have room for what any kind of step swaps; False where there is less than planned, and plans are made again.

        Tells so once for the same demand: a plan that stands all the same runs with the room that there is.

        Args:
            source: Where the plan of the step that is about to run comes from: its wish counts while that lives.
            layout: What its plan puts where.

        Raises:
            SpillError: The disk has no room, and only disk may be used.
        """
        self._wanted[source] = layout.tier_bytes
        try:
            has_room = self.tiers.prepare(*self._most())
        except SpillError as error:
            self._give_disk_up(error)
            has_room = False
        demand = self._most()
        if has_room or demand == self._refused_demand:
            return True
        self._refused_demand = demand
        self.version += 1
        return False

    def _most(self) -> tuple[int, int]:
        """Of host and disk, what any kind of step asks for."""
        wanted = list(self._wanted.values())  # of those that live
        host_bytes = max((tiers.get("host", 0) for tiers in wanted), default=0)
        return host_bytes, max((tiers.get("disk", 0) for tiers in wanted), default=0)

    def observe(self, times: Mapping[Tier, LaneTimes]) -> None:
        """Merge what a measured step showed of the links."""
        if self._spec is None:
            return
        self._spec, self._did = updated(self._spec, times, self._did), times

    def links_since(self, spec: DeviceSpec | None) -> Links:
        """How fast links turned out to be, of what a plan for this spec counted on."""
        if spec is None or self._spec is None:
            return "as planned"
        now = self._spec.derated(_LINK_FRACTION)
        ratios = [rate / planned for rate, planned in zip(_rates(now), _rates(spec), strict=True) if planned]
        if min(ratios, default=1.0) < _MUCH_SLOWER:
            return "slower"
        return "faster" if max(ratios, default=1.0) > _MUCH_FASTER else "as planned"

    def use(self) -> TierUse:
        """How much of the tiers is in use."""
        host, disk = self.tiers.host, self.tiers.disk
        return TierUse(
            host_bytes=host.slab_bytes,
            host_peak_bytes=host.peak_bytes,
            pinned_bytes=host.pinned_bytes,
            disk_bytes=disk.file_bytes if disk is not None else 0,
            disk_peak_bytes=disk.peak_bytes if disk is not None else 0,
        )

    def _measured(self, *, with_disk: bool) -> DeviceSpec:
        """The links' rates, measured again once page-locking turned out to be refused: copies are slower now."""
        is_refused = self.tiers.host.is_pinning_refused
        is_stale = is_refused and not self._knew_pinning_refused
        self._knew_pinning_refused = is_refused
        if self._spec is None or is_stale or (with_disk and not self._spec.disk_write_bytes_per_second):
            self._spec, self._did = self._measure(with_disk=with_disk), None
        return self._spec

    def _measure(self, *, with_disk: bool) -> DeviceSpec:
        try:
            return measure_spec(self.device, self.tiers, with_disk=with_disk)
        except (HostRefusedError, torch.OutOfMemoryError):
            return nominal_spec(self.device)
        except SpillError as error:
            self._give_disk_up(error)
            return self._measure(with_disk=False)

    def _give_disk_up(self, error: SpillError) -> None:
        if self._tier == "disk":
            raise error
        _log.warning("planning without a disk tier: %s", str(error))
        disk, self.tiers.disk = self.tiers.disk, None
        if disk is not None:
            disk.trim()


def _rates(spec: DeviceSpec) -> tuple[float, ...]:
    return (
        spec.d2h_bytes_per_second,
        spec.h2d_bytes_per_second,
        spec.disk_write_bytes_per_second,
        spec.disk_read_bytes_per_second,
    )


def _host_limit(settings: Settings) -> int | None:
    """Most host memory for swapped tensors: what was asked for, else a share of most of what is free.

    Returns:
        Bytes of this process, whose host may have others that train with it; None if not known.
    """
    if settings.tier == "disk":
        return 0
    if settings.host_budget_bytes is not None:
        return settings.host_budget_bytes
    free = available_bytes()
    return int(_HOST_FRACTION * free) // num_local_ranks() if free is not None else None
