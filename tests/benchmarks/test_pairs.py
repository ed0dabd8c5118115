"""Interleaved pairs: the order alternates, and the ratio is the pairs' median with its interval."""

from __future__ import annotations

import pytest

from benchmarks.pairs import PairedTimes, quartiles, ratio_of, time_pairs, time_rounds


class FakeMachine:
    """Steps that take as long as they say, on a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order = ""

    def clock(self) -> float:
        return self.now

    def plain(self) -> None:
        self.now += 2.0
        self.order += "p"

    def other(self) -> None:
        self.now += 3.0
        self.order += "o"


def test_order_alternates_and_times_belong_to_their_step():
    """Each kind goes first in every other pair, and no time lands on the wrong side."""
    machine = FakeMachine()
    ticks: list[None] = []
    times = time_pairs(
        machine.plain, machine.other, num_pairs=4, advance=lambda: ticks.append(None), clock=machine.clock
    )
    assert machine.order == "po" + "op" + "po" + "op"
    assert times == PairedTimes(plain_seconds=(2.0,) * 4, other_seconds=(3.0,) * 4)
    assert len(ticks) == 4


def test_everybody_takes_a_turn_in_every_round():
    """Who goes first changes, and no time lands on the wrong name."""
    machine = FakeMachine()
    steps = {"plain": machine.plain, "other": machine.other}
    times = time_rounds(steps, num_rounds=4, on_error=_fail, clock=machine.clock)
    assert machine.order == "po" + "op" + "op" + "po"
    assert times == {"plain": [2.0] * 4, "other": [3.0] * 4}


def test_untimed_steps_and_steps_in_a_row():
    """Each follows those of its own kind in the same turns: untimed ones count nowhere, those in a row as one."""
    for how in ({"num_untimed": 2}, {"num_steps": 3}):
        machine = FakeMachine()
        steps = {"plain": machine.plain, "other": machine.other}
        times = time_rounds(steps, num_rounds=2, on_error=_fail, clock=machine.clock, **how)
        assert machine.order == "ppp" + "ooo" + "ooo" + "ppp", how
        assert times == {"plain": [2.0] * 2, "other": [3.0] * 2}, how


def test_who_fails_takes_no_further_part():
    """The others go on; the failure is told once."""
    machine = FakeMachine()
    told: list[tuple[str, str]] = []

    def failing() -> None:
        if len(machine.order) > 2:
            raise RuntimeError("out of memory")
        machine.order += "f"

    steps = {"plain": machine.plain, "failing": failing}
    times = time_rounds(
        steps, num_rounds=5, on_error=lambda name, error: told.append((name, str(error))), clock=machine.clock
    )
    assert times == {"plain": [2.0] * 5}
    assert told == [("failing", "out of memory")]


def _fail(name: str, error: Exception) -> None:
    pytest.fail(f"{name}: {error}")


def test_ratio_is_the_median_of_pairs_not_of_times():
    """A machine that slows down for whole pairs does not change the ratio."""
    plain = (1.0, 10.0, 100.0, 1.0, 10.0)
    times = PairedTimes(plain_seconds=plain, other_seconds=tuple(1.5 * seconds for seconds in plain))
    ratio = ratio_of(times)
    assert ratio.median == pytest.approx(1.5)
    assert ratio.low == pytest.approx(1.5)
    assert ratio.high == pytest.approx(1.5)


def test_interval_is_around_the_median_and_repeats():
    """The interval holds the median, is no wider than the data, and is the same in every run."""
    other = tuple(1.0 + 0.01 * (index % 7) for index in range(30))
    times = PairedTimes(plain_seconds=(1.0,) * 30, other_seconds=other)
    ratio = ratio_of(times)
    assert min(other) <= ratio.low <= ratio.median <= ratio.high <= max(other)
    assert ratio.low < ratio.high
    assert ratio_of(times) == ratio


def test_quartiles():
    """Lower quartile, median, upper quartile."""
    assert quartiles([4.0, 0.0, 2.0, 1.0, 3.0]) == [1.0, 2.0, 3.0]
