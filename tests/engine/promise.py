"""Holds the budget's promise against one training: every tensor that is alive counts, whoever made it.

A case is trained by a loop like a user's, `for batch in loader`, where the next batch is made while the last one is
alive and the last one is gone before the next step begins. `LiveStorageTracker` counts all tensors of the process
that were made since the job began. The promise, for steps from the fourth of a kind on:

* the true peak of the step is within the budget, or `BudgetInfeasibleError` was raised on entering a step, at the
  latest the fourth; where structure or state change later on, at the latest the step that would not fit, or, where
  some steps fit under no plan, one warning told of it; of what holds memory that only measured steps show, each plan
  is measured in its first step, and corrected: the promise holds from the seventh on,
* `report().measured_peak_bytes` is, to 2%, the true peak of the step that it was measured in,
* losses and weights are those of plain training, bit for bit, and there is no other error.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.report import Report
from tests.engine.harness import BUILD_SEED, TRAIN_SEED, snapshot
from tests.engine.live_tracker import LiveStorageTracker, Window
from tests.zoo.case import Case, Job
from tests.zoo.cases_loops import LOOPS_BY_NAME

FIRST_STEADY_STEP = 4
"""Steps of a kind count from 1; from the fourth on the plan is final."""

FIRST_CORRECTED_STEP = 7
"""From here on it is where memory shows in measured steps alone, whose plans are corrected by them."""

TOLERANCE = 0.02
"""Of a measured figure."""

NUM_HEIGHTS = 40
"""Budgets between floor and plain peak, 2.5% of the way apart."""

MUST_BE_FEASIBLE = 0.5
"""From this height on a case of one structure may not be refused."""

NUM_RETRIES = 8
"""How often a case whose structure or state changes may find that it needs a larger budget."""


@dataclass(slots=True, kw_only=True)
class Step:
    """What the tracker saw of one step, and what the plugin measured of it, if it did.

    Attributes:
        kind: The shapes of its inputs.
        number: Its number among the steps of its kind, from 1.
        window: The true peak, over the whole step.
        first_steady: From which of these on the promise holds.
        forward_peak_bytes: The true peak until the first backward begins, and between backwards.
        backward_peak_bytes: The true peak in backward.
        measured: The report's figures of this step: in total, of forward and of backward.
    """

    kind: Any
    number: int
    window: Window
    first_steady: int = FIRST_STEADY_STEP
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    measured: tuple[int | None, int | None, int | None] | None = None

    @property
    def is_steady(self) -> bool:
        """Whether the promise holds for it."""
        return self.number >= self.first_steady


@dataclass(slots=True)
class Watch:
    """The scope of one training; see :class:`tests.zoo.case.Scope`.

    Attributes:
        steps: Those that began.
        optimizer_peaks: The true peak of each optimizer's step outside of the plugin's.
        reports: The last report on each kind of step.
        digest: Of the losses so far.
        last: The last step of each kind.
        first_steady: From which step of a kind on the promise holds.
        warnings: What the plugin warned of.
    """

    memory: MemoryPlugin | None
    tracker: LiveStorageTracker
    first_steady: int = FIRST_STEADY_STEP
    steps: list[Step] = field(default_factory=list)
    optimizer_peaks: list[int] = field(default_factory=list)
    reports: dict[Any, Report] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)
    last: dict[Any, Step] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def step(self, *inputs: Any) -> Iterator[None]:
        """Surround one forward and its backward."""
        kind = tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        before = self.last.get(kind)
        self.tracker.register_all()
        with self.tracker.window() as window, self.memory.step(*inputs) if self.memory else nullcontext():
            number = before.number + 1 if before else 1
            step = Step(kind=kind, number=number, window=window, first_steady=self.first_steady)
            if before is not None:
                self.take_figures(before)
            self.steps.append(step)
            self.last[kind] = step
            step.forward_peak_bytes = self.tracker.live_bytes
            yield

    def take_figures(self, step: Step) -> None:
        """What the plugin measured of a step, as its report tells; None where it says what it said before."""
        if self.memory is None:
            return
        report = self.reports[step.kind] = self.memory.report(of_last=True)
        figures = (report.measured_peak_bytes, report.forward_peak_bytes, report.backward_peak_bytes)
        known = [other.measured for other in self.steps if other.kind == step.kind and other.measured is not None]
        if not known or known[-1] != figures:
            step.measured = figures

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround the forward part."""
        with self.tracker.window() as window:
            yield
        step = self.steps[-1]
        step.forward_peak_bytes = max(step.forward_peak_bytes, window.peak_bytes)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward."""
        with self.backward_scope():
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Surround a backward."""
        with self.tracker.window() as window:
            yield
        step = self.steps[-1]
        step.backward_peak_bytes = max(step.backward_peak_bytes, window.peak_bytes)

    def update(self, *optimizers: Optimizer) -> None:
        """Step the optimizers and set the gradients to None."""
        for optimizer in optimizers:
            self.tracker.register_all()
            with self.tracker.window() as window:
                optimizer.step()
            self.optimizer_peaks.append(window.peak_bytes)
            optimizer.zero_grad(set_to_none=True)

    def record(self, name: str, value: Any) -> None:
        """Take the bits of a loss down."""
        for leaf in tree_leaves(value):
            self.digest.update(snapshot(leaf).data)


