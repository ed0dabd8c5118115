"""Where the tests run, and how they make CUDA repeat itself to the bit."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin

DEVICE = torch.device(os.environ.get("LIGHTNING_OFFLOAD_TEST_DEVICE", "cuda"))
"""The device under test."""

IS_CUDA = DEVICE.type == "cuda"
IS_EMULATED = os.environ.get("EMULATED_CUDA") == "1"
"""Whether CUDA is the emulated device: tests/emulated_cuda/README.md."""

_MODE = os.environ.get("EMULATED_CUDA_MODE", "threads") if IS_EMULATED else ""

ARE_COPIES_FIRST = _MODE == "lazy" and os.environ.get("EMULATED_CUDA_POLICY") == "copies_first"
"""Whether copies are done before all else that could be done, so that who does not wait for them sees the same bits."""

IS_FAST = IS_CUDA and not IS_EMULATED
"""Whether large models train in seconds."""

IS_AHEAD = IS_FAST or _MODE in {"lazy", "threads"}
"""Whether the host may be ahead of all that it asked of the device: in threads it is where they get no processor."""

MARKS = [pytest.mark.gpu] if IS_CUDA else []
"""Of tests that are skipped where the device under test is missing."""

CUDA_MARKS = [pytest.mark.gpu]
"""Of tests that mean nothing without CUDA."""

# Kernels and libraries warn about themselves, each version about something else. What is ours to mend shows elsewhere.
TOLERANT = pytest.mark.filterwarnings("ignore")

NOT_DETERMINISTIC = "deterministic"
"""What torch's complaint about an op without a deterministic kernel contains."""


@contextlib.contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """Ask for kernels that repeat themselves; memory that nobody wrote holds NaNs meanwhile.

    Args:
        warn_only: Whether ops that have no such kernel may run all the same.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def take_races() -> list[str]:
    """What the emulated device saw of accesses that nothing orders, since this was last asked; nothing elsewhere."""
    if not IS_EMULATED:
        return []
    import emulated_cuda

    races: list[str] = emulated_cuda.take_races()
    return races


def clean() -> None:
    """Give back to the device whatever earlier tests left in its allocator."""
    gc.collect()
    if IS_CUDA:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def warm_up() -> int:
    """Clean, and let cuBLAS make what it keeps for each thread: the bytes of that."""
    clean()
    before = torch.cuda.memory_allocated(DEVICE)
    layer = nn.Linear(64, 64, device=DEVICE)
    layer(torch.ones(64, 64, device=DEVICE)).sum().backward()
    del layer
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(DEVICE) - before


def peak_of_step(model: nn.Module, batch: Mapping[str, Tensor], memory: MemoryPlugin | None) -> int:
    """Run forward and backward, as a step of the plugin if there is one; the most bytes allocated meanwhile.

    Args:
        model: Gives its loss, or has one in what it gives.
        batch: Its arguments, on the device.
        memory: The plugin; None for plain PyTorch.
    """
    torch.cuda.reset_peak_memory_stats(DEVICE)
    with memory.step(**batch) if memory is not None else contextlib.nullcontext():
        out = model(**batch)
        loss: Tensor = out if isinstance(out, Tensor) else out.loss
        loss.backward()  # type: ignore[no-untyped-call]
    return torch.cuda.max_memory_allocated(DEVICE)
