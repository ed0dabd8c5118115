"""Modelled step times against public measurements, half of which the model was fitted to.

No device is needed. Steps that are not stored are recorded first; `--fresh` records all of them again (minutes), and
`--quick` none and stores nothing. The fitted numbers stand in the result; `lightning_offload.graph.calibration` has
them by hand, and a test holds both to one another.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.progress import Progress

from benchmarks.calibration import fitting, own, recording
from benchmarks.calibration.checking import Checked, check, median_error, seconds_of, share_close
from benchmarks.calibration.page import DOCUMENT, LEFT_OUT, page
from benchmarks.calibration.public import SOURCES, Public, card_of, is_held, rows
from benchmarks.calibration.recording import Step
from benchmarks.results import RESULTS_FOLDER, Measurements, Options, Row

__all__ = ["DOCUMENT", "TITLE", "page", "run"]

TITLE = "Modelled step times"


def run(options: Options, progress: Progress) -> Measurements:
    """Record what is missing, fit to one half, and check on both."""
    public = rows()
    if not options.quick:
        bar = progress.add_task("calibration", total=len(public))

        def advance(name: str) -> None:
            progress.update(bar, description=name, advance=1)

        recording.steps(public, advance=advance, fresh=options.fresh)
    steps = recording.stored_steps(public)
    fitted = [at for at in range(len(public)) if not is_held(at)]
    fit = fitting.fit([public[at] for at in fitted], [steps[at] for at in fitted])
    found = check(public, steps)
    return Measurements(
        rows=[*_summary(found), *(row for checked in found for row in _rows(checked))],
        config={
            "fit": _encoded(fit),
            "checked": [_described(checked) for checked in found],
            "sources": SOURCES,
            "own": [asdict(step) for step in ([] if options.quick else own.measured_here(RESULTS_FOLDER))],
            "left_out": {} if options.quick else {name: _left_out(public, steps, name) for name in LEFT_OUT},
        },
        repeats=1,
    )


def _summary(found: Sequence[Checked]) -> Iterator[Row]:
    for case, chosen in (
        ("held out", [checked for checked in found if checked.held]),
        ("fitted", [checked for checked in found if not checked.held]),
    ):
        errors, peak_errors = [c.error for c in chosen], [c.peak_error for c in chosen]
        is_goal = case == "held out"
        yield Row(
            case=case,
            metric="share_off_by_over_25_percent",
            value=1 - share_close(errors),
            goal=0.0 if is_goal else None,
        )
        yield Row(case=case, metric="median_error", value=median_error(errors))
        yield Row(case=case, metric="largest_error", value=max(map(abs, errors)))
        yield Row(case=case, metric="num_rows", value=float(len(chosen)))
        yield Row(
            case=f"{case}, at the peaks", metric="share_off_by_over_25_percent", value=1 - share_close(peak_errors)
        )
        yield Row(case=f"{case}, at the peaks", metric="median_error", value=median_error(peak_errors))


def _rows(checked: Checked) -> Iterator[Row]:
    yield Row(case=checked.row.name, metric="predicted_over_public", value=1 + checked.error)
    yield Row(case=checked.row.name, metric="public_step_seconds", value=checked.row.seconds)
    yield Row(case=checked.row.name, metric="predicted_step_seconds", value=checked.seconds)


def _described(checked: Checked) -> dict[str, Any]:
    row = asdict(checked.row)
    return {
        "row": row,
        "title": card_of(checked.row).title,
        "held": checked.held,
        "seconds": checked.seconds,
        "peak_seconds": checked.peak_seconds,
    }


def _left_out(public: Sequence[Public], steps: Sequence[Step], name: str) -> list[float]:
    """Errors of all rows by fits without any of the same model, card or source."""
    found = fitting.fits_without(public, steps, operator.attrgetter(name))
    errors = {
        at: seconds_of(steps[at], fitting.device_of(public[at], fit)) / public[at].seconds - 1 for at, fit in found
    }
    return [errors[at] for at in range(len(public))]


def _encoded(fit: fitting.Fit) -> dict[str, Any]:
    return {
        "shares": {core: asdict(shares) for core, shares in fit.shares.items()},
        "bandwidth_factors": fit.bandwidth_factors,
        "factors": {f"{generation}, {core}": factor for (generation, core), factor in fit.factors.items()},
        "launch_seconds": fit.launch_seconds,
        "reduction_bandwidth": fit.reduction_bandwidth,
        "elementwise_bandwidth": fit.elementwise_bandwidth,
    }
