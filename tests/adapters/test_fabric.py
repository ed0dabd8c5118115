"""A Fabric loop under `OffloadStrategy` leaves exactly what the plain loop leaves."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import warnings
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
from lightning_offload.plugins.report import Report
from tests.adapters.nets import NUM_STEPS, Net, assert_same, net, rows, state_of


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


@functools.cache
def plainly(precision: str) -> dict[str, Tensor]:
    """What the plain loop leaves."""
    return train(precision=precision)


@pytest.mark.parametrize("policy", ["auto", "all-swap", "all-recompute"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_exact(precision: str, policy: str) -> None:
    """Losses, parameters, buffers, optimizer and random state are equal, and every training forward was a step."""
    plain = plainly(precision)
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


class Stepping(Net):
    """Has its loss in a `training_step`, as a LightningModule."""

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)


def train_by_method(strategy: Any = "auto", *, marks: bool = False) -> dict[str, Tensor]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    torch.manual_seed(1)
    module = Stepping()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    if marks:
        model.mark_forward_method("training_step")
    losses = []
    for x, y in rows():
        losses.append(model.training_step(x, y))
        fabric.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
        for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.deepcopy(model)):
            each.training_step(x, y).backward()
    return state_of(model, optimizer, losses)


@pytest.mark.parametrize("marks", [False, True])
def test_training_step(marks: bool) -> None:
    """On one device Fabric calls `training_step` itself; each call is a step, and none of a copy's is."""
    strategy = OffloadStrategy("1GiB", policy="all-recompute")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train_by_method(strategy, marks=marks), train_by_method(marks=marks))
    report = strategy.memory.report()
    assert report.num_steps == NUM_STEPS
    assert report.recomputed_bytes > 0


def test_training_step_is_given_back() -> None:
    """The model has its own method again after `detach`, and is not kept alive by the other."""
    for detaches in (True, False):
        strategy = OffloadStrategy("1GiB")
        module = Stepping()
        model = Fabric(accelerator="cpu", devices=1, strategy=strategy).setup(module)
        assert "training_step" in vars(module)
        if detaches:
            strategy.memory.detach()
            assert "training_step" not in vars(module)
        gc.disable()
        try:
            del model, module
            assert strategy.memory.num_followed == 0
        finally:
            gc.enable()


def test_copies_are_plain() -> None:
    """What `fabric.setup` returned can be copied, for averaged weights say; the copy trains without the plugin."""
    strategy = OffloadStrategy("1GiB", policy="all-swap")
    model = Fabric(accelerator="cpu", devices=1, strategy=strategy).setup(net())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged(torch.ones(64, 32)).sum().backward()
    assert strategy.memory.report().num_steps == 0
    again = copy.deepcopy(strategy)
    assert (again.memory.budget_bytes, again.memory.policy) == (1 << 30, "all-swap")
    strategy.memory.detach()


def test_nothing_seen() -> None:
    """An optimizer that steps without a step of the plugin is one warning, which names two ways out that work."""
    strategy = OffloadStrategy("1GiB", policy="all-swap")
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    module = net()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    call = model.module.forward
    for num_warnings in (1, 0):
        call(torch.ones(64, 32)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert ["no memory budget is kept" in str(each.message) for each in caught] == [True] * num_warnings
    with strategy.memory.step(torch.ones(64, 32)):
        call(torch.ones(64, 32)).sum().backward()
    assert strategy.memory.report().num_steps == 1
    strategy.memory.detach()


@pytest.mark.parametrize("compiles_anew", [True, False])
def test_compiled(compiles_anew: bool) -> None:
    """A compiled model is followed, whether or not Fabric compiles it anew."""
    strategy = OffloadStrategy("1GiB", policy="all-swap")
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    model = fabric.setup(torch.compile(net(), backend="eager"), _reapply_compile=compiles_anew)
    model(torch.ones(64, 32)).sum().backward()
    assert strategy.memory.report().num_steps == 1
    strategy.memory.detach()


def test_what_it_says(caplog: pytest.LogCaptureFixture) -> None:
    """The budget when a model is set up, and the plan's table once it is final, each once."""
    with caplog.at_level(logging.INFO, "lightning_offload"):
        offloaded("1GB", "auto")
    assert caplog.text.count("Offload budget: 1GB (953.7 MiB) on cpu, planned in the first steps") == 1
    assert caplog.text.count("Offload plan") == 1


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
    for make in (OffloadStrategy, DDPOffloadStrategy):
        name = make.__name__
        with pytest.raises(TypeError, match=rf"^{name}\(\) got .* 'bugdet': did you mean 'budget'"):
            make(bugdet="1GiB")
    assert DDPOffloadStrategy("1GiB", find_unused_parameters=True)._ddp_kwargs == {"find_unused_parameters": True}
    with pytest.raises(TypeError, match="bugdet"):
        OffloadStrategy(bugdet="1GiB")
    with pytest.raises(AttributeError, match="NoStrategy"):
        _ = lightning_offload.fabric.NoStrategy
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="ddp_offload"):
        Fabric(accelerator="cpu", devices=1, strategy=OffloadStrategy("1GiB"))


def _set_up_twice(strategy: Any = "auto") -> dict[str, Tensor]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    torch.manual_seed(1)
    module, losses = Stepping(), list[Tensor]()
    for rate in (0.1, 0.05):
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), rate))
        for x, y in rows():
            losses += [nn.functional.cross_entropy(model(x), y), model.training_step(x, y)]
            for loss in losses[-2:]:
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model, optimizer, losses)


def test_a_model_may_be_set_up_again() -> None:
    """With another optimizer, as for a second phase: it is followed as it was."""
    strategy = OffloadStrategy("1GiB", policy="all-recompute")
    assert_same(_set_up_twice(strategy), _set_up_twice())
    report = strategy.memory.report()
    assert report.num_steps == 2 * NUM_STEPS
    assert report.recomputed_bytes > 0
