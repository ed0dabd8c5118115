"""The shapes that a throughput curve may have, each with how likely it is before any trial.

A step's seconds are a few plain things, and every combination over a range of constants is one shape:

* fixed seconds and seconds per sample: throughput is ``n / (n + k)`` (launches, the optimizer, weights to be read);
* the longer of the two, where they overlap: ``n / max(n, k)``, and one in between;
* a bend: from some size on each sample costs more, since swapping no longer hides;
* whole tiles: 17 samples may cost what 24 or 32 do;
* what a performance model predicts, where there is one, times a small power of the size: a prediction that is off by
  tens of percent is seldom off by the same at all sizes. Its weight is less than that of the plain shapes: so the
  search was right more often where a prediction is biased.

Each is known up to a factor only. What no shape explains is left to the residual in :mod:`~.curve`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_offload.tuning.curve import Array

__all__ = ["Shapes", "possible_shapes"]

_TILES = (1, 8, 16, 32)
_TILED = 0.5  # weight of all tiles above 1 together
_SHARPNESS = (1.0, 3.0, 64.0)  # seconds are the p-norm of both parts: their sum, in between, the longer one
_NUM_FIXED = 128  # fixed costs that are considered; so close together that none is far from the truth
_TILTS = np.linspace(-0.1, 0.1, 21)  # powers of the size that a prediction may be off by
_BENDS = (0.3, 1.0, 3.0)  # what a sample costs in addition above the bend, in units of what it costs below
_NUM_BENDS = 48
_NUM_BENT_FIXED = 64
_BENT = 0.3  # weight of all bends together, against 1 for the shapes without
_PREDICTED = 0.3  # weight of a prediction, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Possible shapes over a grid of sizes.

    Args:
        log_speeds: Logarithm of throughput, one shape a row; each is free by a factor.
        log_weights: Logarithm of how likely each is before any trial, up to a constant.
    """

    log_speeds: Array
    log_weights: Array


def possible_shapes(sizes: Array, largest: int, predicted: Callable[[Array], Array] | None = None) -> Shapes:
    """List the shapes over a grid of sizes.

    Args:
        sizes: The grid, ascending.
        largest: The largest size that ran; fixed costs are considered up to several times its seconds.
        predicted: A performance model's logarithm of throughput at any sizes.
    """
    groups = [*_without_bend(sizes, largest), *_with_bend(sizes, largest)]
    if predicted is not None:
        groups += [(_PREDICTED * _tile_weight(tile), _filled(sizes, tile, _tilted(predicted))) for tile in _TILES]
    return Shapes(
        log_speeds=np.concatenate([rows for _, rows in groups]),
        log_weights=np.concatenate([np.full(len(rows), np.log(weight / len(rows))) for weight, rows in groups]),
    )


def _without_bend(sizes: Array, largest: int) -> list[tuple[float, Array]]:
    fixed = np.geomspace(max(0.25, sizes[0] / 16), 8 * max(largest, 8), _NUM_FIXED)[:, None]
    return [
        (_tile_weight(tile) / len(_SHARPNESS), _filled(sizes, tile, _norm(fixed, sharpness)))
        for tile in _TILES
        for sharpness in _SHARPNESS
    ]


def _norm(fixed: Array, sharpness: float) -> Callable[[Array], Array]:
    return lambda sizes: np.asarray(-np.logaddexp(0, sharpness * np.log(fixed / sizes)) / sharpness)


def _tilted(predicted: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda sizes: np.asarray(predicted(sizes) + _TILTS[:, None] * np.log(sizes))


def _with_bend(sizes: Array, largest: int) -> list[tuple[float, Array]]:
    fixed = np.geomspace(max(0.25, sizes[0] / 16), 4 * max(largest, 8), _NUM_BENT_FIXED)[:, None, None]
    bends = np.geomspace(max(2.0, sizes[0]), max(largest, 8), _NUM_BENDS)[:, None]
    seconds = [sizes + fixed + more * np.maximum(0, sizes - bends) for more in _BENDS]
    return [(_BENT / len(_BENDS), np.log(sizes / time).reshape(-1, len(sizes))) for time in seconds]


def _filled(sizes: Array, tile: int, log_speeds: Callable[[Array], Array]) -> Array:
    """Charge each size for whole tiles."""
    whole = np.ceil(sizes / tile) * tile
    return np.asarray(log_speeds(whole) + np.log(sizes / whole))


def _tile_weight(tile: int) -> float:
    return 1 - _TILED if tile == 1 else _TILED / (len(_TILES) - 1)
