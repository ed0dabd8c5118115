"""One rank of a tuning, under torchrun or Lightning's own launcher; `test_ddp` reads what each rank has written.

Arguments: the folder to write to, and the cases; all without any. Every case is a fit in the same two processes.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_offload as lo
from tests.callbacks.same_job import FIRST, MOST, STEPS, Job, by_decorator
from tests.callbacks.test_objectives import Bowl
from tests.callbacks.training import Clock, Net, assert_same, finder_of, fitted, is_trial

EDGE = 12
NOISE_SCALE = 40.0
EXCHANGE_SECONDS = 3.0


class Tight(Net):
    """Runs out of memory above a size, on rank one alone, in backward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and len(batch[0]) > EDGE:
            loss.register_hook(_run_out)
        return loss


def _run_out(grad: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("injected")


class TightManual(Tight):
    """The same with manual optimization, whose backward Lightning prepares DDP for from within the step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


class Broken(Net):
    """Fails above a size, on rank one alone."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_rank == 1 and len(batch[0]) > EDGE:
            raise KeyError("mine")
        return super().training_step(batch, batch_idx)


class Talking(Net):
    """Has a collective of its own in the step: a rank that ran out of memory would leave the other waiting."""

    tried: ClassVar[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.tried.append(len(batch[0]))
        loss = super().training_step(batch, batch_idx)
        return loss + 0.0 * self.all_gather(loss.detach()).sum()


class TalkingInHook(Net):
    """Has its collective between backward and the optimizer, as one that logs the norm of all gradients."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.all_gather(torch.ones(1))


class Synchronised(Net):
    """Has a synchronised batch norm, which does not run here: DDP refuses one on a CPU, so it comes after DDP."""

    def configure_optimizers(self) -> Any:
        self.synchronised = torch.nn.SyncBatchNorm(8, affine=False)
        return super().configure_optimizers()


class Sharded(Net):
    """Every parameter is a DTensor, of which each rank has a half."""

    def configure_model(self) -> None:
        for part in (self.stem, self.head):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def make_trainer(folder: Path, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder,
        **{"strategy": "ddp", **kwargs},
    )  # fmt: skip


def same(folder: Path, settings: Any, net: type[Net] = Net, **wanted: Any) -> dict[str, Any]:
    """Tune and train, then train untuned, and compare everything on this rank."""
    clock = Clock()
    finder = finder_of(clock, **wanted)
    tuned = fitted(make_trainer(folder, callbacks=[finder], **settings()), net(clock=clock))
    result = finder.result
    plain = fitted(make_trainer(folder, **settings()), net(batch_size=result.batch_size, lr=result.lr))
    assert_same(tuned, plain)
    found = {"batch_size": result.batch_size, "lr": result.lr, "note": result.note, "steps": tuned["steps"][0]}
    return {**found, "trials": [dataclasses.asdict(trial) for trial in result.trials]}


def broken(folder: Path) -> dict[str, Any]:
    """An error of one rank is an error of all, and nobody waits."""
    clock = Clock()
    try:
        fitted(make_trainer(folder, callbacks=[finder_of(clock)]), Broken(clock=clock))
    except (KeyError, lo.TuningError) as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {}


class Refusing(Net):
    """Has no loader for a size above the edge, on rank one alone."""

    def train_dataloader(self) -> Any:
        if self.trainer.global_rank == 1 and self.batch_size > EDGE:
            raise ValueError("too large a batch for my part")
        return super().train_dataloader()


class Reading(Net):
    """Reads what it has logged of all ranks, which trials log of each."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("mean", self.average["loss"], sync_dist=True)
        self.average["read"] = float(self.trainer.callback_metrics["loss"])


class Shy(Net):
    """Fails in trials, on all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if is_trial(self):
            raise KeyError("not in a trial")
        return super().training_step(batch, batch_idx)


def kept_as_configured(folder: Path, net: type[Net]) -> dict[str, Any]:
    """A rank, or both, cannot be tuned: all go on as without a finder, bit for bit."""
    clock = Clock()
    finder = finder_of(clock, on_failure="keep")
    tuned = fitted(make_trainer(folder, callbacks=[finder]), net(clock=clock))
    assert_same(tuned, fitted(make_trainer(folder), net()))
    return {"is_kept": finder.result is None}


def alike(folder: Path) -> dict[str, Any]:
    """The same job by the callback and by the decorator, where an exchange of gradients takes seconds."""
    clock = Clock()

    def seconds(batch_size: int) -> float:
        return 1.0 + batch_size / 16

    def wrapped(job: Job) -> DistributedDataParallel:
        model = DistributedDataParallel(job)
        model.register_comm_hook(None, _slow_hook(clock))
        return model

    finder = finder_of(clock, init_val=FIRST, max_val=MOST, lr_arg_name=None, steps_per_trial=STEPS)
    make_trainer(folder, callbacks=[finder]).fit(Hooked(clock, seconds))
    decorated = by_decorator(Job(clock, seconds), wrap=wrapped)
    return {
        name: {"batch_size": found.batch_size, "speeds": {t.batch_size: t.samples_per_second for t in found.trials}}
        for name, found in (("callback", finder.result), ("decorator", decorated))
    }


def objective(folder: Path, accumulation: int) -> dict[str, Any]:
    """Two ranks measure the noise scale of a quadratic whose noise is known, and keep or change its batch."""
    clock = Clock()
    finder = finder_of(clock, objective="goodput", lr_scaling="linear", max_val=64)
    trainer = make_trainer(folder, callbacks=[finder], max_steps=2, accumulate_grad_batches=accumulation)
    trainer.fit(Bowl(NOISE_SCALE, clock))
    result = finder.result
    return {"noise": [*result.noise_scale_interval], "batch_size": result.batch_size, "lr": result.lr}


def kept(folder: Path) -> dict[str, Any]:
    """The effective batch is kept: a larger micro-batch, and the same steps as without a finder at these values."""
    clock = Clock()
    finder = finder_of(clock, objective="auto", max_val=None)
    tuned = fitted(make_trainer(folder, callbacks=[finder], accumulate_grad_batches=4), Net(clock=clock))
    result = finder.result
    settings = {"accumulate_grad_batches": result.accumulation}
    assert_same(tuned, fitted(make_trainer(folder, **settings), Net(batch_size=result.batch_size)))
    return {"batch_size": result.batch_size, "accumulation": result.accumulation, "lr": result.lr}


class Hooked(Job):
    """Reduces its gradients through a hook of its own, which takes seconds."""

    reduced: ClassVar[list[float]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and not model._comm_hooks:
            model.register_comm_hook(None, _slow_hook(self.clock))
        return super().configure_optimizers()


def _slow_hook(clock: Clock) -> Any:
    def slow(state: Any, bucket: Any):  # DDP refuses annotations that are text
        clock.now += EXCHANGE_SECONDS
        return allreduce_hook(state, bucket)

    slow.__annotations__.clear()
    return slow


class Lap(pl.Callback):
    """Notes how long the steps of the training took."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds, self._since = clock, [], 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._since = self.clock.now

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(self.clock.now - self._since)


def hooked(folder: Path) -> dict[str, Any]:
    """What the finder says of a run whose reductions go through a slow hook, and what the run does."""
    clock = Clock()
    finder = finder_of(clock, init_val=FIRST, max_val=MOST, lr_arg_name=None, steps_per_trial=STEPS)
    lap = Lap(clock)
    make_trainer(folder, callbacks=[finder, lap]).fit(Hooked(clock, lambda size: 1.0 + size / 16))
    size = finder.result.batch_size
    (found,) = {trial.samples_per_second for trial in finder.result.trials if trial.batch_size == size}
    return {"found": found, "real": 2 * size * len(lap.seconds) / sum(lap.seconds), "batch_size": size}


CASES = {
    "hooked": hooked,
    "noise": lambda folder: objective(folder, 1),
    "noise-accumulated": lambda folder: objective(folder, 4),
    "kept": kept,
    "plain": lambda folder: same(folder, dict),
    "bf16-accumulated": lambda folder: same(folder, lambda: {"precision": "bf16-mixed", "accumulate_grad_batches": 4}),
    "static-graph": lambda folder: same(folder, lambda: {"strategy": DDPStrategy(static_graph=True)}),
    "bucket-view": lambda folder: same(
        folder, lambda: {"strategy": DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True)}
    ),
    "offload": lambda folder: same(folder, lambda: {"strategy": lo.DDPOffloadStrategy(budget="2MiB")}),
    "out-of-memory": lambda folder: same(folder, dict, Tight, max_val=24),
    "out-of-memory-manual": lambda folder: same(folder, dict, TightManual, max_val=24),
    "not-provoked": lambda folder: same(folder, dict, allow_oom=False),
    "collectives": lambda folder: {**same(folder, dict, Talking, init_val=16), "first": Talking.tried[0]},
    "collectives-in-hook": lambda folder: same(folder, dict, TalkingInHook),
    "synchronised": lambda folder: same(folder, dict, Synchronised),
    "sharded": lambda folder: same(folder, lambda: {"strategy": ModelParallelStrategy(2, 1)}, Sharded),
    "refusing": lambda folder: kept_as_configured(folder, Refusing),
    "shy": lambda folder: kept_as_configured(folder, Shy),
    "reading": lambda folder: same(folder, dict, Reading),
    "broken": broken,
    "alike": alike,
}


def main(folder: Path, names: list[str]) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # trials collect garbage: not what was imported
    found: dict[str, Any] = {}
    rank = 0
    for name in names or CASES:
        try:
            found[name] = CASES[name](folder)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        rank = torch.distributed.get_rank()
    gc.unfreeze()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()  # Lightning leaves a gloo one, whose threads must not outlive Python


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
