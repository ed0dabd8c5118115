"""The learning rate that goes with a batch size, as far as it may change, and the groups of parameters that have it.

The rate is set where the model keeps it, and the optimizers are made anew, so that schedulers are built on it. A group
whose rate did not follow (it is written into `configure_optimizers`) is scaled afterwards, with what its scheduler has
derived from it, so that every group keeps its share of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_offload.callbacks.tuning.options import FinderOptions
from lightning_offload.callbacks.tuning.targets import Fit, batch_of_rate
from lightning_offload.tuning.learning_rate import RULES, Place, has_step_hooks, is_adam_like, resolved_rule
from lightning_offload.tuning.noise_scale import NoiseScale, likely_efficiency

__all__ = ["ScaledRate", "base_rates", "is_resumed", "scaled_rate", "stragglers"]

_MOST_BY_RULE, _MOST_BY_NOISE = 8.0, 16.0
"""By how much a rate is raised at most: where only a rule says how much, and where the noise scale does too."""

_LEFT_ALONE = (
    "EfficientBatchSizeFinder leaves the learning rate alone: the checkpoint's optimizers and schedulers go on with"
    " theirs. Start from weights alone to have it scaled."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRate:
    """The learning rate for a size.

    Attributes:
        lr: The rate itself; None where the optimizer has none.
        factor: By how much it is scaled.
        base_batch: The effective batch that the configured rate was for.
        note: What a reader should know.
        warnings: What a user is to be warned of where it is set.
    """

    lr: float | None
    factor: float
    base_batch: int
    note: str
    warnings: tuple[str, ...]


def scaled_rate(fit: Fit, *, effective: int, configured: int, noise: NoiseScale | None) -> ScaledRate:
    """Scale the rate for an effective batch to come, from that for the configured one, as far as it may be raised."""
    trainer, options, targets = fit.trainer, fit.options, fit.targets
    # of a rate that a tuning has set, that tuning knows; the configured batch may be another one again
    base = options.base_batch_size or batch_of_rate(fit.module, targets) or configured
    rule = resolved_rule(options.lr_scaling, trainer.optimizers)
    warnings = []
    if effective != base and rule != "none" and is_resumed(trainer):
        rule = "none"
        warnings.append(_LEFT_ALONE)
    ratio = effective / base
    # the best rate is that of a step without noise times 1 / (1 + phi / B) (McCandlish et al. 2018, equation 2.5), for
    # optimizers that divide by the gradient's size its square root; for a larger batch never more than the rule says
    if noise is not None and ratio > 1:
        ratio *= likely_efficiency(noise, base_batch=base, batch=effective)
    factor, note = _allowed_factor(trainer, options, RULES[rule](ratio), is_measured=noise is not None)
    adaptive: dict[str, None] = {}
    if rule == "linear" and factor != 1:
        adaptive = dict.fromkeys(type(each).__name__ for each in trainer.optimizers if is_adam_like(each))
    if adaptive:
        warnings.append(
            f"the learning rate is scaled linearly, by {factor:.3g}, which suits SGD; for {', '.join(adaptive)} the"
            f" square root of the batch's ratio ({math.sqrt(factor):.3g}) is usually right: lr_scaling='sqrt'"
        )
    rate = targets.base_rate
    if rate is None:  # that of the first group, at the top of its schedule, stands for all
        group = trainer.optimizers[0].param_groups[0]
        rate = group.get("max_lr", group.get("initial_lr", group.get("lr")))
    lr = None if rate is None else float(rate) * factor
    return ScaledRate(lr=lr, factor=factor, base_batch=base, note=note, warnings=tuple(warnings))


def _allowed_factor(trainer: Any, options: FinderOptions, wanted: float, *, is_measured: bool) -> tuple[float, str]:
    """By how much the rate may change where a rule wants it to by so much, and what to say of it."""
    if any(group.get("lr") is None for optimizer in trainer.optimizers for group in optimizer.param_groups):
        return 1.0, "The learning rate stays: the optimizer has one of its own" if wanted != 1 else ""
    is_warmed_up = options.lr_warmup_steps != 0
    if wanted > 1 and is_warmed_up and not all(map(has_step_hooks, trainer.optimizers)):
        return 1.0, (
            f"The learning rate stays: it would be raised by {wanted:.3g}, and the optimizer has no hooks around its"
            " step for a warm-up; lr_warmup_steps=0 raises it without"
        )
    most = options.max_lr_factor
    if most is None:
        most = _MOST_BY_NOISE if is_measured else _MOST_BY_RULE
    if wanted > most:
        return most, f"The learning rate is raised by {most:g}, not by {wanted:.3g} (max_lr_factor)"
    return wanted, ""


def is_resumed(trainer: Any) -> bool:
    """Whether the fit goes on from a checkpoint with optimizers."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint.get("optimizer_states"))


def base_rates(optimizers: Sequence[Any]) -> list[list[float]]:
    """The rates of all groups, by optimizer, before any scheduler has changed them; 0 for one that has none."""
    rates = [[g.get("initial_lr", g.get("lr")) for g in optimizer.param_groups] for optimizer in optimizers]
    return [[0.0 if rate is None else float(rate) for rate in each] for each in rates]


def stragglers(optimizers: Sequence[Any], before: list[list[float]], factor: float) -> tuple[Place, ...]:
    """The groups whose rates did not follow the model's when that was scaled; `before` are :func:`base_rates`."""
    if factor == 1.0:
        return ()
    return tuple(
        (number, index)
        for number, (new, old) in enumerate(zip(base_rates(optimizers), before, strict=True))
        for index, (rate, was) in enumerate(zip(new, old, strict=True))
        if was and math.isclose(rate, was, rel_tol=1e-9)
    )
