"""Plain steps and steps within the budget take turns in one run, and each time lands on its own side."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.demo.pairs import PairedTimes
from examples.demo.training import quiet_lightning
from examples.demo.turns import StepsInTurns
from lightning_offload import OffloadStrategy
from lightning_offload.strategies.precision import OffloadPrecisionMixin, ungraft

FIRST = 4


def run(num_pairs: int) -> tuple[StepsInTurns, str]:
    """A run whose plain steps take 2 seconds and the others 3; returns who had which step, from the first turn on."""
    now = 0.0
    turns = StepsInTurns(FIRST, num_pairs, clock=lambda: now)
    precision = Precision()
    trainer: Any = SimpleNamespace(global_step=0, strategy=SimpleNamespace(precision_plugin=precision, memory=object()))
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    order = ""
    for step in range(FIRST + turns.num_steps):
        turns.on_train_batch_start(trainer, module, None, step)
        is_ours = isinstance(precision, OffloadPrecisionMixin)
        now += 3.0 if is_ours else 2.0
        trainer.global_step += 1
        turns.on_train_batch_end(trainer, module, None, None, step)
        if step >= FIRST:
            order += "o" if is_ours else "p"
    ungraft(precision)
    return turns, order


@pytest.mark.parametrize(("num_pairs", "order"), [(1, "po"), (2, "poop"), (5, "poop" + "poop" + "po")])
def test_who_goes_first_alternates(num_pairs: int, order: str):
    """After one plain step that is not timed: plain, ours; ours, plain; and so on."""
    turns, found = run(num_pairs)
    assert found == "p" + order
    assert turns.times == PairedTimes(plain_seconds=(2.0,) * num_pairs, other_seconds=(3.0,) * num_pairs)


def test_steps_before_the_turns_are_left_alone():
    """They belong to whom they did."""
    turns = StepsInTurns(FIRST, 1)
    trainer: Any = SimpleNamespace(global_step=FIRST - 1, strategy=None)
    turns.on_train_batch_start(trainer, L.LightningModule(), None, 0)
    trainer.global_step += 1
    turns.on_train_batch_end(trainer, L.LightningModule(), None, None, 0)
    assert turns.times.ratios == []


class Swapped(L.LightningModule):
    """Notes in which steps autograd's hooks are in force."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.is_hooked: list[bool] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.is_hooked.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        loss: Tensor = self.layer(batch[0]).relu().square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_plain_steps_are_without_hooks():
    """In a real run, all of whose own steps swap; and its weights are the plain run's."""
    weights = {}
    for kind, strategy in (("plain", "auto"), ("turns", OffloadStrategy("1GiB", policy="all-swap"))):
        torch.manual_seed(0)
        module, turns = Swapped(), StepsInTurns(FIRST, 2)
        trainer = L.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=FIRST + turns.num_steps, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[turns] if kind == "turns" else [],
        )  # fmt: skip
        data = TensorDataset(torch.randn(16 * (FIRST + turns.num_steps), 64))
        with quiet_lightning():
            trainer.fit(module, DataLoader(data, batch_size=16))
        weights[kind] = module.layer.weight.detach().clone()
    assert torch.equal(weights["plain"], weights["turns"])
    assert module.is_hooked[FIRST:] == [False, False, True, True, False]
    assert all(ratio > 0 for ratio in turns.times.ratios)
    assert len(turns.times.ratios) == 2
