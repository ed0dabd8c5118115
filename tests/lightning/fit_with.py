"""Trains with several spellings of the strategy in one fresh process; run by `test_packages`.

Arguments: modules to import, in order. Prints one line per Lightning package among them: its name, and the
strategy class's base.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
import warnings
from typing import Any

import torch


def fit(package: Any, strategy: Any, callbacks: list[Any]) -> Any:
    """Trains a linear layer for six steps with the Trainer of `package`."""

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    package.seed_everything(0, verbose=False)
    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = package.Trainer(
            strategy=strategy,
            callbacks=callbacks,
            accelerator="cpu",
            max_epochs=1,
            logger=package.loggers.CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(24, 8), 4))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return weights, trainer.strategy


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        importlib.import_module(name)
        if name != names[0] and "lightning_offload" in sys.modules:
            # the class exists now, and must be taken by a package that is imported later
            _ = sys.modules["lightning_offload"].OffloadStrategy
    lightning_offload = sys.modules["lightning_offload"]
    for name in names:
        if name == "lightning_offload":
            continue
        package = importlib.import_module(name)
        logging.getLogger(name).setLevel(logging.ERROR)
        plain, _ = fit(package, "auto", [])
        spellings = ["offload", lightning_offload.OffloadStrategy("1GiB", policy="all-swap")]
        for spelling in spellings:
            weights, strategy = fit(package, spelling, [lightning_offload.OffloadMonitor()])
            assert torch.equal(weights, plain), spelling
            assert isinstance(strategy, lightning_offload.OffloadStrategy), spelling
            assert isinstance(strategy, package.strategies.SingleDeviceStrategy), spelling
            assert strategy.memory.report().num_steps == 6, spelling
        sys.stdout.write(f"{name} {type(strategy).__bases__[1].__module__}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
