"""What backward reads back, and then writes by its address, may leave the device before: Liger's kernels do so."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_offload.plugins.report import Report
from tests.engine.short_training import train

WIDTH, ROWS, NUM_BLOCKS, NUM_STEPS = 64, 512, 3, 6


class _GatedInPlace(torch.autograd.Function):
    """``silu(a) * b``, whose gradients go to the memory of what it saved, by a kernel that is given addresses."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (a, b) = gradients, ctx.saved_tensors
        addresses = a.data_ptr(), b.data_ptr()
        gate = torch.sigmoid(a)
        of_a, of_b = gradient * b * (gate * (1 + a * (1 - gate))), gradient * a * gate
        for address, made in zip(addresses, (of_a, of_b), strict=True):
            ctypes.memmove(address, made.data_ptr(), made.nbytes)
        return a, b


class _Block(nn.Module):
    def __init__(self, *, reads_again: bool) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.reads_again = reads_again

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        gate, up = self.gate(normed), self.up(normed)
        read = torch.sin(up) if self.reads_again else None  # saves `up`; its node comes after that of the function
        out: Tensor = x + self.down(_GatedInPlace.apply(gate, up))  # type: ignore[no-untyped-call]
        return out + 0.1 * read[:, :WIDTH] if read is not None else out


def _train(
    policy: str | None = None, budget: int | None = None, *, reads_again: bool = False
) -> tuple[list[bytes], Report | None]:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(_Block(reads_again=reads_again) for _ in range(NUM_BLOCKS)))

    return train(net, (ROWS, WIDTH), policy, budget, num_steps=NUM_STEPS)


def test_written_after_it_was_read() -> None:
    """Almost all of it may leave, and budgets between the floor and the plain peak are met."""
    expected, _ = _train()
    for policy in ("all-swap", "all-recompute"):
        actual, report = _train(policy)
        assert actual == expected
        assert report is not None
        assert report.swapped_bytes + report.recomputed_bytes > 20 * report.kept_bytes
    assert report is not None
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    assert report.floor_bytes < 0.7 * report.plain_peak_bytes
    for share in (0.2, 0.6):
        budget = int(report.floor_bytes + share * (report.plain_peak_bytes - report.floor_bytes))
        actual, planned = _train("auto", budget)
        assert actual == expected
        assert planned is not None
        assert planned.measured_peak_bytes is not None
        assert planned.measured_peak_bytes <= budget


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute", "auto"])
def test_read_again_after_it_was_written(policy: str) -> None:
    """What another node reads after the write is that node's, as it is in plain PyTorch."""
    expected, _ = _train(reads_again=True)
    actual, report = _train(policy, reads_again=True)
    assert actual == expected
    assert report is not None
    if policy == "auto":
        assert report.floor_bytes is not None
        assert report.plain_peak_bytes is not None
        budget = (report.floor_bytes + report.plain_peak_bytes) // 2
        assert _train("auto", budget, reads_again=True)[0] == expected
