"""Saved tensors come to the native core without Python; whoever looks at them finds what Python's hooks would show."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_offload.runtime.native_executor import NativeExecutor
from lightning_offload.runtime.values import Handle
from tests.runtime.engines import plainly, under, weights
from tests.runtime.executing import Step, compiled, gradients
from tests.runtime.inline import inline_lanes

pytestmark = pytest.mark.usefixtures("core")


def _chain() -> tuple[Step, tuple[Tensor, ...]]:
    (w,), x = weights((8, 8)), torch.randn(4, 8)
    return lambda: ((x @ w).exp() @ w).tanh().sum(), (w,)


class _Doubled(torch.autograd.Function):
    """Saves its input from Python, which holds the GIL."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of Python's hooks from now on."""
    calls: list[str] = []
    for name in ("pack", "unpack"):
        original = getattr(NativeExecutor, name)

        def counted(self: NativeExecutor, it: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(self, it)

        monkeypatch.setattr(NativeExecutor, name, counted)
    return calls


@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
def test_saved_tensors_do_not_come_by_python(action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread saves under the hooks of its own step never reaches them, those of a custom function included."""
    (w,), x = weights((8, 8)), torch.randn(4, 8)

    def step() -> Tensor:
        doubled: Tensor = _Doubled.apply((x @ w).exp())
        return (doubled @ w).tanh().sum()

    program = compiled(step, action)
    w.grad = None
    plain = plainly(step, (w,))
    calls = _counted(monkeypatch)
    torch.manual_seed(3)
    with under(program, "native", inline_lanes()) as executor:
        step().backward()
    assert not calls
    assert executor.num_packs == executor.num_unpacks == len(program.pack_bytes) > 0
    assert gradients((w,)) == plain[:1]


def test_hooks_of_others_within_a_step_are_called() -> None:
    """Those on top take what is saved; the step's own are asked again after them."""
    step, (w,) = _chain()
    program = compiled(step, "swap")
    seen: list[torch.Size] = []

    def noted(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor

    with under(program, "native", inline_lanes()) as executor:
        with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
            (w * w).sum()
        assert executor.num_packs == 0
        step().backward()
    assert seen == [w.shape, w.shape]
    assert executor.num_packs == len(program.pack_bytes)
    assert not executor.deviation


def test_no_hooks_while_they_are_disabled_or_traced() -> None:
    """Then autograd keeps what it saves; the state is the thread's, as plainly."""
    step, (w,) = _chain()
    program = compiled(step, "keep")
    with under(program, "native", inline_lanes()) as executor:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            (w * w).sum().backward()
        before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
        try:
            (w * w).sum().backward()
        finally:
            torch._C._autograd._saved_tensors_hooks_set_tracing(before)
        assert executor.num_packs == 0
    w.grad = None


@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
def test_who_reads_what_a_node_saved_sees_it(action: Any) -> None:
    """`grad_fn._saved_result` is the tensor; the raw one tells of the hook and of the handle, the same each time."""
    (w,), x = weights((8, 8)), torch.randn(4, 8)
    made: list[Tensor] = []

    def step() -> Tensor:
        made[:] = [(x @ w).exp()]
        return (made[0] @ w).tanh().sum()

    program = compiled(step, action)
    expected = (x @ w).exp().detach()
    with under(program, "native", inline_lanes()) as executor:
        loss = step()
        node = made.pop().grad_fn
        assert node is not None
        assert torch.equal(node._saved_result, expected)  # type: ignore[attr-defined]
        raw = node._raw_saved_result  # type: ignore[attr-defined]
        data = getattr(raw, "data", None)
        if data is not None:  # of torch's newer versions
            assert isinstance(data, type(raw.data))
            assert data is raw.data
            assert torch.equal(executor.unpack(data), expected)
            assert raw.unpack_hook == executor.unpack
        with pytest.raises(RuntimeError, match="hooks"):
            raw.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
        del raw, data
        loss.backward()
    w.grad = None


def test_a_write_to_what_was_saved_is_told_as_plainly() -> None:
    """The same error as without hooks, out of backward."""
    (w,), x = weights((8, 8)), torch.randn(4, 8)
    step: Step = lambda: ((x @ w).exp() @ w).sum()  # noqa: E731
    program = compiled(step, "keep")
    w.grad = None
    with under(program, "native", inline_lanes()):
        y = (x @ w).exp()
        loss = (y @ w).sum()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    w.grad = None


def test_anomalies_are_told_with_the_line_of_forward() -> None:
    """The engine that was there makes what tells where a node comes from: ours only stands before it."""
    (w,) = weights((4,))
    program = compiled(lambda: (w * w).sum(), "keep")
    w.grad = None
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="Traceback of forward call"),
        under(program, "native", inline_lanes()),
        pytest.raises(RuntimeError, match="nan"),
    ):
        ((w * 0).sqrt() * 0).sum().backward()
    w.grad = None


def test_what_is_not_read_goes_with_its_graph() -> None:
    """A graph that nobody runs backward on keeps executor and tensors alive, and lets all of them go."""
    step, (w,) = _chain()
    program = compiled(step, "swap")
    with under(program, "native", inline_lanes()) as executor:
        loss = step()
        alive = weakref.ref(executor)
        del executor
    gc.collect()
    assert alive() is not None
    del loss
    gc.collect()
    assert alive() is None
    w.grad = None


def test_handles_that_python_asked_for_live_as_long_as_autograd_holds_them() -> None:
    """In a step that leaves its program Python takes over what was kept: weak references to handles stay good."""
    (w,), x = weights((8, 8)), torch.randn(4, 8)
    other = [False]

    def step() -> Tensor:
        y = (x @ w).exp()
        y = y.sin().cos() if other[0] else y.tanh()
        return (y @ w).tanh().sum()

    program = compiled(step, "keep")
    w.grad = None
    with under(program, "native", inline_lanes()) as executor:
        loss = step()
        assert isinstance(executor, NativeExecutor)
        taken = [weakref.ref(handle) for handle in executor._step.take_kept()]
        gc.collect()
        handles = [ref() for ref in taken]
        assert handles
        assert all(handle is not None for handle in handles)
        assert all(isinstance(handle, type(handles[0])) for handle in handles)
        shown: list[Handle | None] = handles  # the very objects, whoever asks
        assert [ref() for ref in taken] == shown
        del handles, shown
        loss.backward()
        del loss
        gc.collect()
        assert [ref() for ref in taken] == [None] * len(taken)
    other[0] = True
    w.grad = None
    plain = plainly(step, (w,))
    torch.manual_seed(3)
    with under(program, "native", inline_lanes()) as executor:
        step().backward()
    assert executor.deviation
    assert gradients((w,)) == plain[:1]


def test_graphs_are_freed_and_run_by_other_threads() -> None:
    """Threads that hold the GIL and some that do not, at once: nobody waits for another, and bits are plain's."""
    found: dict[int, list[bytes]] = {}
    made = [_chain() for _ in range(4)]
    programs = [compiled(step, "recompute" if i % 2 else "swap") for i, (step, _) in enumerate(made)]
    for _, (w,) in made:
        w.grad = None
    plain = [plainly(step, leaves)[:1] for step, leaves in made]

    def train(i: int) -> None:
        step, leaves = made[i]
        for _ in range(20):
            with under(programs[i], "native", inline_lanes()):
                step()  # freed unread
                step().backward()
            found[i] = gradients(leaves)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert [found[i] for i in range(4)] == plain
