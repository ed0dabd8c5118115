"""What `DistributedDataParallel` does beside the model's own step: its gradient buckets, and its work around forward.

Each rank runs its own memory plugin, and nothing here issues a collective that DDP would not issue at the same
place: ranks may meet new shapes at different steps.

Note [Buckets]: the reducer copies gradients into flat buffers, the buckets, and all-reduces those. They are as
large as the gradients, live as long as the model and are not reachable from Python, so their storages are noted
while DDP allocates them. After the first backward DDP lays them out anew, once, in the order in which gradients
became ready.

Note [DDP's own forward]: before forward DDP may broadcast buffers, after it pass the outputs through a node of
its own, in some steps and not in others (the first one, those after `no_sync`). These ops save nothing and belong
to no plan, so they are run unseen: the recorded step is the model's own, the same in every step.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_offload.runtime.switch import unseen
from lightning_offload.tensors.op_facts import effects, facts_of

_T = TypeVar("_T")
_References = dict[int, "weakref.ref[torch.UntypedStorage]"]


class InSync:
    """Given among a step's inputs: its backward all-reduces the gradients."""


class WithoutSync:
    """Given among a step's inputs: its backward only accumulates gradients, as under `no_sync`."""


class GradientBuckets:
    """The storages that DDP allocates for itself and keeps: its gradient buckets, see Note [Buckets].

    Attributes:
        version: Grows when they are laid out anew.
    """

    def __init__(self) -> None:
        self.version = 0
        self._made: _References = {}
        self._replaced: set[int] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Around the construction of a `DistributedDataParallel`: what it allocates and keeps is noted."""
        made: _References = {}
        with _Allocations(made):
            yield
        self._made.update((key, ref) for key, ref in made.items() if ref() is not None)

    def lay_out(self, model: DistributedDataParallel) -> None:
        """Let DDP lay its buckets out anew if it is about to: just before forward, where it would do it itself.

        Done here it precedes the step, whose ops and memory it is no part of. Like DDP's own call it is a
        collective in the one step where it does anything, and that step is the same on every rank.
        """
        if not torch.is_grad_enabled():
            return
        before = set(self.sizes())
        with self.noted():
            has_changed = model.reducer._rebuild_buckets()
        if has_changed:
            model._has_rebuilt_buckets = True
            self._replaced = before
            self.version += 1

    def sizes(self, device: torch.device | None = None) -> dict[int, int]:
        """Bytes on a device, or on all of them, by identity of the storage."""
        storages = ((key, ref()) for key, ref in self._made.items())
        return {key: s.nbytes() for key, s in storages if s is not None and device in (None, s.device)}

    def were_replaced_in(self, touched: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> bool:
        """Whether storages that a step touched were buckets which DDP has since replaced."""
        return any(key in self._replaced and ref() is None for key, ref in touched.items())


class _Allocations(TorchDispatchMode):
    """Notes the storages that ops make."""

    def __init__(self, made: _References) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        _, made, num_fresh = effects(facts_of(func), args, kwargs, out)
        for tensor in made[:num_fresh]:
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = weakref.ref(storage)
        return out


def run_unseen_around_forward(model: DistributedDataParallel) -> None:
    """Make DDP do its own work around forward unseen, see Note [DDP's own forward]."""
    for name in ("_pre_forward", "_post_forward"):
        setattr(model, name, _unseen(getattr(model, name)))


def _unseen(function: Callable[..., _T]) -> Callable[..., _T]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> _T:
        with unseen:
            return function(*args, **kwargs)

    return run