@dataclass(slots=True, kw_only=True)
class Training:
    """What one training showed.

    Attributes:
        watch: What was seen of it.
        digest: Of losses and weights; empty if it did not end.
        error: What ended it.
    """

    watch: Watch
    digest: str = ""
    error: Exception | None = None

    @property
    def steps(self) -> list[Step]:
        """The steps that ran."""
        return self.watch.steps

    @property
    def highest(self) -> Step | None:
        """The steady step with the highest true peak."""
        return max((s for s in self.steps if s.is_steady), key=lambda s: s.window.peak_bytes, default=None)

    @property
    def report(self) -> Report | None:
        """The last report on the kind of the highest step."""
        highest = self.highest
        return self.watch.reports.get(highest.kind) if highest is not None else None

    @property
    def has_ended(self) -> bool:
        """Whether all steps ran."""
        return self.error is None


def train(
    case: Case, memory: MemoryPlugin | None, *, steps: int | None = None, tracker: LiveStorageTracker | None = None
) -> Training:
    """Train a case under the tracker, plainly or under a plugin; an error ends it and is told.

    Sets aside all that the garbage collector knows so far, with `gc.freeze`.
    """
    tracker = tracker or LiveStorageTracker()
    gc.collect()
    gc.freeze()  # what was there before is neither the job's nor worth looking through in every step
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.* is deprecated", DeprecationWarning)
        return _train(case, memory, steps or case.steps, tracker)


def _train(case: Case, memory: MemoryPlugin | None, steps: int, tracker: LiveStorageTracker) -> Training:
    torch.manual_seed(BUILD_SEED)
    with tracker:
        model = case.build().train()
        job = Job(model=model, optimizers=case.optimizers(model))
        tracker.register(model)
        watch = Watch(memory, tracker, first_steady=FIRST_CORRECTED_STEP if case.hides else FIRST_STEADY_STEP)
        training = Training(watch=watch)
        torch.manual_seed(TRAIN_SEED)
        if memory is not None:
            memory.attach(model)
        listener = _Listener(watch.warnings)
        _LOG.addHandler(listener)
        try:
            for job.index, batch in enumerate(_loader(case, steps)):
                case.train_step(job, batch, watch)
            watch.take_figures(watch.steps[-1])
        except Exception as error:
            training.error = error.with_traceback(None)
            return training
        finally:
            _LOG.removeHandler(listener)
            if memory is not None:
                memory.detach()
        for value in job.model.state_dict().values():
            watch.digest.update(snapshot(value).data)
        training.digest = watch.digest.hexdigest()
    return training


_LOG = logging.getLogger("lightning_offload")


class _Listener(logging.Handler):
    """Notes warnings."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())


def _loader(case: Case, steps: int) -> Iterator[Any]:
    for index in range(steps):
        yield case.batch(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What plain training needs, and what a first, unbounded run reports.

    Attributes:
        floor_bytes: The smallest feasible budget, as reported.
        plain_peak_bytes: The true peak of plain training, from the fourth step on.
        reported_plain_peak_bytes: The same as reported.
        digest: Of plain training.
    """

    floor_bytes: int
    plain_peak_bytes: int
    reported_plain_peak_bytes: int
    digest: str

    def budget(self, height: float) -> int:
        """The budget at a height between the floor (0) and the plain peak (1)."""
        return int(self.floor_bytes + height * (self.plain_peak_bytes - self.floor_bytes))


@functools.cache
def probe(name: str) -> Probe:
    """Find where the budgets of a case lie."""
    case = LOOPS_BY_NAME[name]
    plain = train(case, None)
    swapped = train(case, MemoryPlugin(budget=None, policy="all-swap"))
    for training in (plain, swapped):
        if training.error is not None:
            raise training.error
    assert plain.highest is not None
    reports = swapped.watch.reports.values()
    return Probe(
        floor_bytes=max(report.floor_bytes or 0 for report in reports),
        plain_peak_bytes=plain.highest.window.peak_bytes,
        reported_plain_peak_bytes=max(report.plain_peak_bytes or 0 for report in reports),
        digest=plain.digest,
    )


