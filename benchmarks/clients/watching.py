"""Watches a training from outside: torch itself tells of each backward and of each step of an optimizer.

A step ends when an optimizer's step does. Its losses are what `backward` is called on; its peak is that of live bytes
until backward is through, counted by the tracker of the tests, which asks the library nothing. What an optimizer needs
beyond that comes after, and is in no budget. What kernels allocate within themselves the tracker does not see; torch's
profiler tells of that in the last steps. What the library says of itself is noted beside: what a step was, and what it
warns of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import operator
import random
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_offload.plugins.memory import attached_plugins
from tests.engine.live_tracker import LiveStorageTracker

_LOGGER = "lightning_offload"
_FIRST_PROFILED = 37
"""Steps from here on are profiled. Memory from before the first of them is not known when it goes: the last counts."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Seen:
    """What a training was seen to do.

    Attributes:
        losses: A digest of what each backward was called on.
        weights: A digest of parameters and buffers after it.
        random_state: A digest of Python's, numpy's and torch's random states after it.
        cpu_seconds: CPU time of each step after the first, all threads together.
        peak_bytes: Live bytes at most in forward and backward of each step, if they were counted.
        allocated_bytes: The same of the last step, with what kernels allocate within themselves; 0 if it is not known.
        phases: What the plugin says that each step was; none in a plain run.
        warnings: What the plugin warned of.
    """

    losses: list[str] = dataclasses.field(default_factory=list)
    weights: str = ""
    random_state: str = ""
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: list[int] = dataclasses.field(default_factory=list)
    allocated_bytes: int = 0
    phases: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def watching(*, counts: bool) -> Iterator[Seen]:
    """Note what is trained inside.

    Args:
        counts: Whether live bytes are counted, which takes time: such steps are not to be timed.
    """
    seen = Seen()
    with contextlib.ExitStack() as stack:
        watch = _Counting(seen, stack.enter_context(LiveStorageTracker())) if counts else _Watch(seen)
        stack.callback(watch.close)
        stack.callback(register_optimizer_step_post_hook(watch.after_optimizer).remove)
        stack.enter_context(_told_of_backward(watch))
        stack.enter_context(_collecting(seen.warnings))
        yield seen


def note_end(seen: Seen, trained: nn.Module) -> None:
    """Note the bits of what was trained, and the random state."""
    state = trained.state_dict()
    seen.weights = _digest(*(state[name] for name in sorted(state) if isinstance(state[name], Tensor)))
    _, keys, *others = np.random.get_state()  # noqa: NPY002  # the state that libraries use
    states = f"{random.getstate()} {keys.tobytes()!r} {others} {_digest(torch.get_rng_state())}"
    seen.random_state = hashlib.sha256(states.encode()).hexdigest()[:16]


class _Watch:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._began: float | None = None

    def before_backward(self, losses: Any) -> None:
        with _disable_current_modes():
            self._seen.losses.append(_digest(*([losses] if isinstance(losses, Tensor) else losses)))

    def after_backward(self) -> None: ...

    def close(self) -> None: ...

    def after_optimizer(self, *_: Any) -> None:
        if self._began is not None:
            self._seen.cpu_seconds.append(time.process_time() - self._began)
        self._seen.phases.extend(memory.phase for memory in attached_plugins())
        self._began = time.process_time()


class _Counting(_Watch):
    """Opens a window on the live bytes when a step begins, and notes what it shows when backward is through."""

    def __init__(self, seen: Seen, tracker: LiveStorageTracker) -> None:
        super().__init__(seen)
        self._tracker = tracker
        self._windows = contextlib.ExitStack()
        self._window = self._windows.enter_context(tracker.window())
        self._allocations = _Allocations()
        self._num_steps = 0

    @override
    def after_backward(self) -> None:
        self._seen.peak_bytes[self._num_steps :] = [self._window.peak_bytes]
        self._allocations.mark_through()

    @override
    def after_optimizer(self, *arguments: Any) -> None:
        super().after_optimizer(*arguments)
        self._num_steps += 1
        self._windows.close()
        self._window = self._windows.enter_context(self._tracker.window())
        if self._num_steps >= _FIRST_PROFILED:
            self._allocations.mark_begin(self._tracker.live_bytes)

    @override
    def close(self) -> None:
        self._windows.close()
        self._seen.allocated_bytes = self._allocations.peak_bytes()


class _Allocations:
    """All that torch's allocator does in the last steps.

    The profiler runs until all is over: stopped within an optimizer's step, where Lightning calls backward, it crashes.
    """

    def __init__(self) -> None:
        self._profile: Any = None
        self._live_bytes: list[int] = []  # when each step began

    def mark_begin(self, live_bytes: int) -> None:
        if self._profile is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profile.start()
        self._live_bytes.append(live_bytes)
        _mark(_BEGINS)

    def mark_through(self) -> None:
        if self._profile is not None:
            _mark(_IS_THROUGH)

    def peak_bytes(self) -> int:
        """Of the last step whose backward was seen, 0 without one."""
        if self._profile is None:
            return 0
        self._profile.stop()
        found = [(event.start_ns(), event.name(), event.nbytes()) for event in _events(self._profile)]
        begun = iter(self._live_bytes)
        live_bytes = peak_bytes = last_bytes = 0
        for _, name, num_bytes in sorted(found, key=operator.itemgetter(0)):
            if name == _BEGINS:
                live_bytes = peak_bytes = next(begun)
            elif name == _IS_THROUGH:
                last_bytes = peak_bytes
            elif name == _MEMORY:
                live_bytes += num_bytes
                peak_bytes = max(peak_bytes, live_bytes)
        return last_bytes


_BEGINS, _IS_THROUGH, _MEMORY = "a step begins", "backward is through", "[memory]"


def _mark(name: str) -> None:
    """Leave a mark among the profiler's events, which is no op to anyone."""
    with torch._C._profiler._RecordFunctionFast(name):
        pass


def _events(profile: Any) -> list[Any]:
    return [
        event for event in profile.profiler.kineto_results.events() if event.name() in (_BEGINS, _IS_THROUGH, _MEMORY)
    ]


@contextlib.contextmanager
def _told_of_backward(watch: _Watch) -> Iterator[None]:
    """What all calls of backward lead to tells the watch, before and after."""
    backward = torch.autograd.backward

    def told(tensors: Any, *arguments: Any, **keywords: Any) -> None:
        watch.before_backward(tensors)
        backward(tensors, *arguments, **keywords)
        watch.after_backward()

    torch.autograd.backward = told
    try:
        yield
    finally:
        torch.autograd.backward = backward


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


@contextlib.contextmanager
def _collecting(messages: list[str]) -> Iterator[None]:
    """What the library warns of, in its log and by Python's warnings, is collected too."""
    logger, handler, show = logging.getLogger(_LOGGER), _Collector(messages), warnings.showwarning

    def showwarning(message: Any, *arguments: Any, **keywords: Any) -> None:
        if any(word in str(message) for word in ("plugin", "budget", "BatchSizeFinder")):
            messages.append(str(message))
        show(message, *arguments, **keywords)

    logger.addHandler(handler)
    warnings.showwarning = showwarning
    try:
        yield
    finally:
        logger.removeHandler(handler)
        warnings.showwarning = show


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
