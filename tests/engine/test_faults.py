"""Exceptions, writes to saved tensors, abandoned outputs: what goes wrong leaves training exactly as plain."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.errors import StaleInputError
from tests.engine.harness import Outcome, Wrap, assert_same, run
from tests.engine.live_tracker import LiveStorageTracker
from tests.zoo.case import Case, Job, Scope
from tests.zoo.models.sandwich import Sandwich, body_case, rows, square_loss

POLICIES = ("keep-all", "all-swap", "all-recompute")
WRAPS = pytest.mark.parametrize("wrap", list(Wrap), ids=lambda wrap: wrap.value)
FAULTY_STEPS = (0, 1, 2, 5)
"""A step of each phase: recorded, verified, measured, planned."""


def active() -> list[str]:
    """What is in force on this thread: dispatch modes and saved-tensor hooks."""
    found = []
    for index in range(torch._C._len_torch_dispatch_stack()):
        mode = torch._C._get_dispatch_stack_at(index)
        if not isinstance(mode, LiveStorageTracker):
            found.append(type(mode).__name__)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        found.append("saved-tensor hooks")
    return found


def our_threads() -> list[str]:
    """Names of the runtime's threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-offload")]


@contextmanager
def without_gc() -> Iterator[None]:
    """Collect, then let reference counts alone free what is freed inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- saved tensors that are written


def _write_input(x: Tensor) -> Tensor:
    scaled = x * 1.5
    out = scaled.sin()
    scaled.add_(1.0)
    return out


def _write_output(x: Tensor) -> Tensor:
    out = x.sigmoid()
    out.mul_(2.0)
    return out


def _write_view(x: Tensor) -> Tensor:
    scaled = x * 1.5
    out = scaled[:, ::2].exp().sum() + scaled.sin()
    scaled[3:5].zero_()
    return out


def _write_without_grad(x: Tensor) -> Tensor:
    scaled = x.tanh() * 1.5
    out = scaled * scaled.sigmoid()
    with torch.no_grad():
        scaled.zero_()
    return out


class _WriteWeight(nn.Module):
    """Moves a weight that backward needs right after its use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Use the weight, then move it."""
        out: Tensor = self.linear(x)
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return out


WRITES: dict[str, Callable[[], nn.Module | Callable[[Tensor], Tensor]]] = {
    "input": lambda: _write_input,
    "output": lambda: _write_output,
    "view": lambda: _write_view,
    "without-grad": lambda: _write_without_grad,
    "weight": _WriteWeight,
}


class _Sometimes(nn.Module):
    """Runs a faulty body in one step and a sound one in the others."""

    def __init__(self, faulty: Any, faulty_call: int) -> None:
        super().__init__()
        self.faulty = faulty
        self.faulty_call = faulty_call
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Choose the body by the number of the call."""
        self.num_calls += 1
        out: Tensor = self.faulty(x) if self.num_calls - 1 == self.faulty_call else x.sin() * x.sigmoid()
        return out


def _tolerant(job: Job, batch: Any, scope: Scope) -> None:
    """Train for one step; note an interruption, drop the gradients and go on."""
    try:
        with scope.step(batch):
            with scope.forward():
                loss = square_loss(job.model, batch)
            scope.backward(loss)
    except Exception as error:
        scope.record("interrupted", f"{type(error).__name__}: {error}".split(".")[0][:80])
        job.optimizer.zero_grad()
        return
    scope.record("loss", loss)
    scope.update(*job.optimizers)


def _tolerant_case(module: Callable[[], nn.Module]) -> Case:
    return body_case("tolerant", module=module, train_step=_tolerant, depth=1, steps=9)


