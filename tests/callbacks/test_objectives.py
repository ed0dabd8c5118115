"""What is best: the same optimizer steps in larger micro-batches, progress by time, or throughput."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_offload.callbacks.tuning.result import TuningResult
from lightning_offload.errors import TuningError
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.test_errors import raised
from tests.callbacks.training import NUM_SAMPLES, Clock, Net, assert_same, finder_of, fitted, is_trial
from tests.shares import pairs

DIMENSIONS = 50


_CLOCKS: dict[int, Clock] = {}


def _tick(number: int, seconds: float) -> None:
    _CLOCKS[number].now += seconds


def ticking(clock: Clock) -> Callable[[float], None]:
    """Moves a clock that is not reached from what moves it, so that no tuning puts it back."""
    _CLOCKS[id(clock)] = clock
    return functools.partial(_tick, id(clock))


class Bowl(pl.LightningModule):
    """A quadratic whose samples pull to places of their own: gradients with a known noise, steps of a known time.

    Args:
        noise_scale: At the start, in samples; the rate is so low that it stays.
        clock: Moved by `fixed` and, for each sample, one second; it is no state of the model.
        batch_size: The configured one.
        fixed: Seconds of a step of no samples.
    """

    def __init__(
        self, noise_scale: float, clock: Clock, batch_size: int = 8, fixed: float = 64.0, lr: float = 1e-6
    ) -> None:
        super().__init__()
        self.batch_size, self.lr, self.tick, self.fixed = batch_size, lr, ticking(clock), fixed
        self.place = torch.nn.Parameter(torch.full((DIMENSIONS,), 1.0))
        generator = torch.Generator().manual_seed(1)
        self.pulls = TensorDataset(math.sqrt(noise_scale) * torch.randn(20_000, DIMENSIONS, generator=generator))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (pulls,) = batch
        self.tick(self.fixed + len(pulls))
        return 0.5 * (self.place - pulls).square().sum(dim=1).mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.pulls, self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


class Stop(pl.Callback):
    """Ends a fit with its first batch: only its tuning is of interest."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = True


def goodput(clock: Clock, **kwargs: Any) -> Any:
    return finder_of(
        clock,
        **{
            "objective": "auto",
            "max_val": None,
            "lr_scaling": "linear",
            "max_data_share": 0.1,
            "min_efficiency": 0,
            **kwargs,
        },
    )


@pytest.mark.parametrize(("noise_scale", "precision"), pairs([20.0, 400.0], ["32-true", "bf16-mixed"], every=2))
def test_the_noise_scale_is_measured(make_trainer: MakeTrainer, noise_scale: float, precision: Any) -> None:
    """The interval holds the true one, and the result carries it, through a checkpoint too."""
    clock = Clock()
    finder = goodput(clock)
    make_trainer(callbacks=[finder], max_steps=1000, precision=precision).fit(Bowl(noise_scale, clock))
    result = finder.result
    low, high = result.noise_scale_interval
    assert result.objective == "goodput"
    assert low <= result.noise_scale <= high
    assert low <= noise_scale <= high
    assert low > noise_scale / 5
    assert TuningResult.from_state_dict(json.loads(json.dumps(result.state_dict()))) == result


def test_a_measured_noise_scale_allows_a_higher_rate(make_trainer: MakeTrainer) -> None:
    """16 times the configured one at most."""
    clock = Clock()
    finder = goodput(clock, max_data_share=1.0, max_lr_factor=None)
    make_trainer(callbacks=[finder, Stop()], max_steps=10**6, max_epochs=-1).fit(Bowl(10_000.0, clock))
    assert finder.result.lr_factor == 16
    assert "The learning rate is raised by 16, not by" in finder.result.note


