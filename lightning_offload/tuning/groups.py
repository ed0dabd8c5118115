"""Learning rates inside torch optimizers and schedulers: finding, checking and multiplying them in place.

Works on anything with ``param_groups``, wrapped by Lightning or Accelerate or not, without importing torch. A rate
may be a number or a tensor of one element (compiled and captured optimizers); a tensor stays the same object.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from typing import Any

from lightning_offload.errors import TuningError

Group = MutableMapping[str, Any]
"""One of an optimizer's parameter groups."""

_RATES = ("lr", "initial_lr", "max_lr")
"""The rate itself and what schedulers keep beside it in the groups."""
_ONE_CYCLE = (*_RATES, "min_lr")
"""What OneCycleLR keeps there, the last one as a share of the others; alone it is somebody else's."""

_ADAPTIVE_NAMES = ("adam", "lamb", "rmsprop")


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer, or scheduler, inside wrappers such as Lightning's and Accelerate's.

    Args:
        optimizer: With ``param_groups``, or something around one.

    Raises:
        TuningError: It is none.
    """
    while not _is_scheduler(optimizer) and hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
        optimizer = inner
    if not hasattr(optimizer, "param_groups"):
        raise TuningError(f"{type(optimizer).__name__} is no optimizer: it has no param_groups")
    return optimizer


def is_adam_like(optimizer: Any) -> bool:
    """Whether an optimizer divides gradients by their running size, as Adam does."""
    inner = unwrapped(optimizer)
    name = type(inner).__name__.lower()
    return "betas" in getattr(inner, "defaults", {}) or any(part in name for part in _ADAPTIVE_NAMES)


def learning_rates(optimizer: Any) -> tuple[float, ...]:
    """The rate of each group.

    Raises:
        TuningError: A group has none, or one that is not finite or negative.
    """
    rates = []
    for i, group in enumerate(unwrapped(optimizer).param_groups):
        if "lr" not in group:
            raise TuningError(f"parameter group {i} of {type(unwrapped(optimizer)).__name__} has no 'lr' to scale")
        rates.append(check_rate(group["lr"]))
    return tuple(rates)


def scale_optimizer(optimizer: Any, factor: float) -> tuple[float, ...]:
    """Multiply the rates of all groups, and those between which a scheduler moves them.

    Args:
        optimizer: A torch optimizer, wrapped or not.
        factor: Positive and finite; 1 changes no bit.

    Returns:
        The new rate of each group.

    Raises:
        TuningError: A rate, or the factor, is not possible; nothing was changed then.
    """
    check_factor(factor)
    learning_rates(optimizer)
    slots = list(_slots(unwrapped(optimizer).param_groups))
    for group, key in slots:
        check_rate(check_rate(group[key]) * factor)
    tensors: set[int] = set()
    for group, key in slots:
        if id(group[key]) not in tensors:  # they may be shared
            scale_in(group, key, factor)
        if hasattr(group[key], "mul_"):
            tensors.add(id(group[key]))
    return learning_rates(optimizer)


def scale_scheduler(scheduler: Any, factor: float) -> None:
    """Multiply the rates that a scheduler starts from, for one that is not made anew.

    The floor of a decay (``eta_min``, ``min_lrs``) stays as the user set it.

    Args:
        scheduler: A torch scheduler, wrapped or not, or one made of others.
        factor: Positive and finite.

    Raises:
        TuningError: The factor is not possible.
    """
    check_factor(factor)
    while hasattr(inner := getattr(scheduler, "scheduler", None), "step"):
        scheduler = inner
    for part in getattr(scheduler, "_schedulers", ()):
        scale_scheduler(part, factor)
    for name in ("base_lrs", "max_lrs", "_last_lr"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list):
            setattr(scheduler, name, [rate * factor for rate in rates])


def scale_in(group: Group, key: str, factor: float) -> None:
    """Multiply one rate; a tensor is changed in place."""
    if hasattr(group[key], "mul_"):
        group[key].mul_(factor)
    else:
        group[key] = group[key] * factor


def check_rate(rate: Any) -> float:
    """A learning rate as a number, checked.

    Raises:
        TuningError: It is no number, not finite, or negative.
    """
    try:
        number = float(rate)
    except (TypeError, ValueError, RuntimeError):
        raise TuningError(f"learning rate {rate!r} is not a number") from None
    if not math.isfinite(number) or number < 0:
        raise TuningError(f"learning rate {number!r} cannot be scaled: it must be finite and not negative")
    return number


def check_factor(factor: float) -> float:
    """What rates are multiplied by, checked.

    Raises:
        TuningError: It is not finite, or not positive.
    """
    if not math.isfinite(factor) or factor <= 0:
        raise TuningError(f"learning rates cannot be scaled by {factor!r}: it must be finite and positive")
    return factor


def _slots(groups: list[Group]) -> Iterator[tuple[Group, str]]:
    for group in groups:
        keys = _ONE_CYCLE if all(key in group for key in _ONE_CYCLE) else _RATES
        yield from ((group, key) for key in keys if key in group)


def _is_scheduler(found: Any) -> bool:
    return hasattr(found, "last_epoch")
