"""Puts an executor in force: the one dispatch mode and the one pair of saved-tensor hooks.

Of stacked hooks only the innermost run, so there is one pair. ``torch.func`` transforms refuse to run under
saved-tensor hooks, so while a step is open ``torch.autograd.graph.disable_saved_tensors_hooks`` takes ours off
and puts them back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.keeping import KeepingExecutor
from lightning_offload.runtime.step_mode import StepMode, watch_backward

Executor = StepExecutor | KeepingExecutor


@contextlib.contextmanager
def executing(executor: Executor, *, hooks: bool = True) -> Iterator[None]:
    """Run what is inside under an executor.

    Args:
        executor: The step's executor.
        hooks: Whether tensors saved inside are packed; False around a backward that is only watched.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(executor.close)
        if hooks:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(executor.pack, executor.unpack))
            stack.enter_context(_yielding_to_functorch(executor))
        if isinstance(executor, StepExecutor) and (hooks or executor.watches_backward):
            stack.callback(watch_backward(contextlib.nullcontext))  # Note [modes change backward]
            stack.enter_context(StepMode(executor.dispatch, executor.made))
        yield


_OPEN = threading.local()
_PATCH_LOCK = threading.Lock()
_num_patches = 0
_original_disable = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
    """Stands in for torch's: takes our hooks off inside, where they are the only ones."""
    executor = getattr(_OPEN, "executor", None)
    if executor is None or not _ours_is_top(executor):
        with _original_disable(error_message):
            yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    _OPEN.executor = None
    try:
        with _original_disable(error_message):
            yield
    finally:
        _OPEN.executor = executor
        torch._C._autograd._push_saved_tensors_default_hooks(executor.pack, executor.unpack)


def _ours_is_top(executor: Executor) -> bool:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[0] == executor.pack


@contextlib.contextmanager
def _yielding_to_functorch(executor: Executor) -> Iterator[None]:
    global _num_patches
    previous = getattr(_OPEN, "executor", None)
    _OPEN.executor = executor
    with _PATCH_LOCK:
        _num_patches += 1
        torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks
    try:
        yield
    finally:
        _OPEN.executor = previous
        with _PATCH_LOCK:
            _num_patches -= 1
            if _num_patches == 0:
                torch.autograd.graph.disable_saved_tensors_hooks = _original_disable
