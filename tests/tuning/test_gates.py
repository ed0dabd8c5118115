"""When what was found is set, as numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_offload.tuning.gates import (
    Choice,
    Speedup,
    is_known_not_to_fit,
    paying_choice,
    speedup_of,
    sure_choice,
    surely_faster,
)
from lightning_offload.tuning.noise_scale import NoiseScale
from lightning_offload.tuning.posterior import Estimate
from lightning_offload.tuning.search import SearchResult


def found(
    batch_size: int, confidence: float, smallest_failing: int | None = None, speeds: dict[int, float] | None = None
) -> SearchResult:
    estimates = tuple(
        Estimate(batch_size=size, samples_per_second=speed, relative_error=0.01, num_repeats=5, num_trials=1)
        for size, speed in (speeds or {}).items()
    )
    return SearchResult(
        batch_size=batch_size, confidence=confidence, trials=(), estimates=estimates, largest=batch_size,
        smallest_failing=smallest_failing, ended_by="trials",
    )  # fmt: skip


TWICE = found(32, 0.9, speeds={8: 100.0, 32: 200.0})
ERROR = 1.96 * 0.01 * 2**0.5


@pytest.mark.parametrize(("confidence", "size"), [(0.29, 16), (0.5, 1440), (0.9, 1440)])
def test_a_guess_is_not_set(confidence: float, size: int) -> None:
    """Below the wanted confidence the configured size stays, and it is said why."""
    choice = sure_choice(found(1440, confidence), base_size=16, min_confidence=0.5)
    assert choice.batch_size == size
    assert bool(choice.why_kept) == (size == 16)


@pytest.mark.parametrize(
    ("low", "min_confidence", "is_set"), [(1.06, 0.5, True), (1.04, 0.5, False), (3.0, 0.975, True), (3.0, 0.98, False)]
)
def test_what_is_surely_better_is_set_though_another_size_may_be_best(
    low: float, min_confidence: float, is_set: bool
) -> None:
    """By the lower end of a 95% interval, so that much confidence may be asked for."""
    choice = sure_choice(
        found(96, 0.04), base_size=16, min_confidence=min_confidence, speedup=Speedup(value=low + 1, low=low)
    )
    assert (choice.batch_size == 96) == is_set
    assert bool(choice.why_kept) != is_set


def test_a_smaller_sure_gain_is_set_where_the_likely_best_is_not_sure() -> None:
    """Of the sizes that were tried, that which is surely fastest; what would be set, or fits alone, stays."""
    speedups = {8: Speedup(value=1.0, low=1.0), 16: Speedup(value=1.3, low=1.1), 24: Speedup(value=1.4, low=1.2)}
    speedups[128] = Speedup(value=3.0, low=0.9)

    def chosen(size: int, confidence: float = 0.9, **kwargs: Any) -> int:
        result = found(size, confidence, smallest_failing=kwargs.pop("fails", None))
        given = kwargs.pop("speedups", speedups)
        set_ = surely_faster(result, given, base_size=8, **{"min_confidence": 0.5, **kwargs})
        assert (set_ == result) or (set_.confidence == 0 and set_.batch_size != size)
        return set_.batch_size

    assert chosen(128) == 24
    assert chosen(16) == 16
    assert chosen(8) == 8
    assert chosen(128, speedups={128: speedups[128]}) == 128
    assert chosen(128, least=1.15) == 24
    assert chosen(4, fails=8) == 4, "the configured size does not fit"
    assert chosen(16, fails=20) == 16
    assert chosen(128, fails=24) == 16, "24 ran once, and failed another time"
    assert chosen(128, min_confidence=0.98) == 128, "nothing is as sure as that"
    nearly = {**speedups, 128: Speedup(value=3.0, low=1.03)}
    assert chosen(128, least=1.0, speedups=nearly) == 128, "the search is sure of it, and it is no slower"
    assert chosen(128, 0.3, least=1.0, speedups=nearly) == 24, "that is not"
    slight = {8: speedups[8], 16: Speedup(value=1.1, low=1.01), 128: Speedup(value=3.0, low=0.99)}
    assert chosen(128, least=1.0, speedups=slight) == 128, "nor is one of many that is 1% better to be sure of"


def test_what_was_found_to_be_the_configured_size_needs_no_reason() -> None:
    """Nothing changes, so nothing is said."""
    assert sure_choice(found(16, 0.1), base_size=16, min_confidence=0.5) == Choice(batch_size=16)


def test_a_size_that_failed_is_not_kept() -> None:
    """Nor one above it."""
    unsure = found(8, 0.1, smallest_failing=12)
    assert [is_known_not_to_fit(size, unsure) for size in (11, 12, 16)] == [False, True, True]
    assert sure_choice(unsure, base_size=16, min_confidence=0.5).batch_size == 8
    assert sure_choice(unsure, base_size=11, min_confidence=0.5).batch_size == 11


def test_throughput_alone_is_the_speed_up_where_the_batch_stays() -> None:
    """Its lower end is that of both trials' noise; what tuning takes comes off, by the length of the run."""
    plain = speedup_of(TWICE, base_size=8, size=32)
    assert plain is not None
    assert (plain.value, plain.low) == (2.0, pytest.approx(2 * (1 - ERROR)))
    short = speedup_of(TWICE, base_size=8, size=32, run_seconds=100, tuning_seconds=25)
    assert short is not None
    assert short.value == pytest.approx(100 / (50 + 25))
    assert speedup_of(TWICE, base_size=8, size=16) is None
    assert speedup_of(TWICE, base_size=8, size=8) == Speedup(value=1.0, low=1.0)


