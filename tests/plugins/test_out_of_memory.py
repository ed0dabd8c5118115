"""A device that runs out of memory all the same: what was allocated goes, plans get tighter, steps are repeated."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_offload import MemoryPlugin
from tests.engine.faults import active
from tests.plugins.training import attached, rows

STEPS = pytest.mark.parametrize("at", [0, 1, 2, 4])
"""A step that is recorded, verified, measured, and one under the final plan."""
NUM_STEPS = 7
TOLD = r"out of memory.*\nlightning-offload: budget 64\.0 MiB"
PLANNED = TOLD + r", predicted peak .*, smallest feasible budget .*planned tighter; lower the budget or the batch size"


class _Scarce(nn.Module):
    """Runs out of memory at chosen calls, in forward or in backward; watches what it was given."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.fails: list[int] = []
        self.num_calls = 0
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive_at_call: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive_at_call.append(sum(tensor() is not None for tensor in self.seen))
        fails = self.num_calls in self.fails
        self.num_calls += 1
        large = x.sin() * x.sigmoid()
        self.seen += [weakref.ref(x), weakref.ref(large)]
        if fails and self.where == "forward":
            self._run_out(large)
        if fails:
            large.register_hook(self._run_out)
        return large.exp()

    def _run_out(self, tensor: Tensor) -> None:
        self.seen.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Model(nn.Module):
    """Has running statistics, draws random numbers, and gets gradients on both sides of what fails."""

    def __init__(self, where: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Dropout(0.2))
        self.scarce = _Scarce(where)
        self.after = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.scarce(self.before(x)))
        return out


