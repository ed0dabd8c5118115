"""Predicts the throughput of many devices that train alike from one device's step: *simulated*, nothing is measured.

Each device takes a batch of its own, and gradients are exchanged as DistributedDataParallel does: bucket by bucket, in
the order in which buckets become ready in backward, one after another on a communication lane. What is left of the
exchange when backward has ended is *exposed*: ``N A b / (A T + exposed + update)`` samples a second, for ``N`` devices
with ``A`` micro-batches of ``b`` samples each, of which only the last is followed by an exchange (``no_sync``).

Contention: swaps of a plan and the exchange may share a device's link to the host (PCIe, where devices of a node talk
over it or their network cards are behind it). Swaps keep their place, since the plan's times stay right only then; an
exchange has ended when it has had both its own duration and, while no swap was under way, the time that its bytes take
of that link.

Shortfalls: all devices are equally fast in every step (no stragglers), compute is not slowed down by the exchange,
reading and writing the buckets takes no time, and loading data keeps up.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from benchmarks.scale.collectives import Algorithm, Choice, Cluster, exchange_cost
from benchmarks.scale.gradients import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    gradients_of,
    make_buckets,
)
from lightning_offload.errors import PlanError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.trace import follow

__all__ = ["Bucket", "Cluster", "ClusterStep", "StepProfile", "profile_step", "scale", "scaling"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One device's step, as far as a cluster is concerned.

    Attributes:
        batch_size: Its samples.
        step_seconds: Duration of forward and backward under the plan.
        buckets: What is exchanged, in order; ready times are seconds from the beginning of the step.
        copies: When swaps use the link to the host, begin and end, in any order; they may overlap.
        host_link_bytes_per_second: Rate of one direction of that link; inf where it sets no limit.
        update_seconds: Duration of the optimizer's update, once for all micro-batches.
    """

    batch_size: int
    step_seconds: float
    buckets: tuple[Bucket, ...]
    copies: tuple[tuple[float, float], ...] = ()
    host_link_bytes_per_second: float = math.inf
    update_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 < self.step_seconds < math.inf:
            raise PlanError(
                f"a step of {self.batch_size} samples in {self.step_seconds} s is none: both must be positive"
            )
        if not 0 <= self.update_seconds < math.inf or not self.host_link_bytes_per_second > 0:
            raise PlanError(f"an update cannot take {self.update_seconds} s over {self.host_link_bytes_per_second} B/s")
        if any(b.num_bytes < 0 or not 0 <= b.ready_seconds < math.inf for b in self.buckets):
            raise PlanError(f"buckets need sizes and ready times of 0 or more, got {self.buckets!r:.200}")

    @property
    def gradient_bytes(self) -> int:
        """What each device exchanges."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def lasting(self, step_seconds: float) -> StepProfile:
        """The step with another duration, a measured one say, its parts in proportion."""
        ratio = step_seconds / self.step_seconds
        return dataclasses.replace(
            self,
            step_seconds=step_seconds,
            buckets=tuple(dataclasses.replace(b, ready_seconds=b.ready_seconds * ratio) for b in self.buckets),
            copies=tuple((begin * ratio, end * ratio) for begin, end in self.copies),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStep:
    """Simulated training on many devices.

    Attributes:
        num_devices: How many.
        num_nodes: On how many nodes they are.
        effective_batch: Samples of one update, of all devices and micro-batches.
        step_seconds: From one update to the next.
        samples_per_second: Of all devices.
        efficiency: Share of what as many devices would do that need not exchange anything.
        exchange_seconds: How long the exchange takes, undisturbed.
        exposed_seconds: The part of the step in which devices only wait for it.
        algorithms: How it is done, each named once; none for one device.
    """

    num_devices: int
    num_nodes: int
    effective_batch: int
    step_seconds: float
    samples_per_second: float
    efficiency: float
    exchange_seconds: float
    exposed_seconds: float
    algorithms: tuple[Algorithm, ...]


def profile_step(
    step: StepGraph | Problem,
    plan: MemoryPlan | None,
    device: DeviceSpec,
    *,
    batch_size: int,
    bucket_bytes: int | None = None,
    update_seconds: float = 0.0,
) -> StepProfile:
    """Profile a step under a plan on the simulated clock.

    Args:
        step: The step, or the problem made of it.
        plan: What happens to its memory; None to keep everything.
        device: Where it runs.
        batch_size: Its samples.
        bucket_bytes: DDP's ``bucket_cap_mb`` in bytes, then for the first bucket too; None for its default.
        update_seconds: Duration of the optimizer's update.

    Raises:
        PlanError: The plan is one for another step, or the step takes no time.
    """
    problem = step if isinstance(step, Problem) else Problem(step)
    timeline = follow(problem, plan, device)
    end = timeline.step_seconds - timeline.slowdown_seconds
    ratio = timeline.step_seconds / end if end > 0 else 1.0  # the slow-down by copies, spread over the step
    ends = {span.tick: span.end_seconds for span in timeline.of("compute") if span.kind == "op"}
    ops = problem.graph.ops
    gradients = [
        (g.num_bytes, ratio * ends[ops[g.ready_op].tick] if g.ready_op >= 0 else timeline.step_seconds)
        for g in gradients_of(problem.requested)
    ]
    copies = (*timeline.of("d2h"), *timeline.of("h2d"))
    return StepProfile(
        batch_size=batch_size,
        step_seconds=timeline.step_seconds,
        buckets=make_buckets(
            gradients, cap_bytes=bucket_bytes or BUCKET_BYTES, first_bytes=bucket_bytes or FIRST_BUCKET_BYTES
        ),
        copies=tuple((ratio * span.start_seconds, ratio * span.end_seconds) for span in copies),
        host_link_bytes_per_second=min(device.d2h_bytes_per_second, device.h2d_bytes_per_second),
        update_seconds=update_seconds,
    )


def scale(
    profile: StepProfile,
    cluster: Cluster,
    num_devices: int,
    *,
    accumulation: int = 1,
    algorithm: Choice = "auto",
    overlap: bool = True,
) -> ClusterStep:
    """Simulate training on many devices; pure, and quick enough to call for every batch size of a search.

    Args:
        profile: The step of one device.
        cluster: The links between devices.
        num_devices: How many train, at most one model on each.
        accumulation: Micro-batches of one update.
        algorithm: How gradients are exchanged.
        overlap: Whether the exchange overlaps backward; else all gradients are exchanged at once after it.

    Raises:
        PlanError: There is no device or no micro-batch.
    """
    if accumulation < 1:
        raise PlanError(f"{accumulation} micro-batches make no update: give 1 or more")
    place = cluster.place(num_devices)
    buckets = profile.buckets
    if not overlap and buckets:
        buckets = (Bucket(num_bytes=profile.gradient_bytes, ready_seconds=profile.step_seconds),)
    costs = [exchange_cost(bucket.num_bytes, place, algorithm) for bucket in buckets]
    is_shared = any(cost.link_bytes for cost in costs) and profile.host_link_bytes_per_second < math.inf
    link = _CopiesOnLink(profile.copies if is_shared else ())
    now = 0.0
    for bucket, cost in zip(buckets, costs, strict=True):
        start = max(now, bucket.ready_seconds)
        now = link.end(start, cost.seconds, cost.link_bytes / profile.host_link_bytes_per_second)
    exposed = max(0.0, now - profile.step_seconds) if num_devices > 1 else 0.0
    alone = accumulation * profile.step_seconds + profile.update_seconds
    effective_batch = num_devices * accumulation * profile.batch_size
    return ClusterStep(
        num_devices=num_devices,
        num_nodes=place.num_nodes,
        effective_batch=effective_batch,
        step_seconds=alone + exposed,
        samples_per_second=effective_batch / (alone + exposed),
        efficiency=alone / (alone + exposed),
        exchange_seconds=sum(cost.seconds for cost in costs),
        exposed_seconds=exposed,
        algorithms=tuple(sorted({cost.algorithm for cost in costs})) if num_devices > 1 else (),
    )


def scaling(
    profile: StepProfile,
    cluster: Cluster,
    devices: Sequence[int],
    *,
    accumulation: int = 1,
    algorithm: Choice = "auto",
    overlap: bool = True,
) -> tuple[ClusterStep, ...]:
    """Simulate several numbers of devices; see :func:`scale`."""
    return tuple(
        scale(profile, cluster, num, accumulation=accumulation, algorithm=algorithm, overlap=overlap) for num in devices
    )


class _CopiesOnLink:
    """When a link is free of copies.

    Args:
        copies: When they are under way.
    """

    def __init__(self, copies: Iterable[tuple[float, float]]) -> None:
        self._ends: list[float] = []
        self._free_before: list[float] = []
        for begin, end in sorted(copies):
            if end <= begin:
                continue
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                gap = begin - (self._ends[-1] if self._ends else 0.0)
                self._free_before.append(gap + (self._free_before[-1] if self._free_before else 0.0))
                self._ends.append(end)

    def end(self, start: float, seconds: float, link_seconds: float) -> float:
        """When an exchange has had its duration, and its time of the link beside the copies."""
        if not self._ends or not link_seconds:
            return start + seconds
        free = self._free_at(start) + link_seconds
        index = bisect_left(self._free_before, free) - 1  # the last copy that it waits for
        through = self._ends[index] + free - self._free_before[index] if index >= 0 else free
        return max(start + seconds, through)

    def _free_at(self, now: float) -> float:
        """For how long the link was free up to a time."""
        index = bisect_left(self._ends, now)  # the copies before it have ended
        since = now - self._ends[index - 1] if index else now
        before = self._free_before[index - 1] if index else 0.0
        if index < len(self._ends):
            return min(before + since, self._free_before[index])
        return before + since
