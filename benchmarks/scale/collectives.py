"""What exchanging gradients among the devices of a cluster costs, by algorithm.

* ``ring``: reduce-scatter and all-gather around a ring (Patarasuk and Yuan, JPDC 2009); ``2 (N-1)/N`` of the bytes pass
  each link, in ``2 (N-1)`` hops.
* ``tree``: NCCL's double binary tree (Sanders, Speck and Traeff, Parallel Computing 2009), pipelined: twice the bytes
  at full bandwidth, a chain within each node and ``log2`` hops between nodes, up and down.
* ``auto``: the cheaper of these two for the bytes at hand, as NCCL chooses.
* ``binary-tree``: whole arrays, level by level, up and then down: Caffe before NCCL (its docs/multigpu.md).
* ``server``: one parameter server receives all gradients and then sends all parameters over one link.

Rings and trees run over all of a node's network cards at once, as NCCL lays its channels, and over its inner links:
the narrower of the two sets the rate. Shortfalls: no reduction within switches, no protocols for short messages, no
time to launch a collective, and no compute that NCCL's kernels take away.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple, get_args

from benchmarks.scale.interconnects import Interconnect
from lightning_offload.errors import PlanError, UnsupportedError

Algorithm = Literal["ring", "tree", "binary-tree", "server"]
Choice = Literal["auto", "ring", "tree", "binary-tree", "server"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices.

    Attributes:
        intra: Link of a device to the others of its node.
        inter: Link of one network card to those of other nodes.
        devices_per_node: Devices of a node.
        nics_per_node: Network cards of a node; None for one a device.
    """

    intra: Interconnect
    inter: Interconnect
    devices_per_node: int = 8
    nics_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or (self.nics_per_node is not None and self.nics_per_node < 1):
            raise PlanError(
                f"a node of {self.devices_per_node} devices and {self.nics_per_node} network cards: give 1 or more"
            )
        for link in (self.intra, self.inter):
            if not (0 < link.bytes_per_second < math.inf and 0 <= link.latency_seconds < math.inf):
                raise PlanError(f"interconnect {link.name!r} has an impossible rate or latency: {link}")

    def place(self, num_devices: int) -> Placement:
        """Spread devices over as few nodes as hold them, as evenly as can be.

        Raises:
            PlanError: There is not even one.
        """
        if num_devices < 1:
            raise PlanError(f"{num_devices} devices cannot train: give 1 or more")
        num_nodes = math.ceil(num_devices / self.devices_per_node)
        return Placement(self, num_devices, num_nodes)


class Placement(NamedTuple):
    """Devices of a cluster that train together."""

    cluster: Cluster
    num_devices: int
    num_nodes: int

    @property
    def most_per_node(self) -> int:
        """Devices of the fullest node."""
        return math.ceil(self.num_devices / self.num_nodes)

    @property
    def num_rails(self) -> int:
        """Network cards of a node that work at once: no more than the emptiest node has devices."""
        fewest = self.num_devices // self.num_nodes
        return min(fewest, self.cluster.nics_per_node or fewest)

    @property
    def bytes_per_second(self) -> float:
        """Rate of a ring or tree over all."""
        rates = []
        if self.most_per_node > 1:
            rates.append(self.cluster.intra.bytes_per_second)
        if self.num_nodes > 1:
            rates.append(self.num_rails * self.cluster.inter.bytes_per_second)
        return min(rates)

    @property
    def host_link_share(self) -> float:
        """The part of a device's traffic to other devices that its link to the host carries."""
        if self.most_per_node > 1 and self.cluster.intra.uses_host_link:
            return 1.0
        if self.num_nodes > 1 and self.cluster.inter.uses_host_link:
            return 1.0 / self.num_rails
        return 0.0


class Cost(NamedTuple):
    """What an exchange costs.

    Attributes:
        seconds: Its duration, undisturbed.
        link_bytes: What the link to the host of the busiest device carries of it, in each direction.
        algorithm: How it is done.
    """

    seconds: float
    link_bytes: float
    algorithm: Algorithm


def check_algorithm(name: str) -> Choice:
    """The name of an algorithm, checked.

    Raises:
        UnsupportedError: There is none of that name.
    """
    if name not in get_args(Choice):
        raise UnsupportedError(f"unknown algorithm {name!r}: choose one of {', '.join(get_args(Choice))}")
    return name  # type: ignore[return-value]


def exchange_cost(num_bytes: int, place: Placement, algorithm: Choice = "auto") -> Cost:
    """What exchanging gradients costs; nothing for one device.

    Args:
        num_bytes: Their size on each device.
        place: Where the devices are.
        algorithm: How.
    """
    if algorithm == "auto":
        ring, tree = (exchange_cost(num_bytes, place, one) for one in ("ring", "tree"))
        return tree if tree.seconds < ring.seconds else ring
    if place.num_devices == 1:
        return Cost(0.0, 0.0, algorithm)
    if algorithm == "binary-tree":
        return _binary_tree(num_bytes, place)
    if algorithm == "server":
        return _server(num_bytes, place)
    seconds = _ring(num_bytes, place) if algorithm == "ring" else _tree(num_bytes, place)
    passed = _turns(place) * num_bytes  # a device of a tree sends as much, on average
    return Cost(seconds, passed * place.host_link_share, algorithm)


def _turns(place: Placement) -> float:
    return 2 * (place.num_devices - 1) / place.num_devices


def _ring(num_bytes: int, place: Placement) -> float:
    intra, inter = place.cluster.intra, place.cluster.inter
    between = 2 * (place.num_nodes - 1)
    within = 2 * (place.num_devices - 1) - between
    hops = within * intra.latency_seconds + between * inter.latency_seconds
    return _turns(place) * num_bytes / place.bytes_per_second + hops


def _tree(num_bytes: int, place: Placement) -> float:
    intra, inter = place.cluster.intra, place.cluster.inter
    within = (place.most_per_node - 1) * intra.latency_seconds
    hops = 2 * (within + _levels(place.num_nodes) * inter.latency_seconds)
    return 2 * num_bytes / place.bytes_per_second + hops


def _binary_tree(num_bytes: int, place: Placement) -> Cost:
    within, between = _levels(place.most_per_node), _levels(place.num_nodes)
    link = place.cluster.intra, place.cluster.inter
    seconds = sum(
        2 * levels * (num_bytes / one.bytes_per_second + one.latency_seconds)
        for levels, one in zip((within, between), link, strict=True)
    )
    crossing = sum(levels for levels, one in zip((within, between), link, strict=True) if one.uses_host_link)
    return Cost(seconds, float(crossing * num_bytes), "binary-tree")


def _server(num_bytes: int, place: Placement) -> Cost:
    link = place.cluster.inter if place.num_nodes > 1 else place.cluster.intra
    seconds = 2 * (place.num_devices * num_bytes / link.bytes_per_second + link.latency_seconds)
    return Cost(seconds, float(num_bytes) if link.uses_host_link else 0.0, "server")


def _levels(num: int) -> int:
    """Levels of a binary tree: the logarithm, rounded up."""
    return (num - 1).bit_length()
