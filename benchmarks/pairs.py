"""The method of every comparison of step times: interleaved pairs and the median of their ratios.

What a pair is, and how far the median of ratios can be trusted, is the demo's: `examples.demo.pairs`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.progress import Progress, TaskID

from benchmarks.results import Row
from examples.demo.pairs import PairedTimes, Ratio, ratio_of

__all__ = ["Collector", "PairedTimes", "Ratio", "quartiles", "ratio_of", "synchronize", "time_pairs", "time_rounds"]


def time_pairs(
    plain: Callable[[], None],
    other: Callable[[], None],
    *,
    num_pairs: int,
    prepare: Callable[[], None] = lambda: None,
    advance: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> PairedTimes:
    """Time two kinds of step in turns.

    Args:
        plain: Runs one plain step; warmed up by the caller.
        other: Runs one step of the other kind; warmed up by the caller.
        num_pairs: Pairs to time.
        prepare: Called before each step, out of its time.
        advance: Called after every pair.
        clock: Tells the time in seconds.

    Returns:
        The times of both, pair by pair.
    """
    gc.collect()
    seconds: dict[Callable[[], None], list[float]] = {plain: [], other: []}
    for index in range(num_pairs):
        for step in (plain, other) if index % 2 == 0 else (other, plain):
            prepare()
            synchronize()
            start = clock()
            step()
            synchronize()
            seconds[step].append(clock() - start)
        advance()
    return PairedTimes(plain_seconds=tuple(seconds[plain]), other_seconds=tuple(seconds[other]))


def time_rounds(
    steps: Mapping[str, Callable[[], None]],
    *,
    num_rounds: int,
    on_error: Callable[[str, Exception], None],
    num_untimed: int = 0,
    num_steps: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time several kinds of step in turns, each once in a round; who goes first changes from round to round.

    Args:
        steps: Run one step each, by name; warmed up by the caller.
        num_rounds: Rounds to time.
        on_error: Told of a kind of step that failed and that takes no further part.
        num_untimed: Steps of the same kind before each timed one, so that it finds caches and the allocator as steps
            of its own kind leave them, which is how it finds them in training, and not as another kind does.
        num_steps: Steps that are timed as one, between which nobody waits for the device: the host may run ahead, as
            it does in training that reads no result of each step.
        clock: Tells the time in seconds.

    Returns:
        The times of a step of those that did not fail, round by round.
    """
    gc.collect()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(num_rounds):
        names = list(seconds)
        num_turns, turn = divmod(index, max(1, len(names)))
        order = names[turn:] + names[:turn]
        for name in order if num_turns % 2 == 0 else reversed(order):
            try:
                for _ in range(num_untimed):
                    steps[name]()
                synchronize()
                start = clock()
                for _ in range(num_steps):
                    steps[name]()
                synchronize()
            except Exception as error:
                del seconds[name]
                on_error(name, error)
            else:
                seconds[name].append((clock() - start) / num_steps)
    return seconds


@dataclass(kw_only=True)
class Collector:
    """Gathers what comparisons of two kinds of step give, as rows.

    Attributes:
        num_pairs: Pairs of steps per comparison.
        progress: Where they are shown.
        task: Whose bar goes on by one with every pair.
        clock: Tells the time in seconds.
        rows: The figures.
        spread: Quartiles of step times, by case.
    """

    num_pairs: int
    progress: Progress
    task: TaskID
    clock: Callable[[], float] = time.perf_counter
    rows: list[Row] = field(default_factory=list)
    spread: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def time(
        self,
        case: str,
        plain: Callable[[], None],
        other: Callable[[], None],
        goal: float | None,
        prepare: Callable[[], None] = lambda: None,
    ) -> PairedTimes:
        """Time pairs, as :func:`time_pairs` does, and note ratio, interval and step times."""
        times = time_pairs(
            plain, other, num_pairs=self.num_pairs, prepare=prepare, clock=self.clock,
            advance=lambda: self.progress.advance(self.task),
        )  # fmt: skip
        ratio = ratio_of(times)
        self.rows.append(Row(case=case, metric="ratio", value=ratio.median, goal=goal))
        self.note(case, ratio_low=ratio.low, ratio_high=ratio.high)
        series = {"plain_step_seconds": times.plain_seconds, "step_seconds": times.other_seconds}
        self.spread[case] = {name: quartiles(seconds) for name, seconds in series.items()}
        self.note(case, **{name: middle for name, (_, middle, _) in self.spread[case].items()})
        return times

    def note(self, case: str, **figures: float) -> None:
        """Add figures for reading."""
        self.rows += [Row(case=case, metric=metric, value=value) for metric, value in figures.items()]


def quartiles(seconds: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [float(value) for value in np.quantile(seconds, (0.25, 0.5, 0.75))]


def synchronize() -> None:
    """Wait for the GPU, if there is one, so that clocks read the end of its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
