"""What the contests say: rows with goals, and the part of docs/tuner.md that shows them.

The goals: to its loss the tuned training takes at most 1.05 times as long as the configured one in every job; it is
within 10% of the best of the grid; its held-out error is not above the configured one's by more than that differs from
seed to seed; and a configured size that is the best already is kept.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.pairs import PairedTimes, ratio_of
from benchmarks.results import Row
from benchmarks.tuner.contests import GRID, Run
from lightning_offload.units import format_seconds

__all__ = ["contest_lines", "contest_rows"]

_MOST_OVER_BASE, _MOST_OVER_BEST = 1.05, 1.10
_OPTIMAL = 1.05  # times the best of the grid that a configured size may take and be called the best itself
_FIGURE = re.compile(r"\d[\d.,]*( m?s\b)?")  # two notes that differ in these alone say the same


def contest_rows(runs: Sequence[Run], configs: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """The figures of all contests, as far as they have been run.

    Args:
        runs: Of all contests.
        configs: Of each contest, with its "key" and "title".
    """
    for config in configs:
        own = [run for run in runs if run.contest == config["key"]]
        if own:
            yield from _rows(config["title"], own, config)


def _rows(case: str, runs: Sequence[Run], config: dict[str, Any]) -> Iterator[Row]:
    yield from _ratio(case, "tuned_over_base_time_to_loss", runs, "tuned", "base", _MOST_OVER_BASE)
    yield from _ratio(case, "tuned_over_best_time_to_loss", runs, "tuned", "best", _MOST_OVER_BEST)
    yield from _ratio(case, "tuned_over_best_time_to_loss_without_tuning", runs, "tuned", "best", None, is_bare=True)
    base, tuned = _entrant(runs, "base"), _entrant(runs, "tuned")
    if base and tuned:
        yield from _held_out(case, f"tuned_minus_base_{config['error_name']}", _errors(base), _errors(tuned))
        given_up = sum(not run.has_arrived for run in tuned)
        yield Row(case=case, metric="num_tuned_trainings_given_up", value=float(given_up), goal=0.0)
    of_best = _median(_ratios(runs, "best", "base"))
    if of_best is not None and 1 / of_best <= _OPTIMAL:
        changed = sum((run.batch_size, run.lr) != (base[0].batch_size, base[0].lr) for run in tuned)
        yield Row(case=case, metric="num_changes_of_the_best", value=float(changed), goal=0.0)
    figures = {
        "tuning_seconds": _median([run.seconds - run.training_seconds for run in tuned]),
        "base_time_to_loss_seconds": _median([run.seconds for run in base if run.has_arrived]),
        "num_samples_tuned": _median([float(run.batch_size) for run in tuned]),
        "num_trainings": float(len(runs)),
    }
    yield from (Row(case=case, metric=name, value=value) for name, value in figures.items() if value is not None)


def _held_out(case: str, metric: str, base: Sequence[float], tuned: Sequence[float]) -> Iterator[Row]:
    """By how much the held-out error is higher; not more than it differs from seed to seed is good enough."""
    if base and tuned:
        spread = max(base) - min(base) if len(base) > 1 else None
        yield Row(case=case, metric=metric, value=statistics.median(tuned) - statistics.median(base), goal=spread)


def _errors(runs: Sequence[Run]) -> list[float]:
    return [run.held_out_error for run in runs if run.held_out_error is not None]


def _ratio(
    case: str, metric: str, runs: Sequence[Run], above: str, below: str, goal: float | None, *, is_bare: bool = False
) -> Iterator[Row]:
    """The median of a ratio over seeds, with its interval where there are enough of them."""
    pairs = _pairs(runs, above, below, is_bare=is_bare)
    if not pairs:
        return
    yield Row(case=case, metric=metric, value=statistics.median(a / b for a, b in pairs), goal=goal)
    if len(pairs) > 1:
        times = PairedTimes(plain_seconds=tuple(b for _, b in pairs), other_seconds=tuple(a for a, _ in pairs))
        interval = ratio_of(times)
        yield Row(case=case, metric=f"{metric}_low", value=interval.low)
        yield Row(case=case, metric=f"{metric}_high", value=interval.high)


def _entrant(runs: Sequence[Run], name: str) -> list[Run]:
    """The trainings of an entrant; where the best of the grid is what was configured, those of the base are its."""
    found = [run for run in runs if run.entrant == name]
    if not found and name == "best" and any(run.entrant == GRID and run.has_arrived for run in runs):
        return _entrant(runs, "base")
    return found


def _pairs(runs: Sequence[Run], above: str, below: str, *, is_bare: bool = False) -> list[tuple[float, float]]:
    """Seconds of two entrants, one after the other with the same seed, where both arrived."""
    before = {run.seed: run for run in _entrant(runs, below) if run.has_arrived}
    return [
        (run.training_seconds if is_bare else run.seconds, before[run.seed].seconds)
        for run in _entrant(runs, above)
        if run.has_arrived and run.seed in before
    ]


def _ratios(runs: Sequence[Run], above: str, below: str) -> list[float]:
    return [a / b for a, b in _pairs(runs, above, below)]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def contest_lines(runs: Sequence[Run], configs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A section of a document for the contests; nothing where none was run."""
    if not runs:
        return
    yield from ("## Does it pay?", "", _INTRODUCTION, "")
    for config in configs:
        own = [run for run in runs if run.contest == config["key"]]
        if own:
            yield from (f"### {config['title'][0].upper()}{config['title'][1:]}", "", *_lines(own, config), "")


def _lines(runs: Sequence[Run], config: dict[str, Any]) -> Iterator[str]:
    yield (
        f"To a training loss of {config['target_loss']:g}, from {config['batch_size']} samples at a rate of"
        f" {config['lr']:g}; {config['optimizer']}."
    )
    notes = [run.note for run in runs if run.note]
    alike = Counter(_FIGURE.sub("", note) for note in notes)
    first = {_FIGURE.sub("", note): note for note in reversed(notes)}
    said = [f"- The finder, in {count} of {len(notes)}: {first[words]}" for words, count in alike.items()]
    yield from ("", *said, *([""] if said else []))
    yield "| seed | | batch size | learning rate | steps | time | of it tuning | held-out error |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for run in sorted((run for run in runs if run.entrant != GRID), key=lambda run: run.seed):
        time = format_seconds(run.seconds) + ("" if run.has_arrived else ", given up")
        tuning = format_seconds(run.seconds - run.training_seconds) if run.entrant == "tuned" else ""
        yield (
            f"| {run.seed} | {run.entrant} | {run.batch_size} | {run.lr:.4g} | {run.num_steps} | {time} | {tuning} |"
            f" {'-' if run.held_out_error is None else f'{run.held_out_error:.4f}'} |"
        )
    grid = sorted((run for run in runs if run.entrant == GRID), key=lambda run: (run.batch_size, run.lr))
    yield from ("", "The grid: " + "; ".join(map(_point, grid)) + ".") if grid else ()


def _point(run: Run) -> str:
    how = format_seconds(run.seconds) if run.has_arrived else "given up"
    return f"{run.batch_size} at {run.lr:.4g} {how}"


_INTRODUCTION = """A configured training, the same one with the finder among its callbacks, and the best of a grid of
sizes and rates, one after the other for each seed. The clock runs from `fit` on, tuning included; no memory plan is
involved. The finder is as it is by default, with `min_efficiency=0`, since the trainings end at a loss. It may spend 2%
of the configured run on its pilot and 2% on trials. The rows *without tuning* tell what the choice itself is worth. Of
the grid each size and rate is trained once, on a seed of its own, until the best so far would have arrived."""
