"""The peak of one step, as the device's allocator counts it; on a CPU, as the demo's tracker does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.pairs import synchronize
from benchmarks.workloads import Workload
from examples.demo.tracker import peak_tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak of a step.

    Attributes:
        allocated_bytes: Of live tensors.
        reserved_bytes: Of memory held by the allocator; None where there is no such thing.
    """

    allocated_bytes: int
    reserved_bytes: int | None


def measure_peak(workload: Workload, step: Callable[[], None]) -> Peak:
    """Measure a step, after one of its kind in an allocator that holds nothing of others."""
    device = workload.batch[0].device
    workload.model.zero_grad(set_to_none=True)
    free_memory(device)
    step()
    workload.model.zero_grad(set_to_none=True)
    synchronize()
    return peak_within(device, [*workload.model.parameters(), *workload.model.buffers(), *workload.batch], step)


def peak_within(device: torch.device, beside: Iterable[Tensor], run: Callable[[], None]) -> Peak:
    """Measure the peak of whatever is run, with the tensors that are there beside it."""
    with peak_tracker(device) as tracker:
        tracker.add(beside)
        run()
    return Peak(allocated_bytes=tracker.peak_bytes, reserved_bytes=getattr(tracker, "reserved_bytes", None))


def free_memory(device: torch.device) -> None:
    """Give back to the device what no tensor uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
