"""How far predictions are from public figures, on the half that was fitted and on the half that was held out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.calibration.public import DTYPES, Public, card_of, is_held
from benchmarks.calibration.recording import Step
from lightning_offload.graph.catalog import spec_of
from lightning_offload.graph.device_spec import DeviceSpec

CLOSE = 0.25
"""A prediction is close that is at most this share of the public figure away from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A measurement with its predictions.

    Attributes:
        row: What was measured.
        held: Whether it was held out of the fit.
        seconds: What is predicted.
        peak_seconds: What is predicted at the peaks of the datasheet.
    """

    row: Public
    held: bool
    seconds: float
    peak_seconds: float

    @property
    def error(self) -> float:
        """Predicted over public, less one."""
        return self.seconds / self.row.seconds - 1

    @property
    def peak_error(self) -> float:
        """The same of the prediction at the peaks."""
        return self.peak_seconds / self.row.seconds - 1

    @property
    def is_close(self) -> bool:
        """Whether the prediction is."""
        return abs(self.error) <= CLOSE


def seconds_of(step: Step, device: DeviceSpec) -> float:
    """Modelled duration of a step."""
    return sum(count * work.seconds(device) for work, count in step)


def check(rows: Sequence[Public], steps: Sequence[Step]) -> list[Checked]:
    """Predict all rows by the catalogue's calibration."""
    return [_checked(row, step, held=is_held(at)) for at, (row, step) in enumerate(zip(rows, steps, strict=True))]


def _checked(row: Public, step: Step, *, held: bool) -> Checked:
    device = spec_of(card_of(row), DTYPES[row.precision])
    return Checked(
        row=row, held=held, seconds=seconds_of(step, device), peak_seconds=seconds_of(step, device.at_peak())
    )  # fmt: skip


def share_close(errors: Iterable[float]) -> float:
    """Share of errors that are close."""
    found = [abs(error) <= CLOSE for error in errors]
    return sum(found) / len(found)


def median_error(errors: Iterable[float]) -> float:
    """Median of the errors' sizes."""
    return statistics.median(abs(error) for error in errors)
