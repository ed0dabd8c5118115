"""Fits the shares of `lightning_offload.graph.calibration` to public step times, robustly and on a logarithmic scale.

What is fitted: a share for each kind of work and kind of arithmetic, a factor for each generation of cards and kind of
arithmetic that was measured, two shares of the memory bandwidth with a factor for each generation, and the launch
cost. Few rows speak for each of them,
so each is drawn towards a prior: factors to 1, all else to `PRIORS`. The residual of a row is log(predicted / public),
its loss soft-L1, which rows that are off by more than `_ROBUST` count less in than they would in squares.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize

from benchmarks.calibration.public import DTYPES, Public, card_of
from benchmarks.calibration.recording import Step
from lightning_offload.graph import calibration
from lightning_offload.graph.calibration import Arithmetic, Shares
from lightning_offload.graph.catalog import arithmetic_of, spec_of
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.work_kinds import WorkKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_KINDS = (WorkKind.CONVOLUTION, WorkKind.DEPTHWISE, WorkKind.MATMUL, WorkKind.ATTENTION)
_CORES: tuple[Arithmetic, ...] = ("float32", "tf32", "half")

PRIORS = {
    WorkKind.CONVOLUTION: 0.5,
    WorkKind.DEPTHWISE: 0.05,
    WorkKind.MATMUL: 0.6,
    WorkKind.ATTENTION: 0.5,
    WorkKind.REDUCTION: 0.75,
    WorkKind.ELEMENTWISE: 0.75,
}
"""Shares to start from, of arithmetic and of memory: round numbers of what libraries are known to reach."""

PRIOR_LAUNCH_SECONDS = 5e-6
_WIDE, _NARROW = 0.7, 0.25
"""How far, in logarithms, a share may lie from its prior, and a factor or a share of bandwidth from its."""
_ROBUST = 0.15
_TRUST = 0.10
"""Rows of the same kind scatter by about this much, in logarithms; what priors are weighed against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted numbers, as the package has them.

    Attributes:
        shares: By kind of arithmetic; see `calibration.SHARES`.
        factors: By generation and kind of arithmetic.
        bandwidth_factors: By generation.
        launch_seconds: What any op takes beside its work.
        reduction_bandwidth: Share of the memory bandwidth.
        elementwise_bandwidth: The same, for all other kinds.
    """

    shares: dict[Arithmetic, Shares]
    factors: dict[tuple[str, Arithmetic], float]
    bandwidth_factors: dict[str, float]
    launch_seconds: float
    reduction_bandwidth: float
    elementwise_bandwidth: float


COMMITTED = Fit(
    shares=calibration.SHARES,
    factors=calibration.FACTORS,
    bandwidth_factors=calibration.BANDWIDTH_FACTORS,
    launch_seconds=calibration.LAUNCH_SECONDS,
    reduction_bandwidth=calibration.REDUCTION_BANDWIDTH,
    elementwise_bandwidth=calibration.ELEMENTWISE_BANDWIDTH,
)
"""What the package has."""


class _Problem:
    """Predicts rows from a vector of logarithms: shares by cores and kind, factors, two bandwidths, launch cost."""

    def __init__(self, rows: Sequence[Public], steps: Sequence[Step]) -> None:
        keys = [(card_of(row).generation, arithmetic_of(card_of(row), DTYPES[row.precision])) for row in rows]
        self.factors = sorted(set(keys))
        self.generations = sorted({generation for generation, _ in keys})
        self._rows = [_arrays(row, step) for row, step in zip(rows, steps, strict=True)]
        self._places = [
            (_CORES.index(core), self.factors.index((generation, core)), self.generations.index(generation))
            for generation, core in keys
        ]
        self._log_public = np.log([row.seconds for row in rows])
        shares = [math.log(PRIORS[kind]) for _ in _CORES for kind in _KINDS]
        factors = [0.0] * (len(self.factors) + len(self.generations))
        memory = [math.log(PRIORS[WorkKind.REDUCTION]), math.log(PRIORS[WorkKind.ELEMENTWISE])]
        self.prior = np.array([*shares, *factors, *memory, math.log(PRIOR_LAUNCH_SECONDS)])
        self._width = np.array([_WIDE] * len(shares) + [_NARROW] * (len(factors) + 3))

    def split(self, x: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Shares, factors, factors of bandwidth, and the last three numbers, no longer logarithms."""
        ends = np.cumsum([len(_CORES) * len(_KINDS), len(self.factors), len(self.generations)])
        shares, factors, bandwidths, rest = np.split(np.exp(x), ends)
        return shares.reshape(len(_CORES), len(_KINDS)), factors, bandwidths, rest

    def residuals(self, x: Floats) -> Floats:
        """Logarithms of predicted over public, by row."""
        shares, factors, bandwidths, (reduction, elementwise, launch) = self.split(x)
        found = []
        for (flops_seconds, memory_seconds, counts, kinds, is_reduction), places in zip(
            self._rows, self._places, strict=True
        ):
            core, factor, generation = places
            efficiencies = np.append(shares[core] * factors[factor], 1.0)[kinds]
            bandwidth = bandwidths[generation] * np.where(is_reduction, reduction, elementwise)
            seconds = launch + np.maximum(flops_seconds / efficiencies, memory_seconds / bandwidth)
            found.append(math.log(float(counts @ seconds)))
        return np.array(found) - self._log_public

    def losses(self, x: Floats) -> Floats:
        """Square roots of what is minimized: soft-L1 of the rows' residuals, squares of the distance to the prior."""
        scaled = self.residuals(x) / _ROBUST
        robust = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1)) * (_ROBUST / _TRUST)
        return np.concatenate([robust, (x - self.prior) / self._width])


