"""Tells the user, once, what of a model's saved tensors a plan cannot move because the model holds them itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lightning_offload.runtime.nested_hooks import SELECTIVE, NestedSaves, noticing
from lightning_offload.units import format_bytes

_log = logging.getLogger(__name__)


class NestedHooks:
    """Counts, in each step, what its hooks do not see.

    Attributes:
        last: What was counted in the last step.
    """

    def __init__(self) -> None:
        self.last = NestedSaves()
        self._told: set[str] = set()

    @contextlib.contextmanager
    def around(self, pack: Callable[[Tensor], Any]) -> Iterator[None]:
        """Around the part of a step that is under its hooks, of which ``pack`` is the first."""
        self.last = nested = NestedSaves()
        with noticing(nested, pack):
            yield
        for holder in nested.num_tensors.keys() - self._told:
            self._told.add(holder)
            _log.warning("%s", _said(holder, nested.num_tensors[holder], nested.num_bytes[holder]))


def _said(holder: str, num_tensors: int, num_bytes: int) -> str:
    tensors = f"{num_tensors} tensors" if num_tensors > 1 else "1 tensor"
    size = format_bytes(num_bytes)
    if holder == SELECTIVE:
        return (
            f"selective checkpointing in the model caches {tensors} ({size}) beside autograd, where no plan can move "
            "them: they stay on the device, and count as such; to have them planned give "
            "replace_checkpointing=True, train without the model's own checkpointing, or use torch 2.14 or later with "
            "checkpoint(..., respect_saved_tensors_hooks=True)"
        )
    return (
        f"the model saves {tensors} ({size}) under saved-tensor hooks of its own ({holder}), which are inside of the "
        "memory plugin's: they go where those hooks put them, and no plan can move them; to have them planned turn the "
        "model's own offloading off (activation_checkpointing_enable(offload=False) in transformers, no save_on_cpu)"
    )
