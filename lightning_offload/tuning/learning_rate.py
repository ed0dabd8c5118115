"""The learning rate that goes with another batch size.

* ``linear``: rate x effective batch / base batch, for SGD (Goyal et al., arXiv:1706.02677), best with a warm-up. It
  holds up to some thousands of samples; beyond that generalisation suffers there too.
* ``sqrt``: rate x sqrt(effective batch / base batch), which keeps the variance of a step (Krizhevsky, arXiv:1404.5997)
  and is the right one for Adam and RMSprop by the SDEs that they follow (Malladi et al., arXiv:2205.10330). That paper
  also moves the betas and epsilon; here they stay, which matters only for large changes of the batch.
* ``none``: the rate stays.
* ``auto``: ``linear`` where every optimizer is SGD or LARS, ``sqrt`` otherwise (:func:`resolved_rule`).

The effective batch is what one optimizer step sees: samples of one rank x ranks x micro-batches accumulated.

Rates are multiplied in place, in groups of parameters and in what schedulers have derived from them. A rate may be a
number or a tensor of one element (compiled and captured optimizers); a tensor stays the same object. No torch is
imported.

The warm-up is Goyal et al.'s (section 2.2): large rates are unstable while the weights change fast, so the rate starts
at that of the base batch and rises by the same amount at every step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final, final

from lightning_offload.errors import TuningError

Group = MutableMapping[str, Any]
"""One of an optimizer's parameter groups."""
Place = tuple[int, int]
"""A parameter group: the number of its optimizer, and its own there."""

_RATES = ("lr", "initial_lr", "max_lr")
"""The rate itself and what schedulers keep beside it in the groups."""
_ONE_CYCLE = (*_RATES, "min_lr")
"""What OneCycleLR keeps there, the last one as a share of the others; alone it is somebody else's."""

_ADAPTIVE_NAMES = ("adam", "lamb", "rmsprop")
_LINEAR_NAMES = ("sgd", "lars")


def is_adam_like(optimizer: Any) -> bool:
    """Whether an optimizer divides gradients by their running size, as Adam does."""
    name = type(optimizer).__name__.lower()
    return "betas" in getattr(optimizer, "defaults", {}) or any(part in name for part in _ADAPTIVE_NAMES)


def is_sgd_like(optimizer: Any) -> bool:
    """Whether a step is proportional to the gradient or its running mean, so that the linear rule is the one for it."""
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__]
    return any(part in name for part in _LINEAR_NAMES for name in names) and not is_adam_like(optimizer)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether something can be run around an optimizer's steps, which a warm-up needs."""
    return hasattr(optimizer, "register_step_pre_hook")


def scale_groups(
    optimizers: Sequence[Any], schedulers: Sequence[Any], places: Collection[Place], factor: float
) -> None:
    """Multiply the rates of some groups, with what their schedulers have derived from them.

    The floor of a decay (``eta_min``, ``min_lrs``) stays as the user set it.
    """
    for number, optimizer in enumerate(optimizers):
        groups = {index for of, index in places if of == number}
        tensors = set[int]()  # which groups may share
        for group in (optimizer.param_groups[index] for index in groups):
            keys = _ONE_CYCLE if all(key in group for key in _ONE_CYCLE) else _RATES
            for key in filter(group.__contains__, keys):
                if id(group[key]) not in tensors:
                    _scale_in(group, key, factor)
                if hasattr(group[key], "mul_"):
                    tensors.add(id(group[key]))
        for scheduler in schedulers:
            if getattr(scheduler, "optimizer", None) is optimizer:
                _scale_scheduler(scheduler, groups, factor)


def _scale_scheduler(scheduler: Any, groups: Collection[int], factor: float) -> None:
    """Multiply the rates that a scheduler starts from, and those of the schedulers that it is made of."""
    for part in getattr(scheduler, "_schedulers", ()):
        _scale_scheduler(part, groups, factor)
    for name in ("base_lrs", "max_lrs", "_last_lr"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list):  # a new one: that of a SequentialLR is its part's
            setattr(scheduler, name, [rate * factor if i in groups else rate for i, rate in enumerate(rates)])


def _scale_in(group: Group, key: str, factor: float) -> None:
    """Multiply one rate; a tensor is changed in place."""
    if hasattr(group[key], "mul_"):
        group[key].mul_(factor)
    else:
        group[key] = group[key] * factor


