"""The batch size finder on a device: trials by Lightning's own loop, and a training that knows of none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_offload as lo
from tests.gpu.device import DEVICE, IS_CUDA, MARKS, TOLERANT, deterministic

pytestmark = [TOLERANT, *MARKS]

NUM_SAMPLES, WIDTH = 128, 32


class Net(pl.LightningModule):
    """Layers that save more the larger the batch is, with dropout."""

    def __init__(self, batch_size: int, lr: float = 1e-3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.batch_size, self.lr = batch_size, lr
        blocks = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))]
        self.net = nn.Sequential(*blocks, nn.Linear(WIDTH, 4))
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(7)
        features = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        labels = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
        return DataLoader(TensorDataset(features, labels), self.batch_size, shuffle=True, pin_memory=IS_CUDA)


def trained(net: Net, folder: Path, finder: Any = None, budget: str | None = None) -> dict[str, Tensor]:
    """Fit from fixed seeds; return losses and weights."""
    torch.manual_seed(5)
    trainer = pl.Trainer(
        accelerator="cuda" if IS_CUDA else "cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[finder] if finder is not None else [],
        **({"strategy": lo.OffloadStrategy(budget=budget, policy="all-swap")} if budget else {}),
    )  # fmt: skip
    trainer.fit(net)
    return {"losses": torch.stack(net.losses).cpu(), **{name: each.cpu() for name, each in net.state_dict().items()}}


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_a_tuned_run_is_that_of_its_size(tmp_path: Path, budget: str | None) -> None:
    """Bit for bit, with a memory plan and without; what trials took is given back."""
    finder = lo.EfficientBatchSizeFinder(
        objective="throughput", max_val=32, lr_scaling="none", on_failure="raise", max_seconds=1e9,
        advanced={"min_confidence": 0.0, "max_data_share": 1.0, "max_trials": 4},
    )  # fmt: skip
    with deterministic(warn_only=True):
        ours = trained(Net(4), tmp_path, finder, budget)
        plain = trained(Net(finder.result.batch_size), tmp_path, budget=budget)
    assert len(finder.result.trials) >= 2
    assert all(trial.is_ok for trial in finder.result.trials)
    for name, expected in plain.items():
        assert torch.equal(ours[name], expected), name
    if IS_CUDA:
        assert all(trial.peak_bytes for trial in finder.result.trials)
        assert finder.result.budget_bytes
    assert DEVICE.type == ("cuda" if IS_CUDA else "cpu")
