"""Misuse that would be silent: what runs without a budget although one was given is told once, with the fix.

A plugin that serves nothing changes nothing, so nothing else would tell: results are the plain ones, and the peak too.
Each plugin tells of its own, each kind once, as a ``UserWarning``.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from lightning_offload.graph.step_graph import StepGraph

Kind = Literal[
    "not entered", "not attached", "within another", "within a transform", "within hooks of others", "no step", "keep"
]
_SHOWN = 6  # names in a message

_MESSAGES: dict[Kind, str] = {
    "not entered": (
        "memory.step() was called, but not entered, so no step ran under the plugin: write `with memory.step(batch):` "
        "around forward and backward"
    ),
    "not attached": (
        "memory.step() has no effect, because the plugin was not attached: put `with memory:` around the training "
        "loop, or call memory.attach(model) before it"
    ),
    "within another": (
        "this MemoryPlugin has no effect, because its steps are within those of another one, which serves them: one "
        "plugin serves a device, and OffloadStrategy, OffloadCallback and prepare_offload have one of their own; use "
        "theirs (strategy.memory, callback.memory), or leave out one of the two"
    ),
    "within a transform": (
        "a forward within a transform of torch.func (grad, vmap, jvp) runs as without the plugin, so no memory budget "
        "is kept in it: transforms refuse saved-tensor hooks; take gradients by backward(), or put `with "
        "memory.step(batch):` around the transform for what else the step saves"
    ),
    "within hooks of others": (
        "a step within saved-tensor hooks that are not the plugin's (a checkpoint around the whole model, "
        "torch.autograd.graph.save_on_cpu, hooks that compress) or where hooks are disabled runs as without the "
        "plugin, so no memory budget is kept in it: enter them within the step (`with memory.step(batch):` around "
        "them), or leave them out"
    ),
    "no step": (
        "an optimizer stepped, but no step ran under the plugin that was attached, so no memory budget is kept: write "
        "`with memory.step(batch):` around forward and backward"
    ),
}


class _Steps:
    """Of all plugins of the process."""

    num_begun = 0


class Misuse:
    """What is wrong with the use of a plugin, each kind told once.

    Attributes:
        advice: What to tell in place of the usual, by kind: an adapter's user has other things to mend.
    """

    def __init__(self) -> None:
        self.advice: dict[Kind, str] = {}
        self._told: set[Kind] = set()
        self._is_served = self._trains_unserved = False
        self._has_checked_keep = False

    def tell(self, kind: Kind, message: str = "", *, stacklevel: int = 2) -> None:
        """Warn, the first time.

        Args:
            kind: What is wrong.
            message: What to say; by default what there is to say of that kind.
            stacklevel: Of the caller's line, as in ``warnings.warn``.
        """
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(message or self.advice.get(kind) or _MESSAGES[kind], stacklevel=stacklevel + 1)

    def note_step(self) -> None:
        """A step runs under the plugin."""
        self._is_served = True
        _Steps.num_begun += 1

    def note_optimizer(self, parameters: Iterable[Tensor], module: torch.nn.Module | None) -> None:
        """An optimizer begins to step, and may have a closure that runs the training step.

        Where nothing has a gradient nothing is trained: state is made, say.

        Args:
            parameters: What it updates.
            module: The model, where it is known; without it any optimizer is taken for its, unless another plugin's
                steps run.
        """
        if self._is_served or self._told or (module is None and _Steps.num_begun):
            return
        trained = {id(parameter) for parameter in parameters if parameter.grad is not None}  # as the optimizer asks too
        ours = {id(parameter) for parameter in module.parameters()} if module is not None else trained
        self._trains_unserved = not ours.isdisjoint(trained)

    def note_optimizer_end(self) -> None:
        """An optimizer has stepped: of the model, without a step of the plugin before, it trains without a budget."""
        if self._trains_unserved and not (self._is_served or self._told):
            self.tell("no step", stacklevel=5)  # torch's hooks and wrappers are between

    def check_keep(self, patterns: tuple[str, ...], graph: StepGraph) -> None:
        """Check that patterns of modules match some, in the first step that is planned."""
        if not patterns or self._has_checked_keep:
            return
        self._has_checked_keep = True
        modules = sorted({save.module for save in graph.saves} - {""})
        unmatched = [p for p in patterns if not any(fnmatch.fnmatchcase(module, p) for module in modules)]
        if unmatched:
            there = ", ".join(map(repr, modules[:_SHOWN])) + (", ..." if len(modules) > _SHOWN else "")
            self.tell(
                "keep",
                f"keep={unmatched!r} matches no module that saves a tensor in this step, so it keeps nothing: "
                f"give patterns of whole names, such as 'encoder*' for all of encoder; there are {there or 'none'}",
                stacklevel=7,
            )


class StepScope(AbstractContextManager[None]):
    """The scope of a step, which tells where it is not entered.

    Args:
        scope: What is entered.
        misuse: Of the plugin.
    """

    __slots__ = ("_misuse", "_scope")

    def __init__(self, scope: AbstractContextManager[None], misuse: Misuse) -> None:
        self._scope = scope
        self._misuse: Misuse | None = misuse

    def __enter__(self) -> None:
        self._misuse = None
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._scope.__exit__(kind, error, traceback)

    def __del__(self) -> None:
        if self._misuse is not None:
            self._misuse.tell("not entered")
