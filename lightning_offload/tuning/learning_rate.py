"""The learning rate that goes with another batch size.

* ``linear``: rate x effective batch / base batch, for SGD (Goyal et al., arXiv:1706.02677), best with a warm-up
  (:mod:`~.warmup`). It holds up to some thousands of samples; beyond that generalisation suffers there too.
* ``sqrt``: rate x sqrt(effective batch / base batch), which keeps the variance of a step (Krizhevsky, arXiv:1404.5997)
  and is the right one for Adam and RMSprop by the SDEs that they follow (Malladi et al., arXiv:2205.10330). That paper
  also moves the betas and epsilon; here they stay, which matters only for large changes of the batch.
* ``none``: the rate stays.

The effective batch is what one optimizer step sees: samples of one rank x ranks x micro-batches accumulated. Rules
are pure functions of numbers; :mod:`~.groups` applies the factor to optimizers and schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from lightning_offload.errors import TuningError
from lightning_offload.tuning.groups import (
    check_rate,
    is_adam_like,
    learning_rates,
    scale_optimizer,
    scale_scheduler,
    unwrapped,
)
from lightning_offload.tuning.warmup import Warmup, WarmupState, warmup_factor

__all__ = [
    "RULES",
    "Warmup",
    "WarmupState",
    "check_rule",
    "effective_batch",
    "is_adam_like",
    "learning_rate_factor",
    "learning_rates",
    "rule_warning",
    "scale_optimizer",
    "scale_scheduler",
    "scaled_learning_rates",
    "warmup_factor",
]

RULES: Final[dict[str, Callable[[float], float]]] = {
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "none": lambda ratio: 1.0,
}
"""By name: the factor of the rate, given the ratio of the batches."""


def check_rule(rule: str) -> str:
    """The name of a rule, checked.

    Raises:
        TuningError: There is none of that name.
    """
    if not isinstance(rule, str) or rule not in RULES:
        raise TuningError(f"unknown learning rate rule {rule!r}: choose one of {', '.join(map(repr, RULES))}")
    return rule


def effective_batch(batch_size: int, num_ranks: int = 1, num_accumulated: int = 1) -> int:
    """Samples that one optimizer step sees.

    Args:
        batch_size: Samples of one step on one rank.
        num_ranks: Ranks that train together.
        num_accumulated: Micro-batches whose gradients are added up before an optimizer step.

    Raises:
        TuningError: One of them is not a positive integer.
    """
    _check_count("batch size", batch_size)
    return batch_size * _check_count("number of ranks", num_ranks) * _check_count("accumulation", num_accumulated)


def learning_rate_factor(*, effective_batch: int, base_batch: int | None, rule: str = "linear") -> float:
    """What to multiply the base rate by.

    Args:
        effective_batch: Samples of an optimizer step from now on.
        base_batch: Samples of the optimizer step that the base rate was chosen for; not needed by "none".
        rule: One of :data:`RULES`.

    Raises:
        TuningError: No such rule, or a batch that is not a positive integer.
    """
    if check_rule(rule) == "none":
        return 1.0
    effective = _check_count("effective batch", effective_batch)
    return RULES[rule](effective / _check_count("base_batch_size", base_batch))


def scaled_learning_rates(
    rates: Sequence[float], *, effective_batch: int, base_batch: int | None, rule: str = "linear"
) -> tuple[float, ...]:
    """The rates for another batch, of each parameter group.

    Args:
        rates: For the base batch.
        effective_batch: Samples of an optimizer step from now on.
        base_batch: Samples of the optimizer step that the rates were chosen for; not needed by "none".
        rule: One of :data:`RULES`.

    Raises:
        TuningError: No such rule, a batch that is not a positive integer, or a rate that is negative, not finite, or
            would not stay so.
    """
    factor = learning_rate_factor(effective_batch=effective_batch, base_batch=base_batch, rule=rule)
    return tuple(check_rate(check_rate(rate) * factor) for rate in rates)


def rule_warning(optimizers: Iterable[Any], *, rule: str, factor: float) -> str | None:
    """What to tell the user about the rule for these optimizers; None where it suits them or nothing changes.

    Args:
        optimizers: Of torch, wrapped or not.
        rule: One of :data:`RULES`.
        factor: What the rates are multiplied by.

    Raises:
        TuningError: No such rule, or something that is no optimizer.
    """
    if check_rule(rule) != "linear" or factor == 1:
        return None
    names = dict.fromkeys(type(unwrapped(o)).__name__ for o in optimizers if is_adam_like(o))
    if not names:
        return None
    return (
        f"the learning rate is scaled linearly, by {factor:.3g}, which suits SGD; for {', '.join(names)} the square "
        f"root of the batch's ratio ({math.sqrt(factor):.3g}) is usually right: lr_scaling='sqrt'"
    )


def _check_count(name: str, count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise TuningError(f"{name} {count!r} is not a positive integer: give the number it is for, such as 32")
    return count
