"""The differentiable ops of torch's `op_db`, called plainly and in place, give the same bits under a plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_offload import MemoryPlugin
from tests.catalogue.samples import Entry, op_entries, share_of
from tests.catalogue.steps import check


@pytest.mark.parametrize("entry", share_of(op_entries()), ids=str)
def test_ops(entry: Entry) -> None:
    """Outputs, loss, gradients and random state of a few steps are those of plain PyTorch."""
    check(entry)


def test_limit_of_smoothed_labels() -> None:
    """Weighted classes, smoothed labels and the mean give the loss and gradient to the last bits, if not exactly."""
    generator = torch.Generator().manual_seed(0)
    logits, weight = torch.randn(64, 10, generator=generator).requires_grad_(), torch.rand(10, generator=generator)
    target = torch.randint(0, 10, (64,), generator=generator)

    def loss() -> torch.Tensor:
        return F.cross_entropy(logits.sin(), target, weight, label_smoothing=0.1, ignore_index=3)

    expected = loss()
    (gradient,) = torch.autograd.grad(expected, logits)
    with MemoryPlugin(policy="all-recompute") as memory:
        for _ in range(4):
            with memory.step():
                found = loss()
                found.backward()  # type: ignore[no-untyped-call]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(logits.grad, gradient, rtol=1e-5, atol=1e-8)
            logits.grad = None
