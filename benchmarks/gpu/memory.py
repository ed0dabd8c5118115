"""The peak of one step, as the device's allocator counts it; on a CPU, as the demo's tracker does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.workloads import Workload
from examples.demo.tracker import CudaPeak, peak_tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak of a step.

    Attributes:
        allocated_bytes: Of live tensors.
        reserved_bytes: Of memory held by the allocator; None where there is no such thing.
    """

    allocated_bytes: int
    reserved_bytes: int | None


class CudaMeter(CudaPeak):
    """Measures the peak between its beginning and its end.

    Args:
        device: A CUDA device.
    """

    @property
    def peak(self) -> Peak:
        """The highest peak so far, known when the measurement has ended."""
        return Peak(allocated_bytes=self.peak_bytes, reserved_bytes=self.reserved_bytes)


def measure_peak(workload: Workload, step: Callable[[], None]) -> Peak:
    """Measure a step, after one of its kind in an allocator that holds nothing of others."""
    device = workload.batch[0].device
    workload.model.zero_grad(set_to_none=True)
    if device.type != "cuda":
        with peak_tracker(device) as tracker:
            tracker.add([*workload.model.parameters(), *workload.model.buffers(), *workload.batch])
            step()
        return Peak(allocated_bytes=tracker.peak_bytes, reserved_bytes=None)
    free_memory(device)
    step()
    workload.model.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    with CudaMeter(device) as meter:
        step()
    return meter.peak


def free_memory(device: torch.device) -> None:
    """Give back to the device what no tensor uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
