"""A plan that was made elsewhere is followed on the device: copies are ordered, bits are those of plain training."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.graph.files import sibling_graph
from tests.gpu.device import DEVICE, MARKS, TOLERANT, clean

pytestmark = [*MARKS, TOLERANT]

NUM_STEPS = 5
FIRST = ["recording", "verifying", "measuring", "planned"]


def net() -> nn.Sequential:
    """Layers whose results are large beside their weights."""
    torch.manual_seed(1)
    layer = lambda: (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Sigmoid())  # noqa: E731
    return nn.Sequential(*(module for _ in range(6) for module in layer())).to(DEVICE)


def train(memory: MemoryPlugin | None, *, logs: bool = False) -> tuple[list[Tensor], list[str]]:
    """The gradients of each step, and its phases; steps that log run ops and save a number that no plan knows of."""
    clean()
    model, found, phases = net(), [], []
    scale = torch.ones((), device=DEVICE, requires_grad=True)
    for step in range(NUM_STEPS):
        batch = torch.full((1024, 64), 0.01 * (step + 1), device=DEVICE)
        with memory.step(batch) if memory is not None else contextlib.nullcontext():
            out = model(batch)
            if logs:
                out.detach().abs().max()
            loss = out.square().mean()
            (loss * scale if logs else loss).backward()
        found += [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        model.zero_grad()
        if memory is not None:
            phases.append(memory.phase)
    return found, phases


@pytest.mark.parametrize("policy", ["auto", "all-swap", "all-recompute"])
@pytest.mark.parametrize("logs", [False, True], ids=["as captured", "logs"])
def test_followed_from_the_first_step(tmp_path: Path, policy: str, logs: bool) -> None:
    """Whatever it does, also where ops and a saved number come between; and nothing is recorded."""
    with MemoryPlugin(budget=None, policy="all-swap", module=net()) as memory:
        train(memory)
        report = memory.report()
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    half = (report.floor_bytes + report.plain_peak_bytes) // 2
    with MemoryPlugin(budget=half if policy == "auto" else None, policy=policy, module=net()) as memory:
        _, phases = train(memory)
        (row,) = memory.state_dict()["plans"]
    assert phases[: len(FIRST)] == FIRST
    path = tmp_path / "plan.json"
    path.write_text(row["plan"])
    sibling_graph(path).write_text(row["graph"])

    expected, _ = train(None, logs=logs)
    with MemoryPlugin(budget="1GiB", plan=path, module=net()) as memory:
        found, phases = train(memory, logs=logs)
        report = memory.report()
    assert phases == ["planned"] * NUM_STEPS
    assert report.swapped_bytes + report.recomputed_bytes > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
