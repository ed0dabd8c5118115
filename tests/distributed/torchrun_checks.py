"""The checks that two processes under torchrun run one after another; each rank writes how they went.

Usage: torchrun --nproc-per-node=2 torchrun_checks.py FOLDER [CHECK ...]
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset

from lightning_offload import (
    BudgetInfeasibleError,
    DDPOffloadStrategy,
    MemoryPlugin,
    OffloadMonitor,
    OffloadStrategy,
    UnsupportedError,
)
from tests.distributed.fitting import (
    Phases,
    SyncedNet,
    Unused,
    compare,
    fit,
    make_trainer,
    num_deviations,
)
from tests.lightning.models import ConvNet, Gan, assert_same, images
from tests.shares import is_all

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
RANK = int(os.environ.get("RANK", 0))


# ---- bit for bit as plain DDP, and under a plan that predicts the peak


def plain_ddp() -> None:
    strategy = compare()
    assert num_deviations(strategy) == 0


def accumulation() -> None:
    strategy = compare(accumulate_grad_batches=4)
    assert num_deviations(strategy) == 0
    assert len(strategy.memory.step_kinds) == 2  # with and without the all-reduce


SIMPLE = "auto" if is_all() else "all-swap"
"""Where others show that the planner's budget is met, and what is of interest is what the plan meets."""


def bf16_mixed() -> None:
    compare(policy=SIMPLE, precision="bf16-mixed")


def bf16_mixed_accumulation() -> None:
    compare(precision="bf16-mixed", accumulate_grad_batches=4)


def static_graph() -> None:
    assert num_deviations(compare(ddp={"static_graph": True})) == 0


def unused_parameters_accumulation() -> None:
    compare(Unused, ddp={"find_unused_parameters": True}, policy=SIMPLE, accumulate_grad_batches=4)


def bucket_views_accumulation() -> None:
    compare(ddp={"gradient_as_bucket_view": True}, accumulate_grad_batches=4)


def several_buckets() -> None:
    assert num_deviations(compare(ddp={"bucket_cap_mb": 0.01})) == 0


def all_swap() -> None:
    compare(policy="all-swap")


def all_recompute() -> None:
    compare(policy="all-recompute")


def synced_norm() -> None:
    compare(SyncedNet)


def synced_norm_recomputed() -> None:
    compare(SyncedNet, policy="all-recompute", accumulate_grad_batches=4)


def manual_optimization() -> None:
    keywords: dict[str, Any] = {"find_unused_parameters": True}
    plain, _ = fit(DDPStrategy(**keywords), Gan)
    for policy in ("all-swap", "all-recompute"):
        ours, _ = fit(DDPOffloadStrategy("1GiB", policy=policy, **keywords), Gan)
        assert_same(ours, plain)


# ---- memory


