"""Writes to what autograd saved, or to what a replay would read, end as in plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.errors import StaleInputError
from tests.engine.faults import FAULTY_STEPS, interruption, tolerant_case
from tests.engine.harness import Outcome, Wrap, assert_same, run
from tests.engine.probing import levels, train_within, trained_plainly
from tests.engine.test_cases import check_within
from tests.zoo.case import Case, Job, Scope
from tests.zoo.cases import BY_NAME
from tests.zoo.models.sandwich import Sandwich, rows, square_loss

POLICIES = ("keep-all", "all-swap", "all-recompute")
WRAPS = pytest.mark.parametrize("wrap", list(Wrap), ids=lambda wrap: wrap.value)


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


@functools.cache
def _plainly(kind: str, step: int) -> Outcome:
    return run(tolerant_case(lambda: _Sometimes(WRITES[kind](), step)))


@pytest.mark.parametrize("step", FAULTY_STEPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", WRITES)
def test_written_saved_tensor_raises_as_plain(kind: str, policy: str, step: int) -> None:
    """The same step raises the same error as in plain PyTorch, and the steps around it are exact."""
    case = tolerant_case(lambda: _Sometimes(WRITES[kind](), step))
    expected = _plainly(kind, step)
    assert "modified by an inplace operation" in interruption(expected, step)
    actual = run(case, memory=MemoryPlugin(budget=None, policy=policy))
    assert "modified by an inplace operation" in interruption(actual, step)
    assert_same(_without_messages(expected), _without_messages(actual))


@WRAPS
@pytest.mark.parametrize("policy", POLICIES)
def test_written_saved_tensor_raises_when_split(policy: str, wrap: Wrap) -> None:
    """It raises too where backward runs outside the step."""
    case = tolerant_case(lambda: _Sometimes(_write_input, 4))
    actual = run(case, memory=MemoryPlugin(budget=None, policy=policy), wrap=wrap)
    assert "modified by an inplace operation" in interruption(actual, 4)
    assert_same(_without_messages(run(case)), _without_messages(actual))


def _without_messages(outcome: Outcome) -> Outcome:
    values = {n: v for n, v in outcome.values.items() if not n.endswith("interrupted")}
    return Outcome(values)


def _moving(moved: str, first_step: int = 0) -> Case:
    """A training that writes a bias or the batch between the scope around forward and backward."""

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
            if job.index >= first_step:
                with torch.no_grad():
                    (job.model.body.bias if moved == "bias" else batch).add_(0.5)  # type: ignore[union-attr,operator]
            scope.backward(loss)
        scope.record("loss", loss)
        scope.update(*job.optimizers)

    class Doubled(Sandwich):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x * 2.0).sin())

    return Case(name="moved", build=lambda: Doubled(Shifted(), depth=1), batch=rows, train_step=train_step, steps=6)


@pytest.mark.parametrize("wrap", [Wrap.FORWARD, Wrap.BARE], ids=lambda wrap: wrap.value)
@pytest.mark.parametrize("moved", ["bias", "input"])
@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_plans_know_of_a_leaf_that_is_moved_before_backward(
    policy: str, moved: str, wrap: Wrap, caplog: pytest.LogCaptureFixture
) -> None:
    """It is written outside each step: what reads it is recomputed in no plan, so no replay finds it changed."""
    case = _moving(moved)
    assert_same(run(case), run(case, memory=MemoryPlugin(budget=None, policy=policy), wrap=wrap))
    assert [r.getMessage() for r in caplog.records if r.name.startswith("lightning_offload")] == []


@pytest.mark.parametrize("wrap", [Wrap.FORWARD, Wrap.BARE], ids=lambda wrap: wrap.value)
@pytest.mark.parametrize("moved", ["bias", "input"])
def test_a_leaf_moved_in_a_late_step_is_exact_or_raises(moved: str, wrap: Wrap) -> None:
    """No plan knows of it, and no replay of that step is verified: never silently another gradient."""
    case = _moving(moved, first_step=4)
    expected = run(case)
    try:
        actual = run(case, memory=MemoryPlugin(budget=None, policy="all-recompute"), wrap=wrap)
    except StaleInputError:
        return
    assert_same(expected, actual)


@pytest.mark.parametrize("height", [0.0, 0.25])
@pytest.mark.parametrize("wrap", [Wrap.FORWARD, Wrap.BARE], ids=lambda wrap: wrap.value)
def test_plans_know_of_an_optimizer_that_steps_before_backward(wrap: Wrap, height: float) -> None:
    """What its update makes impossible to replay is in no plan, also where no mode sees it: peaks stay in budget."""
    case = BY_NAME["optimizer-between"]
    budget_bytes = levels(case.name, wrap).budget(height)
    found, raised_bytes = train_within(case, budget_bytes, wrap, is_tracked=True)
    assert raised_bytes == budget_bytes
    assert_same(trained_plainly(case.name).outcome, found.outcome)
    check_within(found.steps, budget_bytes, wrap)


@pytest.mark.parametrize("fails", [True, False], ids=["backward-fails", "no-backward"])
@pytest.mark.parametrize("engine", ["native", "python"])
def test_weights_reloaded_before_backward_raise_where_they_do_plainly(
    engine: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recomputed from them is lost. Backward says so, as plainly; the writes of the next update do not."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", engine)

    def trained(memory: MemoryPlugin | None) -> tuple[list[int], list[Tensor]]:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
        model = nn.Sequential(*layers, nn.BatchNorm1d(32), nn.Linear(32, 32), nn.GELU())
        good = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        failed = []
        with memory or contextlib.nullcontext():
            for number in range(9):
                x = torch.randn(16, 32)
                with memory.step(x) if memory is not None else contextlib.nullcontext():
                    loss = model(x).square().mean()
                if number in (5, 7):
                    model.load_state_dict(good)
                if fails or number not in (5, 7):
                    try:
                        loss.backward()
                    except RuntimeError:
                        failed.append(number)
                optimizer.step()
                optimizer.zero_grad()
        return failed, [p.detach() for p in model.parameters()]

    plainly_failed, expected = trained(None)
    failed, found = trained(MemoryPlugin("1GiB", policy="all-recompute"))
    assert failed == plainly_failed == ([5, 7] if fails else [])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("engine", ["native", "python"])
def test_who_reads_what_a_write_out_of_sight_has_lost_is_told_why(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are written out of sight, then by an optimizer: backward names the cause, as after one write."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", engine)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with MemoryPlugin("1GiB", policy="all-recompute", module=model) as memory:
        for number in range(7):
            x = torch.randn(16, 32)
            with memory.step(x):
                loss = model(x).square().mean()
            if number < 6:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        optimizer.step()
        with pytest.raises(StaleInputError, match="out of sight of the step"):
            loss.backward()
