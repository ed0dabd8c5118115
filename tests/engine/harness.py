"""Runs a zoo case plainly or under a memory plugin, and compares what came out, byte by byte.

Both runs build the model from the same seed in the same process. Reading tensors happens with all dispatch
modes off, so that recording an outcome is invisible to the runtime and to the tracker.
"""

from __future__ import annotations

import ctypes
import enum
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from tests.zoo.case import Case, Job

TORCH_WARNING = ".torch.jit.script. is deprecated"
"""Given by torch about itself when forward-mode differentiation is first used."""

BUILD_SEED = 11
TRAIN_SEED = 12


class Memory(Protocol):
    """What the harness needs from a memory plugin."""

    def attach(self, module: Any = None, device: Any = None) -> None:
        """Begin to manage a module."""

    def detach(self) -> None:
        """End."""

    def step(self, *inputs: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Surround a step."""

    def backward_scope(self) -> AbstractContextManager[None]:
        """Surround a backward."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run a backward."""


class Wrap(enum.Enum):
    """Which part of a step the memory plugin surrounds."""

    WHOLE = "whole"
    """`step()` around forward and backward."""
    FORWARD = "forward"
    """`step()` around forward alone, then `memory.backward(loss)`."""
    BARE = "bare"
    """`step()` around forward alone, then `loss.backward()`."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tensor's geometry and bytes. Equal snapshots are equal tensors, NaNs included."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: bytes

    def tensor(self) -> Tensor:
        """The values, contiguous."""
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape)


@dataclass(slots=True)
class Outcome:
    """Everything a run left behind, by name, in the order in which it was recorded."""

    values: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Record the tensors and plain values of a tree; repeated names are numbered."""
        leaves, _ = tree_flatten_with_path(value)
        for path, leaf in leaves:
            key = name + "".join(str(part) for part in path)
            number = 0
            while (unique := key if number == 0 else f"{key}#{number}") in self.values:
                number += 1
            self.values[unique] = _frozen(leaf)


def _frozen(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.layout is torch.sparse_coo:
        return (leaf.is_coalesced(), snapshot(leaf._indices()), snapshot(leaf._values()))
    return snapshot(leaf)


def snapshot(tensor: Tensor) -> Snapshot:
    """Copy a strided tensor's bytes out of torch."""
    with _disable_current_modes(), torch.no_grad():
        stride = tensor.stride()
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        num_bytes = dense.numel() * dense.element_size()
        data = ctypes.string_at(dense.data_ptr(), num_bytes) if num_bytes else b""
    return Snapshot(tensor.dtype, tuple(tensor.shape), stride, data)


@dataclass(slots=True, kw_only=True)
class Runner:
    """The scope of one run: decides what `memory` surrounds, and records."""

    memory: Memory | None
    wrap: Wrap
    around: Callable[[], AbstractContextManager[Any]]
    job: Job
    outcome: Outcome | None
    inputs: tuple[Any, ...] = ()

    @contextmanager
    def step(self, *inputs: Any) -> Iterator[None]:
        """Surround one forward and its backward."""
        whole = self.memory is not None and self.wrap is Wrap.WHOLE
        with self.around(), self.memory.step(*inputs) if whole and self.memory else nullcontext():
            self.inputs = inputs
            try:
                yield
            finally:
                self.inputs = ()

    def forward(self) -> AbstractContextManager[None]:
        """Surround forward, if the plugin is to see that alone."""
        if self.memory is None or self.wrap is Wrap.WHOLE:
            return nullcontext()
        return self.memory.step(*self.inputs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward, by the plugin where the wrap says so."""
        if self.memory is not None and self.wrap is Wrap.FORWARD:
            self.memory.backward(loss, **kwargs)
        else:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def backward_scope(self) -> AbstractContextManager[None]:
        """Surround a backward that is not a call of `Tensor.backward`."""
        if self.memory is not None and self.wrap is Wrap.FORWARD:
            return self.memory.backward_scope()
        return nullcontext()

    def update(self, *optimizers: Optimizer) -> None:
        """Record gradients, step, and set the gradients to None."""
        for name, weight in self.job.model.named_parameters():
            self.record(f"grad/{name}", weight.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def record(self, name: str, value: Any) -> None:
        """Record under the number of the step."""
        if self.outcome is not None:
            self.outcome.add(f"step{self.job.index}/{name}", value)


def run(
    case: Case,
    *,
    memory: Memory | None = None,
    wrap: Wrap = Wrap.WHOLE,
    steps: int | None = None,
    device: str = "cpu",
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    on_start: Callable[[Job], None] | None = None,
    after_step: Callable[[Job], None] | None = None,
    record: bool = True,
) -> Outcome:
    """Train a case.

    Args:
        case: What to train.
        memory: The plugin, attached for the duration of the run; None trains plainly.
        wrap: What the plugin surrounds.
        steps: The number of training steps; the case's own by default.
        device: Where to train.
        around: Makes a context that is entered outside each step.
        on_start: Called once with the job, before the first step.
        after_step: Called after each training step.
        record: Whether to record the outcome.

    Returns:
        Losses, gradients, parameters, buffers, optimizer state and random states, empty without `record`.
    """
    torch.manual_seed(BUILD_SEED)
    model = case.build().to(device).train()
    job = Job(model=model, optimizers=case.optimizers(model))
    outcome = Outcome()
    runner = Runner(memory=memory, wrap=wrap, around=around, job=job, outcome=outcome if record else None)
    torch.manual_seed(TRAIN_SEED)
    if on_start is not None:
        on_start(job)
    if memory is not None:
        memory.attach(model)
    try:
        for index in range(steps or case.steps):
            job.index = index
            batch = tree_map_only(Tensor, lambda t: t.to(device), case.batch(index))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", TORCH_WARNING, DeprecationWarning)
                case.train_step(job, batch, runner)
            del batch
            if after_step is not None:
                after_step(job)
    finally:
        if memory is not None:
            memory.detach()
    if record:
        _record_end(outcome, job, device)
    return outcome


def _record_end(outcome: Outcome, job: Job, device: str) -> None:
    outcome.add("state/", job.model.state_dict())
    outcome.add("parameter/", dict(job.model.named_parameters()))
    outcome.add("buffer/", dict(job.model.named_buffers()))
    outcome.add("grad/", {name: weight.grad for name, weight in job.model.named_parameters()})
    for index, optimizer in enumerate(job.optimizers):
        outcome.add(f"optimizer{index}/", optimizer.state_dict())
    outcome.add("rng/cpu", torch.get_rng_state())
    if device != "cpu":
        outcome.add("rng/cuda", torch.cuda.get_rng_state(device))


def differences(expected: Outcome, actual: Outcome, limit: int = 8) -> list[str]:
    """Describe the first names, in recording order, under which two outcomes differ."""
    found: list[str] = []
    names = list(expected.values) + [name for name in actual.values if name not in expected.values]
    for name in names:
        if name not in actual.values or name not in expected.values:
            found.append(f"{name}: only in the {'expected' if name in expected.values else 'actual'} outcome")
        elif expected.values[name] != actual.values[name]:
            found.append(f"{name}: {_describe(expected.values[name], actual.values[name])}")
    more = len(found) - limit
    return found[:limit] + ([f"... and {more} more of {len(names)}"] if more > 0 else [])


def _describe(expected: Any, actual: Any) -> str:
    if not isinstance(expected, Snapshot) or not isinstance(actual, Snapshot):
        return f"expected {str(expected)[:80]}, got {str(actual)[:80]}"
    for attribute in ("dtype", "shape", "stride"):
        before, after = getattr(expected, attribute), getattr(actual, attribute)
        if before != after:
            return f"{attribute} expected {before}, got {after}"
    before, after = expected.tensor().flatten(), actual.tensor().flatten()
    size = expected.dtype.itemsize
    unequal = [
        i
        for i in range(before.numel())
        if expected.data[i * size : (i + 1) * size] != actual.data[i * size : (i + 1) * size]
    ]
    first = unequal[0]
    return (
        f"{len(unequal)} of {before.numel()} elements of {expected.shape} differ, first at {first}: "
        f"expected {before[first].item()!r}, got {after[first].item()!r}"
    )


def assert_same(expected: Outcome, actual: Outcome) -> None:
    """Fail with the first differing names unless two outcomes are equal byte for byte."""
    found = differences(expected, actual)
    assert not found, "outcomes differ:\n  " + "\n  ".join(found)
