"""How fast bytes leave the device and come back: by plain torch copies, through the package's lanes, to disk.

A batch of blocks is timed from the first copy to the end of the last, with page-locked memory on the host where the
device knows that, the best of a few batches. "Both at once" counts the bytes of both directions together. The
lanes' goal is nine tenths of what plain copies of large blocks reach; small ones are there for reading.

Known shortfall: on a CPU a plain copy and a lane are the same copy, in the calling thread or in a worker; on a disk
whose pages the file system caches, reads are those of the cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import quartiles, synchronize
from benchmarks.results import Measurements, Row, error_row
from lightning_offload.errors import OffloadError
from lightning_offload.runtime.lanes import Block, Copy
from lightning_offload.runtime.spill import DiskPool
from lightning_offload.runtime.tiers import Place, Tiers, tiers_for

_GOAL = 1 / 0.9
_NUM_TRIALS = 7
_NUM_DISK_TRIALS = 3
_DIRECTIONS = ("d2h", "h2d", "both")
_MIB = 1 << 20

Move = Callable[[], None]
"""Copies one batch and returns when it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How much is copied in a batch."""

    block_bytes: int
    num_blocks: int

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def __str__(self) -> str:
        return f"{self.num_blocks} blocks of {self.block_bytes // _MIB} MiB"


@dataclass(slots=True, kw_only=True)
class _Rates:
    """What was measured."""

    num_trials: int
    rows: list[Row] = field(default_factory=list)
    spread: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def measurements(self, config: dict[str, Any]) -> Measurements:
        """Return all of it."""
        return Measurements(
            rows=self.rows, config=config, repeats=self.num_trials, spread=self.spread, notes=self.notes
        )  # fmt: skip

    def add(self, case: str, moves: dict[str, Move], total_bytes: int) -> dict[str, float]:
        """Time the moves of one kind of copy; returns their rates."""
        rates: dict[str, float] = {}
        for name, move in moves.items():
            seconds = [_timed(move) for _ in range(self.num_trials)]
            rates[name] = total_bytes * (2 if name == "both" else 1) / min(seconds)
            self.spread.setdefault(case, {})[f"{name}_seconds"] = quartiles(seconds)
            self.rows.append(Row(case=case, metric=f"{name}_bytes_per_second", value=rates[name]))
        return rates

    def compare(self, case: str, raw: dict[str, float], rates: dict[str, float], goal: float | None) -> None:
        """Add by how much plain copies are faster."""
        self.rows += [
            Row(case=case, metric=f"{name}_plain_over_lane", value=raw[name] / rate, goal=goal)
            for name, rate in rates.items()
        ]


def measure(device: torch.device, *, quick: bool) -> Measurements:
    """Measure the links between a device and host memory; a few small blocks will do for `quick`."""
    large = _Sizes(block_bytes=_MIB, num_blocks=4) if quick else _Sizes(block_bytes=64 * _MIB, num_blocks=16)
    small = _Sizes(block_bytes=_MIB, num_blocks=256)
    rates = _Rates(num_trials=2 if quick else _NUM_TRIALS)
    for sizes in (large,) if quick else (large, small):
        raw = rates.add(f"plain copies, {sizes}", _plain_moves(device, sizes), sizes.total_bytes)
        with contextlib.closing(tiers_for(device)) as tiers:
            case = f"lanes, {sizes}"
            moves = dict(zip(_DIRECTIONS, _lane_moves(tiers, device, sizes, None), strict=True))
            rates.compare(case, raw, rates.add(case, moves, sizes.total_bytes), _GOAL if sizes is large else None)
    return rates.measurements({"page_locked": device.type != "cpu"})


def measure_disk(device: torch.device, *, quick: bool, spill_dir: str | None = None) -> Measurements:
    """Measure the disk through the package's lanes; what it refuses is noted.

    Args:
        device: The device.
        quick: Whether a few small blocks will do.
        spill_dir: Folder for the spill file; None for the system's folder of temporary files.
    """
    sizes = _Sizes(block_bytes=_MIB, num_blocks=4) if quick else _Sizes(block_bytes=64 * _MIB, num_blocks=8)
    rates = _Rates(num_trials=2 if quick else _NUM_DISK_TRIALS)
    case = f"disk, {sizes}"
    disk = DiskPool(spill_dir)
    config: dict[str, Any] = {"folder": "the system's own" if spill_dir is None else "given"}
    try:
        disk.prepare(2 * sizes.total_bytes)
        with contextlib.closing(tiers_for(device, disk=disk)) as tiers:
            moves = _lane_moves(tiers, device, sizes, Place(tier="disk"))
            rates.add(case, dict(zip(("write", "read", "both"), moves, strict=True)), sizes.total_bytes)
    except OffloadError as error:
        rates.rows.append(error_row(case))
        rates.notes[case] = str(error)[:300]
    return rates.measurements(config)


def _plain_moves(device: torch.device, sizes: _Sizes) -> dict[str, Move]:
    """Copies as one would write them by hand: page-locked tensors, and a stream for each direction."""
    inside, outside = ([_bytes(sizes, device) for _ in range(sizes.num_blocks)] for _ in range(2))
    host = [[_bytes(sizes, torch.device("cpu"), pin=device.type != "cpu") for _ in inside] for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)] if device.type != "cpu" else [contextlib.nullcontext()] * 2

    def out() -> None:
        _copy(streams[0], host[0], inside)

    def back() -> None:
        _copy(streams[1], outside, host[1])

    def both() -> None:
        # Copies are queued in turns, so that neither direction gets a head start.
        for target, source, other_target, other_source in zip(host[0], inside, outside, host[1], strict=True):
            _copy(streams[0], [target], [source])
            _copy(streams[1], [other_target], [other_source])

    return dict(zip(_DIRECTIONS, (out, back, both), strict=True))


def _bytes(sizes: _Sizes, device: torch.device, *, pin: bool = False) -> Tensor:
    return torch.ones(sizes.block_bytes, dtype=torch.uint8, device=device, pin_memory=pin)


def _copy(stream: Any, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    with stream:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def _lane_moves(tiers: Tiers, device: torch.device, sizes: _Sizes, place: Place | None) -> tuple[Move, Move, Move]:
    """Copies through the package's own lanes, out, back and both at once; each waits for all of its blocks."""
    leaving, coming = ([_bytes(sizes, device).untyped_storage() for _ in range(sizes.num_blocks)] for _ in range(2))
    blocks, filled = ([_block(tiers, sizes, place) for _ in leaving] for _ in range(2))
    _wait([tiers.swap_out(storage, block) for storage, block in zip(leaving, filled, strict=True)])

    def out() -> None:
        _wait([tiers.swap_out(storage, block) for storage, block in zip(leaving, blocks, strict=True)])

    def back() -> None:
        _wait([tiers.swap_in(block, storage) for storage, block in zip(coming, filled, strict=True)])

    def both() -> None:
        copies: list[Copy] = []
        for source, block, full, target in zip(leaving, blocks, filled, coming, strict=True):
            copies += [tiers.swap_out(source, block), tiers.swap_in(full, target)]
        _wait(copies)

    return out, back, both


def _block(tiers: Tiers, sizes: _Sizes, place: Place | None) -> Block:
    block = tiers.allocate(sizes.block_bytes, place)
    if block is None:
        raise OffloadError(f"there is no room for {sizes.block_bytes} bytes: free some host memory or disk space")
    return block


def _wait(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.synchronize()


def _timed(move: Move) -> float:
    synchronize()
    start = time.perf_counter()
    move()
    synchronize()
    return time.perf_counter() - start