def state_of(model: nn.Module) -> list[bytes]:
    """Parameters, buffers, gradients and the random state, as bytes."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    tensors = [*model.parameters(), *model.buffers(), *gradients]
    return [tensor.detach().numpy().tobytes() for tensor in tensors] + [torch.get_rng_state().numpy().tobytes()]


def plainly(step: Callable[[], float], _: Tensor) -> float:
    """What :meth:`MemoryPlugin.run` does without a plugin."""
    return step()


def train(
    model: Model, run: Callable[..., float], *, num_micro: int = 1, on: Callable[[int], None] | None = None
) -> Any:
    """Steps of one or more micro-batches each; the loss and the state after each."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(2)
    found = []
    for index in range(NUM_STEPS):
        for micro in range(num_micro):
            batch = rows(256) * (1 + index + micro)

            def step(batch: Tensor = batch) -> float:
                loss = model(batch).square().mean()
                loss.backward()
                return float(loss.detach())

            if on is not None:
                on(index * num_micro + micro)
            found.append((run(step, batch), state_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


@STEPS
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("policy", ["auto", "all-swap", "all-recompute"])
def test_step_is_repeated_once_exactly(policy: str, where: str, at: int) -> None:
    """Running statistics, random numbers, gradients and losses are as if nothing had happened."""
    expected = train(Model(), plainly)
    model = Model(where)
    model.scarce.fails = [at]
    with attached(model, policy=policy, budget="64MiB") as memory:
        found = train(model, memory.run)
    assert model.scarce.num_calls == NUM_STEPS + 1
    assert found == expected


@STEPS
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_first_attempt_is_freed_before_the_second(where: str, at: int) -> None:
    """Neither the error nor its frames keep a tensor of the failed step."""
    model = Model(where)
    model.scarce.fails = [at]
    with attached(model, policy="all-swap", budget="64MiB") as memory:
        train(model, memory.run)
    assert model.scarce.alive_at_call[at + 1] == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_later_plans_are_tighter(where: str) -> None:
    """They aim at 0.9 of the peak that did not fit, and are met."""
    model = Model(where)
    model.scarce.fails = [4]
    predicted: list[int | None] = []
    with attached(model, budget="64MiB") as memory:
        train(model, memory.run, on=lambda _: predicted.append(memory.report().predicted_peak_bytes))
        report = memory.report()
    before, after = predicted[4], report.predicted_peak_bytes
    assert before is not None
    assert after is not None
    assert after <= 0.9 * before
    assert report.swapped_bytes + report.recomputed_bytes > 0
    assert (report.measured_peak_bytes or 0) <= after


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_second_time_raises_with_the_figures(where: str) -> None:
    """No third attempt; hooks are off, and the plugin can go on."""
    model, batch = Model(where), rows(256)
    with attached(model, policy="all-swap", budget="64MiB") as memory:
        train(model, memory.run)
        calls = model.scarce.num_calls
        model.scarce.fails = [calls, calls + 1]
        with pytest.raises(torch.OutOfMemoryError, match=TOLD):
            memory.run(lambda: model(batch).sum().backward(), batch)
        assert model.scarce.num_calls == calls + 2
        assert active() == []
        model.zero_grad()
        before = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
        memory.run(lambda: model(batch).sum().backward(), batch)
        found = [weight.grad for weight in model.parameters()]
        torch.set_rng_state(before[0])
        for buffer, copy in zip(model.buffers(), before[1], strict=True):
            buffer.copy_(copy)
        model.zero_grad()
        model(batch).sum().backward()
        assert all(torch.equal(a, b.grad) for a, b in zip(found, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_accumulated_gradients_are_not_repeated() -> None:
    """A backward that added to gradients of earlier steps cannot be put back: an error that says so, with figures."""
    model = Model("backward")
    model.scarce.fails = [9]
    with attached(model, policy="all-swap", budget="64MiB") as memory:
        with pytest.raises(torch.OutOfMemoryError, match=r"(?s)" + PLANNED + ".*not repeated.*updated tensors"):
            train(model, memory.run, num_micro=2)
        assert model.scarce.num_calls == 10
        assert active() == []


def test_accumulating_step_is_repeated_where_nothing_was_added_yet() -> None:
    """Out of memory in forward leaves the gradients as they are."""
    expected = train(Model(), plainly, num_micro=2)
    model = Model("forward")
    model.scarce.fails = [9]
    with attached(model, policy="all-swap", budget="64MiB") as memory:
        assert train(model, memory.run, num_micro=2) == expected


def test_weights_that_changed_are_not_repeated() -> None:
    """A function that also updates weights cannot be repeated."""
    model, batch = Model(), rows(256)

    def step() -> None:
        model(batch).sum().backward()
        with torch.no_grad():
            model.before[0].weight.mul_(0.5)
        raise torch.OutOfMemoryError("out of memory")

    with attached(model, policy="all-swap", budget="64MiB") as memory:
        with pytest.raises(torch.OutOfMemoryError, match="not repeated"):
            memory.run(step, batch)
        assert model.scarce.num_calls == 1


def test_a_rank_of_several_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would not repeat theirs, and collectives would not meet."""
    monkeypatch.setattr("lightning_offload.plugins.out_of_memory.num_ranks", lambda: 2)
    model = Model()
    model.scarce.fails = [4]
    with attached(model, policy="all-swap", budget="64MiB") as memory:
        with pytest.raises(torch.OutOfMemoryError, match=r"(?s)" + PLANNED + ".*not repeated.*other processes"):
            train(model, memory.run)
        assert model.scarce.num_calls == 5
        assert active() == []


def test_without_a_model_nothing_is_repeated() -> None:
    """What cannot be known cannot be put back."""
    weight, batch = torch.ones(64, requires_grad=True), rows(64)
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        (batch[:, :64] * weight).sin().sum().backward()
        raise torch.OutOfMemoryError("out of memory")

    with MemoryPlugin(policy="all-swap", budget="64MiB") as memory, pytest.raises(torch.OutOfMemoryError):
        memory.run(step, batch)
    assert len(calls) == 1


@STEPS
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_block_raises_with_the_figures(where: str, at: int) -> None:
    """A ``with`` block cannot be repeated: the error has the figures, hooks are off, and the next step is planned."""
    model, batch = Model(where), rows(256)
    model.scarce.fails = [at]

    def step() -> None:
        with memory.step(batch):
            model(batch).sum().backward()

    with attached(model, policy="all-swap", budget="64MiB") as memory:
        for _ in range(at):
            step()
        with pytest.raises(torch.OutOfMemoryError, match=PLANNED if at else TOLD + "; there was no plan yet") as caught:
            step()
        assert active() == []
        assert caught.value.__cause__ is None
        if at == 0:  # a recording reads frames' locals, and such a frame keeps them for as long as the error lives
            del caught
        assert sum(tensor() is not None for tensor in model.scarce.seen) == 0
        for _ in range(5):
            step()
        assert memory.report().phase == "planned"


def test_other_errors_pass_as_they_are() -> None:
    """Nothing is repeated, and nothing is added to the message."""
    model, batch = Model(), rows(256)

    def step() -> None:
        model(batch)
        raise KeyError("mine")

    with attached(model, policy="all-swap", budget="64MiB") as memory:
        with pytest.raises(KeyError, match=r"^'mine'$"):
            memory.run(step, batch)
        assert model.scarce.num_calls == 1


def test_result_of_the_function_is_returned() -> None:
    """Attached, or not, which is told of."""
    model, batch = Model(), rows(256)
    memory = MemoryPlugin(policy="all-swap", module=model)
    with pytest.warns(UserWarning, match="the plugin was not attached"):
        assert memory.run(lambda: 5, batch) == 5
    with memory:
        assert memory.run(lambda: "x", batch) == "x"


def test_out_of_memory_at_the_floor_stays_an_error_of_memory() -> None:
    """Where no plan is tighter, the smallest one is tried again, and the second error has the figures."""
    model, batch = Model(), rows(256)
    with attached(model, policy="all-swap") as memory:
        train(model, memory.run)
        floor = memory.report().floor_bytes
    assert floor is not None
    model.scarce.num_calls = 0
    model.scarce.fails = [5, 6]
    with attached(model, policy="all-swap", budget=floor) as memory:
        for _ in range(5):
            memory.run(lambda: model(batch).sum().backward(), batch)
            model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError, match="smallest feasible budget"):
            memory.run(lambda: model(batch).sum().backward(), batch)
        model.zero_grad()
        memory.run(lambda: model(batch).sum().backward(), batch)
        assert memory.report().phase == "planned"


class _Centered(nn.Module):
    """Assigns its buffer anew, as the loss of DINO does with its center."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(32, 32)
        self.register_buffer("center", torch.zeros(32))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return out - self.center


@pytest.mark.parametrize("is_held", [False, True])
def test_a_buffer_that_is_assigned_anew_is_put_back(is_held: bool) -> None:
    """Whether or not somebody else holds what it was: the step's second attempt begins from that."""
    x, centers = torch.ones(8, 32), []
    for fails_at in (None, 4):
        model, held = _Centered(), []
        with MemoryPlugin("64MiB", policy="all-swap", module=model) as memory:
            for step in range(6):
                held.append(model.center if is_held else None)
                model.fails = step == fails_at
                memory.run(lambda model=model: model(x).square().mean().backward(), x)  # type: ignore[misc]
                model.zero_grad()
        centers.append(model.center)
        assert isinstance(model._buffers["center"], Tensor)
    assert torch.equal(*centers)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_were_replaced_are_not_repeated() -> None:
    """Autograd adds out of place where a graph is made of it: the gradient is another, at its first version."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.ones(4, 8)

    def step() -> None:
        model(x).square().mean().backward(create_graph=True)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with MemoryPlugin("64MiB", policy="all-swap", module=model) as memory:
        with memory.step(x):
            model(x).square().mean().backward()
        with pytest.raises(torch.OutOfMemoryError, match="it had updated tensors already"):
            memory.run(step, x)
    model.weight.grad = model.bias.grad = None  # which refer to their graph


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.filterwarnings("ignore:memory.step.. has no effect, because the plugin was not attached")
def test_a_plain_step_in_which_an_optimizer_ran_is_not_repeated(is_attached: bool) -> None:
    """A fused one writes without a new version; before the plugin is attached nobody hears of any."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    memory = MemoryPlugin(module=model)  # without a limit steps run plainly

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with memory if is_attached else contextlib.nullcontext():
        for _ in range(4 if is_attached else 0):
            with memory.step(x):
                model(x).square().mean().backward()
            model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError, match="it had updated tensors already"):
            memory.run(step, x)
