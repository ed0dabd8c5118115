"""Regions that the program checkpoints run as if they were not, where that is asked for, and as plainly otherwise."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_offload import BudgetInfeasibleError, MemoryPlugin
from tests.engine.short_training import train

WIDTH, ROWS, NUM_BLOCKS, NUM_STEPS = 64, 512, 3, 5

Call = Callable[[nn.Module, Tensor], Tensor]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden * hidden.tanh()))


def _plainly(block: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = block(x)
    return out


def _checkpointed(block: nn.Module, x: Tensor, **keywords: Any) -> Tensor:
    out: Tensor = torch_checkpoint.checkpoint(block, x, **keywords)
    return out


def _save_products(_: Any, op: Any, *__: Any, **___: Any) -> torch_checkpoint.CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    policy = torch_checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if is_product else policy.PREFER_RECOMPUTE


def _nested(block: nn.Module, x: Tensor) -> Tensor:
    inner = functools.partial(_checkpointed, block, use_reentrant=False)
    out: Tensor = torch_checkpoint.checkpoint(inner, x, use_reentrant=False)
    return out


WAYS: dict[str, Call] = {
    "non-reentrant": functools.partial(_checkpointed, use_reentrant=False),
    "reentrant": functools.partial(_checkpointed, use_reentrant=True),
    "selective": functools.partial(
        _checkpointed,
        use_reentrant=False,
        context_fn=functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, _save_products),
    ),
    "nested": _nested,
    "wrapper": lambda block, x: checkpoint_wrapper(block)(x),
}


class _Net(nn.Module):
    def __init__(self, call: Call, *, as_one: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(NUM_BLOCKS))
        self.call, self.as_one = call, as_one

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.as_one:
            x = torch_checkpoint.checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)
        for block in self.blocks if not self.as_one else ():
            x = self.call(block, x)
        return x


_train = functools.partial(train, shape=(ROWS, WIDTH), num_steps=NUM_STEPS)


@pytest.mark.parametrize("way", [*WAYS, "sequential"])
def test_replaced(way: str) -> None:
    """The bits of the model without checkpointing, a lower floor, and a plan within a budget between both floors."""
    as_one = way == "sequential"
    call = WAYS.get(way, _plainly)

    def net() -> nn.Module:
        return _Net(call, as_one=as_one)

    expected, _ = _train(lambda: _Net(_plainly))
    checkpointed, left = _train(net, policy="all-swap", budget=1 << 30)
    actual, replaced = _train(net, policy="all-swap", budget=1 << 30, replace_checkpointing=True)
    plain, _ = _train(net)
    assert actual == expected
    assert checkpointed == plain
    assert left is not None
    assert replaced is not None
    assert left.floor_bytes is not None
    assert replaced.floor_bytes is not None
    assert replaced.swapped_bytes > 0
    assert replaced.floor_bytes < left.floor_bytes
    budget = (left.floor_bytes + replaced.floor_bytes) // 2
    with pytest.raises(BudgetInfeasibleError, match=r"checkpointed by the model itself.*replace_checkpointing=True"):
        _train(net, policy="auto", budget=budget)
    actual, planned = _train(net, policy="auto", budget=budget, replace_checkpointing=True)
    assert actual == expected
    assert planned is not None
    assert planned.measured_peak_bytes is not None
    assert planned.measured_peak_bytes <= budget


def test_outside_of_steps_nothing_is_replaced() -> None:
    """Forwards without a step checkpoint, so does another model's, and torch is left as it was."""
    before = (torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction.apply)
    net = _Net(WAYS["non-reentrant"])
    calls = []
    net.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with MemoryPlugin("1GiB", replace_checkpointing=True, device="cpu", module=net) as memory:
        x = torch.randn(8, WIDTH)
        with memory.step(x):
            net(x).sum().backward()
        assert len(calls) == 1
        net(x).sum().backward()
        assert len(calls) == 3
        with torch.no_grad(), memory.step(x):
            net(x)
    after = (torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction.apply)
    assert after == before
    assert "apply" not in vars(torch_checkpoint.CheckpointFunction)


def test_an_exception_in_a_region() -> None:
    """It is the region's own, and the next step is as any."""
    net = _Net(WAYS["non-reentrant"])
    with MemoryPlugin("1GiB", replace_checkpointing=True, device="cpu", module=net) as memory:
        with pytest.raises(RuntimeError, match="31"), memory.step():
            net(torch.randn(8, 31))
        for _ in range(3):
            with memory.step(x := torch.randn(8, WIDTH)):
                net(x).sum().backward()
        assert memory.report().num_steps >= 3


def test_a_region_of_another_model_that_is_run_again_in_a_step() -> None:
    """Its forward came before, with the regions in it checkpointed: so they are when backward runs it again."""

    def doubly(net: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = torch_checkpoint.checkpoint(net, x, use_reentrant=False)
        return out

    found = []
    for is_managed in (False, True):
        nets = [_Net(WAYS["non-reentrant"]) for _ in range(2)]
        with MemoryPlugin("1GiB", replace_checkpointing=True, device="cpu", module=nets[0]) as memory:
            for seed in range(NUM_STEPS):
                x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
                before = doubly(nets[1], x).mean()
                with memory.step(x) if is_managed else contextlib.nullcontext():
                    (nets[0](x).square().mean() + before).backward()
        found.append([p.grad for net in nets for p in net.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
