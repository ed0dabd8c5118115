"""Trains a model with 1 GiB of saved tensors, or 2, in a process of its own whose memory its parent watches.

Usage: ``python -m tests.engine.rss_child plain`` or ``... disk FOLDER``; writes JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from tests.shares import is_all

WIDTH = 64
ACTIVATION_MIB = 64 if is_all() else 32
ROWS = (ACTIVATION_MIB << 20) // (4 * WIDTH)
DEPTH = 16
NUM_PLAIN_STEPS = 2 if is_all() else 1
NUM_STEPS = 4
"""Recorded, verified, measured, and under the final plan."""
BUDGET_BYTES = (6 * ACTIVATION_MIB + 1) << 20
"""The smallest feasible one, to the MiB: the batch and the working set of a layer's backward."""


def model() -> nn.Sequential:
    """Layers of 16 KiB that save two activations each."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.SiLU())))


def batch() -> Tensor:
    """A batch of one activation's size."""
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def train(net: nn.Module, rows: Tensor, memory: MemoryPlugin | None, num_steps: int) -> str:
    """Some steps; a digest of losses and gradients, the same in each."""
    digests = set()
    for _ in range(num_steps):
        digest = hashlib.sha256()
        with memory.step(rows) if memory is not None else contextlib.nullcontext():
            loss = net(rows).square().mean()
            loss.backward()
        for tensor in (loss, *(weight.grad for weight in net.parameters())):
            assert tensor is not None
            digest.update(tensor.detach().numpy().tobytes())
        net.zero_grad()
        digests.add(digest.hexdigest())
    (found,) = digests
    return found


def figures(mode: str, folder: str = "") -> dict[str, Any]:
    """Train, and say what came out and what was swapped."""
    net, rows = model(), batch()
    if mode == "plain":
        return {"digest": train(net, rows, None, NUM_PLAIN_STEPS)}
    with MemoryPlugin(BUDGET_BYTES, policy="all-swap", tier="disk", spill_dir=folder, module=net) as memory:
        digest = train(net, rows, memory, NUM_STEPS)
        report = memory.report()
    return {
        "digest": digest,
        "phase": report.phase,
        "swapped_bytes": report.swapped_bytes,
        "floor_bytes": report.floor_bytes,
        "step_seconds": report.measured_step_seconds,
        "stall_seconds": report.stall_seconds,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(figures(*sys.argv[1:])))
