"""What the distributed scripts train, and how they compare a fit under the strategy with one under plain DDP."""

from __future__ import annotations

import functools
import gc
import logging
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_offload import DDPOffloadStrategy
from lightning_offload.plugins.report import Report
from tests.lightning.models import ConvNet, assert_same, images

BATCHES_OF_A_PLAN = 7
"""Steps of one kind after which its plan is surely final; its first ones record, verify and measure."""


class Phases(pl.Callback):
    """Notes the report after each batch."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.reports.append(trainer.strategy.memory.report())


def make_trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    """A quiet Trainer of two processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "default_root_dir": tempfile.gettempdir(),
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, **{**defaults, **settings})


def fit(
    strategy: Any,
    model: type[pl.LightningModule] = ConvNet,
    *,
    data: Any = None,
    ckpt_path: Any = None,
    **settings: Any,
) -> tuple[dict[str, Any], pl.Trainer]:
    """Fits a fresh model; returns all that it leaves, and the trainer."""
    pl.seed_everything(3, verbose=False)
    trainer, module = make_trainer(strategy, **settings), model()
    if data is None:
        num_batches = BATCHES_OF_A_PLAN * settings.get("accumulate_grad_batches", 1)
        data = functools.partial(images, 2 * num_batches)  # of both ranks
    optimizers: list[dict[str, Any]] = []

    class ReadOptimizers(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            optimizers.extend(optimizer.state_dict() for optimizer in trainer.optimizers)

    trainer.callbacks.append(ReadOptimizers())
    batches = data()
    gc.collect()
    gc.freeze()  # neither the data nor what earlier fits left is the step's
    trainer.fit(module, batches, ckpt_path=ckpt_path)
    state = {
        "losses": module.losses,
        "weights": module.state_dict(),
        "optimizers": optimizers,
        "rng": torch.get_rng_state(),
    }
    return state, trainer


def middle_budget(report: Report) -> str:
    """Half way between the smallest feasible budget and the plain peak."""
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    assert report.floor_bytes < report.plain_peak_bytes
    return f"{(report.floor_bytes + report.plain_peak_bytes) // 2}B"


def compare(
    model: type[pl.LightningModule] = ConvNet,
    *,
    ddp: dict[str, Any] | None = None,
    policy: str = "auto",
    **settings: Any,
) -> Any:
    """Fits with plain DDP and with ours under a tight budget; fails unless they agree and a plan was in force."""
    ddp = ddp or {}
    plain = _plain(model, ddp, settings)
    budget = "1GiB"
    if policy == "auto":  # a few steps show what the budget is to be
        num_batches = 2 * 4 * settings.get("accumulate_grad_batches", 1)
        probe = {**settings, "data": functools.partial(images, num_batches)}
        _, trainer = fit(DDPOffloadStrategy(budget, **ddp), model, **probe)
        budget = middle_budget(trainer.strategy.memory.report())
    phases = Phases()
    ours, trainer = fit(
        DDPOffloadStrategy(budget, policy=policy, **ddp),
        model,
        **{**settings, "callbacks": [phases]},
    )
    assert_same(ours, plain)
    check_plan(phases.reports, is_tight=policy == "auto")
    return trainer.strategy


_plain_runs: dict[str, dict[str, Any]] = {}


def _plain(model: type[pl.LightningModule], ddp: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What plain DDP leaves, fitted once for all that is compared with it."""
    key = repr((model, ddp, settings))
    if key not in _plain_runs:
        _plain_runs[key], _ = fit(DDPStrategy(**ddp), model, **settings)
    return _plain_runs[key]


def check_plan(reports: list[Report], *, is_tight: bool) -> None:
    """Fails unless the last steps ran under a final plan that does something and predicts the peak."""
    last = reports[-1]
    assert last.phase == "planned", [r.phase for r in reports]
    assert "unplanned" not in {r.phase for r in reports}
    assert last.swapped_bytes + last.recomputed_bytes > 0
    assert last.num_mismatched == 0
    predicted, budget = last.predicted_peak_bytes, last.budget_bytes
    # of the steps of an accumulation the first has no gradients yet, and needs less
    measured = max(r.measured_peak_bytes or 0 for r in reports if r.phase == "planned")
    assert predicted is not None
    assert budget is not None
    assert 0.95 * predicted <= measured <= min(1.01 * predicted, budget), (measured, predicted, budget)
    if is_tight:
        assert predicted <= budget < (last.plain_peak_bytes or 0)


def num_deviations(strategy: Any) -> int:
    """How many steps left their plans."""
    return sum(kind.changes.num_deviations for kind in strategy.memory._steps.cache.entries.values())


class Unused(ConvNet):
    """Takes its second head in turns with the first, so that some parameters have no gradient in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16 * 144, 4)


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks; its gradient is summed too, as in synchronised batch norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total)
        return total


class SyncedNorm(nn.Module):
    """Normalises over the batches of all ranks, with collectives inside forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        dims, count = (0, 2, 3), 2 * x.numel() / x.shape[1]
        mean = _SumOverRanks.apply(x.sum(dims, keepdim=True)) / count
        variance = _SumOverRanks.apply((x - mean).square().sum(dims, keepdim=True)) / count
        return (x - mean) * (variance + 1e-5).rsqrt()


class SyncedNet(ConvNet):
    """Its norm is synchronised: what it saves comes from collectives, which never run again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = SyncedNorm()
