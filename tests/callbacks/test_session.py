"""A tuned run equals, bit for bit, an untuned run at the same batch size and learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

import lightning_offload as lo
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import Clock, Net, assert_same, finder_of, fitted, samples
from tests.shares import pairs


def compare(make_trainer: MakeTrainer, *, scheduler: str = "onecycle", settings: Any = dict, finder: Any = None) -> Any:
    """Train tuned and untuned, and compare all there is; returns the finder."""
    clock = Clock()
    finder = finder or finder_of(clock)
    tuned = fitted(make_trainer(callbacks=[finder], **settings()), Net(scheduler=scheduler, clock=clock))
    result = finder.result
    assert result.batch_size == 16
    assert len(result.trials) >= 2
    plain_net = Net(batch_size=result.batch_size, lr=result.lr, scheduler=scheduler)
    plain = fitted(make_trainer(**settings()), plain_net)
    assert plain_net.losses, "the untuned run trained"
    assert_same(tuned, plain)
    return finder


SCHEDULERS = ["onecycle", "cosine", "step"]
STEPS_OF_A_RUN = [(1, "32-true"), (1, "bf16-mixed"), (4, "bf16-mixed"), (4, "32-true")]
"""Accumulation and precision; every other one has all values."""


@pytest.mark.parametrize(("scheduler", "step"), pairs(SCHEDULERS, STEPS_OF_A_RUN, every=2), ids=str)
def test_a_tuned_run_equals_an_untuned_one(make_trainer: MakeTrainer, scheduler: str, step: tuple[int, Any]) -> None:
    """Parameters, buffers, optimizer, scheduler, generators, loops, metrics, loggers and callbacks are all the same."""
    accumulation, precision = step
    compare(
        make_trainer,
        scheduler=scheduler,
        settings=lambda: {"precision": precision, "accumulate_grad_batches": accumulation},
    )


@pytest.mark.parametrize("accumulation", [1, 4])
def test_under_an_offload_strategy(make_trainer: MakeTrainer, accumulation: int) -> None:
    """Trials run under the strategy's memory plan, and leave none of their plans behind."""
    strategies: list[Any] = []

    def settings() -> dict[str, Any]:
        strategies.append(lo.OffloadStrategy(budget="2MiB"))
        return {"strategy": strategies[-1], "accumulate_grad_batches": accumulation}

    compare(make_trainer, settings=settings)
    tuned, plain = (strategy.memory.step_kinds for strategy in strategies)
    assert tuned == plain


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch, of a first step that was skipped
def test_with_a_grad_scaler(make_trainer: MakeTrainer) -> None:
    """The scale that trials lowered or raised is put back."""

    def settings() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}

    compare(make_trainer, settings=settings)


def test_with_gradient_clipping_and_manual_optimization(make_trainer: MakeTrainer) -> None:
    """A model that optimizes by itself is tried by its own training_step."""

    class Manual(Net):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.lr_schedulers().step()  # type: ignore[union-attr]

    clock = Clock()
    finder = finder_of(clock)
    tuned = fitted(make_trainer(callbacks=[finder]), Manual(clock=clock))
    plain = fitted(make_trainer(), Manual(batch_size=finder.result.batch_size, lr=finder.result.lr))
    assert finder.result.batch_size == 16
    assert_same(tuned, plain)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dataloaders_passed_to_fit(make_trainer: MakeTrainer, num_workers: int) -> None:
    """The loader is made again at the new size, with its own generator, workers and collation, and draws the same."""

    def loader(batch_size: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(11)
        return DataLoader(
            samples(), batch_size, shuffle=True, generator=generator, num_workers=num_workers, drop_last=True
        )

    clock = Clock()
    finder = finder_of(clock)
    tuned = fitted(make_trainer(callbacks=[finder]), Net(clock=clock), loader(4))
    result = finder.result
    assert result.batch_size == 16
    plain = fitted(make_trainer(), Net(batch_size=16, lr=result.lr), loader(16))
    assert_same(tuned, plain)


def test_standalone_tuning_leaves_a_model_that_was_not_trained(make_trainer: MakeTrainer) -> None:
    """`tune` sets the values, and a later fit with or without the finder is the untuned run at these values."""
    clock = Clock()
    finder = finder_of(clock)
    net = Net(clock=clock)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    result = finder.tune(make_trainer(), net)
    assert torch.equal(torch.get_rng_state(), before)
    assert (net.batch_size, net.lr) == (16, result.lr)
    assert net.losses == []
    trials = result.trials
    fresh = Net(batch_size=16, lr=result.lr)
    fresh.load_state_dict(net.state_dict())
    tuned = fitted(make_trainer(callbacks=[finder]), net)
    assert finder.result.trials is trials, "it was tuned once"
    assert_same(tuned, fitted(make_trainer(), fresh))


def test_nothing_is_tuned_in_a_fast_dev_run(make_trainer: MakeTrainer) -> None:
    """The run is as without the finder."""
    finder = finder_of()
    net = Net()
    make_trainer(callbacks=[finder], fast_dev_run=True).fit(net)
    assert finder.result is None
    assert net.batch_size == 4
    assert net.sizes == [4]
