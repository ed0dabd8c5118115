"""What is right on a curve, and which trial tells most."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_offload.tuning.acquisition import Beliefs, Space, decide, expected_confidence
from lightning_offload.tuning.posterior import Array
from lightning_offload.tuning.trial import Trial

SIZES = np.array([1.0, 2.0, 4.0, 8.0, 16.0])


def beliefs(*curves: list[float], edges: list[float] | None = None) -> Beliefs:
    edge: Array = np.array(edges if edges is not None else [16.0] * len(curves))
    return Beliefs.of(SIZES, np.log(np.array(curves)), edge, 0.03)


def test_right_is_fast_and_not_larger_than_needed() -> None:
    """On one curve the size that first reaches the best is right, no larger or slower one; within the budget."""
    found = beliefs([50, 80, 99, 100, 100])
    assert found.confidence().tolist() == [0, 0, 1, 0, 0]
    assert (found.answers.tolist(), found.bests.tolist()) == ([2], [3])
    below = beliefs([50, 80, 99, 200, 400], edges=[4.0])
    assert below.confidence().tolist() == [0, 0, 1, 0, 0]


def test_confidence_is_the_share_of_draws() -> None:
    """Two draws that contradict each other leave both sizes half right."""
    assert beliefs([50, 80, 100, 100, 100], [50, 60, 70, 100, 100]).confidence().tolist() == [0, 0, 0.5, 0.5, 0]


def test_a_trial_that_decides_is_worth_most() -> None:
    """Where draws differ at one size, a trial there settles the choice; elsewhere it tells nothing."""
    found = beliefs(*[[50, 80, 100, 100, 100]] * 50, *[[50, 60, 70, 100, 100]] * 50)
    known = [2, 3]
    assert expected_confidence(found, known, 2, 0.01) == pytest.approx(1.0)
    assert expected_confidence(found, known, 4, 0.01) == pytest.approx(0.5)
    assert 0.5 < expected_confidence(found, known, 2, 0.5) < 0.8  # so noisy that it can hardly tell


def test_looking_for_the_edge_is_worth_what_depends_on_it() -> None:
    """Whether a larger size fits settles the choice where throughput rises to it, and nothing where it is flat."""
    rising = beliefs([10, 20, 40, 80, 160], [10, 20, 40, 80, 160], edges=[8.0, 16.0])
    assert expected_confidence(rising, [3], 4, 0.01) == pytest.approx(1.0)
    flat = beliefs([50, 99, 100, 100, 100], [50, 99, 100, 100, 100], edges=[8.0, 16.0])
    assert flat.confidence().max() == 1.0


def test_promising_sizes() -> None:
    """Sizes that are never the answer, the best or right are not worth a trial, unless they ran."""
    found = beliefs([50, 80, 99, 100, 100], [50, 80, 99, 100, 100])
    assert found.promising(9, [0]) == [2, 3, 0]
    assert found.promising(1, [0]) == [2]


def test_what_ran_once_and_failed_another_time_does_not_fit() -> None:
    """An allocator's mood decides such a size; it is neither chosen nor in the way."""
    space = Space(low=8, start=8)
    ran = [
        Trial(batch_size=size, is_ok=True, samples_per_second=float(size), step_seconds=(1.0,) * 3)
        for size in (8, 16, 32, 64)
    ]
    failed = Trial(batch_size=64, is_ok=False, reason="out of memory")
    decided = decide(space, [*ran, failed], may_grow=False)
    assert decided.best == 32
    assert decided.next_size is None or decided.next_size < 64
