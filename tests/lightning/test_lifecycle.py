"""When the plugin is attached, what it sees, and that it leaves nothing behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_offload import OffloadStrategy
from tests.lightning.conftest import MakeTrainer
from tests.lightning.models import NUM_STEPS, ConvNet, Gan, assert_same, fit_and_read, images

BUDGET = "1GiB"


def hooked() -> bool:
    """Whether saved-tensor hooks or a dispatch mode are active right now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None or bool(_get_current_dispatch_mode_stack())


def swapping(**kwargs: Any) -> OffloadStrategy:
    """A strategy that must hook every training step."""
    return OffloadStrategy(BUDGET, policy="all-swap", **kwargs)


class Spy:
    """Stands in front of a strategy's plugin and notes calls."""

    def __init__(self, strategy: Any) -> None:
        self._memory = strategy._memory
        self.calls: list[str] = []
        self.inputs: list[tuple[Any, ...]] = []
        strategy._memory = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def attach(self, **kwargs: Any) -> None:
        self.calls.append("attach")
        self._memory.attach(**kwargs)

    def detach(self) -> None:
        self.calls.append("detach")
        self._memory.detach()

    def step(self, *inputs: Any) -> Any:
        self.calls.append("step")
        self.inputs.append(tuple(type(x) for x in inputs))
        return self._memory.step(*inputs)

    def backward_scope(self) -> Any:
        self.calls.append("backward")
        return self._memory.backward_scope()


