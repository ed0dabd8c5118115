"""What a pilot trains on and measures, and what it leaves behind: nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torch import Tensor

from lightning_offload.callbacks.tuning.pilot import pilot_plan, shortest_pilot
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.test_objectives import Bowl, Stop, goodput
from tests.callbacks.training import Clock, is_trial
from tests.shares import share

SECONDS = 64 + 8  # of a step of Bowl with the configured size


@pytest.mark.parametrize("accumulation", [1, 2, 3, 5, 16])
def test_half_of_a_pilot_is_measured(accumulation: int) -> None:
    """In steps of four batches or more, which begin where the run's own would; the others are as in the run."""
    assert pilot_plan(shortest_pilot(accumulation) - 1, most_measured=128, accumulation=accumulation) is None
    for most in (shortest_pilot(accumulation), 1000, 10**9):
        plan = pilot_plan(most, most_measured=128, accumulation=accumulation)
        assert plan is not None
        before, measured = plan.num_lead * accumulation, plan.num_measured * plan.num_micro
        assert before == measured
        assert before + measured <= most
        assert 8 <= plan.num_measured <= 128
        assert plan.num_micro >= max(4, accumulation)
        assert before % plan.num_micro == 0
    assert plan.num_measured == 128


@pytest.mark.parametrize("accumulation", share([1, 2, 3, 5], 2))
def test_accumulated_gradients_have_the_same_noise_scale(make_trainer: MakeTrainer, accumulation: int) -> None:
    """No measured step begins in the midst of the Trainer's own window, where it drops gradients."""
    clock = Clock()
    finder = goodput(clock, objective="goodput")
    trainer = make_trainer(
        callbacks=[finder, Stop()], max_steps=30_000, max_epochs=-1, accumulate_grad_batches=accumulation
    )
    trainer.fit(Bowl(20.0, clock))
    low, high = finder.result.noise_scale_interval
    assert 10 < low < 20 < high < 40


class Rising(Bowl):
    """Its gradients have next to no noise in the first steps, and much from then on."""

    def __init__(self, *args: Any, quiet_steps: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quiet_steps = quiet_steps
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        calm = 1.0 if self.num_steps >= self.quiet_steps else 0.01
        return super().training_step([calm * batch[0]], batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.num_steps += 1


def test_the_noise_scale_is_measured_as_far_into_the_run_as_a_pilot_may_go(make_trainer: MakeTrainer) -> None:
    """After as many batches, trained on as in the run, as it then measures: 400 each in 2% of 40,000 steps."""
    for num_steps, is_late in ((40_000, True), (10_000, False)):
        clock = Clock()
        finder = goodput(clock, max_seconds=None)
        net = Rising(400.0, clock, quiet_steps=300)
        make_trainer(callbacks=[finder, Stop()], max_steps=num_steps, max_epochs=-1).fit(net)
        assert (finder.result.noise_scale > 100) == is_late
        assert int(net.num_steps) == 1, "the pilot's steps are put back"


class Scheduled(Bowl):
    """Warms its rate up by itself, and notes the rates that it is trained with in steps that are not the run's."""

    rates: ClassVar[list[float]] = []  # no state of the model, which trials put back

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if is_trial(self):
            self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_pilot_follows_the_schedule_of_the_rate(make_trainer: MakeTrainer) -> None:
    """It is that of the run, from its beginning; a pilot that is longer than the run does not end it."""
    clock = Clock()
    Scheduled.rates.clear()
    finder = goodput(clock, max_seconds=None)
    net = Scheduled(400.0, clock)
    trainer = make_trainer(callbacks=[finder, Stop()], max_steps=20_000, max_epochs=-1)
    trainer.fit(net)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), max_lr=1e-3, total_steps=20_000
    )
    expected = []
    for _ in range(200):  # the lead: half of 2%
        expected.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    begin = Scheduled.rates.index(expected[1]) - 1
    assert Scheduled.rates[begin : begin + 200] == pytest.approx(expected)
    short = goodput(clock, max_seconds=None)
    result = short.tune(make_trainer(max_steps=20, max_epochs=-1), Scheduled(400.0, clock))
    assert result.noise_scale is not None


