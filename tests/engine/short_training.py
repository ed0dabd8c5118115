"""A few steps of training, plainly or under a plugin: every bit that they leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.report import Report


def train(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    policy: str | None = None,
    budget: int | None = None,
    *,
    num_steps: int = 6,
    **keywords: Any,
) -> tuple[list[bytes], Report | None]:
    """Train on random batches; losses, gradients and the random state as bytes, which are on no device.

    Args:
        build: Makes the model.
        shape: Of a batch.
        policy: That of the plugin; None for a plain training, whose report is None.
        budget: Bytes.
        num_steps: Steps.
        keywords: More of the plugin's.
    """
    model, found, memory = build(), list[bytes](), None
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with contextlib.ExitStack() as stack:
        if policy is not None:
            memory = MemoryPlugin(
                f"{budget}B" if budget else None, policy=policy, device="cpu", module=model, **keywords
            )
            memory.attach()
            stack.callback(memory.detach)
        for step in range(num_steps):
            torch.manual_seed(step)
            x = torch.randn(shape)
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                loss = model(x).square().mean()
                loss.backward()
            found.append(_bits(loss))
            found += [_bits(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        found.append(_bits(torch.get_rng_state()))
        return found, memory.report() if memory is not None else None


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()