def buckets_count() -> None:
    """What the plan holds persistent is exactly parameters, buffers, optimizer state, the batch, and the buckets."""

    class Read(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.losses.clear()  # what the user keeps counts, too

        def on_train_end(self, trainer: Any, module: Any) -> None:
            nonlocal num_bytes
            state = [t for s in trainer.optimizers[0].state.values() for t in s.values()]
            batch = [torch.empty(4, 3, 12, 12), torch.empty(4, dtype=torch.int64)]
            parameters = list(module.parameters())
            # The loss that Lightning scales between forward and backward is not among them: it dies within the step.
            tensors = [*parameters, *module.buffers(), *state, *batch]
            buckets = sum(p.nbytes for p in parameters)
            num_bytes = sum(t.nbytes for t in tensors) + buckets

    for keywords in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        num_bytes = 0
        _, trainer = fit(DDPOffloadStrategy("1GiB", **keywords), callbacks=[Read()])
        planned = trainer.strategy.memory.report().planned
        found = planned.graph.persistent_bytes - num_bytes
        # find_unused_parameters has a map of the parameters used beside, 4 bytes each, on the host and on the device
        num_parameters = len(list(ConvNet().parameters()))
        expected = 2 * 4 * num_parameters if "find_unused_parameters" in keywords else 0
        # Lightning broadcasts whether there was a SIGTERM: gloo's thread may still hold that tensor
        assert found in (expected, expected + 8), (keywords, found)


def buckets_go_with_the_fit() -> None:
    """The next fit of a Trainer has the memory of the last one's buckets: they wait for no garbage collection."""
    trainer, module = make_trainer(DDPOffloadStrategy("1GiB", policy="all-swap")), ConvNet()
    gc.collect()
    gc.disable()
    for num_epochs in (1, 2):
        trainer.fit_loop.max_epochs = num_epochs
        trainer.fit(module, images(8))
        deadline = time.monotonic() + 1  # gloo's thread may still hold the last one
        while trainer.strategy.memory.data_parallel.buckets.sizes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert trainer.strategy.memory.data_parallel.buckets.sizes() == {}
    gc.enable()


# ---- ranks on their own


class Ragged(Dataset[Any]):
    """Batches whose size changes at another step on each rank."""

    def __init__(self) -> None:
        self.data = list(images(24, 8))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[Tensor]:
        x, y = self.data[index]
        size = 4 + 2 * (index // (5 + 4 * RANK) % 3)
        return [x[:size], y[:size]]


def shapes_differ_between_ranks() -> None:
    settings: dict[str, Any] = {"data": lambda: DataLoader(Ragged(), batch_size=None), "use_distributed_sampler": False}
    plain, _ = fit(DDPStrategy(), **settings)
    ours, trainer = fit(DDPOffloadStrategy("1GiB", policy="all-swap"), **settings)
    assert_same(ours, plain)
    assert trainer.strategy.memory.report().num_shapes == 3
    assert num_deviations(trainer.strategy) == 0


class Lopsided(ConvNet):
    """Rank 1 runs its batch in two halves: other ops than rank 0, on the same shapes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Lopsided, self).forward(part) for part in x.chunk(1 + dist.get_rank())])


def checkpoints() -> None:
    """Rank 0's plans are saved; a rank that they do not fit makes its own, and all is exact."""
    path = FOLDER / "epoch.ckpt"

    def twice(strategy: Callable[[], Any], callbacks: list[Any]) -> Any:
        _, trainer = fit(strategy(), Lopsided)
        trainer.save_checkpoint(path)
        return fit(strategy(), Lopsided, ckpt_path=path, max_epochs=2, callbacks=callbacks)[0]

    plain = twice(DDPStrategy, [])
    phases = Phases()
    ours = twice(lambda: DDPOffloadStrategy("1GiB", policy="all-swap"), [phases])
    assert_same(ours, plain)
    seen = [r.phase for r in phases.reports]
    assert seen[-1] == "planned"
    assert (set(seen) == {"planned"}) == (RANK == 0), seen


# ---- names, settings and callbacks


def monitor() -> None:
    """The callback logs the figures of rank 0, and changes nothing."""
    plain, _ = fit(DDPStrategy())
    logger = CSVLogger(FOLDER, name="", version="log")
    ours, _ = fit(DDPOffloadStrategy("1GiB"), logger=logger, log_every_n_steps=1, callbacks=[OffloadMonitor()])
    assert_same(ours, plain)
    if RANK == 0:
        assert "offload/budget_bytes" in (FOLDER / "log" / "metrics.csv").read_text()


def offload_means_ddp() -> None:
    trainer = make_trainer("offload")
    assert isinstance(trainer.strategy, DDPOffloadStrategy)
    assert not isinstance(trainer.strategy, OffloadStrategy)
    assert isinstance(make_trainer("ddp_offload").strategy, DDPOffloadStrategy)
    with pytest.raises(UnsupportedError, match="DDPOffloadStrategy"):
        make_trainer(OffloadStrategy("1GiB"))


def disabled() -> None:
    plain, _ = fit(DDPStrategy())
    ours, trainer = fit(DDPOffloadStrategy("1GiB", enabled=False))
    assert_same(ours, plain)
    assert trainer.strategy.memory.report().num_steps == 0


def infeasible_budget() -> None:
    """Every rank raises, before it issues a collective without the others: the next fit finds the group as it was."""
    trainer = make_trainer(DDPOffloadStrategy("64KiB", timeout=timedelta(seconds=30)))
    with pytest.raises(BudgetInfeasibleError):
        trainer.fit(ConvNet(), images(40))
    plain_ddp()


# ---- collectives are DDP's own, where and when it makes them


def _joined(memory: MemoryPlugin | None) -> list[bytes]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if memory is not None:
        memory.attach(model)
    try:
        with Join([model]):
            for i in range(1 if RANK else 9):
                x = torch.full((4, 8), float(i))
                with memory.step(x) if memory is not None else contextlib.nullcontext():
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if memory is not None:
            memory.detach()
    return [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]


def a_rank_that_joins_after_one_batch() -> None:
    """Its buckets are laid out anew when DDP asks the others for that, which is after they were told who has joined."""
    plain = _joined(None)
    assert _joined(MemoryPlugin("1GiB", policy="all-recompute")) == plain
    assert _joined(MemoryPlugin("1GiB", policy="all-swap")) == plain


def a_step_of_one_rank_alone() -> None:
    """A saliency of the model inside the wrapper issues no collective, so that all meet in the next one."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    with MemoryPlugin("1GiB", module=model) as memory:
        for i in range(4):
            x = torch.full((4, 8), float(i))
            with memory.step(x):
                model(x).mean().backward()
            if RANK == 0:
                image = torch.ones(2, 8, requires_grad=True)
                with memory.step(image):
                    torch.autograd.grad(model.module(image).sum(), image)
            met = torch.ones(3)
            dist.all_reduce(met)
            assert met.tolist() == [2.0, 2.0, 2.0]


# ---- the last ones, after which the job is over


def infeasible_budget_on_one_rank() -> None:
    """Nobody catches its error, so its process ends, and with it the job: the other one is not left waiting."""
    budget = "64KiB" if RANK == 1 else "1GiB"
    make_trainer(DDPOffloadStrategy(budget, timeout=timedelta(minutes=30))).fit(ConvNet(), images(400))


class Breaks(ConvNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if RANK == 1 and batch_idx == 5:
            raise KeyError("on one rank alone")
        return loss


def exception_on_one_rank() -> None:
    """It ends the fit of both ranks, the other one's in a failed collective, and nothing of ours stays behind."""
    trainer = make_trainer(DDPOffloadStrategy("1GiB", policy="all-swap", timeout=timedelta(seconds=30)))
    plugin_class = type(trainer.precision_plugin)
    try:
        trainer.fit(Breaks(), images(40))
    except KeyError:
        assert RANK == 1
    except RuntimeError:
        assert RANK == 0
    else:
        raise AssertionError("the fit went on")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not _get_current_dispatch_mode_stack()
    assert type(trainer.precision_plugin) is plugin_class
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not trainer.strategy.memory._steps.is_attached


CHECKS = (
    offload_means_ddp, plain_ddp, accumulation, bf16_mixed, bf16_mixed_accumulation, static_graph,
    unused_parameters_accumulation, bucket_views_accumulation, several_buckets, all_swap, all_recompute, synced_norm,
    synced_norm_recomputed, manual_optimization, buckets_count, buckets_go_with_the_fit, shapes_differ_between_ranks,
    checkpoints, monitor, disabled, infeasible_budget, a_rank_that_joins_after_one_batch, a_step_of_one_rank_alone,
    exception_on_one_rank,
)  # fmt: skip
ENDING = (infeasible_budget_on_one_rank,)
"""Those that end with an error, each in processes of its own."""


def main() -> None:
    torch.set_num_threads(1)
    done: list[str] = []
    only = sys.argv[2:]
    for check in [c for c in (*CHECKS, *ENDING) if c.__name__ in only or (not only and c in CHECKS)]:
        check()
        done.append(check.__name__)
        (FOLDER / f"rank{RANK}.json").write_text(json.dumps(done))
    os._exit(0)  # the process group is broken on purpose


if __name__ == "__main__":
    main()
