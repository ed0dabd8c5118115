"""When what was found is set, as numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_offload.tuning.gates import LEAST_SPEEDUP, Choice, Speedup, choose, expected_speedups
from lightning_offload.tuning.noise_scale import NoiseScale
from lightning_offload.tuning.posterior import Estimate
from lightning_offload.tuning.search import SearchResult


def found(
    batch_size: int, confidence: float, smallest_failing: int | None = None, speeds: dict[int, float] | None = None
) -> SearchResult:
    estimates = tuple(
        Estimate(batch_size=size, samples_per_second=speed, relative_error=0.01, num_trials=1)
        for size, speed in (speeds or {}).items()
    )
    return SearchResult(
        batch_size=batch_size, confidence=confidence, trials=(), estimates=estimates, largest=batch_size,
        smallest_failing=smallest_failing, ended_by="trials",
    )  # fmt: skip


def speedup_of(result: SearchResult, *, size: int, **given: Any) -> Speedup | None:
    return expected_speedups(result, **given).get(size)


TWICE = found(32, 0.9, speeds={8: 100.0, 32: 200.0})
ERROR = 1.96 * 0.01 * 2**0.5


def expected(value: float, low: float) -> Speedup:
    return Speedup(value=value, low=low, high=2 * value)


def chosen(
    result: SearchResult,
    speedups: dict[int, Speedup] | None = None,
    base_size: int = 8,
    min_confidence: float = 0.5,
    least: float | None = LEAST_SPEEDUP,
) -> Choice:
    return choose(result, speedups or {}, base_size=base_size, min_confidence=min_confidence, least=least)


@pytest.mark.parametrize(("confidence", "size"), [(0.29, 16), (0.5, 1440), (0.9, 1440)])
def test_a_guess_is_not_set(confidence: float, size: int) -> None:
    """Where throughput alone counts the configured size stays below the wanted confidence, and it is said why."""
    choice = chosen(found(1440, confidence), base_size=16, least=None)
    assert (choice.batch_size, choice.best_size, choice.confidence) == (size, 1440, confidence)
    assert bool(choice.why_kept) == (size == 16)


@pytest.mark.parametrize(
    ("low", "min_confidence", "is_set"), [(1.06, 0.5, True), (1.04, 0.5, False), (3.0, 0.975, True), (3.0, 0.98, False)]
)
def test_what_is_surely_better_is_set_though_another_size_may_be_best(
    low: float, min_confidence: float, is_set: bool
) -> None:
    """By the lower end of a 95% interval, so that much confidence may be asked for."""
    speedups = {96: expected(low + 1, low)}
    choice = chosen(found(96, 0.04), speedups, base_size=16, min_confidence=min_confidence)
    assert (choice.batch_size == 96) == is_set
    assert bool(choice.why_kept) != is_set


def test_a_smaller_sure_gain_is_set_where_the_likely_best_is_not_sure() -> None:
    """Of the sizes that were tried, that which is surely fastest; what would be set, or fits alone, stays."""
    speedups = {8: expected(1.0, 1.0), 16: expected(1.3, 1.1), 24: expected(1.4, 1.2), 128: expected(3.0, 0.9)}

    def size(best: int, confidence: float = 0.9, fails: int | None = None, **kwargs: Any) -> int:
        result = found(best, confidence, smallest_failing=fails)
        choice = chosen(result, **{"speedups": speedups, **kwargs})
        is_kept = choice.batch_size == 8 != best
        assert bool(choice.why_kept) == is_kept
        assert choice.best_size == (best if is_kept else choice.batch_size)
        assert choice.confidence == (confidence if choice.best_size == best else 0)
        return choice.batch_size

    assert size(128) == 24
    assert size(16) == 16
    assert size(8) == 8
    assert size(128, speedups={128: speedups[128]}) == 8
    assert size(128, least=1.15) == 24
    assert size(4, fails=8) == 4, "the configured size does not fit"
    assert size(16, fails=20) == 16
    assert size(128, fails=24) == 16, "24 ran once, and failed another time"
    assert size(128, min_confidence=0.98) == 8, "nothing is as sure as that"
    nearly = {**speedups, 128: expected(3.0, 1.03)}
    assert size(128, least=1.0, speedups=nearly) == 128, "the search is sure of it, and it is no slower"
    assert size(128, 0.3, least=1.0, speedups=nearly) == 24, "that is not"
    slight = {8: speedups[8], 16: expected(1.1, 1.01), 128: expected(3.0, 0.99)}
    assert size(128, least=1.0, speedups=slight) == 8, "nor is one of many that is 1% better to be sure of"


def test_throughput_alone_counts_by_either() -> None:
    """A size that the search is sure of is set whatever is expected of it; another one where it surely is faster."""
    surely = {96: expected(4.0, 3.6), 64: expected(3.0, 2.9)}
    unsure = {96: expected(1.3, 1.0), 64: expected(1.2, 1.1)}
    assert chosen(found(96, 0.9), unsure, least=None) == Choice(batch_size=96, best_size=96, confidence=0.9)
    assert chosen(found(96, 0.3), surely, least=None) == Choice(batch_size=96, best_size=96, confidence=0.3)
    assert chosen(found(96, 0.3), unsure, least=None) == Choice(batch_size=64, best_size=64, confidence=0.0)
    assert chosen(found(96, 0.3), {96: expected(1.3, 1.0)}, least=None).batch_size == 8


def test_what_was_found_to_be_the_configured_size_needs_no_reason() -> None:
    """Nothing changes, so nothing is said."""
    assert chosen(found(16, 0.1), base_size=16) == Choice(batch_size=16, best_size=16, confidence=0.1)


def test_a_size_that_failed_is_not_kept() -> None:
    """Nor one above it."""
    unsure = found(8, 0.1, smallest_failing=12)
    for least in (None, LEAST_SPEEDUP):
        assert [chosen(unsure, base_size=size, least=least).batch_size for size in (11, 12, 16)] == [11, 8, 8]


@pytest.mark.parametrize(
    ("speedup", "why"),
    [
        (None, "32 is not known to be faster, tuning included"),
        (expected(1.3, 1.04), "with 32 the run ends 1.04 to 2.60 times as early, tuning included, and 1.05 at least"),
        (expected(1.05, 1.05), "with 32 the run ends 1.05 to 2.10 times as early"),
        (expected(1.3, 1.06), ""),
    ],
)
def test_a_size_has_to_pay(speedup: Speedup | None, why: str) -> None:
    """The lower end of what is expected exceeds 1.05, or the configured size stays, with the interval as the reason."""
    choice = chosen(TWICE, {} if speedup is None else {32: speedup})
    assert choice.batch_size == (8 if why else 32)
    assert choice.why_kept.startswith(why)
    assert bool(choice.why_kept) == bool(why)


def test_throughput_alone_is_the_speed_up_where_the_batch_stays() -> None:
    """Its lower end is that of both trials' noise; what tuning takes comes off, by the length of the run."""
    plain = speedup_of(TWICE, base_size=8, size=32)
    assert plain is not None
    assert (plain.value, plain.low) == (2.0, pytest.approx(2 * (1 - ERROR)))
    assert plain.high == pytest.approx(2 * (1 + ERROR))
    short = speedup_of(TWICE, base_size=8, size=32, run_seconds=100, tuning_seconds=25)
    assert short is not None
    assert short.value == pytest.approx(100 / (50 + 25))
    assert speedup_of(TWICE, base_size=8, size=16) is None
    assert speedup_of(TWICE, base_size=8, size=8) == Speedup(value=1.0, low=1.0, high=1.0)
    assert expected_speedups(TWICE, base_size=16) == {}


def test_progress_is_the_speed_up_where_the_batch_grows() -> None:
    """With a noise scale of 24 to 80 samples a sample in 64 is worth (phi + 16) / (phi + 64) of one in 16."""
    noise = NoiseScale(value=40.0, low=24.0, high=80.0)
    speedup = speedup_of(TWICE, base_size=8, size=32, samples=2, noise=noise)
    assert speedup is not None
    assert speedup.value == pytest.approx(2 * 56 / 104)
    assert speedup.low == pytest.approx(2 * (1 - ERROR) * 40 / 88)
    assert speedup.high == pytest.approx(2 * (1 + ERROR) * 96 / 144)


def test_a_smaller_batch_pays_least_where_the_noise_is_most() -> None:
    """The lower end is over the whole interval, whichever way the size changes."""
    noise = NoiseScale(value=10.0, low=0.0, high=math.inf)
    speedup = speedup_of(found(8, 0.9, speeds={8: 100.0, 32: 200.0}), base_size=32, size=8, noise=noise)
    assert speedup is not None
    assert speedup.value == pytest.approx(0.5 * 42 / 18)
    assert speedup.low == pytest.approx(0.5 * (1 - ERROR))
