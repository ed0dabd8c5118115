"""A Fabric loop under `OffloadStrategy` leaves exactly what the plain loop leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_offload.fabric
from lightning_offload import UnsupportedError
from lightning_offload.errors import BudgetError
from lightning_offload.fabric import DDPOffloadStrategy, OffloadStrategy
from lightning_offload.plugins.report_data import Report
from tests.adapters.nets import NUM_STEPS, assert_same, net, rows, state_of


def train(strategy: Any = "auto", *, precision: str = "32-true", bare: bool = False) -> dict[str, Tensor]:
    """An ordinary Fabric loop with evaluation."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=precision)
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(3)
    losses = []
    for x, y in fabric.setup_dataloaders(rows()):
        loss = nn.functional.cross_entropy(model(x).float(), y)
        if bare:
            loss.backward()
        else:
            fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        model.eval()
        with torch.no_grad():
            losses.append(model(x).sum())
        model.train()
    return state_of(model, optimizer, losses)


def offloaded(budget: Any, policy: str, **settings: Any) -> tuple[dict[str, Tensor], Report]:
    strategy = OffloadStrategy(budget, policy=policy)
    found = train(strategy, **settings)
    report = strategy.memory.report()
    strategy.memory.detach()
    return found, report


@pytest.mark.parametrize("policy", ["auto", "all-swap", "all-recompute"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_exact(precision: str, policy: str) -> None:
    """Losses, parameters, buffers, optimizer and random state are equal, and every training forward was a step."""
    plain = train(precision=precision)
    budget: Any = "1GiB"
    if policy == "auto":
        _, seen = offloaded(budget, "all-swap", precision=precision)
        assert seen.floor_bytes is not None
        assert seen.plain_peak_bytes is not None
        budget = f"{(seen.floor_bytes + seen.plain_peak_bytes) // 2}B"
    ours, report = offloaded(budget, policy, precision=precision)
    assert_same(ours, plain)
    assert report.num_steps == NUM_STEPS
    assert report.swapped_bytes + report.recomputed_bytes > 0


def test_bare_backward() -> None:
    """`loss.backward()` in place of `fabric.backward(loss)` is equal too."""
    ours, report = offloaded("1GiB", "all-recompute", bare=True)
    assert_same(ours, train(bare=True))
    assert report.num_steps == NUM_STEPS


def test_names() -> None:
    """Both names are in Fabric's registry, and give the strategies."""
    for name, cls in (("offload", OffloadStrategy), ("ddp_offload", DDPOffloadStrategy)):
        strategy = Fabric(accelerator="cpu", devices=1, strategy=name).strategy
        assert type(strategy) is cls
        assert strategy.memory.enabled


def test_checkpoints(tmp_path: Path) -> None:
    """The plugin is part of the state that Fabric saves and loads, and a run starts with the plans."""
    for is_first in (True, False):
        strategy = OffloadStrategy("1GiB", policy="all-recompute")
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        model = fabric.setup(net())
        state = {"model": model, "memory": strategy.memory}
        if not is_first:
            fabric.load(tmp_path / "c.ckpt", state)
            assert len(strategy.memory.state_dict()["plans"]) == 1
        for _ in range(3):
            fabric.backward(model(torch.ones(64, 32)).sum())
        if is_first:
            fabric.save(tmp_path / "c.ckpt", state)
        strategy.teardown()
        assert not model.module._forward_pre_hooks


def test_models_that_are_gone() -> None:
    """A strategy that is used for one model after another takes its hooks off when the last is gone."""
    strategy = OffloadStrategy("1GiB", policy="all-swap")
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    for num_steps in (1, 2):
        model = fabric.setup(net())
        fabric.backward(model(torch.ones(64, 32)).sum())
        assert strategy.memory.report().num_steps == num_steps
        del model
        assert strategy.memory.num_followed == 0


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keywords are checked at once, and more than one process is told which strategy to use."""
    with pytest.raises(BudgetError):
        OffloadStrategy("much")
    with pytest.raises(TypeError, match="bugdet"):
        OffloadStrategy(bugdet="1GiB")
    with pytest.raises(AttributeError, match="NoStrategy"):
        _ = lightning_offload.fabric.NoStrategy
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="ddp_offload"):
        Fabric(accelerator="cpu", devices=1, strategy=OffloadStrategy("1GiB"))