@dataclass(slots=True, kw_only=True)
class Verdict:
    """How one budget went.

    Attributes:
        height: Of the budget, between floor (0) and plain peak (1).
        budget_bytes: The budget.
        training: The run.
        failures: In what the promise was not kept; nothing if it was.
    """

    height: float
    budget_bytes: int
    training: Training
    failures: list[str]


def judge(case: Case, budget_bytes: int, training: Training, digest: str) -> list[str]:
    """In what a training did not keep the promise."""
    return [
        *_judge_error(case, budget_bytes, training),
        *_judge_peaks(budget_bytes, training),
        *_judge_figures(case, training),
        *(["bits: losses or weights are not plain training's"] if training.digest not in ("", digest) else []),
    ]


def _judge_error(case: Case, budget_bytes: int, training: Training) -> Iterator[str]:
    error = training.error
    if error is None:
        return
    if not isinstance(error, BudgetInfeasibleError):
        yield f"error: {type(error).__name__}: {str(error)[:160]}"
        return
    if error.floor_bytes <= budget_bytes:
        yield f"error: {budget_bytes} is said to be infeasible, and {error.floor_bytes} feasible"
    if case.static and not case.grows and any(step.is_steady for step in training.steps):
        yield f"late: infeasible only after {training.steps[-1].number} steps"


def _judge_peaks(budget_bytes: int, training: Training) -> Iterator[str]:
    step = training.highest
    is_over = step is not None and step.window.peak_bytes > budget_bytes
    if step is not None and is_over and not _was_told(training):
        ratio = step.window.peak_bytes / budget_bytes
        yield f"over: {ratio:.3f} of the budget in step {step.number} at {step.window.peak_op}"
    for report in training.watch.reports.values():
        predicted = report.predicted_peak_bytes or 0
        if training.has_ended and report.phase == "planned" and predicted > budget_bytes:
            yield f"accepted: a plan of {predicted / budget_bytes:.3f} of the budget is in force"


def _was_told(training: Training) -> bool:
    """Whether the user was warned that nothing keeps the peak of some steps within the budget."""
    return any("no prediction keeps their peak" in warning for warning in training.watch.warnings)


def _judge_figures(case: Case, training: Training) -> Iterator[str]:
    for step in training.steps:
        if not step.is_steady or step.measured is None:
            continue
        if not is_close(step.measured[0], step.window.peak_bytes):
            yield f"figure: measured {step.measured[0]} of {step.window.peak_bytes} in step {step.number}"
            return
    if not training.has_ended or not case.static or case.grows:
        return
    for kind, step in training.watch.last.items():
        measured = training.watch.reports[kind].measured_peak_bytes
        if not is_close(measured, step.window.peak_bytes):
            yield f"figure: measured {measured} at the end, of {step.window.peak_bytes}"


def is_close(figure: int | None, true: int) -> bool:
    """Whether a figure is a true one, to the tolerance."""
    return figure is not None and abs(figure - true) <= TOLERANCE * true


def try_budget(name: str, height: float, *, retry: bool = False) -> Verdict:
    """Train a case within a budget and judge it.

    Args:
        name: The case.
        height: The budget's, between the floor (0) and the plain peak (1).
        retry: Whether to hold an error to its word that its `floor_bytes` are enough.
    """
    case, found = LOOPS_BY_NAME[name], probe(name)
    budget_bytes = found.budget(height)
    training = train(case, MemoryPlugin(budget=budget_bytes))
    failures = judge(case, budget_bytes, training, found.digest)
    if isinstance(training.error, BudgetInfeasibleError):
        if case.static and height >= MUST_BE_FEASIBLE:
            failures.append(f"refused: needs {training.error.floor_bytes}, plain peaks at {found.plain_peak_bytes}")
        if retry:
            failures += _retry(case, training.error.floor_bytes, found.digest)
    return Verdict(height=height, budget_bytes=budget_bytes, training=training, failures=failures)


def _retry(case: Case, budget_bytes: int, digest: str) -> list[str]:
    """Train with exactly the budget that an error named; where structure or state change there may be more errors."""
    for _ in range(NUM_RETRIES):
        training = train(case, MemoryPlugin(budget=budget_bytes))
        failures = judge(case, budget_bytes, training, digest)
        error = training.error
        if not failures and isinstance(error, BudgetInfeasibleError):
            if case.static and not case.grows:
                failures = [f"a budget of {budget_bytes} was to be enough, now it is {error.floor_bytes}"]
            else:
                budget_bytes = error.floor_bytes
                continue
        return [f"at the budget that the error named, {failure}" for failure in failures]
    return [f"still infeasible after {NUM_RETRIES} larger budgets"]


def heights(number: int) -> list[float]:
    """As many heights of budgets, equally spaced from the floor on."""
    return [round(i * NUM_HEIGHTS / number) / NUM_HEIGHTS for i in range(number)]
