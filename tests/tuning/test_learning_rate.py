"""The learning rate that goes with another batch size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_offload.errors import TuningError
from lightning_offload.tuning.learning_rate import (
    RULES,
    check_rule,
    effective_batch,
    learning_rate_factor,
    rule_warning,
    scaled_learning_rates,
)

BATCHES = st.integers(1, 1 << 20)
RATES = st.lists(st.floats(0, 1e6), max_size=4)


def test_rules_as_published() -> None:
    """Goyal et al.: 0.1 at 256 samples is 3.2 at 8192; the square root of the same is 0.1 x sqrt(32)."""
    rates = (0.1, 0.025)
    assert scaled_learning_rates(rates, effective_batch=8192, base_batch=256) == (0.1 * 32, 0.025 * 32)
    root = math.sqrt(32)
    assert scaled_learning_rates(rates, effective_batch=8192, base_batch=256, rule="sqrt") == (0.1 * root, 0.025 * root)
    assert scaled_learning_rates(rates, effective_batch=8192, base_batch=None, rule="none") == rates


@given(RATES, BATCHES, st.sampled_from(list(RULES)))
def test_the_base_batch_keeps_its_rates(rates: list[float], batch: int, rule: str) -> None:
    """Bit for bit, by any rule."""
    assert scaled_learning_rates(rates, effective_batch=batch, base_batch=batch, rule=rule) == tuple(rates)


@given(BATCHES, BATCHES, BATCHES, st.sampled_from(list(RULES)))
def test_rules_compose(a: int, b: int, c: int, rule: str) -> None:
    """From a to b to c is from a to c, and back is the inverse."""

    def factor(base: int, effective: int) -> float:
        return learning_rate_factor(effective_batch=effective, base_batch=base, rule=rule)

    assert factor(a, b) * factor(b, c) == pytest.approx(factor(a, c))
    assert factor(a, b) * factor(b, a) == pytest.approx(1.0)


@given(BATCHES, BATCHES)
def test_sqrt_lies_between_none_and_linear(base: int, effective: int) -> None:
    """Whichever way the batch changes; its square is the linear factor."""
    root = learning_rate_factor(effective_batch=effective, base_batch=base, rule="sqrt")
    line = learning_rate_factor(effective_batch=effective, base_batch=base)
    assert min(1.0, line) <= root <= max(1.0, line)
    assert root**2 == pytest.approx(line)


def test_effective_batch() -> None:
    """Samples x ranks x accumulated micro-batches."""
    assert effective_batch(32) == 32
    assert effective_batch(32, 8, 4) == 1024


@pytest.mark.parametrize("base", [0, -256, 2.5, True, "256", None])
def test_base_batch_must_be_a_positive_integer(base: object) -> None:
    """By the rules that need it, with its value in the error."""
    for rule in ("linear", "sqrt"):
        with pytest.raises(TuningError, match=r"base_batch_size .* is not a positive integer"):
            learning_rate_factor(effective_batch=64, base_batch=base, rule=rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("batches", [(0, 1, 1), (8, 0, 1), (8, 2, -1), (8.0, 1, 1)], ids=str)
def test_effective_batch_takes_positive_integers(batches: tuple[int, int, int]) -> None:
    """Each part is checked."""
    with pytest.raises(TuningError, match="is not a positive integer"):
        effective_batch(*batches)


@pytest.mark.parametrize("rule", ["cubic", "", None, 1])
def test_unknown_rules_are_listed(rule: object) -> None:
    """The error names those that exist."""
    with pytest.raises(TuningError, match="choose one of 'linear', 'sqrt', 'none'"):
        check_rule(rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1, "fast", None, 1e308])
def test_impossible_rates_are_refused(rate: object) -> None:
    """Not finite, negative, no number, or not finite once scaled."""
    with pytest.raises(TuningError, match="learning rate"):
        scaled_learning_rates([0.1, rate], effective_batch=1024, base_batch=1)  # type: ignore[list-item]


def _optimizer(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind(nn.Linear(2, 2).parameters(), lr=0.1)  # type: ignore[call-arg]


def test_adam_is_offered_sqrt() -> None:
    """Linear scaling of an Adam-like optimizer is named with the better factor; once for each class."""
    optimizers = [_optimizer(torch.optim.AdamW), _optimizer(torch.optim.AdamW), _optimizer(torch.optim.SGD)]
    text = rule_warning(optimizers, rule="linear", factor=16.0)
    assert text is not None
    assert "by 16, which suits SGD; for AdamW the square root of the batch's ratio (4) is usually right" in text
    assert "lr_scaling='sqrt'" in text


def test_no_warning_where_the_rule_suits_or_nothing_changes() -> None:
    """SGD, another rule, or a factor of 1."""
    adam, sgd = _optimizer(torch.optim.Adam), _optimizer(torch.optim.SGD)
    assert rule_warning([sgd], rule="linear", factor=16.0) is None
    assert rule_warning([adam], rule="sqrt", factor=4.0) is None
    assert rule_warning([adam], rule="none", factor=1.0) is None
    assert rule_warning([adam], rule="linear", factor=1.0) is None
