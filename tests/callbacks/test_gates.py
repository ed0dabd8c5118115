"""Defaults that keep a tuned run from being worse: rates that survive, sizes within reason, and no guesses."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_offload as lo
from lightning_offload.tuning.learning_rate import has_step_hooks
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import NUM_SAMPLES, Clock, Net, finder_of, fitted, samples, with_advanced


class Flat(Net):
    """One group, one rate, of any optimizer."""

    kind: Any = torch.optim.SGD

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), self.lr)


class Adaptive(Flat):
    kind = torch.optim.AdamW


class Recording(torch.optim.SGD):
    """Keeps the rate of each of its steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.used: list[float] = []

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.used.append(self.param_groups[0]["lr"])
        with torch.no_grad():
            super().step()
        return loss


class Recorded(Flat):
    kind = Recording


class Many(Net):
    """An epoch of many samples, without batch norm's fear of one."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(2000), self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def of(clock: Clock, **kwargs: Any) -> Any:
    """A finder with its own defaults, but for short trials."""
    keywords = {"steps_per_trial": 2, "warmup_steps": 0, "objective": "throughput", "max_seconds": 1e9, **kwargs}
    finder = lo.EfficientBatchSizeFinder(**with_advanced(keywords))
    finder._clock = clock
    return finder


@pytest.mark.parametrize(("kind", "factor"), [(Flat, 4.0), (Adaptive, 2.0)])
def test_the_rule_is_that_of_the_optimizer(make_trainer: MakeTrainer, kind: Any, factor: float) -> None:
    """Linear for SGD, the square root for Adam; no warning, since nothing was asked for that does not suit."""
    clock = Clock()
    finder = of(clock, max_val=16, max_data_share=1.0)
    make_trainer(callbacks=[finder], max_epochs=1).fit(kind(clock=clock))
    assert finder.result.batch_size == 16
    assert finder.result.lr_factor == pytest.approx(factor)


def test_a_rate_that_is_raised_is_warmed_up_unless_forbidden(make_trainer: MakeTrainer) -> None:
    """By default the first step has the configured rate, and a tenth of the run later it is the found one."""
    for keywords, first in (({}, 0.01), ({"lr_warmup_steps": 0}, 0.04), ({"lr_warmup_steps": 3}, 0.01)):
        clock = Clock()
        finder = of(clock, max_val=16, max_data_share=1.0, **keywords)
        trainer = make_trainer(callbacks=[finder], max_epochs=5)
        trainer.fit(Recorded(clock=clock))
        used = trainer.optimizers[0].used
        num_steps = 5 * NUM_SAMPLES // 16
        num_warm = keywords.get("lr_warmup_steps", num_steps // 10)
        assert len(used) == num_steps
        assert used[0] == pytest.approx(first)
        assert used == sorted(used)
        assert used[num_warm:] == pytest.approx([0.04] * (num_steps - num_warm))
        assert max(used[: max(num_warm, 1) - 1], default=0) < 0.04


def test_the_factor_of_the_rate_has_a_limit(make_trainer: MakeTrainer) -> None:
    """8 by a rule alone unless another is set; the result says what the rule asked for."""
    for keywords, factor in (({}, 8.0), ({"max_lr_factor": 3}, 3.0), ({"max_lr_factor": float("inf")}, 24.0)):
        clock = Clock()
        finder = of(clock, max_val=96, max_data_share=1.0, **keywords)
        net = Flat(clock=clock)
        make_trainer(callbacks=[finder], max_epochs=1).fit(net)
        assert finder.result.batch_size == 96
        assert finder.result.lr_factor == factor
        assert net.lr == pytest.approx(0.01 * factor)
        assert ("not by 24 (max_lr_factor)" in finder.result.note) == (factor != 24)


@pytest.mark.parametrize(("accumulation", "largest"), [(1, 200), (4, 50)])
def test_an_optimizer_step_sees_a_tenth_of_the_data_set_at_most(
    make_trainer: MakeTrainer, accumulation: int, largest: int
) -> None:
    """Though throughput rises with any size; what is accumulated counts."""
    clock = Clock()
    finder = of(clock)
    trainer = make_trainer(callbacks=[finder], max_epochs=1, accumulate_grad_batches=accumulation)
    trainer.fit(Many(clock=clock))
    assert max(trial.batch_size for trial in finder.result.trials) <= largest
    assert 0.9 * largest <= finder.result.batch_size <= largest


def test_a_result_that_is_not_sure_changes_nothing(make_trainer: MakeTrainer) -> None:
    """Size and rate stay, the note says why, and the run is that without a finder; what is asked for is set."""
    numbers = random.Random(3)

    def scattered(batch_size: int) -> float:
        return (8.0 + batch_size) * numbers.uniform(1, 4)

    clock = Clock()
    finder = finder_of(clock, max_val=64, min_confidence=0.999, lr_scaling="linear")
    tuned = fitted(make_trainer(callbacks=[finder]), Flat(clock=clock, seconds=scattered))
    result = finder.result
    assert result.confidence < 0.999
    assert result.found_batch_size > 4
    assert (result.batch_size, result.lr, result.lr_factor) == (4, 0.01, 1.0)
    assert f"The configured 4 is kept: the search is only {result.confidence:.0%} sure" in result.note
    plain = fitted(make_trainer(), Flat())
    assert tuned["parameters"]["head.weight"].equal(plain["parameters"]["head.weight"])
    assert tuned["steps"] == plain["steps"]

    finder = finder_of(clock, max_val=64, min_confidence=0, lr_scaling="linear")
    make_trainer(callbacks=[finder]).fit(Flat(clock=clock, seconds=scattered))
    assert finder.result.batch_size == finder.result.found_batch_size > 4


def test_a_configured_size_that_does_not_fit_is_not_kept(make_trainer: MakeTrainer) -> None:
    """However unsure the search is, what runs out of memory cannot stay."""
    numbers = random.Random(3)

    class Tight(Flat):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 9:
                raise torch.OutOfMemoryError("injected")
            return super().training_step(batch, batch_idx)

    clock = Clock()
    finder = finder_of(clock, max_val=64, min_confidence=1.0, lr_scaling="linear")
    net = Tight(batch_size=32, clock=clock, seconds=lambda size: (8.0 + size) * numbers.uniform(1, 4))
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert finder.result.batch_size == finder.result.found_batch_size <= 9


@pytest.mark.parametrize(("keywords", "factor"), [({}, 1.0), ({"lr_warmup_steps": 0}, 4.0)])
def test_an_optimizer_that_cannot_be_warmed_up_keeps_its_rate(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, keywords: Any, factor: float
) -> None:
    """One without hooks around its step; raising the rate without a warm-up has to be asked for."""
    monkeypatch.setattr("lightning_offload.callbacks.tuning.rates.has_step_hooks", lambda optimizer: False)
    clock = Clock()
    finder = of(clock, max_val=16, max_data_share=1.0, **keywords)
    make_trainer(callbacks=[finder], max_epochs=1).fit(Flat(clock=clock))
    assert finder.result.batch_size == 16
    assert finder.result.lr_factor == factor
    assert ("lr_warmup_steps=0 raises it without" in finder.result.note) == (factor == 1.0)


def test_what_can_be_warmed_up() -> None:
    """Optimizers of torch can; something that only has groups cannot."""

    class Groups:
        param_groups: ClassVar[list[Any]] = []

    assert has_step_hooks(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))
    assert not has_step_hooks(Groups())
