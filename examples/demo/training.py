"""One training run through Lightning's Trainer, plain or within a budget, and what came of it.

The same function trains both ways; only the strategy differs. The first steps of a run are warm-up (under a budget
they record, verify and measure), the next ones count live bytes. After the steps that are compared, a run within a
budget may go on with plain steps and its own in turns, which are timed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from examples.demo.data import NUM_CLASSES, load_images, make_loader
from examples.demo.measurement import Measurement
from examples.demo.pairs import PairedTimes
from examples.demo.turns import StepsInTurns
from examples.models.residual import resnet50
from lightning_offload.accelerators import accelerators_here, memory_in_use

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from lightning_offload.plugins.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo trains and for how long.

    Attributes:
        batch_size: Samples per step.
        image_size: Height and width of the images, in pixels.
        width: Channels of the network's stem.
        num_steps: Steps of each of the two runs that are compared.
        num_probe_steps: Steps of the short run that learns the smallest feasible budget.
        num_warmup_steps: First steps of a run, not tracked.
        num_tracked_steps: Steps after those whose live bytes are counted.
        num_pairs: Pairs of steps, one plain and one within the budget, that are timed.
        savings_share: Which part of what lies between the floor and the plain peak the budget grants.
        seed: Seed of weights and order of samples.
    """

    batch_size: int = 64
    image_size: int = 64
    width: int = 64
    num_steps: int = 9
    num_probe_steps: int = 4
    num_warmup_steps: int = 3
    num_tracked_steps: int = 3
    num_pairs: int = 8
    savings_share: float = 0.5
    seed: int = 7

    @property
    def total_steps(self) -> int:
        """Steps of all three runs together."""
        return self.num_steps + self.num_probe_steps + self.longest_run_steps

    @property
    def longest_run_steps(self) -> int:
        """Steps of the run that is timed too; all runs draw from as many samples, so their batches are the same."""
        return self.num_steps + StepsInTurns(self.num_steps, self.num_pairs).num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one run measured.

    Attributes:
        peak_bytes: Most bytes alive in forward and backward of the tracked steps; 0 if none was tracked.
        times: Times of plain steps and of this run's in turns, optimizer included; None if none were timed.
        report: The memory plugin's own account; None for a plain run.
    """

    peak_bytes: int
    times: PairedTimes | None
    report: Report | None


class DigitClassifier(L.LightningModule):
    """A network with a head for ten digits, trained by SGD with momentum."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of a batch of images and labels."""
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD, whose update allocates nothing that could set the peak."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def train(
    config: DemoConfig,
    strategy: Strategy | None,
    advance: Callable[[], None],
    *,
    num_steps: int | None = None,
    state_path: Path | None = None,
    num_pairs: int = 0,
) -> RunResult:
    """Train from the same seed as every other run and measure.

    Args:
        config: Model, data and which steps are tracked.
        strategy: Lightning's strategy; None for the plain one.
        advance: Called after every step.
        num_steps: Steps to train, by default those of `config`.
        state_path: Where to save losses, weights, statistics, optimizer and random state after them.
        num_pairs: Pairs of plain steps and such under the strategy, an `OffloadStrategy`, that are timed after that.

    Returns:
        Peak, times and the plugin's report.
    """
    num_steps = num_steps or config.num_steps
    L.seed_everything(config.seed, verbose=False)
    module = DigitClassifier(resnet50(num_classes=NUM_CLASSES, width=config.width))
    first = config.num_warmup_steps
    tracked = range(first, first + config.num_tracked_steps)
    measurement = Measurement(tracked, num_steps=num_steps, state_path=state_path, advance=advance)
    turns = StepsInTurns(num_steps, num_pairs) if num_pairs else None
    callbacks: list[L.Callback] = [measurement, *([turns] if turns else [])]
    trainer = _trainer(num_steps + (turns.num_steps if turns else 0), strategy, callbacks)
    trainer.fit(module, _loader(config))
    result = RunResult(
        peak_bytes=measurement.peak_bytes, times=turns.times if turns else None, report=measurement.report
    )
    del trainer, module, measurement, callbacks
    gc.collect()  # Trainer and module refer to each other; the next run should find the memory free
    memory = memory_in_use()
    if memory is not None:
        memory.give_back()
    return result


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave the terminal to the demo's own progress bar and table while inside."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.(pytorch|fabric)")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _trainer(num_steps: int, strategy: Strategy | None, callbacks: list[L.Callback]) -> L.Trainer:
    on_gpu = bool(accelerators_here())
    return L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        strategy="auto" if strategy is None else strategy,
        max_steps=num_steps,
        max_epochs=-1,
        callbacks=callbacks,
        # On a GPU two plain runs would differ without it; "warn", since the comparison finds what is left.
        deterministic="warn" if on_gpu else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _loader(config: DemoConfig) -> DataLoader[tuple[Tensor, ...]]:
    images, labels = load_images(config.image_size, limit=config.longest_run_steps * config.batch_size)
    return make_loader(images, labels, batch_size=config.batch_size, seed=config.seed)
