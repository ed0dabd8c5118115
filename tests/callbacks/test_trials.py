"""Trainings that are hard on trials by Lightning's own loop: each is that of an untuned run, or is kept."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_offload.callbacks.tuning import data
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import NUM_SAMPLES, Clock, Net, assert_same, finder_of, fitted, is_trial, samples


def compared(make_trainer: MakeTrainer, kind: Any, loader: Any = None, **settings: Any) -> Any:
    """Tune and train, then train untuned at what was found, and compare everything; returns the result."""
    clock = Clock()
    finder = finder_of(clock)
    tuned = fitted(make_trainer(callbacks=[finder], **settings), kind(clock=clock), *([loader(4)] if loader else []))
    size, rate = finder.result.batch_size, finder.result.lr
    plain = fitted(make_trainer(**settings), kind(batch_size=size, lr=rate), *([loader(size)] if loader else []))
    assert_same(tuned, plain)
    return finder.result


def _shrink(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.9)


class Hooked(Net):
    """Registers hooks in whatever hook of Lightning's there is."""

    def configure_optimizers(self) -> Any:
        self.stem[0].register_forward_hook(lambda module, args, output: 0.9 * output)
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.head.register_forward_hook(lambda module, args, output: 0.9 * output)

    def on_train_start(self) -> None:
        self.head.weight.register_hook(lambda gradient: 0.9 * gradient)
        self.stem[0].weight.register_post_accumulate_grad_hook(_shrink)


class Scripted(Net):
    """Batch norm of a script, whose buffers are no attributes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stem[1] = torch.jit.script(self.stem[1])


class Parametrized(Net):
    """A hook makes a layer one of another class."""

    def on_fit_start(self) -> None:
        torch.nn.utils.parametrizations.weight_norm(self.head)


class Stopping(Net):
    """Asks for the end of the run after some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step >= 3:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Reading(Net):
    """Reads what it has logged, at the end of a batch and of an epoch."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.average["read"] = float(self.trainer.callback_metrics["loss"])


class Mapped(Net):
    """Has a tensor in memory that cannot be written, and one whose elements are all in one place."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.constant = torch.from_numpy(np.broadcast_to(np.float32(2.0), (3,)))
        self.register_buffer("spread", torch.ones(1).expand(5))


class Drawing(Net):
    """Draws by the method of a generator that it does not keep."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.draw = np.random.default_rng(4).random

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0] + 0.1 * float(self.draw()), batch[1]], batch_idx)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*parameters are trained from epoch 0")
@pytest.mark.parametrize("kind", [Hooked, Scripted, Parametrized, Stopping, Reading, Mapped, Drawing])
def test_the_training_is_that_of_an_untuned_run(make_trainer: MakeTrainer, kind: Any) -> None:
    """Bit for bit, whatever hooks, scripts, flags and generators do in trials."""
    assert compared(make_trainer, kind).batch_size == 16


class Iterating(Net):
    """Draws its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        (features, labels), _, _ = next(dataloader_iter)
        self.sizes.append(len(features))
        if self._clock is not None:
            self._clock.now += 1.0
        return torch.nn.functional.cross_entropy(self.head(self.stem(features)), labels)