class Probe(ConvNet):
    """Notes in which hooks of a fit ours are active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[bool]] = {}

    def note(self, where: str) -> None:
        self.seen.setdefault(where, set()).add(hooked())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.note("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("sanity" if self.trainer.sanity_checking else "validation")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.note("predict")
        return batch[1]

    def on_before_backward(self, loss: Tensor) -> None:
        self.note("between")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("between")

    def on_fit_end(self) -> None:
        self.note("between")


def test_only_training_steps_are_hooked(make_trainer: MakeTrainer) -> None:
    """Hooks are active in training_step alone: not between, nor in any kind of evaluation."""
    trainer = make_trainer(strategy=swapping(), num_sanity_val_steps=1, val_check_interval=2)
    module = Probe()
    trainer.fit(module, images(), images(2))
    trainer.validate(module, images(2), verbose=False)
    trainer.test(module, images(2), verbose=False)
    trainer.predict(module, images(2))
    no, yes = {False}, {True}
    assert module.seen == {
        "sanity": no, "training": yes, "between": no, "validation": no, "test": no, "predict": no
    }  # fmt: skip


def test_order_of_calls(make_trainer: MakeTrainer) -> None:
    """A fit attaches once, opens a step per batch with the batch as input, and detaches."""
    strategy = swapping()
    spy = Spy(strategy)
    make_trainer(strategy=strategy, num_sanity_val_steps=1).fit(ConvNet(), images(), images(2))
    assert spy.calls == ["attach", *["step", "backward"] * NUM_STEPS, "detach"]
    assert spy.inputs == [(list,)] * NUM_STEPS


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_evaluation_attaches_nothing(make_trainer: MakeTrainer, entry: str) -> None:
    """Evaluation neither attaches the plugin nor touches the precision plugin."""
    strategy = swapping()
    spy = Spy(strategy)
    trainer = make_trainer(strategy=strategy)
    getattr(trainer, entry)(ConvNet(), images(2))
    assert "attach" not in spy.calls
    assert "step" not in spy.calls
    assert type(trainer.precision_plugin) is Precision


def test_accumulation_opens_a_step_per_batch(make_trainer: MakeTrainer) -> None:
    """Under accumulation each micro-batch is a step with its backward."""
    strategy = swapping()
    spy = Spy(strategy)
    make_trainer(strategy=strategy, accumulate_grad_batches=3).fit(ConvNet(), images())
    assert spy.calls.count("step") == spy.calls.count("backward") == NUM_STEPS


def test_step_without_loss(make_trainer: MakeTrainer) -> None:
    """A training_step that returns None is a step without a backward."""

    class Skips(ConvNet):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    strategy = swapping()
    spy = Spy(strategy)
    with pytest.warns(UserWarning, match="returned `None`"):
        make_trainer(strategy=strategy).fit(Skips(), images())
    assert (spy.calls.count("step"), spy.calls.count("backward")) == (NUM_STEPS, NUM_STEPS - 1)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_dataloader_iter_is_not_an_input(make_trainer: MakeTrainer) -> None:
    """A step that fetches its own batches names no inputs."""

    class Fetches(ConvNet):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    strategy = swapping()
    spy = Spy(strategy)
    make_trainer(strategy=strategy).fit(Fetches(), images())
    assert set(spy.inputs) == {()}


class Boom(Exception):
    pass


def fails_at(where: str, base: type[ConvNet | Gan] = ConvNet) -> ConvNet | Gan:
    """A module that raises in its second batch, in `where`."""

    class Fails(base):  # type: ignore[misc, valid-type]
        armed = True

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            result = super().training_step(batch, batch_idx)
            self.count = batch_idx
            if self.armed and where == "forward" and batch_idx == 1:
                raise Boom
            if self.armed and where == "autograd" and batch_idx == 1:
                result.register_hook(self.raise_boom)
            return result

        def raise_boom(self, *args: Any) -> None:
            raise Boom

        def on_after_backward(self) -> None:
            if self.armed and where == "hook" and getattr(self, "count", 0) == 1:
                raise Boom

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if self.armed and where == "validation":
                raise Boom

    return Fails()


@pytest.mark.parametrize("where", ["forward", "autograd", "hook", "validation"])
def test_exception_leaves_nothing_behind(make_trainer: MakeTrainer, where: str) -> None:
    """After an exception no hook, mode, thread or graft is left, and the same Trainer can fit again."""
    threads = threading.active_count()
    trainer = make_trainer(strategy=swapping(), val_check_interval=2)
    module = fails_at(where)
    with pytest.raises(Boom):
        trainer.fit(module, images(), images(2))
    assert not hooked()
    assert type(trainer.precision_plugin) is Precision
    assert threading.active_count() <= threads

    module.armed = False
    module.train()  # the exception left it as validation had it
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(module, images(), images(2))
    assert trainer.state.finished


def test_exception_under_manual_optimization(make_trainer: MakeTrainer) -> None:
    """The same with the backwards inside the step."""
    trainer = make_trainer(strategy=swapping())
    with pytest.raises(Boom):
        trainer.fit(fails_at("forward", Gan), images())
    assert not hooked()
    assert type(trainer.precision_plugin) is Precision


def test_two_fits_with_one_trainer(make_trainer: MakeTrainer) -> None:
    """A second fit attaches again and is as exact as the first."""
    states = []
    for strategy in ("auto", swapping()):
        pl.seed_everything(1, verbose=False)
        trainer = make_trainer(strategy=strategy)
        module = ConvNet()
        fit_and_read(trainer, module)
        trainer.fit_loop.max_epochs = 2
        states.append(fit_and_read(trainer, module))
    assert len(states[0]["losses"]) == 2 * NUM_STEPS
    assert_same(states[1], states[0])


def test_learning_rate_finder(make_trainer: MakeTrainer) -> None:
    """Lightning's tuner, which leaves its training by an exception, finds the same rate."""

    class Rated(ConvNet):
        lr = 1e-3

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    rates = []
    for strategy in ("auto", swapping()):
        pl.seed_everything(1, verbose=False)
        trainer = make_trainer(strategy=strategy)
        module = Rated()
        finder = Tuner(trainer).lr_find(module, images(), num_training=12, update_attr=True)
        trainer.fit(module, images())
        rates.append((finder.results["loss"], module.lr, module.losses))
    assert_same(rates[1], rates[0])
    assert type(trainer.precision_plugin) is Precision


def test_the_strategy_keeps_no_batch(make_trainer: MakeTrainer) -> None:
    """A batch is gone once its step is over."""
    batches: list[weakref.ref[Tensor]] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: list[Tensor], batch_idx: int) -> None:
            batches.append(weakref.ref(batch[0]))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.num_alive = sum(ref() is not None for ref in batches)

    plain, ours = Watch(), Watch()
    make_trainer(callbacks=[plain]).fit(ConvNet(), images())
    batches.clear()
    make_trainer(callbacks=[ours], strategy=swapping()).fit(ConvNet(), images())
    assert ours.num_alive == plain.num_alive
