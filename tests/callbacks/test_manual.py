"""Models that optimize by themselves, or count their batches: trials go through whole rounds, as the training does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_offload.callbacks.tuning.trials import StepTimer
from lightning_offload.errors import TuningError
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.test_errors import raised
from tests.callbacks.training import Clock, Net, finder_of, is_trial

INDICES: list[int] = []
ACCUMULATIONS: set[int] = set()
STEPS: list[str] = []
"""What trials had: what a model notes of them itself is put back."""


class Counted(Net):
    """Notes the numbers of its batches in trials."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if is_trial(self):
            INDICES.append(batch_idx)
            ACCUMULATIONS.add(self.trainer.accumulate_grad_batches)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_batches_of_a_trial_are_counted(make_trainer: MakeTrainer, accumulation: int) -> None:
    """From 0 on in each trial; a window has two batches at most."""
    clock = Clock()
    finder = finder_of(clock, steps_per_trial=3)
    INDICES.clear()
    make_trainer(callbacks=[finder], max_epochs=1, accumulate_grad_batches=accumulation).fit(Counted(clock=clock))
    starts = [place for place, index in enumerate(INDICES) if index == 0]
    for begin, end in zip(starts, [*starts[1:], len(INDICES)], strict=True):
        assert INDICES[begin:end] == list(range(end - begin))
    assert max(INDICES) + 1 == 3 * min(2, accumulation)


class Manual(Net):
    """Steps every fourth batch, which takes ten times as long as another one."""

    every = 4

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
            if self._clock is not None:
                self._clock.now += 9.0
            if is_trial(self):
                STEPS.append("step")


def test_accumulation_by_hand_is_timed_with_its_steps(make_trainer: MakeTrainer) -> None:
    """A batch is charged its share of the optimizer's step, whenever that comes."""
    clock = Clock()
    finder = finder_of(clock)
    STEPS.clear()
    make_trainer(callbacks=[finder], max_epochs=1).fit(Manual(clock=clock, scheduler="step"))
    assert STEPS
    for trial in finder.result.trials:
        assert trial.samples_per_second == pytest.approx(trial.batch_size / ((4 + 9) / 4))


class Turns(Net):
    """A discriminator that steps with four batches of five, and a generator with the fifth."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.stem.parameters(), self.lr), torch.optim.SGD(self.head.parameters(), self.lr)]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        turn = batch_idx % 5 == 4
        if is_trial(self):
            STEPS.append("generator" if turn else "discriminator")
        loss = super().training_step(batch, batch_idx)
        optimizers[turn].zero_grad()
        self.manual_backward(loss)
        optimizers[turn].step()
        if turn and self._clock is not None:
            self._clock.now += 5.0


def test_optimizers_that_take_turns_all_have_theirs(make_trainer: MakeTrainer) -> None:
    """A trial has whole rounds of both."""
    clock = Clock()
    finder = finder_of(clock)
    STEPS.clear()
    make_trainer(callbacks=[finder], max_epochs=1).fit(Turns(clock=clock))
    assert STEPS.count("discriminator") == 4 * STEPS.count("generator") > 0
    for trial in finder.result.trials:
        assert trial.samples_per_second == pytest.approx(trial.batch_size / ((5 + 5) / 5))


def test_a_model_that_never_steps_is_an_error(make_trainer: MakeTrainer) -> None:
    """Nothing can be timed of a training that does not train; the model is as it was."""

    class Never(Manual):
        every = 1000

    message = raised(make_trainer(callbacks=[finder_of(Clock())]), Never(scheduler="step"))
    assert "made no optimizer step in 64 batches" in message


def test_an_optimizer_that_is_never_used_is_waited_for_once() -> None:
    """A round that is as long as it may be shows who steps."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1) for _ in range(2)]
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer, module = SimpleNamespace(optimizers=optimizers, strategy=strategy), SimpleNamespace()
    module.automatic_optimization = False
    took: list[float] = []
    timer = StepTimer(
        trainer, module, accumulation=1, clock=Clock(), took=took.append, talked=lambda _: None
    )  # fmt: skip
    for expected in (64, 1):
        took.clear()
        with timer.timing():
            num = 0
            while not took:
                timer.before_batch()
                optimizers[0].step()
                timer.after_batch()
                num += 1
        assert num == expected
    assert not optimizers[0]._optimizer_step_pre_hooks, "its hooks are gone"
    with timer.timing():
        for _ in range(63):
            timer.before_batch()
            timer.after_batch()
        with pytest.raises(TuningError, match="no optimizer step in 64"):
            timer.after_batch()


def test_a_schedule_of_accumulation_is_known_before_the_first_epoch(make_trainer: MakeTrainer) -> None:
    """`GradientAccumulationScheduler` sets it when an epoch begins; trials and the result have its number before."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    clock = Clock()
    finder = finder_of(clock, max_val=None)
    trainer = make_trainer(callbacks=[finder, GradientAccumulationScheduler({0: 4})], max_epochs=1)
    ACCUMULATIONS.clear()
    trainer.fit(Counted(clock=clock, scheduler="step"))
    result = finder.result
    assert result.effective_batch_size == 4 * result.batch_size
    assert result.base_batch_size == 16
    assert 4 * result.batch_size <= 96
    assert {2} == ACCUMULATIONS, "of a window two batches are run, whose steps are charged as those of four"
