"""Deepest residual networks, and how little memory networks of given depth need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from benchmarks.papers import captures, searches
from benchmarks.papers.figures import Figure
from benchmarks.papers.networks import resnet34
from examples.models import resnet
from examples.models.registry import Example, image_example
from lightning_offload.cli.batch_search import largest_within
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.units import format_bytes

_MIB = 1 << 20
_GROWING = (6, 32, 6)
"""Blocks of the first, second and fourth stage where the third grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthClaim:
    """A depth that was published, of a batch on a GPU; `plain_depth` None where no baseline is at hand."""

    system: str
    depth: int
    batch_size: int
    gpu: str
    plain_depth: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClaim:
    """Megabytes of a network with and without a system, at a batch of 32.

    Attributes:
        system: Whose.
        title: The network's name for people.
        build: Makes it.
        gpu: Name in the catalogue.
        plain_mb: Of the paper's own framework; None where it did not fit.
        system_mb: The claim.
        seconds_share: The time that was added, as a share of the plain step; None where none was published.
        seconds_note: What was said of that.
        note: What to know.
    """

    system: str
    title: str
    build: Callable[[], nn.Module]
    gpu: str
    plain_mb: int | None
    system_mb: int
    seconds_share: float | None = None
    seconds_note: str = ""
    note: str = ""


_BELOW = 'the paper says "below 10%" of all its nets'


def _residual(*blocks: int) -> Callable[[], nn.Module]:
    return functools.partial(resnet, *blocks)


def _meng(title: str, blocks: tuple[int, int, int, int], plain_mb: int | None, system_mb: int) -> MemoryClaim:
    return MemoryClaim(
        system="Meng et al.", title=title, build=_residual(*blocks), gpu="m40", plain_mb=plain_mb, system_mb=system_mb,
        seconds_share=0.1, seconds_note=_BELOW, note="" if plain_mb else f"blocks {blocks} by our choice",
    )  # fmt: skip


DEPTH_CLAIMS = (
    DepthClaim(
        system="SuperNeurons", depth=1920, batch_size=16, gpu="k40c", plain_depth=592,
        note="the abstract's 3.2432 times deeper is this one over TensorFlow's",
    ),
    DepthClaim(system="SuperNeurons", depth=2500, batch_size=1, gpu="k40c"),
    DepthClaim(system="Layup", depth=2504, batch_size=16, gpu="k40m"),
    DepthClaim(system="Layrub", depth=1517, batch_size=32, gpu="k40m"),
)  # fmt: skip
MEMORY_CLAIMS = (
    _meng("ResNet-101", (3, 4, 23, 3), 5815, 2660),
    _meng("ResNet-200", (3, 24, 36, 3), 10662, 3052),
    _meng("ResNet-1001", (6, 32, 289, 6), None, 5979),
    _meng("ResNet-2000", (6, 32, 622, 6), None, 10650),
    MemoryClaim(
        system="Layrub", title="ResNet-34", build=resnet34, gpu="k40m", plain_mb=4430, system_mb=1257
    ),
    MemoryClaim(
        system="Layrub", title="ResNet-50", build=_residual(3, 4, 6, 3), gpu="k40m", plain_mb=11425, system_mb=1805,
        seconds_share=0.568, seconds_note="the paper does not say at which batch",
    ),
    MemoryClaim(
        system="Layrub", title="ResNet-1001", build=_residual(6, 32, 289, 6), gpu="k40m", plain_mb=None, system_mb=7901
    ),
    MemoryClaim(
        system="Layrub", title="ResNet-1517", build=_residual(6, 32, 461, 6), gpu="k40m",
        plain_mb=None, system_mb=11239,
    ),
)  # fmt: skip


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


def deepest(claim: DepthClaim) -> Iterator[Figure]:
    """Yield the largest depth that fits, in steps of a block."""
    spec = captures.device(claim.gpu)
    room = captures.room_bytes(spec)

    @functools.cache
    def found(num_blocks: int) -> searches.Peaks:
        example = network(3 * num_blocks + 2, claim.batch_size)
        return searches.peaks(captures.record(example, claim.batch_size, spec).graph, spec)

    claimed_blocks = (claim.depth - 2) // 3
    small = sum(_GROWING) + 10
    blocks = small + largest_within(lambda n: found(small + n).floor_bytes, room, searches.MOST)
    plain = small + largest_within(lambda n: found(small + n).plain_bytes, room, searches.MOST)
    per_block = (found(claimed_blocks).floor_bytes - found(small).floor_bytes) / (claimed_blocks - small)
    note = f"a block more takes {per_block / _MIB:.1f} MiB, of which 12.8 are its parameters, gradients and momentum"
    memory_text = format_bytes(captures.memory_bytes(spec))
    yield Figure(
        system=claim.system, what="deepest network", unit="count", claim=claim.depth, claim_baseline=claim.plain_depth,
        ours=3 * blocks + 2, baseline=3 * plain + 2, better="more", how="fake capture",
        setting=f"ResNet(6, 32, n, 6), b={claim.batch_size}, {spec.name}, {memory_text}",
        note="; ".join(filter(None, (note, claim.note))),
    )  # fmt: skip


def memory(claim: MemoryClaim) -> Iterator[Figure]:
    """Yield the smallest peak of a network at a batch of 32 beside the plain one, and what the published one costs."""
    spec = captures.device(claim.gpu)
    graph = captures.record(image_example(claim.build, 32), 32, spec).graph
    found = searches.peaks(graph, spec)
    setting = f"{claim.title}, b=32, {spec.name}"
    yield Figure(
        system=claim.system, what="memory", setting=setting, unit="bytes", claim=claim.system_mb * _MIB,
        claim_baseline=claim.plain_mb and claim.plain_mb * _MIB, ours=captures.process_bytes(found.floor_bytes),
        baseline=captures.process_bytes(found.plain_bytes), better="less", how="fake capture", note=claim.note,
    )  # fmt: skip
    try:
        made = searches.planned(graph, spec, captures.tensor_bytes(claim.system_mb * _MIB))
    except BudgetInfeasibleError:
        return
    yield Figure(
        system=claim.system, what=f"time added at {claim.system_mb} MiB", setting=setting, unit="share",
        claim=claim.seconds_share, ours=searches.overhead(made), better="less", how="simulation",
        note="; ".join(filter(None, (claim.seconds_note, searches.at_least(made)))),
    )  # fmt: skip