def test_progress_is_the_speed_up_where_the_batch_grows() -> None:
    """With a noise scale of 24 to 80 samples a sample in 64 is worth (phi + 16) / (phi + 64) of one in 16."""
    noise = NoiseScale(value=40.0, low=24.0, high=80.0, num_steps=20)
    speedup = speedup_of(TWICE, base_size=8, size=32, samples=2, noise=noise)
    assert speedup is not None
    assert speedup.value == pytest.approx(2 * 56 / 104)
    assert speedup.low == pytest.approx(2 * (1 - ERROR) * 40 / 88)


def test_a_smaller_batch_pays_least_where_the_noise_is_most() -> None:
    """The lower end is over the whole interval, whichever way the size changes."""
    noise = NoiseScale(value=10.0, low=0.0, high=math.inf, num_steps=20)
    speedup = speedup_of(found(8, 0.9, speeds={8: 100.0, 32: 200.0}), base_size=32, size=8, noise=noise)
    assert speedup is not None
    assert speedup.value == pytest.approx(0.5 * 42 / 18)
    assert speedup.low == pytest.approx(0.5 * (1 - ERROR))


@pytest.mark.parametrize(
    ("speedup", "size"),
    [
        (None, 8),
        (Speedup(value=1.3, low=1.04), 8),
        (Speedup(value=1.05, low=1.05), 8),
        (Speedup(value=1.3, low=1.06), 32),
    ],
)
def test_a_size_has_to_pay(speedup: Speedup | None, size: int) -> None:
    """The lower end of what is expected exceeds 1.05, or the configured size stays."""
    choice = paying_choice(Choice(batch_size=32), speedup, TWICE, base_size=8)
    assert choice.batch_size == size
    assert ("The configured 8 is kept: 32 is" in choice.why_kept) == (size == 8)


def test_a_configured_size_that_failed_has_not_to_be_beaten() -> None:
    """It cannot be trained with; nor is a reason given where it was kept already."""
    smaller = found(4, 0.9, smallest_failing=8, speeds={4: 50.0})
    assert paying_choice(Choice(batch_size=4), None, smaller, base_size=8) == Choice(batch_size=4)
    kept = Choice(batch_size=8, why_kept="unsure")
    assert paying_choice(kept, None, TWICE, base_size=8) == kept
