"""The seam through which a step is observed: no-op hooks that the runtime calls, in the order of events.

Capture implements it; the runtime knows only this base. All hooks run on the thread that runs the event (the
caller's in forward, perhaps an autograd thread in backward), with the step's dispatch mode off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_offload.tensors.op_facts import Effects, OpFacts


class StepObserver:
    """Base of observers of one step; every hook does nothing."""

    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to run."""

    def on_op(
        self, facts: OpFacts, args: Any, kwargs: Any, out: Any, seconds: float, did: Effects | None = None
    ) -> None:
        """An op of the program ran for ``seconds``; ``did`` is what it read and made, where that is known already."""

    def on_failed_op(self) -> None:
        """The op that was about to run has raised."""

    def on_made(self, tensors: list[Tensor]) -> None:
        """Autograd made tensors by ops that were not seen."""

    def on_pack(self, index: int, tensor: Tensor, is_plain: bool) -> None:
        """Autograd saved a tensor, the ``index``-th of the step."""

    def on_stay(self, storage: torch.UntypedStorage) -> None:
        """No tier had room for what was saved: the runtime holds it on the device."""

    def on_overwrite(self, index: int) -> None:
        """The storage of a saved tensor is about to be written although it is still saved."""

    def on_unpack(self, index: int) -> None:
        """Autograd is about to read a saved tensor back."""

    def on_unpacked(self, index: int, storage: torch.UntypedStorage) -> None:
        """A saved tensor that had left the device lies on ``storage`` now."""

    def on_release(self, index: int) -> None:
        """Autograd dropped a saved tensor."""

    def on_resized(self, storage: torch.UntypedStorage, num_bytes_before: int) -> None:
        """The program gave a storage another size, as sharded parameters are there for a while only."""

    def on_allocation(self, storage: torch.UntypedStorage) -> None:
        """The runtime itself allocated device memory (a copy back, the result of a replay)."""


def observe_all(observers: tuple[StepObserver, ...]) -> StepObserver | None:
    """One observer that tells several, or None for none."""
    if not observers:
        return None
    return observers[0] if len(observers) == 1 else _Several(observers)


class _Several(StepObserver):
    def __init__(self, observers: tuple[StepObserver, ...]) -> None:
        for name in (name for name in vars(StepObserver) if not name.startswith("_")):
            calls = [getattr(observer, name) for observer in observers]
            base = getattr(StepObserver, name)
            calls = [call for call in calls if getattr(call, "__func__", None) is not base]  # which do nothing
            setattr(self, name, _tell(calls))


def _tell(calls: list[Any]) -> Any:
    if len(calls) == 1:
        return calls[0]

    def tell(*args: Any) -> None:
        for call in calls:
            call(*args)

    return tell