@pytest.mark.filterwarnings("ignore:(You are using|Found).*`dataloader_iter`")
def test_a_step_that_draws_its_own_batches(make_trainer: MakeTrainer) -> None:
    """Epochs follow one another, however short they are."""
    clock = Clock()
    finder = finder_of(clock, max_val=48)
    net = Iterating(clock=clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert all(trial.is_ok for trial in finder.result.trials)
    assert finder.result.batch_size == 48
    assert net.sizes == [48, 48]


class Twice(Net):
    """Several optimizer steps for a batch, which count where the run is limited in steps."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(scheduler="step", **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(5):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def test_several_optimizer_steps_of_a_batch(make_trainer: MakeTrainer) -> None:
    """The run's limit in steps does not end a trial."""
    clock = Clock()
    finder = finder_of(clock)
    make_trainer(callbacks=[finder], max_steps=40, max_epochs=-1).fit(Twice(clock=clock))
    assert all(trial.is_ok for trial in finder.result.trials)


class Ragged(Net):
    """Its batches differ in length, and its step writes to them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels, tokens = batch
        assert float(tokens.max()) == 1.0, "a batch comes as it was made"
        tokens *= 3.0
        batch.pop()
        return super().training_step([features, labels], batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        data = samples()

        def collate(rows: list[int]) -> list[Tensor]:
            return [*data[rows], torch.ones(len(rows), 3 + max(rows) % 7)]

        return DataLoader(range(NUM_SAMPLES), self.batch_size, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


def test_steps_that_write_to_batches_that_differ(make_trainer: MakeTrainer) -> None:
    """Each trial step has a copy of the largest."""
    assert compared(make_trainer, Ragged).batch_size == 16


def test_reading_is_bounded_by_the_clock(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow loaders are not read to the end to find the largest batch."""
    monkeypatch.setattr(data, "_SECONDS", -1.0)
    clock = Clock()
    finder = finder_of(clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(Ragged(clock=clock))
    assert "Lengths vary: trials have the longest of 8 batches" in finder.result.note


class Noisy:
    """A batch sampler that draws as it is made, and a collation with state of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(6)

    def collate(self, rows: Any, scale: torch.Generator) -> list[Tensor]:
        factor = torch.rand(1, generator=self.generator) + torch.rand(1, generator=scale)
        return [factor * torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])]


class DrawnSampler(BatchSampler):
    """Draws a random number where it is made."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        torch.rand(1)


def test_loaders_with_state_behind_functions(make_trainer: MakeTrainer) -> None:
    """What a collation is bound to and given, and what making a loader draws."""

    def loader(batch_size: int) -> DataLoader[Any]:
        scale = torch.Generator().manual_seed(8)
        collate = functools.partial(Noisy().collate, scale=scale)
        sampler = DrawnSampler(SequentialSampler(samples()), batch_size, False)
        return DataLoader(samples(), batch_sampler=sampler, collate_fn=collate)

    states = torch.get_rng_state()
    made = loader(4)
    torch.set_rng_state(states)
    clock = Clock()
    finder = finder_of(clock, lr_scaling="none", max_val=4)
    tuned = fitted(make_trainer(callbacks=[finder]), Net(clock=clock), made)
    assert finder.result.batch_size == 4
    assert_same(tuned, fitted(make_trainer(), Net(), loader(4)))


def test_a_rate_that_another_callback_has_set_is_the_configured_one(make_trainer: MakeTrainer) -> None:
    """As Lightning's `LearningRateFinder` does, in its own `on_fit_start`, before the finder's."""

    class Setting(pl.callbacks.BatchSizeFinder):
        def __init__(self) -> None:
            pl.Callback.__init__(self)

        def setup(self, *_: Any, **__: Any) -> None: ...

        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.lr = 0.003  # type: ignore[assignment]

    clock = Clock()
    finder = finder_of(clock)
    net = Net(clock=clock)
    make_trainer(callbacks=[Setting(), finder], max_epochs=1).fit(net)
    assert finder.result.configured_lr == 0.003
    assert net.lr == pytest.approx(0.003 * finder.result.lr_factor)


def test_properties_that_fail_before_the_fit_are_nobodys(make_trainer: MakeTrainer) -> None:
    """One that reads optimizers, before there are any, is no place for a learning rate."""

    class Property(Net):
        @property
        def lr(self) -> float:  # type: ignore[override]
            rate: float = self.trainer.optimizers[0].param_groups[0]["lr"]
            return rate

        @lr.setter
        def lr(self, value: float) -> None:
            vars(self)["_lr"] = value

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self._lr)

    clock = Clock()
    finder = finder_of(clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(Property(clock=clock))
    assert finder.result.batch_size == 16


def test_warnings_of_trials_are_not_shown(make_trainer: MakeTrainer) -> None:
    """Those of the training are, each as often as without a finder."""

    class Warning_(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            warnings.warn(f"in a trial: {is_trial(self)}", UserWarning, stacklevel=1)
            return super().training_step(batch, batch_idx)

    clock = Clock()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(callbacks=[finder_of(clock)], max_epochs=1).fit(Warning_(clock=clock))
    texts = [str(each.message) for each in caught if "in a trial" in str(each.message)]
    assert texts == ["in a trial: False"] * 6
