"""Gradual warm-up: the learning rate grows from the base rate to the scaled one over the first steps.

After Goyal et al. (arXiv:1706.02677, section 2.2): large rates are unstable while the weights change fast, so the rate
starts at that of the base batch and rises by the same amount at every step.

:class:`Warmup` lies on top of whatever schedule there is. Right before an optimizer's step it multiplies the rates, and
right after it puts back the very values that were there, so schedulers, checkpoints and monitors between steps see
the rates without warm-up, and a resumed run goes on bit for bit. Only steps that were made count: not those that a
gradient scaler skips, nor micro-batches that are accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict, final

from lightning_offload.errors import TuningError
from lightning_offload.tuning.groups import Group, check_factor, scale_in, unwrapped


class WarmupState(TypedDict):
    """What a resumed run goes on from: the steps made, by optimizer."""

    num_steps: int
    scale: float
    steps: list[int]


def warmup_factor(step: int, num_warmup_steps: int, scale: float) -> float:
    """What to multiply the scaled rate with at a step: from ``1 / scale`` at step 0 to 1 after the warm-up.

    Args:
        step: Optimizer steps made before this one.
        num_warmup_steps: Length of the warm-up; 0 for none.
        scale: What the base rate was multiplied by. Up to 1 there is nothing to warm up to.

    Raises:
        TuningError: A negative count, or a scale that is not finite and positive.
    """
    check_factor(scale)
    for name, count in (("step", step), ("num_warmup_steps", num_warmup_steps)):
        if count < 0:
            raise TuningError(f"{name}={count} is negative: steps are counted from 0")
    if step >= num_warmup_steps or scale <= 1:
        return 1.0
    return 1 / scale + (1 - 1 / scale) * (step / num_warmup_steps)


@final
class Warmup:
    """Warms up the rates of optimizers; see the module's docstring.

    Use: ``attach`` it to the optimizers once they exist, ``remove`` it at the end of the fit, and keep ``state_dict``
    in the checkpoint. Attached again, it goes on where it was.

    Args:
        num_steps: Optimizer steps until the scaled rate is reached.
        scale: What the base rates were multiplied by.

    Raises:
        TuningError: As :func:`warmup_factor`.
    """

    def __init__(self, num_steps: int, scale: float) -> None:
        warmup_factor(0, num_steps, scale)
        self.num_steps = num_steps
        self.scale = scale
        self._steps: list[int] = []
        self._attached: list[_Attached] = []

    @property
    def is_over(self) -> bool:
        """Whether all attached optimizers use their full rates."""
        return all(self.factor(i) == 1.0 for i in range(len(self._attached)))

    def factor(self, optimizer: int = 0) -> float:
        """What the rates of the optimizer of this index are multiplied by in its next step."""
        step = self._steps[optimizer] if optimizer < len(self._steps) else 0
        return warmup_factor(step, self.num_steps, self.scale)

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Warm up these optimizers from their next step on, in place of those attached before.

        Args:
            optimizers: Of torch, wrapped or not; each keeps its own count, by its place.

        Raises:
            TuningError: One of them is no torch optimizer.
        """
        self.remove()
        for i, optimizer in enumerate(optimizers):
            if i == len(self._steps):
                self._steps.append(0)
            self._attached.append(_Attached(self, i, unwrapped(optimizer)))

    def remove(self) -> None:
        """Take the hooks off; the counts stay."""
        for attached in self._attached:
            attached.remove()
        self._attached.clear()

    def state_dict(self) -> WarmupState:
        """What :meth:`load_state_dict` takes."""
        return WarmupState(num_steps=self.num_steps, scale=self.scale, steps=list(self._steps))

    def load_state_dict(self, state: WarmupState) -> None:
        """Go on from a checkpoint, attached or not."""
        warmup_factor(0, state["num_steps"], state["scale"])
        self.num_steps, self.scale = state["num_steps"], state["scale"]
        self._steps[:] = [*state["steps"], *self._steps[len(state["steps"]) :]]

    def made_step(self, optimizer: int) -> None:
        """Count a step of the optimizer of this index."""
        self._steps[optimizer] += 1


@final
class _Attached:
    """The hooks on one optimizer, and its rates while they are multiplied."""

    def __init__(self, warmup: Warmup, index: int, optimizer: Any) -> None:
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise TuningError(
                f"{type(optimizer).__name__} has no hooks around its step: warm-up needs torch's Optimizer"
            )
        self._warmup = warmup
        self._index = index
        self._multiplied: list[tuple[Group, Any, Any]] = []  # group, rate before, rate as multiplied
        self._handles = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def remove(self) -> None:
        """Take the hooks off."""
        self._restore()
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._restore()  # of a step that failed
        factor = self._warmup.factor(self._index)
        if factor == 1.0:
            return
        for group in optimizer.param_groups:
            before = group["lr"].clone() if hasattr(group["lr"], "clone") else group["lr"]
            scale_in(group, "lr", factor)
            self._multiplied.append((group, before, group["lr"]))

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._restore()
        self._warmup.made_step(self._index)

    def _restore(self) -> None:
        """Put the rates back, but for those that somebody else has set meanwhile."""
        for group, before, multiplied in self._multiplied:
            if group["lr"] is not multiplied:
                continue
            if hasattr(multiplied, "copy_"):
                multiplied.copy_(before)
            else:
                group["lr"] = before
        self._multiplied.clear()
