"""A fit under `OffloadStrategy` leaves exactly what the plain Trainer leaves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_offload import OffloadStrategy
from tests.lightning.conftest import MakeTrainer
from tests.lightning.models import ConvNet, Gan, assert_same, fit_and_read
from tests.shares import pairs

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip": {"gradient_clip_val": 0.05},
    "validate-between": {"val_check_interval": 2, "num_sanity_val_steps": 1},
}
MANUAL = ("fp32", "bf16-mixed", "64-true", "validate-between")
FIXED = ("all-swap", "all-recompute")


def run(make_trainer: MakeTrainer, model: type[pl.LightningModule], **settings: Any) -> tuple[dict[str, Any], Any]:
    """Fits a fresh `model` and returns the state it leaves and the strategy."""
    pl.seed_everything(3, verbose=False)
    trainer = make_trainer(**settings)
    return fit_and_read(trainer, model()), trainer.strategy


_plain: dict[tuple[type[pl.LightningModule], str], dict[str, Any]] = {}


def plain_state(make_trainer: MakeTrainer, model: type[pl.LightningModule], setting: str) -> dict[str, Any]:
    """What the plain Trainer leaves, which is asked for by several tests."""
    if (model, setting) not in _plain:
        _plain[model, setting], _ = run(make_trainer, model, **SETTINGS[setting])
    return _plain[model, setting]


def by_turns(settings: Collection[str]) -> list[tuple[str, str]]:
    """The planner in each setting, and one of the fixed policies beside it."""
    return [*((setting, "auto") for setting in settings), *pairs([*settings], FIXED, every=2)]


def budget_for(policy: str, make_trainer: MakeTrainer, model: type[pl.LightningModule], **settings: Any) -> str:
    """For the planner half way between floor and plain peak; the fixed policies move everything anyway."""
    if policy != "auto":
        return "1GiB"
    _, strategy = run(make_trainer, model, strategy=OffloadStrategy("1TiB"), **settings)
    report = strategy.memory.report()
    return f"{(report.floor_bytes + report.plain_peak_bytes) // 2}B"


@pytest.mark.parametrize(("setting", "policy"), by_turns(SETTINGS))
def test_automatic_optimization(make_trainer: MakeTrainer, setting: str, policy: str) -> None:
    """Losses, weights, buffers, optimizer and RNG state are equal under every precision and Trainer flag."""
    settings = SETTINGS[setting]
    plain = plain_state(make_trainer, ConvNet, setting)
    budget = budget_for(policy, make_trainer, ConvNet, **settings)
    ours, strategy = run(make_trainer, ConvNet, strategy=OffloadStrategy(budget, policy=policy), **settings)
    assert_same(ours, plain)
    assert strategy.memory.report().num_steps == len(plain["losses"])


@pytest.mark.parametrize(("setting", "policy"), by_turns(MANUAL))
def test_manual_optimization(make_trainer: MakeTrainer, setting: str, policy: str) -> None:
    """A GAN with two optimizers, whose backwards and updates run inside the step, is equal too."""
    settings = SETTINGS[setting]
    plain = plain_state(make_trainer, Gan, setting)
    budget = budget_for(policy, make_trainer, Gan, **settings)
    ours, _ = run(make_trainer, Gan, strategy=OffloadStrategy(budget, policy=policy), **settings)
    assert_same(ours, plain)


class Perceptron(ConvNet):
    """Linear layers alone: half precision convolutions are slow on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        del self.stem, self.norm, self.inner, self.head
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(432, 64),
            torch.nn.GELU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(64, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_gradient_scaler(make_trainer: MakeTrainer) -> None:
    """A precision plugin with a GradScaler scales, unscales and updates as it does without us."""

    def scaled() -> MixedPrecision:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return MixedPrecision("16-mixed", "cpu", scaler)

    plain_plugin, our_plugin = scaled(), scaled()
    plain, _ = run(make_trainer, Perceptron, plugins=plain_plugin)
    ours, _ = run(make_trainer, Perceptron, plugins=our_plugin, strategy=OffloadStrategy("1GiB", policy="all-swap"))
    assert_same(ours, plain)
    assert our_plugin.state_dict() == plain_plugin.state_dict()
    assert our_plugin.state_dict()["scale"] > 2.0**10


def test_disabled(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither enabled=False nor LIGHTNING_OFFLOAD=0 runs anything of ours."""
    plain = plain_state(make_trainer, ConvNet, "fp32")
    ours, strategy = run(make_trainer, ConvNet, strategy=OffloadStrategy("1GiB", enabled=False))
    assert_same(ours, plain)
    assert strategy.memory.report().num_steps == 0

    monkeypatch.setenv("LIGHTNING_OFFLOAD", "0")
    ours, strategy = run(make_trainer, ConvNet, strategy=OffloadStrategy("1GiB"))
    assert_same(ours, plain)
    assert strategy.memory.report().num_steps == 0
