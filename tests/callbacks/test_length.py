"""A run with another batch size is as long as it was: limits in steps, schedules that count them, thawed layers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_offload.callbacks.tuning.length import scaled_steps
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.test_errors import raised
from tests.callbacks.training import NUM_FEATURES, NUM_SAMPLES, Clock, Net, finder_of, is_trial, samples


def test_a_limit_in_steps_sees_as_many_samples(make_trainer: MakeTrainer) -> None:
    """80 steps of 4 samples are 20 of 16; the schedule knows, and the Trainer has its own limit afterwards."""
    clock = Clock()
    finder = finder_of(clock)
    trainer = make_trainer(callbacks=[finder], max_steps=80, max_epochs=-1)
    net = Net(clock=clock, scheduler="cosine")
    trainer.fit(net)
    assert finder.result.batch_size == 16
    assert trainer.global_step == 20
    assert sum(net.sizes) == 80 * 4
    assert trainer.lr_scheduler_configs[0].scheduler.T_max == 20
    assert "max_steps is 20, which is as many samples as 80 steps of the configured batch" in finder.result.note
    assert trainer.max_steps == 80


def test_a_run_that_goes_on_has_the_same_limit(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    """Half of a tuned run and its rest, and a second fit of the same model, are no longer than the whole."""
    clock = Clock()
    trainer = make_trainer(callbacks=[finder_of(clock)], max_steps=40, max_epochs=-1)
    trainer.fit(Net(clock=clock, scheduler="step"))
    assert trainer.global_step == 10
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again = make_trainer(callbacks=[finder_of(Clock())], max_steps=80, max_epochs=-1)
    net = Net(scheduler="step")
    again.fit(net, ckpt_path=tmp_path / "half.ckpt")
    assert again.global_step == 20
    assert net.sizes == [16] * 10


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_limit_in_batches_sees_as_many_samples(make_trainer: MakeTrainer, accumulation: int, tmp_path: Any) -> None:
    """Epochs of 16 batches of 4 are of 4 batches of 16, also where these accumulate less, and in a resumed run."""
    clock = Clock()
    kept = {"objective": "keep_effective_batch"} if accumulation > 1 else {}
    finder = finder_of(clock, **kept)
    limits: dict[str, Any] = {"limit_train_batches": 16, "accumulate_grad_batches": accumulation}
    trainer = make_trainer(callbacks=[finder], max_epochs=1, **limits)
    net = Net(clock=clock, scheduler="cosine")
    trainer.fit(net)
    assert (finder.result.batch_size, finder.result.accumulation) == (16, 1)
    assert net.sizes == [16] * 4
    assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.T_max == 4
    assert "limit_train_batches is 4, which is as many samples as 16 batches as configured" in finder.result.note
    assert trainer.limit_train_batches == 16
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    again = make_trainer(callbacks=[finder_of(Clock(), **kept)], max_epochs=2, **limits)
    rest = Net(scheduler="step")
    again.fit(rest, ckpt_path=tmp_path / "first.ckpt")
    assert rest.sizes == [16] * 4


def test_a_batch_is_no_more_than_a_limited_epoch(make_trainer: MakeTrainer) -> None:
    """Two batches of 4 are an epoch of 8 samples, so no larger batch is tried; a share of the epoch is no number."""
    for limit, expected in ((2, 8), (0.25, 16)):
        clock = Clock()
        finder = finder_of(clock)
        net = Net(clock=clock, scheduler="step")
        make_trainer(callbacks=[finder], max_epochs=1, limit_train_batches=limit).fit(net)
        assert finder.result.batch_size == expected
        assert max(trial.batch_size for trial in finder.result.trials) == expected


def test_steps_for_a_batch_four_times_as_large(subtests: pytest.Subtests) -> None:
    """What is left of them is divided, rounded up; no limit stays none."""
    for steps, done, expected in [(100, 0, 25), (101, 0, 26), (-1, 0, -1), (100, 60, 70), (50, 60, 50)]:
        with subtests.test(steps=steps):
            assert scaled_steps(steps, Fraction(4), done) == expected


class Stale(Net):
    """Calculates the length of the run before its batch size is known."""

    def setup(self, stage: str) -> None:
        self.length = NUM_SAMPLES // self.batch_size * int(self.trainer.max_epochs or 0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = self.schedule(optimizer, self.length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def schedule(self, optimizer: Any, length: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)


class StaleSequence(Stale):
    def schedule(self, optimizer: Any, length: int) -> Any:
        schedules = torch.optim.lr_scheduler
        parts = [
            schedules.ConstantLR(optimizer, total_iters=2),
            schedules.CosineAnnealingLR(optimizer, T_max=length - 2),
        ]
        return schedules.SequentialLR(optimizer, parts, milestones=[2])


class StaleFunction(Stale):
    def schedule(self, optimizer: Any, length: int) -> Any:
        import functools

        def linear(step: int, *, num_training_steps: int) -> float:
            return max(0.0, 1 - step / num_training_steps)

        return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(linear, num_training_steps=length))


class StaleSteps(Stale):
    def schedule(self, optimizer: Any, length: int) -> Any:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[length // 3, 2 * length // 3])


class StaleClosure(Stale):
    def schedule(self, optimizer: Any, length: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))


class StaleCycle(Stale):
    def schedule(self, optimizer: Any, length: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=length)


class StaleChain(Stale):
    def schedule(self, optimizer: Any, length: int) -> Any:
        schedules = torch.optim.lr_scheduler
        parts = [schedules.ConstantLR(optimizer, total_iters=2), schedules.LinearLR(optimizer, 1.0, 0.1, length)]
        return schedules.ChainedScheduler(parts, optimizer)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Stale, "CosineAnnealingLR"),
        (StaleSequence, "SequentialLR"),
        (StaleFunction, "LambdaLR"),
        (StaleSteps, "MultiStepLR"),
        (StaleClosure, "LambdaLR"),
        (StaleCycle, "OneCycleLR"),
        (StaleChain, "ChainedScheduler"),
    ],
)
def test_a_schedule_of_the_old_length_is_an_error(make_trainer: MakeTrainer, kind: Any, name: str) -> None:
    """It would not end with the run; the message says where the length is to be read, and all is as it was."""
    clock = Clock()
    message = raised(make_trainer(callbacks=[finder_of(clock)]), kind(clock=clock))
    assert f"{name} is for the 48 steps of the run with the configured batch size, and with the found one" in message
    assert "in configure_optimizers() from self.trainer.estimated_stepping_batches" in message


class WarmedUp(Stale):
    def schedule(self, optimizer: Any, length: int) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)


class Sized(Stale):
    def schedule(self, optimizer: Any, length: int) -> Any:
        return super().schedule(optimizer, int(self.trainer.estimated_stepping_batches))


@pytest.mark.parametrize("kind", [WarmedUp, Sized])
def test_a_schedule_that_ends_with_the_run_or_does_not_end_is_none(make_trainer: MakeTrainer, kind: Any) -> None:
    """One that has come to the rate of the run long before its end is right for a shorter run, too."""
    clock = Clock()
    finder = finder_of(clock)
    make_trainer(callbacks=[finder]).fit(kind(clock=clock))
    assert finder.result.batch_size == 16


@pytest.mark.parametrize("epochs", [None, 1])
def test_validation_sees_as_many_samples(make_trainer: MakeTrainer, epochs: int | None) -> None:
    """After 8 batches of 4 samples, and then after 2 of 16, of which a run has half as many as it had."""

    class Validated(Net):
        num_validations = 0

        def val_dataloader(self) -> Any:
            return DataLoader(samples(), 32)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.num_validations += batch_idx == 0

    clock = Clock()
    finder = finder_of(clock, max_val=12)
    net = Validated(clock=clock)
    settings = {"val_check_interval": 8, "check_val_every_n_epoch": epochs, "num_sanity_val_steps": 0}
    trainer = make_trainer(callbacks=[finder], max_epochs=2, **settings)
    trainer.fit(net)
    assert finder.result.batch_size == 12
    assert net.num_validations == 8
    assert "val_check_interval is 2, which is as many samples as 8 batches were" in finder.result.note
    assert trainer.val_check_interval == 8


def test_a_limit_in_time_is_that_of_the_tuning_too(make_trainer: MakeTrainer) -> None:
    """Of a run without an end but for that, trials take a share; one that is over in a minute is not tuned."""
    for max_time, is_kept in ({"seconds": 40}, True), ({"hours": 10}, False):
        clock = Clock()
        finder = finder_of(clock, objective="keep_effective_batch", max_seconds=None)
        settings: dict[str, Any] = {"max_epochs": -1, "max_steps": -1, "limit_train_batches": 16}
        trainer = make_trainer(
            callbacks=[finder, StopAfter(20)], max_time=max_time, accumulate_grad_batches=4, **settings
        )
        trainer.fit(Net(clock=clock, scheduler="epochs", seconds=lambda size: 0.1))
        assert ("The configured 4 is kept: the run takes about" in finder.result.note) == is_kept
        seconds = {"seconds": 40, "hours": 36000}[next(iter(max_time))]
        assert clock.now - 20 * 4 * 0.1 < 0.1 * seconds


class StopAfter(pl.Callback):
    """Ends a training."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.num_batches