def test_a_noisy_gradient_gets_the_batch_of_the_most_progress(make_trainer: MakeTrainer) -> None:
    """With a fixed cost of 64 samples that is sqrt(400 x 64) = 160, far below the largest; the rate obeys the noise."""
    clock = Clock()
    finder = goodput(clock)
    net = Bowl(400.0, clock)
    make_trainer(callbacks=[finder], max_steps=20_000, limit_train_batches=100, max_epochs=1).fit(net)
    result = finder.result

    def progress(size: float) -> float:
        return size / (64 + size) / (400 + size)

    assert progress(result.batch_size) >= 0.85 * progress(160)
    assert 50 <= result.batch_size <= 320
    phi, size = result.noise_scale, result.batch_size
    expected = size / (64 + size) / (8 / (64 + 8)) * (phi + 8) / (phi + size)
    assert result.expected_speedup == pytest.approx(expected, rel=0.01)
    shares = [1.0 if math.isinf(phi) else (phi + 8) / (phi + size) for phi in result.noise_scale_interval]
    assert result.lr_factor == pytest.approx(size / 8 * math.sqrt(math.prod(shares)))
    assert net.lr == pytest.approx(1e-6 * result.lr_factor)


def test_a_run_of_so_many_epochs_is_to_make_its_progress(make_trainer: MakeTrainer) -> None:
    """Though progress by time is more in a larger batch: by default a sample is worth nine tenths at least."""
    clock = Clock()
    finder = goodput(clock, min_efficiency=0.9)
    make_trainer(callbacks=[finder], max_steps=20).fit(Bowl(400.0, clock))
    result = finder.result
    low = result.noise_scale_interval[0]
    assert (low + 8) / (low + result.batch_size) >= 0.9
    assert 12 <= result.batch_size < 60
    assert max(trial.batch_size for trial in result.trials) == result.batch_size


def test_a_run_that_takes_little_time_is_not_tuned(make_trainer: MakeTrainer) -> None:
    """A tuning takes a second whatever it tries, so 2% of the run have to be more; the first trial shows that."""
    for fixed, objective, is_tuned in (
        (0.001, "goodput", False),
        (0.001, "throughput", True),
        (100.0, "goodput", True),
    ):
        clock = Clock()
        finder = goodput(clock, objective=objective, max_seconds=None)
        net = Bowl(100.0, clock, fixed=fixed)
        net.tick = lambda seconds, tick=net.tick, fixed=fixed: tick(fixed)
        make_trainer(callbacks=[finder, Stop()], max_steps=4000, max_epochs=-1).fit(net)
        assert (len(finder.result.trials) > 1 or finder.result.noise_scale is not None) == is_tuned
        assert ("The configured 8 is kept: the run takes about 4.00 s" in finder.result.note) == (not is_tuned)


@pytest.mark.parametrize("objective", ["goodput", "keep_effective_batch"])
def test_the_configured_size_may_be_one_that_is_not_allowed(make_trainer: MakeTrainer, objective: Any) -> None:
    """It is tried and compared with; the search is for one of the others."""
    clock = Clock()
    finder = goodput(clock, objective=objective, max_seconds=None, max_val=32)
    trainer = make_trainer(
        callbacks=[finder, Stop()], max_steps=20_000, max_epochs=-1, accumulate_grad_batches=2, limit_train_batches=100
    )
    trainer.fit(Bowl(400.0, clock, batch_size=64))
    result = finder.result
    sizes = [trial.batch_size for trial in result.trials]
    assert sizes[0] == 64
    assert len(sizes) > 1
    assert all(size <= 32 for size in sizes[1:])
    assert result.found_batch_size <= 32
    assert result.expected_speedup is not None
    assert result.batch_size == 64, "a smaller one is slower"


