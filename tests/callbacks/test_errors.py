"""Bad input is one clear error before training starts, and leaves everything as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import lightning_offload as lo
from lightning_offload.callbacks.tuning.options import AdvancedTuning
from lightning_offload.errors import BudgetInfeasibleError, TuningError
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import Clock, Net, assert_same, finder_of, fitted, samples, with_advanced


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


class Streaming(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(), self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


class Untrained(Net):
    def configure_optimizers(self) -> Any:
        return None


class Stubborn(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), 8)


class Early(Net):
    """Its loader is made before the batch size is set."""

    def setup(self, stage: str) -> None:
        self.loader = DataLoader(samples(), self.batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader


class Sampled(Net):
    """Its loader has a batch sampler of a size of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), batch_sampler=BatchSampler(SequentialSampler(samples()), 4, drop_last=False))


class Dividing(Net):
    """Its loader is made of no size but its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), self.batch_size, num_workers=0 if self.batch_size == 4 else 1 // 0)


class Fixed(Net):
    """Its batch size takes no other value."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "batch_size" and "batch_size" in vars(self):
            raise ValueError("it is frozen")
        super().__setattr__(name, value)


class Lazy(Net):
    def __init__(self, scheduler: str) -> None:
        super().__init__(scheduler=scheduler)
        self.more = torch.nn.LazyLinear(3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


class Unknown(Net):
    def __init__(self, scheduler: str) -> None:
        super().__init__(lr=float("inf"), scheduler=scheduler)


class Empty(Net):
    def __init__(self, scheduler: str) -> None:
        super().__init__(batch_size=0, scheduler=scheduler)


def raised(trainer: Any, net: Any, *args: Any) -> str:
    """Fit, expect one error that is ours and Lightning's, and find the model untouched."""
    before = {name: value.clone() for name, value in net.state_dict().items() if not is_lazy(value)}
    size, rate, rng = vars(net).get("batch_size"), net.lr, torch.get_rng_state()
    with pytest.raises(TuningError) as caught:
        trainer.fit(net, *args)
    assert isinstance(caught.value, MisconfigurationException)
    assert net.losses == []
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert (vars(net).get("batch_size"), net.lr) == (size, rate)
    assert torch.equal(torch.get_rng_state(), rng)
    assert "setup_optimizers" not in vars(trainer.strategy)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("net", "keywords", "text"),
    [
        (Net, {"batch_arg_name": "bs"}, "`bs` is no attribute of Net"),
        (Net, {"lr_arg_name": "rate"}, "`rate` is no attribute of Net .* set lr_arg_name= to the name"),
        (Net, {"batch_arg_name": "scheduler"}, "`scheduler` is 'step', a str"),
        (Empty, {}, "`batch_size` is 0: a batch size is an int of at least 1"),
        (Net, {"lr_arg_name": "scheduler"}, "`scheduler` is 'step', a str"),
        (Untrained, {}, "returned no optimizer"),
        (Streaming, {}, "has no length"),
        (Streaming, {"max_val": None}, "max_val="),
        (Stubborn, {}, "makes batches of \\[8\\]"),
        (Early, {}, "`batch_size` was set to 8, but train_dataloader\\(\\) goes on with batches of \\[4\\]"),
        (Sampled, {}, "goes on with batches of \\[4\\]"),
        (Fixed, {}, "`batch_size` of Fixed cannot be set to \\d+ \\(it is frozen\\)"),
        (Lazy, {}, "`more.weight` is not initialized"),
        (Unknown, {}, "`lr` is inf: a learning rate is finite and not negative"),
        (Net, {"min_val": 97, "max_val": None}, "min_val=97 is above the 96 samples"),
    ],
)
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_what_cannot_be_tuned(make_trainer: MakeTrainer, net: Any, keywords: Any, text: str) -> None:
    """The message says what was found and what to do."""
    message = raised(make_trainer(callbacks=[finder_of(Clock(), **keywords)]), net(scheduler="step"))
    assert re.search(text, message), message


@pytest.mark.parametrize(
    ("net", "keywords", "text"),
    [
        (Net, {"batch_arg_name": "bs"}, "what is configured: `bs` is no attribute of Net"),
        (Stubborn, {}, "the configured 4: .* makes batches of \\[8\\]"),
        (Fixed, {}, "the configured 4: `batch_size` of Fixed cannot be set"),
        (Dividing, {}, "the configured 4: ZeroDivisionError"),
        (Net, {"min_val": 97, "max_val": None}, "the configured 4: min_val=97 is above the 96 samples"),
    ],
)
def test_a_run_goes_on_as_configured(make_trainer: MakeTrainer, net: Any, keywords: Any, text: str) -> None:
    """What cannot be tuned is told in one line, and the training is that without a finder, bit for bit."""
    expected = fitted(make_trainer(), net(scheduler="step"))
    trainer = make_trainer(callbacks=[finder_of(Clock(), on_failure="keep", **keywords)])
    with pytest.warns(UserWarning, match=f"EfficientBatchSizeFinder keeps {text}"):
        actual = fitted(trainer, net(scheduler="step"))
    assert_same(actual, expected)
    assert trainer.callbacks[0].result is None  # type: ignore[attr-defined]
    assert "setup_optimizers" not in vars(trainer.strategy)