@pytest.mark.parametrize("step", FAULTY_STEPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", WRITES)
def test_written_saved_tensor_raises_as_plain(kind: str, policy: str, step: int) -> None:
    """The same step raises the same error as in plain PyTorch, and the steps around it are exact."""
    case = _tolerant_case(lambda: _Sometimes(WRITES[kind](), step))
    expected = run(case)
    assert "modified by an inplace operation" in _interruption(expected, step)
    actual = run(case, memory=MemoryPlugin(budget=None, policy=policy))
    assert "modified by an inplace operation" in _interruption(actual, step)
    assert_same(_without_messages(expected), _without_messages(actual))


@WRAPS
@pytest.mark.parametrize("policy", POLICIES)
def test_written_saved_tensor_raises_when_split(policy: str, wrap: Wrap) -> None:
    """It raises too where backward runs outside the step."""
    case = _tolerant_case(lambda: _Sometimes(_write_input, 4))
    actual = run(case, memory=MemoryPlugin(budget=None, policy=policy), wrap=wrap)
    assert "modified by an inplace operation" in _interruption(actual, 4)
    assert_same(_without_messages(run(case)), _without_messages(actual))


def _interruption(outcome: Outcome, step: int) -> str:
    return str(outcome.values.get(f"step{step}/interrupted", "not interrupted"))


def _without_messages(outcome: Outcome) -> Outcome:
    values = {n: v for n, v in outcome.values.items() if not n.endswith("interrupted")}
    return Outcome(values)


# ---- exceptions


class Interruption(Exception):
    """Raised by the tests' own models."""


class _RaiseInForward(nn.Module):
    """Raises once, half way through forward."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Raise at the chosen call."""
        self.num_calls += 1
        out = x.sin() * x.sigmoid()
        if self.num_calls - 1 == self.call:
            raise Interruption("forward")
        return out.exp().clamp(max=2.0)


class _RaiseInBackward(_RaiseInForward):
    """Raises once, half way through backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Let a gradient hook raise at the chosen call."""
        self.num_calls += 1
        hidden = x.sin() * x.sigmoid()
        if self.num_calls - 1 == self.call:
            hidden.register_hook(_raise)
        return hidden.exp().clamp(max=2.0)


def _raise(_: Tensor) -> None:
    raise Interruption("backward")


RAISING = pytest.mark.parametrize("raising", [_RaiseInForward, _RaiseInBackward])


@WRAPS
@RAISING
@pytest.mark.parametrize("step", FAULTY_STEPS)
@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_exception_leaves_nothing(policy: str, step: int, raising: Any, wrap: Wrap) -> None:
    """After an exception no hook, mode or memory is left, and the following steps are exact."""
    case = _tolerant_case(lambda: raising(step))
    expected, expected_live = _observed(case, None, wrap)
    assert "Interruption" in _interruption(expected, step)
    actual, live = _observed(case, MemoryPlugin(budget=None, policy=policy), wrap)
    assert_same(expected, actual)
    assert live == expected_live
    assert our_threads() == []


def _observed(case: Case, memory: MemoryPlugin | None, wrap: Wrap) -> tuple[Outcome, list[int]]:
    tracker = LiveStorageTracker()
    live: list[int] = []

    def after_step(_: Job) -> None:
        assert active() == []
        live.append(tracker.live_bytes)

    with without_gc(), tracker:
        outcome = run(
            case,
            memory=memory,
            wrap=wrap,
            after_step=after_step,
            on_start=lambda job: tracker.register(job.model, *job.optimizers),
        )
    return outcome, live


def test_keyboard_interrupt_leaves_nothing() -> None:
    """An exception that is no `Exception` is cleaned up after as well."""
    memory = MemoryPlugin(budget=None, policy="all-swap")
    model = Sandwich(torch.sin)
    memory.attach(model)

    def interrupted() -> None:
        with memory.step(rows(0)):
            model(rows(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert active() == []
    memory.detach()
    assert our_threads() == []


# ---- abandoned outputs


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_outputs_never_backpropagated_leak_nothing(policy: str) -> None:
    """What a forward saved is freed with its outputs, without a backward or the garbage collector."""
    memory = MemoryPlugin(budget=None, policy=policy)
    model = Sandwich(torch.sin)
    tracker = LiveStorageTracker()
    tracker.register(model)
    persistent = tracker.live_bytes
    with without_gc(), tracker:
        memory.attach(model)
        host: list[int] = []
        for step in range(12):
            batch = rows(step)
            with memory.step(batch):
                loss = square_loss(model, batch)
                if step % 3 == 0:
                    loss.backward()
                    model.zero_grad()
            grad_fn = weakref.ref(loss.grad_fn)
            del loss, batch
            assert grad_fn() is None
            assert tracker.live_bytes == persistent, step
            host.append(memory.report().host_peak_bytes)
        assert host[-1] <= max(host[:6])
        memory.detach()


def test_a_graph_outlives_its_step_and_the_plugin() -> None:
    """A backward long after the step, and even after detach, is exact."""
    gradients = []
    for memory in (None, MemoryPlugin(budget=None, policy="all-swap"), MemoryPlugin(policy="all-recompute")):
        torch.manual_seed(0)
        model = Sandwich(torch.sin)
        losses = []
        if memory is not None:
            memory.attach(model)
        for step in range(6):
            with memory.step(rows(step)) if memory is not None else torch.enable_grad():
                losses.append(square_loss(model, rows(step)))
        if memory is not None:
            memory.detach()
        for loss in reversed(losses):
            loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
        assert our_threads() == []
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], found, strict=True))


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_backward_from_another_thread(policy: str) -> None:
    """Autograd may ask for saved tensors on any thread."""

    def in_thread(job: Job, batch: Any, scope: Scope) -> None:
        with scope.step(batch):
            with scope.forward():
                loss = square_loss(job.model, batch)
            thread = threading.Thread(target=scope.backward, args=(loss,))
            thread.start()
            thread.join()
        scope.record("loss", loss)
        scope.update(*job.optimizers)

    case = body_case("threaded", torch.sin, train_step=in_thread)
    assert_same(run(case), run(case, memory=MemoryPlugin(budget=None, policy=policy)))


