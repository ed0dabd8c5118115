"""Trials count and time optimizer steps, end the function in time, and turn what does not fit into a reason."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module

from lightning_offload import BudgetInfeasibleError, MemoryPlugin, TuningError
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from lightning_offload.tuning.function_host import FunctionHost
from lightning_offload.tuning.ranks import Coordinator
from lightning_offload.tuning.runner import RankStatus, TrialRunner, TrialSettings
from lightning_offload.tuning.trial import Trial
from tests.plugins.training import Net, rows
from tests.tuning.trainings import Clock, Training


def run_trial(train: Any, batch_size: int, settings: TrialSettings, agreement: Coordinator) -> Trial:
    return TrialRunner(FunctionHost(train, (), settings.clock), settings, agreement).run(batch_size)


def tried(training: Training, batch_size: int = 8, **settings: Any) -> Trial:
    return run_trial(training, batch_size, TrialSettings(clock=training.clock, **settings), Coordinator())


def test_timed() -> None:
    """A trial is its warm-up and its timed steps, no more, and its throughput that of the median step."""
    seconds = iter([50.0, 50.0, *[1.0, 2.0, 9.0]])
    training = Training(Clock(), seconds=lambda _: next(seconds))
    trial = tried(training, warmup_steps=2, timed_steps=3)
    assert trial.is_ok
    assert trial.step_seconds == (1.0, 2.0, 9.0)
    assert trial.samples_per_second == 8 / 2.0
    assert training.num_batches == 5
    assert training.ended == []


def test_accumulation() -> None:
    """A step is one backward: with 4 batches accumulated, the time of an optimizer step counts for 4."""
    training = Training(Clock(), accumulate=4, seconds=lambda _: 2.0)
    trial = tried(training, warmup_steps=1, timed_steps=3)
    assert trial.step_seconds == (2.0, 2.0, 2.0)
    assert training.num_batches == 16


def test_two_optimizers() -> None:
    """With two optimizers a step is over when the first steps again."""
    clock = Clock()

    def train(batch_size: int) -> None:
        models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        while True:
            for model, optimizer, seconds in zip(models, optimizers, (1.0, 5.0), strict=True):
                clock.now += seconds
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    trial = run_trial(train, 8, TrialSettings(clock=clock, warmup_steps=1, timed_steps=2), Coordinator())
    assert trial.step_seconds == (3.0, 3.0)  # 6 seconds and two backwards


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "out of memory"),
        (MemoryError(), "out of memory"),
        (BudgetInfeasibleError("too small", budget_bytes=1, floor_bytes=2, op="x"), "needs a budget of 2 B"),
        (ValueError("mine: no room\nmore"), "mine: no room"),
    ],
    ids=["memory", "host memory", "budget", "framework's"],
)
def test_does_not_fit(error: Exception, reason: str) -> None:
    """What says that a size does not fit is a failed trial with the reason, and nothing of it stays alive."""
    kept: list[weakref.ref[nn.Module]] = []

    def train(batch_size: int) -> None:
        model = nn.Linear(batch_size, 1)
        kept.append(weakref.ref(model))
        raise error

    settings = TrialSettings(is_out_of_memory=lambda error: "no room" in str(error))
    trial = run_trial(train, 8, settings, Coordinator())
    assert (trial.is_ok, trial.reason) == (False, reason)
    assert kept[0]() is None


def test_nothing_stays_alive() -> None:
    """A trial that was ended leaves nothing of the function's variables, even in cycles."""
    kept: list[weakref.ref[nn.Module]] = []

    def train(batch_size: int) -> None:
        model = nn.Linear(2, 1)
        model.cycle = [model]
        kept.append(weakref.ref(model))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            optimizer.step()

    gc.disable()
    try:
        assert run_trial(train, 8, TrialSettings(warmup_steps=0), Coordinator()).is_ok
        assert kept[0]() is None
    finally:
        gc.enable()


def test_too_short() -> None:
    """A function that returns before a step was timed fails its trial; one timed step is enough."""
    training = Training(Clock(), num_steps=4)
    trial = tried(training)
    assert not trial.is_ok
    assert trial.reason == "training ended after 4 optimizer steps of whole batches, a trial takes at least 5"
    training.num_steps = 5
    assert tried(training).is_ok


def test_own_error() -> None:
    """Any other error is the caller's, as it was raised."""
    error = ValueError("mine")

    def train(batch_size: int) -> None:
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        run_trial(train, 8, TrialSettings(), Coordinator())
    assert caught.value is error


