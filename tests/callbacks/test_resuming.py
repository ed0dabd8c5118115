"""A resumed run is neither tuned nor scaled again; one from an untuned checkpoint is tuned in its middle."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import Clock, Net, assert_same, finder_of, fitted


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_tuned_run_goes_on_from_its_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Size and rate come from the checkpoint, no step is tried; the end is that of an untuned run resumed likewise."""
    clock = Clock()
    first = finder_of(clock)
    trainer = make_trainer(callbacks=[first], max_epochs=1)
    fitted(trainer, Net(clock=clock, scheduler="cosine"))
    path = tmp_path / "tuned.ckpt"
    trainer.save_checkpoint(path)

    again = finder_of(Clock())
    net = Net(scheduler="cosine")
    tuned = fitted(make_trainer(callbacks=[again], max_epochs=3), net, ckpt_path=path)
    assert again.result == first.result
    assert set(net.sizes) == {16}
    assert len(net.sizes) == 2 * 6, "the steps of two epochs and no trials"
    plain = fitted(
        make_trainer(max_epochs=3), Net(batch_size=16, lr=first.result.lr, scheduler="cosine"), ckpt_path=path
    )
    assert_same(tuned, plain)


def test_started_in_the_middle_of_a_training(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """From an untuned run's checkpoint step, epoch and optimizer state are kept, with the rates of the checkpoint."""
    trainer = make_trainer(max_epochs=1)
    fitted(trainer, Net(scheduler="epochs"))
    path = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    steps = trainer.global_step

    clock = Clock()
    finder = finder_of(clock)
    with pytest.warns(UserWarning, match="leaves the learning rate alone"):
        tuned = fitted(
            make_trainer(callbacks=[finder], max_epochs=2), Net(scheduler="epochs", clock=clock), ckpt_path=path
        )
    assert finder.result.batch_size == 16
    assert finder.result.lr_factor == 1.0
    assert tuned["steps"][0] == steps + 6
    plain_net = Net(batch_size=16, lr=finder.result.lr, scheduler="epochs")
    assert_same(tuned, fitted(make_trainer(max_epochs=2), plain_net, ckpt_path=path))


@pytest.mark.parametrize("schedule", ["cosine", "step", "onecycle"])
def test_a_schedule_that_counts_steps_keeps_a_resumed_run(
    make_trainer: MakeTrainer, tmp_path: Path, schedule: str
) -> None:
    """The checkpoint brings its length back, and it would not end with the run."""
    trainer = make_trainer(max_epochs=3)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(Net(scheduler=schedule))
    path = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    finder = finder_of(Clock())
    net = Net(scheduler=schedule)
    again = make_trainer(callbacks=[finder], max_epochs=3)
    trainer.fit_loop.max_epochs = 3
    with contextlib.suppress(ValueError):  # torch's, of a schedule that was made for one epoch
        again.fit(net, ckpt_path=path)
    assert "The configured 4 is kept: the checkpoint's schedules count steps of its batch" in finder.result.note
    assert set(net.sizes) == {4}


def test_a_larger_micro_batch_leaves_such_schedules_as_they_are(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """An optimizer step sees as many samples as before, so there are as many of them."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    trainer = make_trainer(**settings)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(Net(scheduler="step"))
    path = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    clock = Clock()
    finder = finder_of(clock, objective="keep_effective_batch")
    make_trainer(callbacks=[finder], **settings).fit(Net(scheduler="step", clock=clock), ckpt_path=path)
    assert (finder.result.batch_size, finder.result.accumulation) == (16, 1)


def test_a_checkpoint_within_an_epoch_keeps_a_resumed_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """It counts the batches of that epoch, which would be others."""
    trainer = make_trainer(max_epochs=-1, max_steps=10)
    trainer.fit(Net(scheduler="epochs"))
    path = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    finder = finder_of(Clock())
    net = Net(scheduler="epochs")
    make_trainer(callbacks=[finder], max_epochs=2).fit(net, ckpt_path=path)
    assert "is kept: the checkpoint is from the midst of an epoch" in finder.result.note
    assert set(net.sizes) == {4}


def test_a_resumed_run_that_is_kept_is_warned_of_nothing(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Nothing was to be scaled."""
    trainer = make_trainer(max_epochs=1)
    fitted(trainer, Net(scheduler="epochs"))
    path = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    finder = finder_of(Clock(), objective="goodput", max_seconds=None)
    make_trainer(callbacks=[finder], max_epochs=2).fit(Net(scheduler="epochs"), ckpt_path=path)
    assert "The configured 4 is kept: " in finder.result.note


def test_the_state_is_plain_data(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A checkpoint with the finder's state loads with `weights_only=True`, and gives an equal result."""
    clock = Clock()
    finder = finder_of(clock, lr_warmup_steps=6)
    trainer = make_trainer(callbacks=[finder], max_epochs=1)
    trainer.fit(Net(clock=clock))
    path = tmp_path / "tuned.ckpt"
    trainer.save_checkpoint(path)
    checkpoint: Any = torch.load(path, weights_only=True)
    other = finder_of()
    other.load_state_dict(checkpoint["callbacks"]["EfficientBatchSizeFinder"])
    assert other.result == finder.result
    assert other.result.trials
    assert other.state_dict()["warmup"]["steps"] == [6]


def test_a_finder_that_was_skipped_has_no_state() -> None:
    """There is nothing to take over from a run that was not tuned."""
    finder = finder_of()
    finder.load_state_dict(finder.state_dict())
    assert finder.result is None
