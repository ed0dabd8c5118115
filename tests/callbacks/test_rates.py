"""What a tuned run does with learning rates: every group's, its scheduler's, and a warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_offload.errors import TuningError
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import NUM_SAMPLES, Clock, Net, finder_of, fitted, saturating


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
@pytest.mark.filterwarnings("ignore:the learning rate is scaled linearly")
def test_each_group_and_schedule_follows_the_rule(make_trainer: MakeTrainer, rule: Any, factor: float) -> None:
    """OneCycleLR has the length and the top of the new size, in both groups."""
    clock = Clock()
    finder = finder_of(clock, lr_scaling=rule)
    net = Net(clock=clock)
    state = fitted(make_trainer(callbacks=[finder]), net)
    assert finder.result.batch_size == 16
    assert finder.result.lr_factor == factor
    assert net.lr == finder.result.lr == pytest.approx(0.01 * factor)
    (scheduler,) = state["schedulers"]
    assert scheduler["total_steps"] == 2 * NUM_SAMPLES // 16
    groups = state["optimizers"][0]["param_groups"]
    assert [group["max_lr"] for group in groups] == pytest.approx([0.01 * factor, 0.005 * factor])


def test_the_base_is_the_effective_batch_that_the_rate_was_for(make_trainer: MakeTrainer) -> None:
    """The factor is of samples per optimizer step: size x accumulation, over `base_batch_size`."""
    clock = Clock()
    finder = finder_of(clock, lr_scaling="sqrt", base_batch_size=16)
    fitted(make_trainer(callbacks=[finder], accumulate_grad_batches=4), Net(clock=clock))
    result = finder.result
    assert (result.batch_size, result.effective_batch_size, result.base_batch_size) == (16, 64, 16)
    assert result.lr_factor == pytest.approx(2.0)


def test_a_rate_written_into_a_group_is_scaled_too(make_trainer: MakeTrainer) -> None:
    """Groups that do not follow the attribute are multiplied, with what their scheduler starts from."""

    class Fixed(Net):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.stem.parameters(), "lr": self.lr}, {"params": self.head.parameters(), "lr": 0.3}]
            optimizer = torch.optim.SGD(groups)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

    clock = Clock()
    finder = finder_of(clock, lr_scaling="linear")
    state = fitted(make_trainer(callbacks=[finder]), Fixed(clock=clock))
    assert state["rates"] == [pytest.approx([0.04, 1.2])]
    assert state["schedulers"][0]["base_lrs"] == pytest.approx([0.04, 1.2])


def test_without_an_attribute_the_groups_are_scaled_as_they_are(make_trainer: MakeTrainer) -> None:
    """`lr_arg_name=None` needs nothing of the model."""
    clock = Clock()
    finder = finder_of(clock, lr_arg_name=None)
    net = Net(clock=clock, scheduler="step")
    state = fitted(make_trainer(callbacks=[finder], max_epochs=1, limit_train_batches=4), net)
    assert net.lr == 0.01
    assert state["rates"] == [pytest.approx([0.02, 0.01])]
    assert finder.result.lr == pytest.approx(0.02)


def test_groups_are_scaled_in_the_fit_after_a_standalone_tuning(make_trainer: MakeTrainer) -> None:
    """Where no attribute carries the rate over, the callback does, once."""
    clock = Clock()
    finder = finder_of(clock, lr_arg_name=None)
    net = Net(clock=clock, scheduler="step")
    finder.tune(make_trainer(), net)
    for _ in range(2):
        state = fitted(make_trainer(callbacks=[finder], max_epochs=1, limit_train_batches=1), net)
        assert state["rates"] == [pytest.approx([0.02, 0.01])]


def test_a_warm_up_ramps_the_rate_around_each_step(make_trainer: MakeTrainer) -> None:
    """The first step has the configured rate, those after an epoch the scaled one, which the groups always show."""
    used: list[float] = []

    class Flat(Net):
        def configure_optimizers(self) -> Any:
            self.made = torch.optim.SGD(self.parameters(), self.lr)
            return self.made

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen_rate = optimizer.param_groups[0]["lr"]

    class Step(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            used.append(self.param_groups[0]["lr"])
            with torch.no_grad():
                super().step()
            return loss

    class Warm(Flat):
        def configure_optimizers(self) -> Any:
            return Step(self.parameters(), self.lr)

    clock = Clock()
    finder = finder_of(clock, lr_scaling="linear", lr_warmup_steps=6)
    net = Warm(clock=clock)
    trainer = make_trainer(callbacks=[finder])
    trainer.fit(net)
    per_epoch = NUM_SAMPLES // 16
    trained = used[-2 * per_epoch :]
    assert trained[0] == pytest.approx(0.01)
    assert trained[per_epoch:] == pytest.approx([0.04] * per_epoch)
    assert trained == sorted(trained)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.04)
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks, "its hooks are gone"


def test_the_smallest_size_within_the_tolerance_is_chosen(make_trainer: MakeTrainer) -> None:
    """Where throughput stops rising, larger batches are not taken although they fit."""
    clock = Clock()
    finder = finder_of(clock, max_val=64)
    fitted(make_trainer(callbacks=[finder]), Net(clock=clock, seconds=saturating))
    best = max(trial.samples_per_second for trial in finder.result.trials)
    assert 12 <= finder.result.batch_size <= 22
    assert min(finder.result.batch_size, 16) >= 0.95 * best


def test_adam_with_the_linear_rule_is_offered_the_square_root(make_trainer: MakeTrainer) -> None:
    """The rule is kept, and a warning tells of the other one."""
    clock = Clock()
    finder = finder_of(clock, lr_scaling="linear")
    told = r"by 4, which suits SGD; for AdamW the square root of the batch's ratio \(2\) is .* lr_scaling='sqrt'"
    with pytest.warns(UserWarning, match=told) as caught:
        fitted(make_trainer(callbacks=[finder]), Net(clock=clock))
    assert sum("which suits SGD" in str(each.message) for each in caught) == 1
    assert finder.result.lr_factor == 4.0


def test_an_unknown_rule_is_an_error_at_once() -> None:
    """The message names the rules."""
    with pytest.raises(
        TuningError, match="unknown learning rate rule 'cubic': choose one of 'auto', 'linear', 'sqrt', 'none'"
    ):
        finder_of(lr_scaling="cubic")


def test_an_optimizer_with_rates_of_its_own(make_trainer: MakeTrainer) -> None:
    """Adafactor has none in its groups: there is nothing to scale or to warm up, and the size is tuned all the same."""

    class Adafactor(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-0.01)
            return loss

    class Own(Net):
        def configure_optimizers(self) -> Any:
            optimizer = Adafactor(self.parameters(), 0.1)
            optimizer.param_groups[0]["lr"] = None
            return optimizer

    clock = Clock()
    finder = finder_of(clock, lr_arg_name=None, lr_warmup_steps=None, lr_scaling="linear")
    net = Own(clock=clock)
    make_trainer(callbacks=[finder]).fit(net)
    assert set(net.sizes) == {16}
    assert (finder.result.lr, finder.result.lr_factor) == (None, 1.0)
    assert "The learning rate stays: the optimizer has one of its own" in finder.result.note


def test_a_rate_that_is_none_ends_no_fit(make_trainer: MakeTrainer) -> None:
    """Something has made nonsense of it since the fit began: the run goes on as configured."""

    class Nonsense(Net):
        def configure_optimizers(self) -> Any:
            self.lr: Any = 0.01
            made = super().configure_optimizers()
            self.lr = "high"
            return made

    finder = finder_of(Clock(), on_failure="keep")
    net = Nonsense()
    with pytest.warns(UserWarning, match="a learning rate is a number"):
        make_trainer(callbacks=[finder], max_epochs=1).fit(net)
    assert len(net.sizes) == 24
