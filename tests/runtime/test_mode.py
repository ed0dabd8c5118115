"""One mode and one pair of hooks, in force inside and gone outside, beside functorch and other hooks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_offload.capture.live import LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import StepMode, executing, watch_backward
from lightning_offload.tensors.observer import observe_all
from tests.runtime.executing import CPU, compiled, executor_for, gradients, plain, planned, under


def hooks() -> object:
    """The saved-tensor hooks in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def leaf() -> Tensor:
    """A trainable vector."""
    return torch.linspace(-1.0, 1.0, 300).requires_grad_()


def test_in_force_inside_and_gone_outside() -> None:
    """The mode and the hooks are on inside, and off after a normal end and after an exception."""
    for fails in (False, True):
        try:
            with executing(executor_for(None)):
                assert isinstance(_get_current_dispatch_mode(), StepMode)
                assert hooks() is not None
                if fails:
                    raise KeyError("on purpose")
        except KeyError:
            assert fails
        assert _get_current_dispatch_mode() is None
        assert hooks() is None


def test_mode_is_an_infra_mode() -> None:
    """Compiled modules stay compiled under it, and higher-order operators pass."""
    assert StepMode.is_infra_mode()
    assert StepMode.ignore_compile_internals()
    assert StepMode.supports_higher_order_operators


@pytest.mark.parametrize("action", ["swap", "recompute", None])
def test_functorch_inside_a_step(action: str | None) -> None:
    """``torch.func`` transforms run inside a step and give what they give outside; the step stays exact."""
    x = leaf()

    def step() -> Tensor:
        inner = torch.func.vmap(torch.func.grad(lambda v: (v.sin() * v).sum()))(x.detach().view(10, 30))
        return ((x * 2.0).sin() * inner.view(-1)).exp().sum()

    program = compiled(step, action) if action else None  # type: ignore[arg-type]
    x.grad = None
    found, ran = planned(step, x, program=program)
    assert found == plain(step, x)
    assert not ran.executor.has_deviated


def test_disabling_hooks_is_undone() -> None:
    """``disable_saved_tensors_hooks`` takes ours off inside, puts them back after, and is torch's own outside."""
    original = torch.autograd.graph.disable_saved_tensors_hooks
    with executing(executor_for(None)):
        ours = hooks()
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            assert not torch._C._autograd._saved_tensors_hooks_is_enabled()
            with pytest.raises(RuntimeError, match="no hooks here"):
                torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
        assert hooks() == ours
        assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert torch.autograd.graph.disable_saved_tensors_hooks is original


def test_other_hooks_inside_win() -> None:
    """What is saved under a user's own hooks is the user's; ours take the rest."""
    x, seen = leaf(), []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    def step() -> Tensor:
        y = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = y.exp()
        return y.cos().sum()

    expected = plain(step, x)
    seen.clear()
    with under(None) as ran:
        step().backward()
    assert gradients((x,)) == expected[:1]
    assert len(seen) == 1
    assert ran.executor.num_unpacks == 2


def test_checkpoint_inside_a_step() -> None:
    """A user's own checkpointing keeps working inside a step."""
    x = leaf()

    def step() -> Tensor:
        y = torch.utils.checkpoint.checkpoint(lambda v: v.sin().exp().cos(), x * 2.0, use_reentrant=False)
        return (y * y).sum()

    for action in ("swap", "recompute"):
        program = compiled(step, action)  # type: ignore[arg-type]
        x.grad = None
        assert planned(step, x, program=program)[0] == plain(step, x)


def test_steps_may_nest() -> None:
    """An executor inside another serves what is saved inside; the outer one goes on afterwards."""
    x = leaf()
    with under(None) as outer:
        y = x.sin()
        with under(None) as inner:
            y = y.exp()
        y.cos().sum().backward()
    assert (outer.executor.num_unpacks, inner.executor.num_unpacks) == (2, 1)
    assert gradients((x,)) == plain(lambda: x.sin().exp().cos().sum(), x)[:1]


def test_without_hooks_ops_alone_are_seen() -> None:
    """Around a backward that is only watched nothing is packed."""
    with executing(executor_for(None), hooks=False):
        assert hooks() is None


def test_watched_backwards() -> None:
    """Every way to call backward passes the watcher once, until the watch ends."""
    entered: list[int] = []

    class Around:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *exc: object) -> None:
            entered.append(-1)

    x = leaf()
    end = watch_backward(Around)  # type: ignore[arg-type]
    try:
        x.sin().sum().backward()
        torch.autograd.grad(x.sin().sum(), x)
        torch.autograd.backward([x.sin().sum()])
    finally:
        end()
    assert entered == [1, -1] * 3
    x.sin().sum().backward()
    end()
    assert len(entered) == 6


class _Calls(TorchFunctionMode):
    """Counts the calls of torch that come from Python, ops that a dispatch mode runs aside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += not isinstance(func, torch._ops.OpOverload)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("action", ["swap", "recompute", None])
def test_a_function_mode_of_the_program_sees_the_program_alone(action: str | None) -> None:
    """Our own calls of torch in backward go past it: it counts what it counts without us."""
    x = leaf()

    def step() -> Tensor:
        y = (x * 2.0).sin()
        y.mul_(1.5)
        return (y.exp() @ x.detach()).relu()

    program = compiled(step, action) if action else None  # type: ignore[arg-type]
    x.grad = None
    expected = plain(step, x)

    def counted(executor: StepExecutor | None) -> tuple[int, list[bytes]]:
        calls = _Calls()
        end = watch_backward(lambda: calls)  # around the engine, as a mode around ``backward()`` is off inside of it
        try:
            with executing(executor) if executor is not None else contextlib.nullcontext():
                step().backward()
        finally:
            end()
        return calls.num_calls, gradients((x,))

    num_calls, found = counted(None)
    assert found == expected[:-1]
    for observer in (None, observe_all((LiveBytes(CPU), Recorder(CPU)))):
        executor = executor_for(program, observer=observer)
        assert counted(executor) == (num_calls, found)
        assert not executor.has_deviated