def test_a_model_that_fails_in_a_trial_alone(make_trainer: MakeTrainer) -> None:
    """Its error is told, and the run goes on; `tune`, which has nothing else to do, raises it."""

    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) > 8:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    expected = fitted(make_trainer(), Net())
    clock = Clock()
    finder = finder_of(clock, on_failure="keep")
    with pytest.warns(UserWarning, match="keeps the configured 4: KeyError: 'mine'"):
        assert_same(fitted(make_trainer(callbacks=[finder]), Failing(clock=clock)), expected)
    with pytest.raises(KeyError, match="mine"):
        finder.tune(make_trainer(callbacks=[finder]), Failing(clock=clock))


def test_a_keyword_that_is_not_possible(subtests: pytest.Subtests) -> None:
    """It is an error when the finder is made; the message repeats the value."""
    for keywords in [
        {"base_batch_size": 0},
        {"min_val": 0},
        {"min_val": 20, "max_val": 10},
        {"max_val": 2.5},
        {"init_val": True},
        {"steps_per_trial": 0},
        {"warmup_steps": -1},
        {"tolerance": 0.0},
        {"tolerance": 1.5},
        {"lr_scaling": "cubic"},
        {"max_seconds": 0},
        {"lr_warmup_steps": -1},
        {"max_lr_factor": 0.5},
        {"max_lr_factor": float("nan")},
        {"max_data_share": 0},
        {"max_data_share": 1.5},
        {"min_confidence": 1.1},
        {"min_confidence": "high"},
        {"min_efficiency": 1.5},
        {"min_efficiency": -0.1},
        {"init_val": 40, "max_val": 20},
        {"init_val": 3, "min_val": 4},
        {"tolerance": "small"},
        {"max_seconds": "5m"},
        {"batch_arg_name": None},
        {"batch_arg_name": ""},
        {"lr_arg_name": 3},
        {"allow_oom": "no"},
        {"on_failure": "ignore"},
        {"plot_dir": 3},
    ]:
        with subtests.test(keywords=keywords):
            with pytest.raises(TuningError) as caught:
                lo.EfficientBatchSizeFinder(**with_advanced(keywords))
            assert str(next(iter(keywords.values()))) in str(caught.value)


def test_what_few_set_is_a_record_or_a_mapping() -> None:
    """Anything else, and an entry that it does not have, is an error that names those that there are."""
    record = AdvancedTuning(tolerance=0.07)
    for advanced in (record, {"tolerance": 0.07}):
        assert lo.EfficientBatchSizeFinder(advanced=advanced)._options.tolerance == 0.07
    with pytest.raises(TuningError, match=r"'tolerated'.* is not known: choose among init_val, .*tolerance"):
        lo.EfficientBatchSizeFinder(advanced={"tolerated": 0.07})
    with pytest.raises(TuningError, match="advanced=3 is a int"):
        lo.EfficientBatchSizeFinder(advanced=3)


def test_a_stream_is_tuned_where_its_bounds_are_given(make_trainer: MakeTrainer) -> None:
    """With max_val and max_steps nothing needs the length; as many samples are seen as in 12 steps of 4."""
    clock = Clock()
    net = Streaming(clock=clock)
    finder = finder_of(clock)
    make_trainer(callbacks=[finder], max_steps=12).fit(net)
    assert finder.result.batch_size == 16
    assert net.sizes == [16] * 3


def test_an_error_of_the_model_comes_through_and_everything_is_put_back(make_trainer: MakeTrainer) -> None:
    """It is the model's own error, and the model is as it was before the trials."""

    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) > 8:
                raise KeyError("mine")
            return loss

    clock = Clock()
    net = Failing(clock=clock)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = make_trainer(callbacks=[finder_of(clock)])
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(net)
    assert net.losses == []
    assert net.batch_size == 4
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert net.seen.tolist() == [0.0, 0.0]


def test_no_size_that_fits(make_trainer: MakeTrainer) -> None:
    """Where even the smallest batch runs out of memory, that is said."""

    class Huge(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise torch.OutOfMemoryError("injected")

    message = raised(make_trainer(callbacks=[finder_of(Clock())]), Huge(scheduler="step"))
    assert "fit" in message


def test_running_out_of_memory_ends_a_trial_and_not_the_run(make_trainer: MakeTrainer) -> None:
    """Sizes above the edge are not ok, and one below it is chosen."""

    class Tight(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if len(batch[0]) > 11:
                raise torch.OutOfMemoryError("injected")
            return loss

    clock = Clock()
    finder = finder_of(clock, max_val=64)
    net = Tight(clock=clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert 8 <= finder.result.batch_size <= 11
    assert any(not trial.is_ok for trial in finder.result.trials)
    assert all(trial.is_ok == (trial.batch_size <= 11) for trial in finder.result.trials)
    assert set(net.sizes[:-1]) == {finder.result.batch_size}


def test_a_size_that_no_plan_fits_has_a_short_reason(make_trainer: MakeTrainer) -> None:
    """The table's row says what the size would need, and not all that an infeasible budget tells."""

    class Planned(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) > 8:
                raise BudgetInfeasibleError("long", budget_bytes=1 << 20, floor_bytes=3 << 20, op="stem.0 (backward)")
            return super().training_step(batch, batch_idx)

    clock = Clock()
    finder = finder_of(clock)
    make_trainer(callbacks=[finder], max_epochs=1).fit(Planned(clock=clock))
    assert finder.result.batch_size == 8
    assert {trial.reason for trial in finder.result.trials} == {"", "needs a budget of 3.0 MiB"}