def test_a_batch_that_is_best_already_is_kept(make_trainer: MakeTrainer) -> None:
    """Where a larger one is more throughput and less progress; nothing changes, and one line says why."""
    clock = Clock()
    finder = goodput(clock)
    net = Bowl(4.0, clock, batch_size=16)
    make_trainer(callbacks=[finder], max_steps=20).fit(net)
    result = finder.result
    assert (result.batch_size, result.lr, result.lr_factor) == (16, 1e-6, 1.0)
    assert result.found_batch_size == 16 or "The configured 16 is kept" in result.note
    left = (
        r"\d+ would give \d+\.\d times the samples per second at .* times the rate, .* objective='throughput' takes it"
    )
    assert re.search(left, result.note)
    assert max(trial.batch_size for trial in result.trials) > 16
    throughputs = {trial.batch_size: trial.samples_per_second for trial in result.trials}
    assert max(throughputs.values()) > 1.5 * throughputs[16]


def test_a_run_that_is_kept_is_warned_of_nothing(make_trainer: MakeTrainer) -> None:
    """What a rule would do to the rate with another size is no news, where that is not set."""

    class Adaptive(Bowl):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), self.lr)

    clock = Clock()
    finder = goodput(clock)
    make_trainer(callbacks=[finder], max_steps=20).fit(Adaptive(4.0, clock, batch_size=16))
    assert (finder.result.batch_size, finder.result.lr_factor) == (16, 1.0)
    assert "times the rate" in finder.result.note


def test_what_a_base_batch_changes_is_told_where_the_size_is_kept(make_trainer: MakeTrainer) -> None:
    """The rate is for another effective batch, or that is kept by accumulating more."""
    for objective, change in (
        ("goodput", "the learning rate is multiplied by 0.25"),
        ("keep_effective_batch", "4 micro-batches are accumulated, not 1"),
    ):
        clock = Clock()
        finder = goodput(clock, objective=objective, max_seconds=None, base_batch_size=32)
        make_trainer(callbacks=[finder, Stop()], max_steps=50, max_epochs=-1).fit(Bowl(100.0, clock))
        assert finder.result.note.startswith("The configured 8 is kept: ")
        assert f"; since the base batch is 32, {change}." in finder.result.note


def test_a_run_whose_values_are_kept_is_the_run_without_a_finder(make_trainer: MakeTrainer) -> None:
    """Bit for bit, after a pilot that trained it on its own batches."""
    clock = Clock()
    finder = finder_of(clock, objective="goodput", min_val=4, pilot_steps=16)
    tuned = fitted(make_trainer(callbacks=[finder]), Net(clock=clock, seconds=float))
    assert finder.result.noise_scale is not None
    assert finder.result.batch_size == 4
    assert_same(tuned, fitted(make_trainer(), Net()))


@pytest.mark.parametrize("accumulation", [4, 6])
def test_the_effective_batch_is_kept_where_there_is_accumulation(make_trainer: MakeTrainer, accumulation: int) -> None:
    """The default then: one larger micro-batch in place of several, the same steps and the same rate, bit for bit."""
    clock = Clock()
    finder = finder_of(clock, objective="auto", max_val=None, lr_warmup_steps=None)
    trainer = make_trainer(callbacks=[finder], accumulate_grad_batches=accumulation)
    tuned = fitted(trainer, Net(clock=clock))
    result = finder.result
    assert result.objective == "keep_effective_batch"
    assert (result.batch_size, result.accumulation) == (4 * accumulation, 1)
    assert (result.lr, result.lr_factor, result.effective_batch_size) == (0.01, 1.0, 4 * accumulation)
    assert all(4 * accumulation % trial.batch_size == 0 for trial in result.trials)
    assert trainer.accumulate_grad_batches == accumulation, "the Trainer has the user's again"
    assert result.expected_speedup == pytest.approx(accumulation)
    plain = fitted(make_trainer(), Net(batch_size=4 * accumulation))
    assert_same(tuned, plain)


