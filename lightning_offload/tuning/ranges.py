"""The numbers that a tuner may be given, by the keyword: what is possible, and what to give in place of what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_offload.errors import TuningError
from lightning_offload.tuning.noise_scale import MIN_STEPS

__all__ = ["check_ranges"]


class _Range(NamedTuple):
    """What is possible for a keyword."""

    holds: Callable[[Any], bool]
    advice: str
    is_optional: bool = False


def _count(least: int, *, is_optional: bool = False) -> _Range:
    return _Range(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"give an int of at least {least}",
        is_optional,
    )


def _number(holds: Callable[[float], bool], advice: str, *, is_optional: bool = False) -> _Range:
    return _Range(
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and holds(value),
        advice,
        is_optional,
    )


_RANGES = {
    **dict.fromkeys(("min_val", "min_size", "starting_batch_size", "steps_per_trial", "multiple_of"), _count(1)),
    **dict.fromkeys(("init_val", "max_val", "max_size", "base_batch_size", "max_trials"), _count(1, is_optional=True)),
    "pilot_steps": _count(MIN_STEPS),
    "warmup_steps": _count(0),
    "lr_warmup_steps": _count(0, is_optional=True),
    "tolerance": _number(lambda value: 0 < value < 1, "give a fraction between 0 and 1, such as 0.03"),
    "max_data_share": _number(
        lambda value: 0 < value <= 1, "give a share of the data set above 0 and up to 1, such as 0.1"
    ),
    "min_efficiency": _number(
        lambda value: 0 <= value <= 1,
        "give a share from 0 to 1, such as 0.9; 0 for trainings that end at a loss, however many samples that takes",
    ),
    "min_confidence": _number(
        lambda value: 0 <= value <= 1, "give a probability from 0 to 1, such as 0.5; 0 sets whatever is found"
    ),
    "max_lr_factor": _number(
        lambda value: value >= 1,
        "give a number of at least 1, such as 8, or float('inf') for no limit",
        is_optional=True,
    ),
    "max_seconds": _number(lambda value: value > 0, "give a positive number, or None", is_optional=True),
}


def check_ranges(given: Mapping[str, Any]) -> None:
    """Check the numbers among some keywords.

    Raises:
        TuningError: One is not possible.
    """
    for name, value in given.items():
        allowed = _RANGES.get(name)
        if allowed is None or (value is None and allowed.is_optional) or allowed.holds(value):
            continue
        raise TuningError(f"{name}={value!r} is not possible: {allowed.advice}")
