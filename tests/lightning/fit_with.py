"""Trains with several spellings of the strategy in one fresh process; run by `test_packages`.

Arguments: modules to import, in order. Prints one line per Lightning package among them: its name, and the
strategy class's base. What else needs such a process is checked beside: that registering is lazy, that a subclass
cannot change sides, and that the old package's own Trainer is tuned.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import tempfile
import warnings
from typing import Any

import pytest
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


def check_registered(names: list[str]) -> None:
    """The registry of each package that is imported has the name."""
    for name in names:
        if name != "lightning_offload":
            registry = importlib.import_module(f"{name}.strategies").StrategyRegistry
            assert "offload" in registry, f"not registered with {name}"


def check_subclass() -> None:
    """A user's subclass belongs to one package, and the error says what to do."""
    import pytorch_lightning

    import lightning_offload

    class Mine(lightning_offload.OffloadStrategy):
        pass

    with pytest.raises(lightning_offload.UnsupportedError, match=r"^Mine is a subclass of the strategy for lightning"):
        pytorch_lightning.Trainer(strategy=Mine("1GiB"), accelerator="cpu", logger=False)


def check_tuning() -> None:
    """The package gets its own class, and a fit of its Trainer is tuned."""
    import pytorch_lightning as pl

    import lightning_offload as lo

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.lr, self.net = 4, 0.1, torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(64, 2), self.batch_size)

    advanced = {"steps_per_trial": 1, "warmup_steps": 0}
    finder: Any = lo.EfficientBatchSizeFinder(max_val=16, on_failure="raise", advanced=advanced)
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[finder], max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model: Any = Module()
    trainer.fit(model)
    assert isinstance(finder, pl.callbacks.BatchSizeFinder)
    assert model.batch_size == finder.result.batch_size
    assert trainer.global_step == -(-64 // model.batch_size)
    model.batch_size = "x"
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException) as raised:
        trainer.fit(model, ckpt_path=None)
    assert isinstance(raised.value, lo.TuningError)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", "lightning-offload", RuntimeWarning)  # a registration that failed
    was_used = False
    for number, name in enumerate(names):
        importlib.import_module(name)
        if number and "lightning_offload" in sys.modules:
            check_registered(names[: number + 1])
            assert was_used or "lightning_offload.plugins.memory" not in sys.modules, "registration is not lazy"
            # the class exists now, and must be taken by a package that is imported later
            _ = sys.modules["lightning_offload"].OffloadStrategy
            was_used = True
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
    if names[0] == "lightning_offload":
        check_subclass()
    if names == ["pytorch_lightning", "lightning_offload"]:
        with contextlib.redirect_stdout(sys.stderr):  # of a finder, which tells what it found
            check_tuning()
        importlib.import_module("lightning.pytorch")
        check_registered(["lightning.pytorch"])


if __name__ == "__main__":
    main(sys.argv[1:])
