"""A step that keeps everything: plain gradients, the version check, and an eye on the structure."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from lightning_offload.runtime.executor import KeepingExecutor
from lightning_offload.runtime.hooks import executing
from tests.runtime.executing import compiled, gradients, plain


def leaf() -> Tensor:
    """A trainable vector."""
    return torch.linspace(-1.0, 1.0, 300).requires_grad_()


def step(x: Tensor) -> Tensor:
    """A small step."""
    return (x * 2.0).sin().exp().sum()


def keeping(x: Tensor) -> KeepingExecutor:
    """An executor for the small step."""
    made = KeepingExecutor(compiled(lambda: step(x), "keep"))
    x.grad = None
    return made


def test_step_is_exact_without_a_mode() -> None:
    """Only the hooks are in force, and the step is the one that was planned."""
    x = leaf()
    executor = keeping(x)
    with executing(executor):
        assert torch._C._len_torch_dispatch_stack() == 0
        step(x).backward()
    assert gradients((x,)) == plain(lambda: step(x), x)[:1]
    assert not executor.has_deviated
    assert executor.num_unpacks > 0


@pytest.mark.parametrize("change", ["longer", "other size"])
def test_another_structure_is_noticed(change: str) -> None:
    """More saved tensors, or others, than were planned: noticed, and exact all the same."""
    x = leaf()
    executor = keeping(x)

    def other() -> Tensor:
        return step(x.sin()) if change == "longer" else step(x[:200])

    with executing(executor):
        other().backward()
    assert executor.has_deviated
    assert gradients((x,)) == plain(other, x)[:1]


def test_backward_is_announced_once() -> None:
    """The first unpack of the step tells that backward has begun."""
    x = leaf()
    executor, heard = keeping(x), []
    executor.on_backward = lambda: heard.append(1)
    with executing(executor):
        loss = step(x)
        assert heard == []
        loss.backward(retain_graph=True)
        loss.backward()
    assert heard == [1]


def test_modified_tensor_raises() -> None:
    """The version check that hooks switch off is made up for."""
    x = leaf()
    executor = keeping(x)
    with executing(executor):
        y = x * 2.0
        out = y.sin().sum()
        y.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_nothing_leaks_without_backward() -> None:
    """A result that saved itself is freed by reference counts alone when it is dropped."""
    x = leaf()
    executor = keeping(x)
    gc.collect()
    gc.disable()
    try:
        with executing(executor):
            y = (x * 2.0).exp()
            memory = weakref.ref(y.untyped_storage())
            del y
        assert memory() is None
    finally:
        gc.enable()
