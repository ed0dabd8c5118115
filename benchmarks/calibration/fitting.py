"""Fits the shares of `lightning_offload.graph.calibration` to public step times, robustly and on a logarithmic scale.

What is fitted: a share for each kind of work and kind of arithmetic, a factor for each generation of cards and kind of
arithmetic that was measured, two shares of the memory bandwidth and the launch cost. Few rows speak for each of them,
so each is drawn towards a prior: factors to 1, all else to `PRIORS`. The residual of a row is log(predicted / public),
its loss soft-L1, which rows that are off by more than `_ROBUST` count less in than they would in squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize

from benchmarks.calibration.public import Public, card_of
from benchmarks.calibration.recording import Step
from lightning_offload.graph import calibration
from lightning_offload.graph.calibration import Arithmetic, Shares
from lightning_offload.graph.catalog import DType, arithmetic_of
from lightning_offload.graph.work_kinds import WorkKind

Floats = npt.NDArray[np.float64]

DTYPES: dict[str, DType] = {"float32": "float32", "tf32": "tf32", "amp": "float16"}
"""The catalogue's type, by precision."""

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
        launch_seconds: What any op takes beside its work.
        reduction_bandwidth: Share of the memory bandwidth.
        elementwise_bandwidth: The same, for all other kinds.
    """

    shares: dict[Arithmetic, Shares]
    factors: dict[tuple[str, Arithmetic], float]
    launch_seconds: float
    reduction_bandwidth: float
    elementwise_bandwidth: float


COMMITTED = Fit(
    shares=calibration.SHARES,
    factors=calibration.FACTORS,
    launch_seconds=calibration.LAUNCH_SECONDS,
    reduction_bandwidth=calibration.REDUCTION_BANDWIDTH,
    elementwise_bandwidth=calibration.ELEMENTWISE_BANDWIDTH,
)
"""What the package has."""


class _Problem:
    """Predicts rows from a vector of logarithms: shares by cores and kind, factors, two bandwidths, launch cost."""

    def __init__(self, rows: Sequence[Public], steps: Sequence[Step]) -> None:
        cores = [arithmetic_of(card_of(row), DTYPES[row.precision]) for row in rows]
        self.factors = sorted({(card_of(row).generation, core) for row, core in zip(rows, cores, strict=True)})
        self._rows = [
            _arrays(row, step, _CORES.index(core), self.factors.index((card_of(row).generation, core)))
            for row, core, step in zip(rows, cores, steps, strict=True)
        ]
        self._log_public = np.log([row.seconds for row in rows])
        priors = [math.log(PRIORS[kind]) for _ in _CORES for kind in _KINDS] + [0.0] * len(self.factors)
        bandwidths = [math.log(PRIORS[WorkKind.REDUCTION]), math.log(PRIORS[WorkKind.ELEMENTWISE])]
        self.prior = np.array([*priors, *bandwidths, math.log(PRIOR_LAUNCH_SECONDS)])
        num_shares = len(_CORES) * len(_KINDS)
        self._width = np.array([_WIDE] * num_shares + [_NARROW] * (len(self.factors) + 3))

    def log_predicted(self, x: Floats) -> Floats:
        shares = x[: len(_CORES) * len(_KINDS)].reshape(len(_CORES), len(_KINDS))
        factors = x[shares.size : shares.size + len(self.factors)]
        reduction, elementwise, launch = np.exp(x[-3:])
        found = []
        for flops_seconds, memory_seconds, counts, kinds, is_reduction, core, factor in self._rows:
            efficiencies = np.append(np.exp(shares[core] + factors[factor]), 1.0)[kinds]
            bandwidths = np.where(is_reduction, reduction, elementwise)
            seconds = launch + np.maximum(flops_seconds / efficiencies, memory_seconds / bandwidths)
            found.append(math.log(float(counts @ seconds)))
        return np.array(found)

    def residuals(self, x: Floats) -> Floats:
        return self.log_predicted(x) - self._log_public

    def losses(self, x: Floats) -> Floats:
        """Square roots of what is minimized: soft-L1 of the rows' residuals, squares of the distance to the prior."""
        scaled = self.residuals(x) / _ROBUST
        robust = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1)) * (_ROBUST / _TRUST)
        return np.concatenate([robust, (x - self.prior) / self._width])


def _arrays(row: Public, step: Step, core: int, factor: int) -> tuple[Floats, Floats, Floats, Floats, Floats, int, int]:
    """Seconds of each work at the peaks, how often it is done, its kind, and where its parameters stand."""
    card = card_of(row)
    peak = getattr(card, DTYPES[row.precision]) or card.float32
    places = {kind: place for place, kind in enumerate(_KINDS)} | {WorkKind.RECURRENT: _KINDS.index(WorkKind.MATMUL)}
    return (
        np.array([work.flops / peak for work, _ in step]),
        np.array([work.num_bytes / card.memory_bytes_per_second for work, _ in step]),
        np.array([float(count) for _, count in step]),
        np.array([places.get(work.kind, len(_KINDS)) for work, _ in step]),
        np.array([work.kind is WorkKind.REDUCTION for work, _ in step]),
        core,
        factor,
    )


def fit(rows: Sequence[Public], steps: Sequence[Step]) -> Fit:
    """Fit to rows and their steps."""
    problem = _Problem(rows, steps)
    x = optimize.least_squares(problem.losses, problem.prior, method="trf", xtol=1e-10, ftol=1e-10).x
    shares = np.exp(x[: len(_CORES) * len(_KINDS)]).reshape(len(_CORES), len(_KINDS))
    factors = np.exp(x[shares.size : shares.size + len(problem.factors)])
    return Fit(
        shares={core: _shares(line) for core, line in zip(_CORES, shares, strict=True)},
        factors={key: _rounded(factor) for key, factor in zip(problem.factors, factors, strict=True)},
        launch_seconds=_rounded(math.exp(x[-1])),
        reduction_bandwidth=_rounded(math.exp(x[-3])),
        elementwise_bandwidth=_rounded(math.exp(x[-2])),
    )


def _shares(line: Floats) -> Shares:
    convolution, depthwise, matmul, attention = (_rounded(share) for share in line)
    return Shares(
        convolution=convolution, depthwise=depthwise, matmul=matmul, attention=attention, recurrent=matmul
    )  # fmt: skip


def _rounded(number: float) -> float:
    """Three digits, which is more than the data say."""
    return float(f"{number:.3g}")