class Backed(Net):
    """Has a backbone, which is frozen by somebody."""

    thawed: bool = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.backbone = torch.nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if is_trial(self):
            TRAINED.add(self.backbone.weight.requires_grad)
        return super().training_step([self.backbone(batch[0]), batch[1]], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], self.lr)


TRAINED: set[bool] = set()


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
def test_what_a_callback_unfreezes_later_is_trained_in_trials(make_trainer: MakeTrainer) -> None:
    """With gradients and the optimizer's state; when training begins it is frozen, until the callback's epoch."""
    clock = Clock()
    finder = finder_of(clock)
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    net = Backed(clock=clock)
    TRAINED.clear()
    states: list[bool] = []
    net.on_train_epoch_start = lambda: states.append(net.backbone.weight.requires_grad)  # type: ignore[method-assign]
    make_trainer(callbacks=[finder, callback], max_epochs=2).fit(net)
    assert {True} == TRAINED
    assert states[-2:] == [False, True]
    assert finder.result.batch_size == 16


def test_a_model_that_thaws_its_own_is_warned(make_trainer: MakeTrainer) -> None:
    """Trials could not know; it is said once, when it happens."""

    class Thawing(Backed):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.backbone.requires_grad_(False)

        def on_train_epoch_end(self) -> None:
            self.backbone.requires_grad_(True)

    clock = Clock()
    trainer = make_trainer(callbacks=[finder_of(clock)], max_epochs=3)
    with pytest.warns(UserWarning, match="2 parameters are trained from epoch 1 on that were frozen") as caught:
        trainer.fit(Thawing(clock=clock))
    assert sum("were frozen" in str(each.message) for each in caught) == 1
