"""One rank of two: trains plainly and in one of our ways with the same DDP, and compares; run by `test_data_parallel`.

Prints "fabric", "accelerate", "transformers" and "tuner" when every bit is equal, and "errors" when both ranks got
theirs.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin, TuningError
from tests.adapters.nets import assert_same, net, state_of


def batches() -> list[tuple[Tensor, Tensor]]:
    """Another six batches on each rank."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    rows = [torch.randn(32, 32, generator=generator) for _ in range(6)]
    found = [(x, torch.randint(0, 4, (32,), generator=generator)) for x in rows]
    gc.freeze()  # batches that wait for their turn, and what is left of other runs, are not what is looked at here
    return found


def with_fabric(policy: str | None) -> dict[str, Tensor]:
    from lightning.fabric import Fabric

    from lightning_offload.fabric import DDPOffloadStrategy

    strategy: Any = DDPOffloadStrategy("1GiB", policy=policy) if policy else "ddp"
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(3 + fabric.global_rank)
    losses = []
    for i, (x, y) in enumerate(batches()):
        with fabric.no_backward_sync(model, enabled=i % 2 == 0):
            losses.append(nn.functional.cross_entropy(model(x), y))
            fabric.backward(losses[-1])
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    if policy:
        check(strategy.memory, model.module)
        strategy.memory.detach()
    return state_of(model.module, optimizer, losses)


def with_accelerate(policy: str | None) -> dict[str, Tensor]:
    from accelerate import Accelerator

    from lightning_offload.accelerate import prepare_offload

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    memory = prepare_offload(accelerator, model, "1GiB", policy=policy) if policy else None
    torch.manual_seed(3 + accelerator.process_index)
    losses = []
    for x, y in batches():
        with accelerator.accumulate(model):
            losses.append(nn.functional.cross_entropy(model(x), y))
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
    if memory is not None:
        check(memory, accelerator.unwrap_model(model))
        memory.detach()
    return state_of(accelerator.unwrap_model(model), optimizer, losses)


QUIET = {"logging_strategy": "no", "eval_strategy": "no", "log_level": "error"}


def with_transformers(policy: str | None) -> dict[str, Tensor]:
    from transformers import PrinterCallback

    from lightning_offload.transformers import OffloadCallback
    from tests.adapters.test_transformers import trainer_for

    callback = OffloadCallback("1GiB", policy=policy) if policy else None
    trainer = trainer_for(Path("out"), callback, gradient_accumulation_steps=2, num_train_epochs=3, **QUIET)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if callback is not None:
        check(callback.memory, trainer.model, num_steps=9)
    return state_of(trainer.model, trainer.optimizer, trainer.losses)


def check(memory: MemoryPlugin, model: nn.Module, num_steps: int = 6) -> None:
    """Steps with and without an all-reduce have plans of their own, each with the gradient buckets in it."""
    report = memory.report()
    assert report.num_steps == num_steps
    assert len(memory.step_kinds) == 2
    assert report.planned is not None
    parameters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    found = report.planned.graph.persistent_bytes
    assert 4 * parameters <= found < 5 * parameters + 20_000, found / parameters  # with AdamW's state, and maybe .grad
    assert sum(memory.data_parallel.buckets.sizes().values()) == parameters


CAPACITY = 20
"""Largest batch for which the second rank has memory; the first has it for all."""


def fail() -> None:
    """An error of one rank is one of both at once: before a step, after an out-of-memory error, and after its end."""
    from lightning_offload.tuning.function import find_efficient_batch_size

    rank = torch.distributed.get_rank()

    def train(batch_size: int, when: str) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if when == "first" and rank == 1:
            raise KeyError(when)
        try:
            for _ in range(12):
                if when == "memory" and batch_size == 16:
                    raise torch.OutOfMemoryError("CUDA out of memory.") if rank == 0 else KeyError(when)
                model(torch.ones(batch_size, 4)).sum().backward()
                optimizer.step()
        finally:
            if when == "end" and rank == 1:
                raise KeyError(when)

    begin = time.monotonic()
    for when in ("first", "memory", "end"):
        with pytest.raises(KeyError if rank == 1 else TuningError) as caught:
            find_efficient_batch_size(train, 8, max_size=16)(when)
        assert rank == 1 or f"failed on rank 1 (KeyError: '{when}')" in str(caught.value), caught.value
    assert time.monotonic() - begin < 60


def tune() -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from lightning_offload.accelerate import find_efficient_batch_size

    # its first iteration reduces all gradients at its end, unless it is kept from that
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    rank = accelerator.process_index
    found: dict[str, Tensor] = {}

    def train(batch_size: int) -> None:
        accelerator.free_memory()
        model = net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for _ in range(12):
            x = torch.randn(batch_size, 32)
            loss = model(x).square().mean()
            if batch_size > CAPACITY and rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        found.clear()
        found.update(state_of(accelerator.unwrap_model(model), optimizer, losses))

    torch.manual_seed(3 + rank)
    tuned = find_efficient_batch_size(train, starting_batch_size=16, min_size=8, max_size=32, max_trials=6)
    tuned()
    ours = dict(found)
    size = tuned.result.batch_size
    assert size <= CAPACITY
    too_large = [trial for trial in tuned.result.trials if trial.batch_size > CAPACITY]
    assert too_large
    assert {trial.reason for trial in too_large} == {"rank 1: out of memory"}
    sizes: list[Any] = [None, None]
    torch.distributed.all_gather_object(sizes, size)
    assert sizes == [size, size]

    torch.manual_seed(3 + rank)
    train(size)
    assert_same(ours, found)


def main() -> None:
    runs = (
        ("fabric", with_fabric, "all-swap"),
        ("accelerate", with_accelerate, "all-recompute"),
        ("transformers", with_transformers, "all-swap"),
    )
    for name, train, policy in runs:
        assert_same(train(policy), train(None))
        sys.stdout.write(f"{name}\n")
    gc.freeze()  # trials collect garbage: not what was imported
    tune()
    sys.stdout.write("tuner\n")
    fail()
    sys.stdout.write("errors\n")
    gc.unfreeze()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