@pytest.mark.parametrize("frequency", [1, 3, 10**6])
def test_a_schedule_is_stepped_as_often_as_in_the_run(make_trainer: MakeTrainer, frequency: int) -> None:
    """By its frequency, and not at all once it fails; trials after the pilot have the rate of the beginning again."""

    class Doubling(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1e-9)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
            config = {"scheduler": schedule, "interval": "step", "frequency": frequency}
            return {"optimizer": optimizer, "lr_scheduler": config}

        def factor(self, step: int) -> float:
            if step == 20:
                raise RuntimeError("a schedule that ends before the run")
            return float(min(20, 1 + step))

    clock = Clock()
    Scheduled.rates.clear()
    finder = goodput(clock, max_seconds=None)
    make_trainer(callbacks=[finder, Stop()], max_steps=5_000, max_epochs=-1).fit(Doubling(400.0, clock))
    rates = [round(rate * 1e9) for rate in Scheduled.rates]
    begin = rates.index(2) - frequency if frequency < 100 else 0
    if frequency < 100:
        assert rates[begin : begin + 50] == [min(20, 1 + step // frequency) for step in range(50)]
    num_pilot = 100
    assert set(rates[:begin] + rates[begin + num_pilot :]) == {1}
    assert len(rates) > num_pilot + 7, "there are trials after the pilot"


def test_a_model_that_steps_its_schedule_itself_does_not_end_it(make_trainer: MakeTrainer) -> None:
    """Nor is Lightning's hook called, which may read what only a run has."""

    class Own(Scheduled):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            assert self.trainer.callback_metrics["loss"] > 0
            scheduler.step()

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            self.lr_schedulers().step()

    clock = Clock()
    finder = goodput(clock)
    result = finder.tune(make_trainer(max_steps=30, max_epochs=-1), Own(400.0, clock))
    assert result.noise_scale is not None


def test_a_run_of_unknown_length_has_a_short_pilot(make_trainer: MakeTrainer) -> None:
    """128 batches: the last of its 64 and 16 steps is still one of the quiet ones here."""
    clock = Clock()
    finder = goodput(clock, objective="goodput", max_seconds=None)
    net = Rising(400.0, clock, quiet_steps=80)
    callbacks = [finder, Stop(), GradientAccumulationScheduler({0: 1})]
    make_trainer(callbacks=callbacks, max_epochs=4).fit(net)
    assert finder.result.noise_scale < 10
    short = goodput(clock, objective="goodput", max_seconds=None)
    callbacks = [short, Stop(), GradientAccumulationScheduler({0: 1})]
    make_trainer(callbacks=callbacks, max_epochs=1).fit(Bowl(400.0, clock))
    assert short.result.noise_scale is None
    assert "a pilot of 64 batches, which measures the gradient noise scale, is more than 2%" in short.result.note


@pytest.mark.parametrize("accumulation", [1, 16])
def test_a_pilot_takes_half_of_the_time_that_is_given(make_trainer: MakeTrainer, accumulation: int) -> None:
    """Trials have what it leaves; where the time is too short for any, the configured values stay."""
    shortest = shortest_pilot(accumulation) * SECONDS
    for seconds, is_tuned in ((2.2 * shortest, True), (1.9 * shortest, False)):
        clock = Clock()
        finder = goodput(clock, objective="goodput", max_seconds=seconds)
        trainer = make_trainer(
            callbacks=[finder, Stop()], max_steps=10**6, max_epochs=-1, accumulate_grad_batches=accumulation
        )
        trainer.fit(Bowl(400.0, clock))
        assert (finder.result.noise_scale is not None) == is_tuned
        assert (f"takes more than half of max_seconds={seconds:g}" in finder.result.note) != is_tuned
        assert finder.result.tuning_seconds < 1.3 * seconds


@pytest.mark.filterwarnings("ignore:EfficientBatchSizeFinder leaves the learning rate alone")
def test_a_run_that_goes_on_spends_a_share_of_what_is_left(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    """Not of the whole run."""
    trainer = make_trainer(max_steps=6_000, max_epochs=-1, limit_train_batches=2_400)
    net = Bowl(400.0, Clock(), lr=0.0)
    trainer.fit_loop.epoch_loop.max_steps = 2_400
    trainer.fit(net)
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    for max_steps, is_tuned in ((5_500, False), (5_700, True)):
        clock = Clock()
        finder = goodput(clock, max_seconds=None)
        again = make_trainer(callbacks=[finder, Stop()], max_steps=max_steps, max_epochs=-1, limit_train_batches=2_400)
        again.fit(Bowl(400.0, clock), ckpt_path=tmp_path / "late.ckpt")
        assert (finder.result.noise_scale is not None) == is_tuned


def test_what_a_pilot_changes_in_the_optimizer_is_put_back(make_trainer: MakeTrainer) -> None:
    """A rate that is a tensor stays the same object."""

    class Tensors(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), torch.tensor(1e-6))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(64.0, 1.0 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    clock = Clock()
    Scheduled.rates.clear()
    finder = goodput(clock, max_seconds=None)
    make_trainer(callbacks=[finder, Stop()], max_steps=5_000, max_epochs=-1).fit(Tensors(400.0, clock))
    assert float(Scheduled.rates[-1]) == pytest.approx(1e-6)
    assert max(map(float, Scheduled.rates)) > 1e-5


def test_loaders_that_are_slow_do_not_make_a_pilot_longer(make_trainer: MakeTrainer) -> None:
    """Where not the first batches wait for them, a trial does not show that; so a pilot looks at the clock."""

    class Slow(Bowl):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if is_trial(self) and batch_idx > 40:
                self.tick(9 * SECONDS)

    for steps in (
        1000,
        1010,
        1020,
        1030,
    ):  # the lead ends anywhere; a measured step begins without gradients all the same
        clock = Clock()
        finder = goodput(clock, max_seconds=float(steps * SECONDS))
        make_trainer(callbacks=[finder, Stop()], max_steps=10**6, max_epochs=-1).fit(Slow(20.0, clock))
        assert 8 < finder.result.noise_scale < 50
        assert finder.result.tuning_seconds < 1.1 * steps * SECONDS


@pytest.mark.filterwarnings("ignore:.*parameters are trained from epoch")
def test_a_schedule_goes_on_where_parameters_are_thawed_later(make_trainer: MakeTrainer) -> None:
    """Trials train all of them, in a group of their own that the schedule does not know."""

    class Thawing(BaseFinetuning):
        def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
            self.freeze(pl_module.head)

        def finetune_function(self, *args: Any) -> None:
            pass

    class Headed(Scheduled):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.head = torch.nn.Linear(50, 1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + 0.0 * self.head(self.place).sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD([self.place], 1e-9)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(64.0, 1.0 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    clock = Clock()
    Scheduled.rates.clear()
    finder = goodput(clock, max_seconds=None)
    trainer = make_trainer(callbacks=[finder, Stop(), Thawing()], max_steps=5_000, max_epochs=-1)
    trainer.fit(Headed(400.0, clock))
    rates = [round(rate * 1e9) for rate in Scheduled.rates]
    assert max(rates) > 40
    assert len(trainer.optimizers[0].param_groups) == 1


@pytest.mark.filterwarnings("ignore:EfficientBatchSizeFinder leaves the learning rate alone")
def test_epochs_are_left_whatever_batch_the_former_had(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    """A checkpoint's steps are of its own batch: 2,500 of an epoch, of which the run with 64 samples has 313."""
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Bowl(400.0, Clock(), lr=0.0))
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    for max_epochs, is_tuned in ((20, True), (8, False)):
        clock = Clock()
        finder = goodput(clock, max_seconds=None, max_data_share=0.5)
        net = Bowl(400.0, clock, batch_size=64)
        callbacks = [finder, Stop()]
        make_trainer(callbacks=callbacks, max_epochs=max_epochs).fit(net, ckpt_path=tmp_path / "small.ckpt")
        assert (finder.result.noise_scale is not None) == is_tuned
        assert "the run has 0 steps" not in finder.result.note


def test_the_accumulation_of_a_pilot_is_put_back(make_trainer: MakeTrainer) -> None:
    """A schedule of accumulation leaves the Trainer's own number at 1 until an epoch begins."""
    found: list[int] = []

    class Starting(Bowl):
        def on_train_start(self) -> None:
            if not is_trial(self):
                found.append(self.trainer.accumulate_grad_batches)

    clock = Clock()
    finder = goodput(clock, objective="goodput")
    callbacks = [finder, Stop(), GradientAccumulationScheduler({0: 4})]
    make_trainer(callbacks=callbacks, max_epochs=4).fit(Starting(400.0, clock))
    assert finder.result.noise_scale is not None
    assert found == [1]
