"""AccUDNN's eight GPUs, *simulated*: one GPU's planned step, and an exchange of gradients among eight in one machine.

The paper says "without communication optimisation", so gradients are exchanged after backward, none of it overlapped:
by the binary tree that Caffe had, by a ring, and by one parameter server. What today's bucketed and overlapped exchange
would make of the same GPUs stands beside them. All go over the GPUs' own links to PCIe, at the rate of their copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.papers.figures import Figure
from benchmarks.scale.cluster import Cluster, profile_step, scale
from benchmarks.scale.collectives import Choice
from benchmarks.scale.interconnects import interconnect
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph

_NUM_GPUS = 8
_CLAIM = 7.7
CAFFE = "Caffe's binary tree"
DDP = "DDP's overlapped buckets"
WAYS: dict[str, tuple[Choice, bool]] = {
    CAFFE: ("binary-tree", False),
    "ring": ("ring", False),
    "one server": ("server", False),
    DDP: ("auto", True),
}
_NOTES = {
    CAFFE: "; the paper's GPUs and batch are not known to us, and with ops slower than a roofline's more is gained",
    DDP: "; the paper's figure is one without such an optimisation",
}


def machine(spec: DeviceSpec) -> Cluster:
    """Return one machine of eight GPUs that talk over PCIe, as fast as they copy to and from the host."""
    rate = min(spec.d2h_bytes_per_second, spec.h2d_bytes_per_second)
    link = dataclasses.replace(interconnect("pcie3"), bytes_per_second=rate)
    return Cluster(intra=link, inter=interconnect("10gbe"), devices_per_node=_NUM_GPUS)


def eight_gpus(
    graph: StepGraph,
    plan: MemoryPlan,
    spec: DeviceSpec,
    batch_size: int,
    update_seconds: float,
    ways: Sequence[str] = tuple(WAYS),
) -> Iterator[Figure]:
    """Return what eight GPUs make of a planned step, by the way in which gradients are exchanged."""
    profile = profile_step(graph, plan, spec, batch_size=batch_size, update_seconds=update_seconds)
    for what in ways:
        algorithm, overlap = WAYS[what]
        found = scale(profile, machine(spec), _NUM_GPUS, algorithm=algorithm, overlap=overlap)
        alone = found.step_seconds - found.exposed_seconds
        yield Figure(
            system="AccUDNN", what=f"speed-up of {_NUM_GPUS} GPUs, {what}", unit="ratio",
            setting=f"ResNet-152, b={batch_size} each, {spec.name}", claim=None if overlap else _CLAIM,
            ours=_NUM_GPUS * found.efficiency, better="more", how="simulation",
            note=f"a simulated cluster: {found.exchange_seconds:.2f} s of exchange over the GPUs' own links, of which "
            f"{found.exposed_seconds:.2f} s come on top of a step of {alone:.1f} s{_NOTES.get(what, '')}",
        )  # fmt: skip
