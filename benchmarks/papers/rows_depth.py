"""Deepest residual networks, and how little memory networks of given depth need."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.papers import captures, searches
from benchmarks.papers.figures import Figure
from examples.models import resnet
from examples.models.registry import Example, image_example
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.units import format_bytes

_MIB = 1 << 20
_GROWING = (6, 32, 6)
"""Blocks of the first, second and fourth stage where the third grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthClaim:
    """A depth that was published, of a batch on a GPU."""

    system: str
    depth: int
    batch_size: int
    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClaim:
    """Megabytes of a network with and without a system, at a batch of 32; `plain_mb` 0 where it did not fit."""

    title: str
    blocks: tuple[int, int, int, int]
    plain_mb: int
    system_mb: int


DEPTH_CLAIMS = (
    DepthClaim(system="SuperNeurons", depth=1920, batch_size=16, gpu="k40c"),
    DepthClaim(system="SuperNeurons", depth=2500, batch_size=1, gpu="k40c"),
    DepthClaim(system="Layup", depth=2504, batch_size=16, gpu="k40m"),
    DepthClaim(system="Layrub", depth=1517, batch_size=32, gpu="k40m"),
)
MEMORY_CLAIMS = (
    MemoryClaim(title="ResNet-101", blocks=(3, 4, 23, 3), plain_mb=5815, system_mb=2660),
    MemoryClaim(title="ResNet-200", blocks=(3, 24, 36, 3), plain_mb=10662, system_mb=3052),
    MemoryClaim(title="ResNet-1001", blocks=(6, 32, 289, 6), plain_mb=0, system_mb=5979),
    MemoryClaim(title="ResNet-2000", blocks=(6, 32, 622, 6), plain_mb=0, system_mb=10650),
)


def network(depth: int, batch_size: int) -> Example:
    """Return the residual network of a depth whose third stage takes what the others leave.

    Raises:
        ValueError: If there is no such depth.
    """
    blocks = (depth - 2) // 3 - sum(_GROWING)
    if blocks < 1:
        raise ValueError(f"a depth of {depth} is not above {3 * sum(_GROWING) + 2}")
    n1, n2, n4 = _GROWING
    return image_example(functools.partial(resnet, n1, n2, blocks, n4), batch_size)


def floor_of_depth(depth: int, batch_size: int, gpu: str) -> int:
    """Return the smallest peak of a network."""
    spec = captures.device(gpu)
    graph = captures.record(network(depth, batch_size), batch_size, spec).graph
    return searches.peaks(graph, spec).floor_bytes


def deepest(claim: DepthClaim) -> Iterator[Figure]:
    """Yield the largest depth that fits, in steps of a block."""
    spec = captures.device(claim.gpu)
    budget = captures.memory_bytes(spec)
    found: dict[int, int] = {}

    @functools.cache
    def floor(num_blocks: int) -> int:
        found[num_blocks] = floor_of_depth(3 * num_blocks + 2, claim.batch_size, claim.gpu)
        return found[num_blocks]

    claimed_blocks = (claim.depth - 2) // 3
    small = sum(_GROWING) + 10
    blocks = searches.secant(floor, budget, low=small, high=claimed_blocks)
    per_block = (floor(claimed_blocks) - floor(small)) / (claimed_blocks - small)
    yield Figure(
        system=claim.system, what="deepest network", unit="count", claim=claim.depth, ours=3 * blocks + 2,
        setting=f"ResNet(6, 32, n, 6), b={claim.batch_size}, {spec.name}, {format_bytes(budget)}", better="more",
        how="fake capture",
        note=f"a block more takes {per_block / _MIB:.1f} MiB, of which 12.8 are its parameters, gradients and momentum",
    )  # fmt: skip


def memory(claim: MemoryClaim) -> Iterator[Figure]:
    """Yield peaks of a network at a batch of 32, plain and smallest, and what the published one costs."""
    spec = captures.device("m40")
    graph = captures.record(image_example(functools.partial(resnet, *claim.blocks), 32), 32, spec).graph
    found = searches.peaks(graph, spec)
    setting = f"{claim.title}, b=32, {spec.name}"
    if claim.plain_mb:
        yield Figure(
            system="Meng et al.", what="memory without offloading", setting=setting, unit="bytes",
            claim=claim.plain_mb * _MIB, ours=found.plain_bytes, better="same", how="fake capture",
            note="TensorFlow against PyTorch: activations and additions in place, and no workspaces here",
        )  # fmt: skip
    yield Figure(
        system="Meng et al.", what="memory", setting=setting, unit="bytes", claim=claim.system_mb * _MIB,
        ours=found.floor_bytes, better="less", how="fake capture",
        note="the smallest peak, with parameters, gradients and momentum"
        + ("" if claim.plain_mb else f"; blocks {claim.blocks} by our choice"),
    )  # fmt: skip
    try:
        made = searches.planned(graph, spec, claim.system_mb * _MIB)
    except BudgetInfeasibleError:
        return
    yield Figure(
        system="Meng et al.", what=f"time added at {claim.system_mb} MiB", setting=setting, unit="share", claim=0.1,
        ours=searches.overhead(made), better="less", how="simulation",
        note=f'the paper says "below 10%" of all its nets; {searches.at_least(made)}',
    )  # fmt: skip
