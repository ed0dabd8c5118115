"""What one job gave, as plain data; and the rows that a result is read by."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.pairs import PairedTimes, quartiles, ratio_of
from benchmarks.results import Row
from benchmarks.tuner.grid import Measured
from benchmarks.tuner.judging import Verdict, judge, most_best_over_chosen, most_smaller_over_best
from benchmarks.tuner.racing import Race, median_ratio, ratios
from benchmarks.tuner.sleeping import Outcome
from lightning_offload.callbacks.tuning.result import TuningResult

__all__ = ["Record", "job_rows", "sleeping_rows", "spread_of"]

_MOST_TRIALS, _MOST_TRIALS_UNPREDICTED = 12, 24
_MOST_FAILURES = 0.05
_ALL_SHAPES = "sleeping modules, all shapes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One job.

    Attributes:
        key: Short name, for files.
        title: Name for people.
        tolerance: That of the finder.
        config: Sizes and settings.
        result: What the finder found.
        tuning_seconds: What that took.
        measured: The grid.
        infeasible: Sizes of the grid that no plan could be made for.
        races: To the training loss.
    """

    key: str
    title: str
    tolerance: float
    config: dict[str, Any]
    result: TuningResult
    tuning_seconds: float
    measured: tuple[Measured, ...]
    infeasible: tuple[int, ...]
    races: tuple[Race, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether the choice is right on the grid."""
        speeds = {m.batch_size: m.samples_per_second for m in self.measured}
        return judge(self.result.batch_size, speeds, self.tolerance)

    def predicted(self) -> dict[int, tuple[float, int]]:
        """Throughput and peak that the performance model predicted, by size, where it was asked."""
        return {
            p.batch_size: (p.samples_per_second, p.peak_bytes)
            for p in self.result.predictions
            if p.is_feasible and p.samples_per_second and p.peak_bytes is not None
        }

    def encoded(self) -> dict[str, Any]:
        """The record as JSON-able data."""
        return {
            **{name: getattr(self, name) for name in ("key", "title", "tolerance", "config", "tuning_seconds")},
            "result": self.result.state_dict(),
            "measured": [asdict(measured) for measured in self.measured],
            "infeasible": list(self.infeasible),
            "races": [asdict(race) for race in self.races],
        }

    @classmethod
    def decoded(cls, data: dict[str, Any]) -> Record:
        """Read what `encoded` gave."""
        measured = (
            Measured(**{**found, "step_seconds": tuple(tuple(steps) for steps in found["step_seconds"])})
            for found in data["measured"]
        )
        return cls(
            **{name: data[name] for name in ("key", "title", "tolerance", "config", "tuning_seconds")},
            result=TuningResult.from_state_dict(data["result"]),
            measured=tuple(measured),
            infeasible=tuple(data["infeasible"]),
            races=tuple(Race(**race) for race in data["races"]),
        )


def job_rows(record: Record) -> Iterator[Row]:
    """The figures of a job: the choice on the measured curve, its cost, the predictions, the races."""
    result, case = record.result, record.title
    yield from _verdict_rows(record)
    yield Row(case=case, metric="num_trials", value=float(len(result.trials)), goal=float(_MOST_TRIALS))
    ratio = median_ratio(record.races)
    if ratio is not None:
        yield Row(case=case, metric="tuned_over_base_time_to_loss", value=ratio, goal=1.0)
        yield Row(case=case, metric="tuned_over_base_time_to_loss_least", value=min(ratios(record.races)))
        yield Row(case=case, metric="tuned_over_base_time_to_loss_most", value=max(ratios(record.races)))
    figures: dict[str, float | None] = {
        "num_samples_base": record.config["batch_size"],
        "num_samples_chosen": result.batch_size,
        "num_samples_largest_with_plan": result.largest_size,
        "num_samples_largest_without_plan": result.largest_plain_size,
        "base_learning_rate": record.config["lr"],
        "chosen_learning_rate": result.lr,
        "confidence": result.confidence,
        "budget_bytes": result.budget_bytes,
        "tuning_seconds": record.tuning_seconds,
        **_prediction_errors(record),
        **_race_figures(record.races),
        "num_races_won": float(sum(ratio < 1 for ratio in ratios(record.races))),
        "num_races_lost": float(sum(ratio >= 1 for ratio in ratios(record.races))),
        "num_trainings_given_up": float(sum(not race.has_arrived for race in record.races)),
    }
    yield from (Row(case=case, metric=name, value=float(value)) for name, value in figures.items() if value is not None)


def _verdict_rows(record: Record) -> Iterator[Row]:
    """The two halves of "right", each with its interval over rounds, and the whole."""
    verdict, tolerance, case = record.verdict, record.tolerance, record.title
    by_size = {measured.batch_size: measured for measured in record.measured}
    chosen, best = by_size[record.result.batch_size], by_size[verdict.best_size]
    goal = most_best_over_chosen(tolerance)
    yield from _ratio_rows(case, "best_over_chosen_throughput", verdict.best_over_chosen, chosen, best, goal)
    if verdict.smaller_size is not None and verdict.smaller_over_best is not None:
        smaller, goal = by_size[verdict.smaller_size], most_smaller_over_best(tolerance)
        yield from _ratio_rows(case, "smaller_over_best_throughput", verdict.smaller_over_best, best, smaller, goal)
    yield Row(case=case, metric="num_wrong_choices", value=float(not verdict.is_right), goal=0.0)
    yield Row(case=case, metric="num_samples_fastest", value=float(verdict.best_size))


def unsettled(record: Record) -> list[tuple[float, float, float]]:
    """Lower end, upper end and limit of those ratios of the verdict whose interval has the limit inside."""
    rows = {row.metric: row for row in _verdict_rows(record)}
    found = []
    for name in ("best_over_chosen_throughput", "smaller_over_best_throughput"):
        limit = rows[name].goal if name in rows else None
        if limit is None:
            continue
        low, high = rows[f"{name}_low"].value, rows[f"{name}_high"].value
        if low <= limit <= high:
            found.append((low, high, limit))
    return found


def _ratio_rows(case: str, metric: str, value: float, slow: Measured, fast: Measured, goal: float) -> Iterator[Row]:
    """Throughput of one size over that of another, with the interval of the rounds' median ratio."""
    per_sample = [[s / one.batch_size for s in one.round_seconds] for one in (fast, slow)]
    ratio = ratio_of(PairedTimes(plain_seconds=tuple(per_sample[0]), other_seconds=tuple(per_sample[1])))
    yield Row(case=case, metric=metric, value=value, goal=goal)
    yield Row(case=case, metric=f"{metric}_low", value=ratio.low)
    yield Row(case=case, metric=f"{metric}_high", value=ratio.high)


def _prediction_errors(record: Record) -> dict[str, float]:
    """How far predictions were off, as shares, over the sizes of the grid that were predicted."""
    predicted = record.predicted()
    both = [
        (measured, predicted[measured.batch_size]) for measured in record.measured if measured.batch_size in predicted
    ]
    if not both:
        return {}
    speeds = [abs(speed / measured.samples_per_second - 1) for measured, (speed, _) in both]
    peaks = [peak / measured.peak_bytes - 1 for measured, (_, peak) in both]
    return {
        "throughput_prediction_error_median": statistics.median(speeds),
        "throughput_prediction_error_most": max(speeds),
        "peak_prediction_error_most": max(map(abs, peaks)),
        "num_sizes_predicted_and_measured": float(len(both)),
    }


def _race_figures(races: Sequence[Race]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, is_tuned in (("base", False), ("tuned", True)):
        arrived = [race for race in races if race.is_tuned == is_tuned and race.has_arrived]
        if arrived:
            figures[f"{name}_time_to_loss_seconds"] = statistics.median(race.seconds for race in arrived)
            figures[f"num_{name}_steps_to_loss"] = statistics.median(race.num_steps for race in arrived)
    return figures


def sleeping_rows(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """How often searches on known curves were wrong, and what they took."""
    groups = {f"sleeping modules, {shape}": [o for o in outcomes if o.shape == shape] for shape in _shapes(outcomes)}
    for case, group in {**groups, _ALL_SHAPES: list(outcomes)}.items():
        num_wrong, num_trials = sum(not outcome.is_right for outcome in group), [o.num_trials for o in group]
        # of a few searches of one shape a share says little: the goal is for all of them
        goal = _MOST_FAILURES if case == _ALL_SHAPES else None
        yield Row(case=case, metric="wrong_share", value=num_wrong / len(group), goal=goal)
        yield Row(case=case, metric="num_searches", value=float(len(group)))
        yield Row(case=case, metric="num_wrong", value=float(num_wrong))
        yield Row(case=case, metric="num_trials_most", value=float(max(num_trials)), goal=_MOST_TRIALS_UNPREDICTED)
        yield Row(case=case, metric="num_trials_median", value=float(statistics.median(num_trials)))
        yield Row(case=case, metric="median_search_seconds", value=statistics.median(o.seconds for o in group))


def _shapes(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.shape for outcome in outcomes))


def spread_of(record: Record) -> dict[str, list[float]]:
    """Quartiles of the steps of each size."""
    return {
        f"step_seconds at {measured.batch_size}": quartiles([s for steps in measured.step_seconds for s in steps])
        for measured in record.measured
    }
