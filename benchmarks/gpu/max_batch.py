"""One size of batch within a cap on the device's memory: does a whole training step run?

The cap holds for what the allocator reserves, in a process of its own. A plain step fits if it does not run out
of memory; one under management is given the cap less a margin for the allocator's own losses as its budget. On a
CPU, where there is no cap, the tracker's peak is compared with it: enough to try the search.
"""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from benchmarks.gpu.memory import Peak, peak_within
from benchmarks.gpu.models import workload
from benchmarks.pairs import synchronize
from benchmarks.workloads import Workload
from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError

_MARGIN = 0.03
_NUM_STEPS = 7
"""Enough for the plan to be final, and for the optimizer to have its state; the peak is that of one more."""


def trial(
    device: torch.device, *, quick: bool, model: str, cap_bytes: int, is_managed: bool, batch_size: int
) -> dict[str, Any]:
    """Try one size.

    Returns:
        `fits`, `need_bytes` where it is known what a step of this size needs at least, `reason` if it does not
        fit, and `figures` and `config` if it does.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total, device)
    need_bytes = None
    try:
        trained = workload(model, device, quick=quick, batch_size=batch_size)
        budget = f"{round((1 - _MARGIN) * cap_bytes)}B"
        memory = MemoryPlugin(budget, module=trained.model) if is_managed else None
        with memory if memory is not None else nullcontext():
            seconds, peak = _train(trained, memory)
            peak_bytes = peak.allocated_bytes
            need_bytes = memory.report().floor_bytes if memory is not None else peak_bytes
        if device.type != "cuda" and peak_bytes > cap_bytes:
            return {"fits": False, "need_bytes": need_bytes, "reason": f"its peak is {peak_bytes}"}
    except Exception as error:
        return refusal(error, need_bytes)
    figures = {"samples_per_second": batch_size / seconds, "step_seconds": seconds, "peak_bytes": peak_bytes}
    if peak.reserved_bytes is not None:
        figures["reserved_bytes"] = peak.reserved_bytes
        figures["num_alloc_retries"] = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    config = {name: value for name, value in trained.config.items() if name != "batch_size"}
    return {"fits": True, "need_bytes": need_bytes, "figures": figures, "config": config}


def _train(trained: Workload, memory: MemoryPlugin | None) -> tuple[float, Peak]:
    """Run training steps with updates; returns the seconds of the quickest one and the peak of the last one."""
    device = trained.batch[0].device
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=1e-3, momentum=0.9)
    step = functools.partial(memory.step, *trained.batch) if memory is not None else nullcontext
    best = float("inf")
    for _ in range(_NUM_STEPS):
        synchronize()
        start = time.perf_counter()
        _train_step(trained, optimizer, step())
        synchronize()
        best = min(best, time.perf_counter() - start)
    beside = [*trained.model.parameters(), *trained.model.buffers(), *trained.batch]
    return best, peak_within(device, beside, lambda: _train_step(trained, optimizer, step()))


def _train_step(trained: Workload, optimizer: torch.optim.Optimizer, context: AbstractContextManager[object]) -> None:
    with context:
        trained.loss(trained.model, trained.batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def refusal(error: Exception, need_bytes: int | None) -> dict[str, Any]:
    """What a trial returns where an error says that the size does not fit; any other is raised."""
    if isinstance(error, BudgetInfeasibleError):
        return {"fits": False, "need_bytes": error.floor_bytes, "reason": str(error)}
    if not is_out_of_memory(error):
        raise error
    return {"fits": False, "need_bytes": need_bytes, "reason": str(error)[:300]}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out here or further down the chain of causes."""
    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text:
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_out_of_memory(cause)
