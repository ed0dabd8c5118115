"""What `OffloadMonitor` writes, where and when."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_offload import OffloadMonitor, OffloadStrategy
from lightning_offload.callbacks.monitor import peak_of_budget
from tests.lightning.conftest import MakeTrainer
from tests.lightning.models import NUM_STEPS, ConvNet, images

BUDGET = 2**30


class SilentBar(ProgressBar):
    """A progress bar that collects what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.shown.append(self.get_metrics(trainer, pl_module))


def rows(tmp_path: Path) -> list[dict[str, str]]:
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row.get("offload/budget_bytes")]


def test_logged_metrics(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Every log_every_n_steps the logger receives bytes and seconds under offload/."""
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    strategy = OffloadStrategy(BUDGET, policy="all-swap")
    make_trainer(strategy=strategy, callbacks=[OffloadMonitor()], logger=logger, log_every_n_steps=3).fit(
        ConvNet(), images()
    )
    logged = rows(tmp_path)
    assert [int(row["step"]) for row in logged] == [2, 5]
    last, report = logged[-1], strategy.memory.report()
    assert float(last["offload/budget_bytes"]) == BUDGET
    assert float(last["offload/peak_bytes"]) == report.measured_peak_bytes
    assert float(last["offload/swapped_bytes"]) == report.swapped_bytes > 0
    assert float(last["offload/recomputed_bytes"]) == 0
    assert float(last["offload/stall_seconds"]) >= 0


def test_group_separator(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A logger's own group separator is used."""

    class Dashed(CSVLogger):
        group_separator = "-"

    logger = Dashed(tmp_path, flush_logs_every_n_steps=1)
    make_trainer(
        strategy=OffloadStrategy(BUDGET), callbacks=[OffloadMonitor()], logger=logger, log_every_n_steps=1
    ).fit(ConvNet(), images(2))
    (path,) = tmp_path.rglob("metrics.csv")
    assert "offload-budget_bytes" in path.read_text()


def test_progress_bar_without_logger(make_trainer: MakeTrainer) -> None:
    """The progress bar has one item in every batch, the peak of the budget, logger or not."""
    bar = SilentBar()
    trainer = make_trainer(
        strategy=OffloadStrategy(BUDGET),
        callbacks=[OffloadMonitor(), bar],
        enable_progress_bar=True,
        log_every_n_steps=2,
    )
    trainer.fit(ConvNet(), images())
    assert len(bar.shown) == NUM_STEPS
    assert all(re.fullmatch(r"0\.0/1\.0 GiB", shown["mem"]) for shown in bar.shown[2:])
    assert not any("offload" in name for shown in bar.shown for name in shown)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_both_bars_show_the_item(
    make_trainer: MakeTrainer,
    bar: type[ProgressBar],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's own bars take text beside numbers; small models are shown in a unit of their size."""
    monkeypatch.setenv("COLUMNS", "120")
    if bar is RichProgressBar:
        monkeypatch.setattr("rich._console", Console(force_terminal=True, width=200))
    trainer = make_trainer(
        strategy=OffloadStrategy("8MiB"), callbacks=[OffloadMonitor(), bar()], enable_progress_bar=True,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(ConvNet(), images())
    shown = "".join(capfd.readouterr())
    assert re.search(r"mem[=:] ?\d\.\d/8\.0 MiB", shown)


@pytest.mark.parametrize(
    ("strategy", "named"),
    [("auto", "lightning_offload.OffloadStrategy(...)"), ("ddp", "lightning_offload.DDPOffloadStrategy(...)")],
)
def test_the_strategy_that_it_recommends(make_trainer: MakeTrainer, strategy: str, named: str) -> None:
    """The one for several devices under plain DDP, else that for one."""
    trainer = make_trainer(strategy=strategy, devices=2 if strategy == "ddp" else 1)
    with pytest.raises(MisconfigurationException, match=re.escape(f"use `Trainer(strategy={named})`")):
        OffloadMonitor().setup(trainer, ConvNet(), "fit")


def test_a_peak_and_its_budget_share_a_unit() -> None:
    """That of the larger; without a budget the peak stands alone, and without a peak there is nothing to show."""
    assert peak_of_budget(3 << 20, 8 << 30) == "0.0/8.0 GiB"
    assert peak_of_budget(1536, None) == "1.5 KiB"
    assert peak_of_budget(None, 8 << 30) == ""


@pytest.mark.parametrize("monitor", [OffloadMonitor(), OffloadMonitor(progress_bar=False)], ids=["bar", "no bar"])
def test_nowhere_to_write(make_trainer: MakeTrainer, monitor: Callback) -> None:
    """Without logger and progress bar it raises, as DeviceStatsMonitor does."""
    bar = (
        {"callbacks": [monitor]}
        if monitor._progress_bar
        else {"callbacks": [monitor, SilentBar()], "enable_progress_bar": True}
    )
    trainer = make_trainer(strategy=OffloadStrategy(BUDGET), **bar)
    with pytest.raises(MisconfigurationException, match="nowhere to write"):
        trainer.fit(ConvNet(), images())


def test_disabled_strategy_logs_nothing(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """With offloading turned off there is nothing to log, and nothing is."""
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    make_trainer(
        strategy=OffloadStrategy(BUDGET, enabled=False),
        callbacks=[OffloadMonitor()],
        logger=logger,
        log_every_n_steps=1,
    ).fit(ConvNet(), images(2))
    assert not any("offload" in path.read_text() for path in tmp_path.rglob("metrics.csv"))


def test_evaluation_needs_nothing(make_trainer: MakeTrainer) -> None:
    """Evaluation with the monitor in the list is left alone."""
    make_trainer(callbacks=[OffloadMonitor()]).validate(ConvNet(), images(2), verbose=False)