@final
class Warmup:
    """Raises the rates of optimizers from the base rate to the scaled one over the first steps.

    It lies on top of whatever schedule there is. Right before an optimizer's step it multiplies the rates, and right
    after it puts back the very values that were there, so schedulers, checkpoints and monitors between steps see the
    rates without warm-up, and a resumed run goes on bit for bit. Only steps that were made count: not those that a
    gradient scaler skips, nor micro-batches that are accumulated.

    Use: ``attach`` it to the optimizers once they exist, ``remove`` it at the end of the fit, and keep ``state_dict``
    in the checkpoint. Attached again, it goes on where it was.

    Args:
        num_steps: Optimizer steps until the scaled rate is reached; 0 for none.
        scale: What the base rates were multiplied by. Up to 1 there is nothing to warm up to.

    Raises:
        TuningError: A negative count, or a scale that is not finite and positive.
    """

    def __init__(self, num_steps: int, scale: float) -> None:
        if num_steps < 0:
            raise TuningError(f"num_steps={num_steps} is negative: steps are counted from 0")
        if not math.isfinite(scale) or scale <= 0:
            raise TuningError(f"learning rates cannot be scaled by {scale!r}: it must be finite and positive")
        self.num_steps, self.scale = num_steps, scale
        self._steps: list[int] = []
        self._hooks = contextlib.ExitStack()

    def factor(self, optimizer: int = 0) -> float:
        """What the rates of the optimizer of this index are multiplied by in its next step: from 1 / scale to 1."""
        step = self._steps[optimizer] if optimizer < len(self._steps) else 0
        if step >= self.num_steps or self.scale <= 1:
            return 1.0
        return 1 / self.scale + (1 - 1 / self.scale) * (step / self.num_steps)

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Warm up these optimizers from their next step on, in place of those attached before.

        Args:
            optimizers: Of torch; each keeps its own count, by its place.

        Raises:
            TuningError: One of them is no torch optimizer.
        """
        self.remove()
        for index, optimizer in enumerate(optimizers):
            if not has_step_hooks(optimizer):
                raise TuningError(
                    f"{type(optimizer).__name__} has no hooks around its step: warm-up needs torch's Optimizer"
                )
            if index == len(self._steps):
                self._steps.append(0)
            self._hook(index, optimizer)

    def remove(self) -> None:
        """Take the hooks off; the counts stay."""
        self._hooks.close()

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` takes: the steps made, by optimizer."""
        return {"num_steps": self.num_steps, "scale": self.scale, "steps": list(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, attached or not."""
        self.num_steps, self.scale = state["num_steps"], state["scale"]
        self._steps[:] = [*state["steps"], *self._steps[len(state["steps"]) :]]

    def _hook(self, index: int, optimizer: Any) -> None:
        multiplied: list[tuple[Group, Any, Any]] = []  # group, rate before, rate as multiplied

        def before_step(*_: Any) -> None:
            _put_back(multiplied)  # of a step that failed
            factor = self.factor(index)
            for group in optimizer.param_groups if factor != 1.0 else ():
                before = group["lr"].clone() if hasattr(group["lr"], "clone") else group["lr"]
                _scale_in(group, "lr", factor)
                multiplied.append((group, before, group["lr"]))

        def after_step(*_: Any) -> None:
            _put_back(multiplied)
            self._steps[index] += 1

        self._hooks.callback(_put_back, multiplied)
        self._hooks.callback(optimizer.register_step_pre_hook(before_step).remove)
        self._hooks.callback(optimizer.register_step_post_hook(after_step).remove)


def _put_back(multiplied: list[tuple[Group, Any, Any]]) -> None:
    """Put rates back, but for those that somebody else has set meanwhile."""
    for group, before, now in multiplied:
        if group["lr"] is not now:
            continue
        if hasattr(now, "copy_"):
            now.copy_(before)
        else:
            group["lr"] = before
    multiplied.clear()


RULES: Final[dict[str, Callable[[float], float]]] = {
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "none": lambda ratio: 1.0,
}
"""By name: the factor of the rate, given the ratio of the batches."""
AUTO: Final = "auto"
"""The name of the rule that the optimizers decide."""
SCALINGS: Final = (AUTO, *RULES)
WARMUP_STEPS: Final = 50  # at most
WARMUP_SHARE: Final = 0.1  # of the run, at most


def resolved_rule(rule: str, optimizers: Iterable[Any]) -> str:
    """The rule that "auto" means for optimizers; any other as it is.

    Linear is for steps that are proportional to gradients. One optimizer of another kind makes it "sqrt" for all: too
    low a rate costs time, too high a one the run.
    """
    if rule != AUTO:
        return rule
    kinds = [is_sgd_like(optimizer) for optimizer in optimizers]
    return "linear" if kinds and all(kinds) else "sqrt"


def default_warmup_steps(num_steps: float) -> int:
    """How many optimizer steps a scaled-up rate is warmed up for in a run of so many, unless the user says.

    Goyal et al. (arXiv:1706.02677) take 5 of 90 epochs: it is a tenth of the run at most, where that is known.
    """
    if not math.isfinite(num_steps):
        return WARMUP_STEPS
    return max(1, min(WARMUP_STEPS, math.ceil(WARMUP_SHARE * num_steps)))
