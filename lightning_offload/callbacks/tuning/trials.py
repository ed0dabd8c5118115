"""Trials of batch sizes: each rank runs and times a few steps, then all agree on what came of them.

A trial begins with the model as it was, takes a batch of its size, warms up, and times steps. Running out of memory
makes it a trial that is not ok; any other error is raised on every rank, once all have finished the trial.
"""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch

from lightning_offload.callbacks.tuning.recording import NUM_LEARNING_STEPS, StepRecorder
from lightning_offload.callbacks.tuning.safety import num_collectives
from lightning_offload.callbacks.tuning.start import Prepared, Start
from lightning_offload.callbacks.tuning.steps import TrainingSteps, quiet
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.lightning_packages import import_from
from lightning_offload.plugins.predictions import Recorded
from lightning_offload.plugins.snapshot import Memento
from lightning_offload.tuning.agreement import Agreement, agreed
from lightning_offload.tuning.trial import Trial
from lightning_offload.units import format_bytes

__all__ = ["TrialRunner"]

_NO_MEMORY = "out of memory"


class TrialRunner:
    """Runs trials on this rank and agrees on them with the others.

    Args:
        trainer: At the start of a fit, optimizers made.
        module: The model.
        package: The Lightning package of both.
        start: What every trial begins from, but for what has been made since for the optimizers and the loaders.
        make_batch: Makes a batch of a size, on the host.
        set_batch_size: Sets a size where the model keeps it.
        agreement: Between ranks.
        steps_per_trial: Steps that are timed.
        warmup_steps: Steps before them.
        clock: Tells seconds.

    Attributes:
        has_collectives: Whether ranks talk to one another in a recorded step, the optimizer's part included.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        package: str,
        *,
        start: Start,
        make_batch: Callable[[int], Any],
        set_batch_size: Callable[[int], None],
        agreement: Agreement,
        steps_per_trial: int,
        warmup_steps: int,
        clock: Callable[[], float],
    ) -> None:
        self.recorder = StepRecorder(trainer, module)
        self.has_collectives = False
        self._trainer, self._module, self._package = trainer, module, package
        self._prepared = Prepared(start)
        self._plugin = Memento([trainer.precision_plugin])
        self._make_batch, self._set_batch_size = make_batch, set_batch_size
        self._agreement = agreement
        self._steps_per_trial, self._warmup_steps = steps_per_trial, warmup_steps
        self._steps = TrainingSteps(trainer, module, package, clock)
        self._recorded: dict[int, Recorded] = {}

    def restore(self) -> None:
        """Undo what all trials have done to model, data, loops, GradScaler and generators."""
        self._steps.drop_gradients()
        self._plugin.restore()
        self._prepared.restore()

    def record(self, batch_size: int) -> Recorded | None:
        """Record a step at a size on every rank; None where a rank has no memory for it."""
        found, _ = self._together(batch_size, self._watched)
        is_ok = self._agreement.is_true_on_all(found is not None)
        if found is not None:
            self._recorded[batch_size] = found
        return found if is_ok else None

    def _watched(self, batch: Any) -> Recorded:
        num_before = num_collectives()
        found = self.recorder.record(lambda: self._steps.seconds(batch))
        self.has_collectives |= found.has_collectives or num_collectives() != num_before
        return found

    def __call__(self, batch_size: int) -> Trial:
        """Run the trial of a size; the same record is returned on every rank."""
        trial, reason = self._together(batch_size, lambda batch: self._timed(batch_size, batch))
        trial = trial or Trial(batch_size=batch_size, is_ok=False, reason=reason)
        return agreed(trial, self._agreement)

    def _together(self, batch_size: int, run: Callable[[Any], Any]) -> tuple[Any, str]:
        """What `run` gives for a batch, or None and why there was no memory for it."""
        found, reason, failure = None, "", None
        try:
            self.restore()
            self._set_batch_size(batch_size)
            with quiet(self._trainer, self._module, self._package):
                self._steps.begin()
                found = run(self._make_batch(batch_size))
        except BudgetInfeasibleError as error:
            reason = f"needs a budget of {format_bytes(error.floor_bytes)}"
        except Exception as error:
            if self._is_out_of_memory(error):
                reason = _NO_MEMORY
            else:
                failure = error
            _let_go(error)
        self._clean_up(has_failed=bool(reason) or failure is not None)
        self._agreement.raise_together(failure, f"the trial of batch size {batch_size}")
        return found, reason

    def _timed(self, batch_size: int, batch: Any) -> Trial:
        device, recorder = self._steps.device, self.recorder
        num_warmup = self._warmup_steps
        if recorder.memory is not None:
            # each size is a new shape of step to the plugin; what it records and verifies is no time to trust
            num_warmup += NUM_LEARNING_STEPS
        elif device.type == "cpu" and batch_size not in self._recorded:
            self._recorded[batch_size] = recorder.record(lambda: self._steps.seconds(batch))
        for _ in range(num_warmup):
            self._steps.seconds(batch)
        retries = _num_retries(device)
        if device.type == "cuda" and recorder.memory is None:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = tuple(self._steps.seconds(batch) for _ in range(self._steps_per_trial))
        peak_bytes = self._peak_bytes(batch_size, device)
        trial = Trial.from_steps(batch_size, seconds, peak_bytes=peak_bytes)
        budget_bytes = recorder.budget_bytes if recorder.memory is not None else None
        reason = ""
        if _num_retries(device) > retries:
            reason = "the allocator had to free its cache to go on: memory is as good as full"
        elif budget_bytes is not None and peak_bytes is not None and peak_bytes > budget_bytes:
            reason = f"peak above the budget of {format_bytes(budget_bytes)}"
        if not reason:
            return trial
        return dataclasses.replace(trial, is_ok=False, samples_per_second=None, reason=reason)

    def _peak_bytes(self, batch_size: int, device: torch.device) -> int | None:
        if self.recorder.memory is not None:
            return self.recorder.peak_bytes()
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        recorded = self._recorded.get(batch_size)
        return recorded.peak_bytes if recorded is not None else None

    def _is_out_of_memory(self, error: Exception) -> bool:
        is_oom_error = import_from(self._package, "utilities.memory").is_oom_error
        return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or bool(is_oom_error(error))

    def _clean_up(self, *, has_failed: bool) -> None:
        self._steps.drop_gradients()
        is_cuda = self._steps.device.type == "cuda"
        if has_failed or is_cuda:
            gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()  # so that a trial's memory is not that of the one before it


def _let_go(error: BaseException) -> None:
    """Free what the frames of an error hold: the tensors that memory ran out for."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__


def _num_retries(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
