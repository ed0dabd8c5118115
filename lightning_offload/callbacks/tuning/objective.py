"""What is to be best, and which batch sizes come into question for it.

*keep_effective_batch*: samples per second, while an optimizer step sees as many samples as it did. The micro-batch
grows and fewer are accumulated, so the sizes are the divisors of what a rank sees in a step. Nothing statistical
changes but batch norm's statistics, which are of a micro-batch. *goodput*: throughput by what a sample is worth in the
larger batch, from the gradient noise scale. *throughput*: samples per second, whatever they are worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_offload.callbacks.tuning.targets import Fit
from lightning_offload.callbacks.tuning.trainer_facts import accumulation_of, accumulation_schedule
from lightning_offload.errors import TuningError

__all__ = ["Objective", "objective_of"]

KEEP: Final = "keep_effective_batch"
GOODPUT: Final = "goodput"
THROUGHPUT: Final = "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a search is for.

    Attributes:
        name: "keep_effective_batch", "goodput" or "throughput".
        base_size: The configured size.
        configured_accumulation: Micro-batches of an optimizer step, as the user gave them.
        samples_per_rank: What a rank sees in an optimizer step, where that is kept; None where the size changes it.
        multiple_of: Sizes other than the configured one are multiples of this.
    """

    name: str
    base_size: int
    configured_accumulation: int = 1
    samples_per_rank: int | None = None
    multiple_of: int = 1

    def accumulation(self, batch_size: int) -> int:
        """Micro-batches of an optimizer step with a size."""
        if self.samples_per_rank is None:
            return self.configured_accumulation
        return max(1, self.samples_per_rank // batch_size)

    def sizes(self, largest: int) -> list[int] | None:
        """The sizes up to a limit that may be tried, ascending, and the configured one; None for all."""
        kept, step = self.samples_per_rank, self.multiple_of
        if kept is None and step == 1:
            return None
        multiples = range(step, min(largest, kept or largest) + 1, step)
        return sorted({self.base_size, *(size for size in multiples if kept is None or kept % size == 0)})


def objective_of(fit: Fit) -> Objective:
    """Settle what the search of a fit is for.

    "auto" keeps the effective batch where that leaves room for a larger micro-batch, and is for goodput otherwise.

    Raises:
        TuningError: The effective batch is to be kept and cannot be.
    """
    options, base_size, accumulation = fit.options, fit.targets.base_size, accumulation_of(fit.trainer)
    kept = _kept(fit, accumulation)
    if options.objective == KEEP or (options.objective == "auto" and isinstance(kept, int) and kept > base_size):
        if isinstance(kept, str):
            raise TuningError(f"objective={KEEP!r} is not possible: {kept}")
        return Objective(
            name=KEEP, base_size=base_size, configured_accumulation=accumulation, samples_per_rank=kept,
            multiple_of=options.multiple_of,
        )  # fmt: skip
    name = GOODPUT if options.objective == "auto" else options.objective
    return Objective(
        name=name, base_size=base_size, configured_accumulation=accumulation, multiple_of=options.multiple_of
    )  # fmt: skip


def _kept(fit: Fit, accumulation: int) -> int | str:
    """The samples that a rank is to go on seeing in an optimizer step, or why there are none."""
    trainer, base_batch = fit.trainer, fit.options.base_batch_size
    if not fit.module.automatic_optimization:
        return "with manual optimization the model accumulates by itself"
    if accumulation_schedule(trainer) is not None:
        return "a GradientAccumulationScheduler sets the accumulation"
    if base_batch is None:
        return fit.targets.base_size * accumulation
    if base_batch % trainer.world_size:
        return f"base_batch_size={base_batch} is no multiple of the {trainer.world_size} ranks"
    return base_batch // int(trainer.world_size)
