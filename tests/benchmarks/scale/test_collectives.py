"""What exchanging gradients costs: closed forms, and what holds for any cluster."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scale.collectives import Choice, Cluster, check_algorithm, exchange_cost
from lightning_offload.errors import PlanError, UnsupportedError
from tests.benchmarks.scale.clusters import clusters, faster, flat, link

ALGORITHMS: tuple[Choice, ...] = ("auto", "ring", "tree", "binary-tree", "server")


def seconds(num_bytes: int, cluster: Cluster, num_devices: int, algorithm: Choice) -> float:
    return exchange_cost(num_bytes, cluster.place(num_devices), algorithm).seconds


def test_closed_forms_between_equal_nodes(subtests: pytest.Subtests) -> None:
    """800 bytes over links of 100 bytes a second, half a second a hop, one device a node."""
    for num_devices, algorithm, expected in [
        (2, "ring", 2 * 1 / 2 * 800 / 100 + 2 * 1 * 0.5),
        (8, "ring", 2 * 7 / 8 * 800 / 100 + 2 * 7 * 0.5),
        (8, "tree", 2 * 800 / 100 + 2 * 3 * 0.5),
        (1024, "tree", 2 * 800 / 100 + 2 * 10 * 0.5),
        (5, "tree", 2 * 800 / 100 + 2 * 3 * 0.5),
        (8, "binary-tree", 2 * 3 * (800 / 100 + 0.5)),
        (6, "binary-tree", 2 * 3 * (800 / 100 + 0.5)),
        (8, "server", 2 * (8 * 800 / 100 + 0.5)),
    ]:
        with subtests.test(num_devices=num_devices):
            assert seconds(800, flat(100.0, 0.5), num_devices, algorithm) == expected


def test_two_levels_of_links() -> None:
    """4 nodes of 8: the narrower of a device's inner link and of its node's 8 cards sets the rate; hops add up."""
    cluster = Cluster(intra=link(400.0, 0.25), inter=link(40.0, 2.0))
    assert seconds(3200, cluster, 32, "ring") == 2 * 31 / 32 * 3200 / 320 + 56 * 0.25 + 6 * 2.0
    assert seconds(3200, cluster, 32, "tree") == 2 * 3200 / 320 + 2 * (7 * 0.25 + 2 * 2.0)
    assert seconds(3200, cluster, 32, "binary-tree") == 2 * 3 * (8 + 0.25) + 2 * 2 * (80 + 2.0)
    assert seconds(3200, cluster, 32, "server") == 2 * (32 * 80 + 2.0)
    narrow = dataclasses.replace(cluster, intra=link(200.0, 0.25))
    assert seconds(3200, narrow, 32, "ring") == 2 * 31 / 32 * 3200 / 200 + 56 * 0.25 + 6 * 2.0
    two_cards = dataclasses.replace(cluster, nics_per_node=2)
    assert seconds(3200, two_cards, 32, "ring") == 2 * 31 / 32 * 3200 / 80 + 56 * 0.25 + 6 * 2.0


def test_one_node_has_no_use_for_its_cards() -> None:
    """Up to a full node only the inner links count; a tree is a chain there."""
    cluster = Cluster(intra=link(400.0, 0.25), inter=link(1e-6, 1e6))
    assert seconds(3200, cluster, 8, "ring") == 2 * 7 / 8 * 8 + 14 * 0.25
    assert seconds(3200, cluster, 8, "tree") == 2 * 8 + 14 * 0.25
    assert seconds(3200, cluster, 9, "ring") > 1e6


@pytest.mark.parametrize(
    ("num_devices", "num_nodes", "most", "rails"),
    [(1, 1, 1, 1), (8, 1, 8, 8), (9, 2, 5, 4), (12, 2, 6, 6), (64, 8, 8, 8)],
)
def test_placement(num_devices: int, num_nodes: int, most: int, rails: int) -> None:
    """As few nodes as hold them, as evenly as can be; cards beyond the emptiest node's devices are idle."""
    place = Cluster(intra=link(1.0), inter=link(1.0)).place(num_devices)
    assert (place.num_nodes, place.most_per_node, place.num_rails) == (num_nodes, most, rails)
    many = Cluster(intra=link(1.0), inter=link(1.0), nics_per_node=16)
    assert many.place(num_devices).num_rails == rails
    few = Cluster(intra=link(1.0), inter=link(1.0), nics_per_node=2)
    assert few.place(num_devices).num_rails == min(rails, 2)


