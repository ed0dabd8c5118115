"""Finds the program's entry for each op that runs, and copes with ops that come and go beside the model's own."""

from __future__ import annotations

import torch

from lightning_offload.runtime.program import OpStep, Program

MAX_STRAY_OPS = 64
"""So many ops that were not planned may come between planned ones, as those of logging do."""

_NOTHING = OpStep(name="", num_bytes=())


class ProgramCursor:
    """Where a step is in its program.

    A wrong guess costs memory or time, as a wrong plan does, never exactness.
    """

    def __init__(self, program: Program) -> None:
        self._ops = program.ops
        self._is_strict = program.is_strict
        self._next = 0
        self._num_stray_ops = 0

    @property
    def expected(self) -> str:
        """The op that the program has next, for messages."""
        return self._ops[self._next].name if self._next < len(self._ops) else "the end"

    def next(self, name: str) -> OpStep | None:
        """The entry for the op that is about to run; None if the step has left the program."""
        if not self._is_strict and torch._C._current_graph_task_id() != -1:
            return _NOTHING
        index = self._next
        if index < len(self._ops) and self._ops[index].name == name:
            self._next = index + 1
            return self._ops[index]
        return self._resynchronise(name)

    def _resynchronise(self, name: str) -> OpStep | None:
        """Skip planned ops for which there is nothing to do, or take this one for a stray."""
        for index in range(self._next, min(self._next + MAX_STRAY_OPS, len(self._ops))):
            if self._ops[index].name == name:
                self._next = index + 1
                return self._ops[index]
            if self._ops[index].is_busy:
                break
        self._num_stray_ops += 1
        return _NOTHING if self._num_stray_ops <= MAX_STRAY_OPS else None
