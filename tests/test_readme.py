"""The code in README.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_readme_has_its_usage() -> None:
    """The ways of use are shown, and the two commands."""
    assert len(BLOCKS) == 3
    assert "make demo" in README
    assert "make test" in README


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_usage_runs_and_trains(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block, given a model, data, loss and optimizer, trains that model."""
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs into the working directory
    module = Classifier()
    before = [parameter.clone() for parameter in module.parameters()]
    names: dict[str, Any] = {
        "lightning_module": module,
        "model": module.layers,
        "loader": DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(2, (24,))), batch_size=4),
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
    }
    exec(compile(BLOCKS[index], f"README.md, block {index + 1}", "exec"), names)
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