# ---- parameters and inputs that move


@pytest.mark.parametrize("wrap", [Wrap.FORWARD, Wrap.BARE], ids=lambda wrap: wrap.value)
@pytest.mark.parametrize("moved", ["bias", "input"])
@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_moved_leaf_is_exact_or_raises(policy: str, moved: str, wrap: Wrap) -> None:
    """A leaf written outside the step, between forward and backward, never silently changes a gradient."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.full((128,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.bias).sin()

    def train_step(job: Job, batch: Any, scope: Scope) -> None:
        with scope.step(batch):
            with scope.forward():
                loss = square_loss(job.model, batch)
            with torch.no_grad():
                (job.model.body.bias if moved == "bias" else batch).add_(0.5)  # type: ignore[union-attr,operator]
            scope.backward(loss)
        scope.record("loss", loss)
        scope.update(*job.optimizers)

    class Doubled(Sandwich):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x * 2.0).sin())

    case = Case(
        name="moved", build=lambda: Doubled(Shifted(), depth=1), batch=rows, train_step=train_step, steps=6
    )
    expected = run(case)
    try:
        actual = run(case, memory=MemoryPlugin(budget=None, policy=policy), wrap=wrap)
    except StaleInputError:
        return
    assert_same(expected, actual)


# ---- nothing to do


def test_nothing_is_active_between_steps() -> None:
    """Attached but outside a step, nothing is in force; inside it is; after detach no thread is left."""
    memory = MemoryPlugin(budget=None, policy="all-swap")
    model = Sandwich(torch.sin)
    with memory:
        for step in range(5):
            assert active() == []
            with memory.step(rows(step)):
                assert active() != []
                loss = square_loss(model, rows(step))
            assert active() == []
            memory.backward(loss)
            assert active() == []
    assert our_threads() == []
    memory.detach()


def test_nothing_is_active_without_grad() -> None:
    """A step under no_grad or inference_mode, or with the plugin disabled, is left alone."""
    model = Sandwich(torch.sin)
    with MemoryPlugin(budget=None, policy="all-swap") as memory:
        for nothing in (torch.no_grad, torch.inference_mode):
            with nothing(), memory.step(rows(0)):
                assert active() == []
                model(rows(0))
        assert memory.report().num_steps == 0
    with MemoryPlugin(budget=None, policy="all-swap", enabled=False) as memory, memory.step(rows(0)):
        assert active() == []


def test_environment_switches_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LIGHTNING_OFFLOAD=0` makes steps plain."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD", "0")
    with MemoryPlugin(budget=None, policy="all-swap") as memory, memory.step(rows(0)):
        assert active() == []


def test_evaluation_between_steps_changes_nothing() -> None:
    """Validation between training steps neither disturbs the plan nor the bits."""

    def train_step(job: Job, batch: Any, scope: Scope) -> None:
        with scope.step(batch):
            with scope.forward():
                loss = square_loss(job.model, batch)
            scope.backward(loss)
        scope.record("loss", loss)
        scope.update(*job.optimizers)
        job.model.eval()
        with torch.no_grad():
            scope.record("validation", square_loss(job.model, batch[:64]))
        job.model.train()

    case = body_case(
        "validated", module=lambda: nn.Sequential(nn.Dropout(0.1), nn.GELU()), train_step=train_step
    )
    memory = MemoryPlugin(budget=None, policy="all-recompute")
    phases: list[str] = []
    outcome = run(case, memory=memory, after_step=lambda _: phases.append(memory.report().phase))
    assert_same(run(case), outcome)
    assert phases[-1] == "planned"


def test_steps_are_exact_after_attaching_again() -> None:
    """Detach and attach half way: plans are remembered, nothing is lost."""
    case = body_case("again", torch.sin, steps=8)
    memory = MemoryPlugin(budget=None, policy="all-recompute")

    def after_step(job: Job) -> None:
        if job.index in (3, 5):
            memory.detach()
            memory.detach()
            memory.attach(job.model)

    assert_same(run(case), run(case, memory=memory, after_step=after_step))
    assert memory.report().num_steps == 8