def test_swallowed() -> None:
    """A function that catches everything is ended again at its next optimizer step, and not measured further."""
    caught = []

    def train(batch_size: int) -> None:
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
        for _ in range(9):
            try:
                optimizer.step()
            except BaseException as error:
                caught.append(type(error).__name__)

    trial = run_trial(train, 8, TrialSettings(warmup_steps=1, timed_steps=2), Coordinator())
    assert len(trial.step_seconds) == 2
    assert caught == ["TrialOver"] * 7


def plugin_training(memory: MemoryPlugin) -> Any:
    model = Net()

    def train(batch_size: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if isinstance(memory, ModuleMemoryPlugin):
            memory.follow(model)
        try:
            while True:
                with memory.step():
                    model(rows(batch_size)).sum().backward()
                optimizer.step()
        finally:
            memory.detach()

    return train


def test_peaks() -> None:
    """The peak is that of the plugin that follows a model, or is given, under its final plan and within its budget."""
    following = ModuleMemoryPlugin("1GiB", policy="all-swap")
    trial = run_trial(plugin_training(following), 256, TrialSettings(), Coordinator())
    assert trial.is_ok
    assert trial.peak_bytes == following.report().measured_peak_bytes

    given, idle = MemoryPlugin("1GiB"), ModuleMemoryPlugin("1B", policy="all-swap")
    idle.attach()
    for memory in (None, given):
        given.attach()
        assert (
            run_trial(plugin_training(given), 256, TrialSettings(memory=memory), Coordinator()).peak_bytes is not None
        )
    idle.detach()
    infeasible = run_trial(plugin_training(ModuleMemoryPlugin("4MiB")), 2048, TrialSettings(), Coordinator())
    assert "needs a budget of" in infeasible.reason


class Scripted(Coordinator):
    """The second of two ranks, whose fates are given; those of this one are noted."""

    def __init__(self, *others: RankStatus) -> None:
        self.others = list(others)
        self.ours: list[RankStatus] = []

    @property
    def num_ranks(self) -> int:
        return 2

    def largest(self, value: float) -> float:
        if not self.others:
            return super().largest(value)
        self.ours.append(RankStatus(int(value)))
        return max(value, float(self.others.pop(0)))


@pytest.mark.parametrize(("other", "is_ok"), [(RankStatus.DOES_NOT_FIT, False), (RankStatus.ENDED, True)])
def test_another_rank_stops(other: RankStatus, is_ok: bool) -> None:
    """When another rank runs out of memory or data, this one stops in the same round."""
    training = Training(Clock())
    agreement = Scripted(*[RankStatus.GOES_ON] * 5, other)
    trial = run_trial(training, 8, TrialSettings(clock=training.clock), agreement)
    assert trial.is_ok is is_ok
    assert trial.reason == ("" if is_ok else "another rank stopped")
    assert training.num_batches == 6
    assert len(agreement.ours) == 6
    assert not nn_module._global_forward_pre_hooks


def test_another_rank_ends_early() -> None:
    """A rank that was stopped in its warm-up does not say that its own training has ended."""
    training = Training(Clock())
    trial = run_trial(training, 8, TrialSettings(clock=training.clock), Scripted(RankStatus.GOES_ON, RankStatus.ENDED))
    assert not trial.is_ok
    assert trial.reason == "another rank stopped"


def test_another_rank_fails() -> None:
    """An error on another rank is one here too."""
    training = Training(Clock())
    with pytest.raises(TuningError, match="at batch size 8 failed on another rank"):
        run_trial(training, 8, TrialSettings(clock=training.clock), Scripted(RankStatus.FAILED))


def test_this_rank_tells() -> None:
    """This rank's out-of-memory error and its failure are told in the round in which the others wait."""
    agreement = Scripted(RankStatus.GOES_ON)
    trial = run_trial(Training(Clock(), capacity=4), 8, TrialSettings(), agreement)
    assert not trial.is_ok
    assert agreement.ours == [RankStatus.DOES_NOT_FIT]

    def fail(batch_size: int) -> None:
        raise ValueError("mine")

    agreement = Scripted(RankStatus.GOES_ON)
    with pytest.raises(ValueError, match="mine"):
        run_trial(fail, 8, TrialSettings(), agreement)
    assert agreement.ours == [RankStatus.FAILED]
