"""Links, clusters and steps made by hand or at random, and an independent simulation of an exchange."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import strategies as st

from benchmarks.scale.cluster import Bucket, Cluster, StepProfile
from benchmarks.scale.interconnects import Interconnect


def link(rate: float, latency: float = 0.0, *, uses_host_link: bool = False) -> Interconnect:
    """A link by its figures."""
    return Interconnect(
        name="link", title="link", peak_bytes_per_second=rate, bytes_per_second=rate, latency_seconds=latency,
        uses_host_link=uses_host_link, source="",
    )  # fmt: skip


def flat(rate: float, latency: float = 0.0, *, uses_host_link: bool = False) -> Cluster:
    """Nodes of one device each."""
    one = link(rate, latency, uses_host_link=uses_host_link)
    return Cluster(intra=one, inter=one, devices_per_node=1)


def faster(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with all rates multiplied and all latencies divided."""
    links = {
        name: dataclasses.replace(
            one, bytes_per_second=factor * one.bytes_per_second, latency_seconds=one.latency_seconds / factor
        )
        for name, one in (("intra", cluster.intra), ("inter", cluster.inter))
    }
    return dataclasses.replace(cluster, **links)


def profile(*buckets: tuple[int, float], seconds: float = 10.0, copies: tuple[tuple[float, float], ...] = (),
            host_rate: float = math.inf) -> StepProfile:  # fmt: skip
    """A step of 4 samples with these buckets, bytes and ready time each."""
    return StepProfile(
        batch_size=4, step_seconds=seconds, copies=copies, host_link_bytes_per_second=host_rate,
        buckets=tuple(Bucket(num_bytes=size, ready_seconds=ready) for size, ready in buckets),
    )  # fmt: skip


_LINKS = st.builds(
    link,
    st.sampled_from([3.0, 10.0, 70.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
    uses_host_link=st.booleans(),
)


def clusters() -> st.SearchStrategy[Cluster]:
    """Any, with any number of devices and network cards a node."""
    return st.builds(
        Cluster,
        intra=_LINKS,
        inter=_LINKS,
        devices_per_node=st.sampled_from([1, 2, 3, 8]),
        nics_per_node=st.sampled_from([None, 1, 2, 16]),
    )


@st.composite
def profiles(draw: st.DrawFn) -> StepProfile:
    """Steps of eight seconds; buckets in any order of readiness, copies that overlap, touch and follow one another."""
    times = st.integers(0, 16).map(lambda n: n / 2)
    copies = st.builds(lambda begin, length: (begin, begin + length), times, st.sampled_from([0.0, 0.5, 1.5, 4.0]))
    found = profile(
        *draw(st.lists(st.tuples(st.integers(0, 40), times), max_size=6)),
        seconds=8.0,
        copies=tuple(draw(st.lists(copies, max_size=6))),
        host_rate=draw(st.sampled_from([4.0, 20.0, math.inf])),
    )
    return dataclasses.replace(found, update_seconds=draw(st.sampled_from([0.0, 0.5])))


def simulated_end(buckets: list[tuple[float, float, float]], copies: tuple[tuple[float, float], ...]) -> float:
    """When the last exchange ends, found by walking from event to event.

    Args:
        buckets: Ready time, duration and time of the link beside copies of each, in order.
        copies: When the link is taken.
    """
    now = 0.0
    for ready, duration, link_time in buckets:
        now = max(now, ready)
        while duration > 0 or link_time > 0:
            is_taken = any(begin <= now < end for begin, end in copies)
            events = [t for copy in copies if copy[0] < copy[1] for t in copy if t > now]
            steps = [t - now for t in events]
            steps += [duration] if duration > 0 else []
            steps += [link_time] if link_time > 0 and not is_taken else []
            step = min(steps)
            target = min([t for t in events if t - now == step], default=now + step)
            duration = max(0.0, duration - step) if duration > step else 0.0
            if not is_taken:
                link_time = link_time - step if link_time > step else 0.0
            now = target
    return now
