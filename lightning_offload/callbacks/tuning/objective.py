"""What is to be best, and which batch sizes come into question for it.

*keep_effective_batch*: samples per second, while an optimizer step sees as many samples as it did. The micro-batch
grows and fewer are accumulated, so the sizes are the divisors of what a rank sees in a step. Nothing statistical
changes but batch norm's statistics, which are of a micro-batch. *goodput*: throughput by what a sample is worth in the
larger batch, from the gradient noise scale. *throughput*: samples per second, whatever they are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_offload.callbacks.tuning.options import FinderOptions
from lightning_offload.callbacks.tuning.trainer_facts import accumulation_of, accumulation_schedule
from lightning_offload.errors import TuningError

__all__ = ["Objective", "objective_of"]

KEEP: Final = "keep_effective_batch"
GOODPUT: Final = "goodput"
THROUGHPUT: Final = "throughput"
LARGEST: Final = 1 << 31  # samples: more than any device holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a search is for.

    Attributes:
        name: "keep_effective_batch", "goodput" or "throughput".
        configured_accumulation: Micro-batches of an optimizer step, as the user gave them.
        samples_per_rank: What a rank sees in an optimizer step, where that is kept; None where the size changes it.
        sizes: Those that may be tried, ascending; None for all.
    """

    name: str
    configured_accumulation: int
    samples_per_rank: int | None = None
    sizes: Sequence[int] | None = None

    def accumulation(self, batch_size: int) -> int:
        """Micro-batches of an optimizer step with a size."""
        if self.samples_per_rank is None:
            return self.configured_accumulation
        return max(1, self.samples_per_rank // batch_size)


def objective_of(trainer: Any, module: Any, options: FinderOptions, base_size: int) -> Objective:
    """Settle what a search is for.

    Args:
        trainer: At the start of a fit.
        module: The model.
        options: What the user asked for; "auto" keeps the effective batch where that leaves room for a larger
            micro-batch, and is for goodput otherwise.
        base_size: The configured size.

    Raises:
        TuningError: The effective batch is to be kept and cannot be.
    """
    accumulation = accumulation_of(trainer)
    kept = _kept(trainer, module, options, base_size, accumulation)
    if options.objective == KEEP or (options.objective == "auto" and isinstance(kept, int) and kept > base_size):
        if isinstance(kept, str):
            raise TuningError(f"objective={KEEP!r} is not possible: {kept}")
        sizes = [size for size in range(1, kept + 1) if kept % size == 0 and _is_multiple(size, options, base_size)]
        return Objective(name=KEEP, configured_accumulation=accumulation, samples_per_rank=kept, sizes=sizes)
    name = GOODPUT if options.objective == "auto" else options.objective
    sizes_of_a_multiple = None
    if options.multiple_of > 1:
        sizes_of_a_multiple = range(options.multiple_of, LARGEST, options.multiple_of)
    return Objective(name=name, configured_accumulation=accumulation, sizes=sizes_of_a_multiple)


def _is_multiple(size: int, options: FinderOptions, base_size: int) -> bool:
    return size % options.multiple_of == 0 or size == base_size


def _kept(trainer: Any, module: Any, options: FinderOptions, base_size: int, accumulation: int) -> int | str:
    """The samples that a rank is to go on seeing in an optimizer step, or why there are none."""
    if not module.automatic_optimization:
        return "with manual optimization the model accumulates by itself"
    if accumulation_schedule(trainer) is not None:
        return "a GradientAccumulationScheduler sets the accumulation"
    if options.base_batch_size is None:
        return base_size * accumulation
    if options.base_batch_size % trainer.world_size:
        return f"base_batch_size={options.base_batch_size} is no multiple of the {trainer.world_size} ranks"
    return options.base_batch_size // int(trainer.world_size)
