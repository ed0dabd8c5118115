"""A forked child neither hangs nor harms its parent: its copies of lanes, slabs and the spill file are not its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_offload import MemoryPlugin
from lightning_offload.errors import SpillError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def in_child(body: Callable[[], None]) -> int:
    """Exit status of a fork that runs this; 0 if it raised nothing."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def training(tier: str, tmp_path: Path) -> tuple[MemoryPlugin, Callable[[], list[torch.Tensor]]]:
    """An attached plugin, and a step that returns gradients."""
    folder: dict[str, Any] = {"spill_dir": tmp_path} if tier == "disk" else {}
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)))
    batch = torch.randn(512, 64)
    memory = MemoryPlugin(policy="all-swap", tier=tier, device="cpu", module=model, **folder)
    memory.attach()

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        with memory.step(batch):
            model(batch).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    return memory, step


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_child_that_detaches_leaves_the_parent_alone(tier: str, tmp_path: Path) -> None:
    """Threads, memory and file stay the parent's."""
    memory, step = training(tier, tmp_path)
    expected = [step() for _ in range(5)][-1]
    assert in_child(memory.detach) == 0
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    memory.detach()


def test_child_trains_on_through_host_memory(tmp_path: Path) -> None:
    """Without threads it copies inline, exactly."""
    memory, step = training("host", tmp_path)
    expected = [step() for _ in range(5)][-1]

    def train() -> None:
        assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))

    assert in_child(train) == 0
    memory.detach()


def test_child_may_not_use_the_spill_file(tmp_path: Path) -> None:
    """It is told so, or keeps its tensors; either way the parent's gradients are right."""
    memory, step = training("disk", tmp_path)
    expected = [step() for _ in range(5)][-1]

    def train() -> None:
        try:
            found = step()
        except SpillError:
            return
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    assert in_child(train) == 0
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    memory.detach()
