"""Notices the saved tensors of a step that never come to its hooks.

Of stacked saved-tensor hooks only the innermost are called. Hooks that a model pushes within a step
(``torch.autograd.graph.save_on_cpu``, alone or around a checkpoint) are inside of ours, so what is saved under them is
theirs: exact, but never planned. Here it is counted. torch's own checkpoints push hooks as well, but those keep
nothing: what they drop is computed again, and the inputs of the checkpoint are saved under ours.

Selective checkpoints hold the results of chosen ops in a dispatch mode of their own, beside autograd. From torch 2.14
on that mode passes them to the hooks around the checkpoint if it is told to: while a step is open it is, unless the
model has said what it wants. Before that, they are counted too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from lightning_offload.tensors.op_facts import as_saved

SELECTIVE = "selective checkpointing"
"""Names the holder of tensors that a selective checkpoint caches."""

_CHECKPOINT = checkpoint.__name__
_Caching: Any = getattr(checkpoint, "_CachingTorchDispatchMode", None)
_resolve: Any = getattr(checkpoint, "_current_user_saved_tensors_hooks", None)


@dataclasses.dataclass(slots=True)
class NestedSaves:
    """What was saved out of sight.

    Attributes:
        num_tensors: The number of tensors, by who holds them.
        num_bytes: Their bytes, by who holds them; a storage saved twice counts twice.
    """

    num_tensors: dict[str, int] = dataclasses.field(default_factory=dict)
    num_bytes: dict[str, int] = dataclasses.field(default_factory=dict)

    def note(self, holder: str, tensor: Tensor) -> None:
        """Count a tensor; not one that a compiler or a prediction only thinks of."""
        if is_fake(tensor):
            return
        plain = as_saved(tensor)[1]
        self.num_tensors[holder] = self.num_tensors.get(holder, 0) + 1
        size = tensor.untyped_storage().nbytes() if plain else 0
        self.num_bytes[holder] = self.num_bytes.get(holder, 0) + size


class _OpenHooks(threading.local):
    """The step that is open in a thread: what counts for it, and its own hooks."""

    nested: NestedSaves | None = None
    pack: Callable[[Tensor], Any] | None = None


_open = _OpenHooks()
_LOCK = threading.Lock()
_num_open = 0
_original_enter = saved_tensors_hooks.__enter__


@contextlib.contextmanager
def noticing(nested: NestedSaves, pack: Callable[[Tensor], Any]) -> Iterator[None]:
    """Around the part of a step in which its hooks are on: count what does not come to them.

    Args:
        nested: Where to count it.
        pack: The step's own pack hook.
    """
    before = (_open.nested, _open.pack)
    _open.nested, _open.pack = nested, pack
    _patch(1)
    try:
        yield
    finally:
        _open.nested, _open.pack = before
        _patch(-1)


def _patch(change: int) -> None:
    global _num_open
    with _LOCK:
        _num_open += change
        if change > 0 and _num_open == 1:
            saved_tensors_hooks.__enter__ = _enter_hooks  # type: ignore[method-assign]
            if _Caching is not None:
                _Caching.__enter__, _Caching.__exit__ = _enter_caching, _exit_caching
        elif not _num_open:
            saved_tensors_hooks.__enter__ = _original_enter  # type: ignore[method-assign]
            if _Caching is not None:
                del _Caching.__enter__, _Caching.__exit__


def _enter_hooks(hooks: saved_tensors_hooks) -> None:
    """Stands in for torch's: hooks that are pushed in a step tell what they are given in forward."""
    nested, pack = _open.nested, hooks.pack_hook
    if nested is None or pack == _open.pack or type(hooks).__module__ == _CHECKPOINT:
        _original_enter(hooks)
        return
    holder = (
        type(hooks).__name__ if type(hooks) is not saved_tensors_hooks else getattr(pack, "__qualname__", str(pack))
    )

    def counted(tensor: Tensor) -> Any:
        if torch._C._current_graph_task_id() == -1:
            nested.note(holder, tensor)
        return pack(tensor)

    hooks.pack_hook = counted
    try:
        _original_enter(hooks)
    finally:
        hooks.pack_hook = pack


def _enter_caching(mode: Any) -> Any:
    """Stands in for that of a selective checkpoint: its tensors come to the step's hooks, where torch knows how."""
    if getattr(mode, "respect_saved_tensors_hooks", True) is None and _is_under_ours():
        mode.respect_saved_tensors_hooks = True
    return super(_Caching, mode).__enter__()


def _exit_caching(mode: Any, *args: Any) -> Any:
    nested = _open.nested
    if nested is not None and torch._C._current_graph_task_id() == -1:
        # By op: a list of what its calls gave up to torch 2.11, a dict of it by call later.
        for item in tree_leaves(list(mode.storage.values())):
            tensor = getattr(item, "val", None)
            if isinstance(tensor, Tensor) and getattr(item, "unpack_hook", None) is None:
                nested.note(SELECTIVE, tensor)
    return super(_Caching, mode).__exit__(*args)


def _is_under_ours() -> bool:
    """Whether a tensor saved now, checkpoints aside, would come to the hooks of the step."""
    hooks = _resolve() if _resolve is not None else None
    return hooks is not None and hooks[0] == _open.pack