def test_less_accumulation_is_in_force_after_a_checkpoint(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    """A run that goes on has as many optimizer steps as the whole would have had."""
    clock = Clock()
    finder = finder_of(clock, objective="auto", max_val=8)
    trainer = make_trainer(callbacks=[finder], accumulate_grad_batches=4, max_epochs=1)
    trainer.fit(Net(clock=clock, scheduler="step"))
    assert (finder.result.batch_size, finder.result.accumulation) == (8, 2)
    assert trainer.global_step == NUM_SAMPLES // 16
    trainer.save_checkpoint(tmp_path / "tuned.ckpt")
    again = make_trainer(callbacks=[finder_of(Clock(), objective="auto")], accumulate_grad_batches=4, max_epochs=2)
    net = Net(scheduler="step")
    again.fit(net, ckpt_path=tmp_path / "tuned.ckpt")
    assert again.global_step == 2 * (NUM_SAMPLES // 16)
    assert set(net.sizes) == {8}
    assert again.accumulate_grad_batches == 4


def test_a_micro_batch_that_is_no_faster_is_not_set(make_trainer: MakeTrainer) -> None:
    """Where a sample takes as long in any size, the configured accumulation stays."""
    clock = Clock()
    finder = finder_of(clock, objective="keep_effective_batch", max_val=None)
    trainer = make_trainer(callbacks=[finder], accumulate_grad_batches=4, max_epochs=1)
    net = Net(clock=clock, seconds=lambda size: float(size))
    trainer.fit(net)
    assert (finder.result.batch_size, finder.result.accumulation) == (4, 4)
    assert set(net.sizes) == {4}


@pytest.mark.parametrize(("objective", "most"), [("goodput", 3200), ("keep_effective_batch", 100)])
def test_a_run_that_is_too_short_is_not_tuned(make_trainer: MakeTrainer, objective: Any, most: int) -> None:
    """Where a pilot, or a single trial, is more than 2% of it; not a step is tried. A longer one is."""
    for num_steps, is_tuned in ((most - 50, False), (most + 50, True)):
        clock = Clock()
        finder = goodput(clock, objective=objective, max_seconds=None, base_batch_size=32)
        trainer = make_trainer(callbacks=[finder, Stop()], max_steps=num_steps, max_epochs=-1)
        trainer.fit(Bowl(100.0, clock))
        result = finder.result
        assert bool(result.trials) == is_tuned
        assert (result.batch_size == 8) or is_tuned
        assert is_tuned or "The configured 8 is kept: " in result.note
        assert is_tuned or "2% of the run" in result.note or "are more than 2%" in result.note


def test_no_run_is_too_short_where_throughput_is_asked_for(make_trainer: MakeTrainer) -> None:
    """Trials may take a minute of it, however many steps it has."""
    clock = Clock()
    finder = goodput(clock, objective="throughput", max_seconds=None)
    net = Bowl(100.0, clock)
    net.tick = lambda seconds, tick=net.tick: tick(0.1)
    make_trainer(callbacks=[finder, Stop()], max_steps=12, max_epochs=-1).fit(net)
    result = finder.result
    assert result.batch_size > 8
    assert result.run_seconds == pytest.approx(1.2)
    assert 0.02 * 1.2 < result.tuning_seconds < 61


def test_trials_take_a_share_of_the_run(make_trainer: MakeTrainer) -> None:
    """By default 2% of what it is estimated to take; `tune` has no limit, since it was asked for."""
    clock = Clock()
    finder = goodput(clock, objective="throughput", max_seconds=None)
    net = Bowl(100.0, clock)
    make_trainer(callbacks=[finder], max_steps=600, max_epochs=-1).fit(net)
    result = finder.result
    assert result.run_seconds == pytest.approx(600 * (64 + 8))
    assert 0 < result.tuning_seconds < 0.1 * result.run_seconds
    free = goodput(clock, objective="throughput", max_seconds=None)
    free.tune(make_trainer(max_steps=600, max_epochs=-1), Bowl(100.0, clock))
    assert len(free.result.trials) > len(result.trials)


def test_what_has_no_noise_scale_keeps_its_batch(make_trainer: MakeTrainer) -> None:
    """Models with manual optimization: one line says so, and which objective does without."""

    class Manual(Net):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    clock = Clock()
    finder = finder_of(clock, objective="auto")
    net = Manual(clock=clock, scheduler="step")
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert finder.result.trials == ()
    assert set(net.sizes) == {4}
    assert "with manual optimization" in finder.result.note
    assert "objective='throughput' does without" in finder.result.note
    finder = finder_of(clock, objective="keep_effective_batch")
    message = raised(make_trainer(callbacks=[finder]), Manual(clock=clock, scheduler="step"))
    assert "objective='keep_effective_batch' is not possible: with manual optimization" in message


def test_sizes_of_a_multiple(make_trainer: MakeTrainer) -> None:
    """Only those are tried and chosen, besides the configured one."""
    clock = Clock()
    finder = finder_of(clock, multiple_of=5, max_val=64)
    make_trainer(callbacks=[finder], max_epochs=1).fit(Net(clock=clock, scheduler="step"))
    assert finder.result.batch_size == 60
    assert all(trial.batch_size % 5 == 0 or trial.batch_size == 4 for trial in finder.result.trials)


def test_the_number_of_trials_has_a_limit(make_trainer: MakeTrainer) -> None:
    """As many as were asked for."""
    clock = Clock()
    finder = finder_of(clock, max_val=90, max_trials=3, min_confidence=0)
    make_trainer(callbacks=[finder], max_epochs=1).fit(Net(clock=clock, scheduler="step"))
    assert len(finder.result.trials) <= 3


def test_an_unknown_objective_is_an_error() -> None:
    """The message names all; a pilot has a least length."""
    with pytest.raises(TuningError, match="'auto', 'keep_effective_batch', 'goodput', 'throughput'"):
        finder_of(objective="speed")
    with pytest.raises(TuningError, match="pilot_steps=3 is not possible: give an int of at least 8"):
        finder_of(pilot_steps=3)


class Brittle(Net):
    """Fails in a pilot, or above a size; trials repeat one batch, whose number is small."""

    def __init__(self, error: Exception, largest: int = 10**9, last: int = 10**9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.error, self.largest, self.last = error, largest, last

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_tried = is_trial(self)
        if len(batch[0]) > self.largest or (is_tried and batch_idx > self.last):
            raise self.error
        return super().training_step(batch, batch_idx)


def test_an_error_in_a_pilot_comes_through_and_everything_is_put_back(make_trainer: MakeTrainer) -> None:
    """It is the model's own, and the model is as it was before its first step."""
    clock = Clock()
    net = Brittle(KeyError("mine"), last=20, clock=clock)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = make_trainer(callbacks=[finder_of(clock, objective="goodput")])
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(net)
    assert net.losses == []
    assert (net.batch_size, net.lr) == (4, 0.01)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert "on_after_backward" not in vars(net)


def test_a_pilot_that_runs_out_of_memory_changes_nothing(make_trainer: MakeTrainer) -> None:
    """Its second set of gradients may be too much where the training is not."""
    clock = Clock()
    finder = finder_of(clock, objective="goodput")
    net = Brittle(torch.OutOfMemoryError("injected"), last=20, clock=clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert set(net.sizes) == {4}
    assert "a pilot, which holds a second set of gradients, ran out of memory" in finder.result.note


def test_a_configured_size_that_does_not_fit_gives_way(make_trainer: MakeTrainer) -> None:
    """There is nothing to keep then: the best of the smaller sizes is set, without a pilot."""
    clock = Clock()
    finder = finder_of(clock, objective="goodput")
    net = Brittle(torch.OutOfMemoryError("injected"), largest=9, batch_size=16, clock=clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert 7 <= finder.result.batch_size <= 9
    assert finder.result.noise_scale is None
    assert len(set(net.sizes[:-1])) == 1