def _arrays(row: Public, step: Step) -> tuple[Floats, Floats, Floats, Ints, Ints]:
    """Seconds of each work at the peaks, how often it is done, the place of its kind, and whether it is a reduction."""
    card = card_of(row)
    peak = getattr(card, DTYPES[row.precision]) or card.float32
    places = {kind: place for place, kind in enumerate(_KINDS)} | {WorkKind.RECURRENT: _KINDS.index(WorkKind.MATMUL)}
    return (
        np.array([work.flops / peak for work, _ in step]),
        np.array([work.num_bytes / card.memory_bytes_per_second for work, _ in step]),
        np.array([float(count) for _, count in step]),
        np.array([places.get(work.kind, len(_KINDS)) for work, _ in step]),
        np.array([int(work.kind is WorkKind.REDUCTION) for work, _ in step]),
    )


def fit(rows: Sequence[Public], steps: Sequence[Step]) -> Fit:
    """Fit to rows and their steps."""
    problem = _Problem(rows, steps)
    x = optimize.least_squares(problem.losses, problem.prior, method="trf", xtol=1e-10, ftol=1e-10).x
    shares, factors, bandwidths, (reduction, elementwise, launch) = problem.split(x)
    return Fit(
        shares={core: _shares(line) for core, line in zip(_CORES, shares, strict=True)},
        factors={key: _rounded(factor) for key, factor in zip(problem.factors, factors, strict=True)},
        bandwidth_factors={
            generation: _rounded(factor) for generation, factor in zip(problem.generations, bandwidths, strict=True)
        },
        launch_seconds=_rounded(launch),
        reduction_bandwidth=_rounded(reduction),
        elementwise_bandwidth=_rounded(elementwise),
    )


def device_of(row: Public, numbers: Fit) -> DeviceSpec:
    """The device of a row as the catalogue would have it with other numbers."""
    card = card_of(row)
    cores = arithmetic_of(card, DTYPES[row.precision])
    shares, factor = numbers.shares[cores], numbers.factors.get((card.generation, cores), 1.0)
    bandwidth = numbers.bandwidth_factors.get(card.generation, 1.0)
    return dataclasses.replace(
        spec_of(card, DTYPES[row.precision]),
        launch_seconds=numbers.launch_seconds,
        convolution_efficiency=factor * shares.convolution,
        depthwise_efficiency=factor * shares.depthwise,
        matmul_efficiency=factor * shares.matmul,
        attention_efficiency=factor * shares.attention,
        recurrent_efficiency=factor * shares.recurrent,
        reduction_bandwidth=bandwidth * numbers.reduction_bandwidth,
        elementwise_bandwidth=bandwidth * numbers.elementwise_bandwidth,
    )


def fits_without(
    rows: Sequence[Public], steps: Sequence[Step], key: Callable[[Public], str]
) -> Iterator[tuple[int, Fit]]:
    """Each row's place with a fit to all rows of another key: what it would be predicted by, were its kind new."""
    for left_out in sorted({key(row) for row in rows}):
        places = [at for at, row in enumerate(rows) if key(row) != left_out]
        numbers = fit([rows[at] for at in places], [steps[at] for at in places])
        yield from ((at, numbers) for at, row in enumerate(rows) if key(row) == left_out)


def _shares(line: Floats) -> Shares:
    convolution, depthwise, matmul, attention = (_rounded(share) for share in line)
    return Shares(
        convolution=convolution, depthwise=depthwise, matmul=matmul, attention=attention, recurrent=matmul
    )  # fmt: skip


def _rounded(number: float) -> float:
    """Three digits, which is more than the data say."""
    return float(f"{number:.3g}")