def test_auto_takes_the_cheaper() -> None:
    """A ring for long messages among few devices, a tree for short ones among many."""
    cluster = flat(100.0, 0.5)
    assert exchange_cost(10**6, cluster.place(4)).algorithm == "ring"
    assert exchange_cost(10, cluster.place(256)).algorithm == "tree"


def test_one_device_exchanges_nothing(subtests: pytest.Subtests) -> None:
    """It costs no time, and no bytes of any link."""
    for algorithm in ALGORITHMS:
        with subtests.test(algorithm=algorithm):
            cost = exchange_cost(10**9, flat(1.0, 1.0, uses_host_link=True).place(1), algorithm)
            assert (cost.seconds, cost.link_bytes) == (0.0, 0.0)


def test_what_passes_the_host_link(subtests: pytest.Subtests) -> None:
    """In one direction, of the busiest device: what a ring passes on, or its share of the node's cards."""
    for intra, inter, num_devices, algorithm, expected in [
        (True, True, 8, "ring", 2 * 7 / 8 * 800),  # PCIe within the node
        (False, True, 8, "ring", 0.0),  # NVLink within the node
        (False, True, 16, "ring", 2 * 15 / 16 * 800 / 8),  # NVLink, and a card for each device
        (False, True, 16, "tree", 2 * 15 / 16 * 800 / 8),
        (True, True, 16, "auto", 2 * 15 / 16 * 800),
        (True, False, 16, "binary-tree", 3 * 800),
        (True, True, 16, "binary-tree", 4 * 800),
        (False, True, 16, "server", 800),
        (False, False, 16, "ring", 0.0),
    ]:
        with subtests.test(intra=intra):
            cluster = Cluster(intra=link(10.0, uses_host_link=intra), inter=link(10.0, uses_host_link=inter))
            assert exchange_cost(800, cluster.place(num_devices), algorithm).link_bytes == expected


@given(
    clusters(), st.integers(0, 500), st.integers(1, 40), st.sampled_from(ALGORITHMS), st.sampled_from([1.0, 1.5, 8.0])
)
def test_faster_links_never_cost_more(
    cluster: Cluster, num_bytes: int, num_devices: int, algorithm: Choice, factor: float
) -> None:
    """Nor do fewer bytes, nor the choice among two algorithms."""
    cost = seconds(num_bytes, cluster, num_devices, algorithm)
    assert seconds(num_bytes, faster(cluster, factor), num_devices, algorithm) <= cost * (1 + 1e-12)
    assert seconds(num_bytes // 2, cluster, num_devices, algorithm) <= cost
    both = [seconds(num_bytes, cluster, num_devices, one) for one in ("ring", "tree")]  # type: ignore[arg-type]
    assert seconds(num_bytes, cluster, num_devices, "auto") == min(both)


def test_impossible_clusters() -> None:
    """No devices, no cards, or links that carry nothing are refused with the value."""
    with pytest.raises(PlanError, match="a node of 0 devices"):
        Cluster(intra=link(1.0), inter=link(1.0), devices_per_node=0)
    with pytest.raises(PlanError, match="0 network cards"):
        Cluster(intra=link(1.0), inter=link(1.0), nics_per_node=0)
    for rate in (0.0, math.nan):
        with pytest.raises(PlanError, match="impossible rate or latency"):
            Cluster(intra=link(1.0), inter=link(rate))
    with pytest.raises(PlanError, match="0 devices cannot train"):
        flat(1.0).place(0)
    with pytest.raises(UnsupportedError, match="unknown algorithm 'star': choose one of auto, ring, tree, binary-tree"):
        check_algorithm("star")
