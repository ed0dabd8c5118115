"""A plan that the user gives: with the step that it was made for it is in force from the first training step on.

The command line writes a plan and the step beside it, captured on FakeTensors. Steps follow it as far as what it
decides about is there (:mod:`~lightning_offload.runtime.follow`). Where one does not, one line says where, and from the
next step on steps are recorded and planned as without it. Where what is on the device leaves it no room, the captured
step is planned anew within the budget. Without its step a plan waits for the first recording, and is taken if it is
for that.

It is for one specialization: for the shapes of the first one that followed it to its end.
"""

from __future__ import annotations

import logging

from lightning_offload.planning.resizing import Shapes
from lightning_offload.plugins.lifecycle import leave_imported, take_imported
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.plan_source import Imported
from lightning_offload.plugins.settings import Settings

_log = logging.getLogger(__name__)
_MOST_TRIES = 3  # specializations that did not follow it, before it is given up


class ImportedPlan:
    """Gives specializations the plan that the user gave.

    Args:
        settings: What the user asked for.
    """

    def __init__(self, settings: Settings) -> None:
        self._plan, self._step = settings.plan, settings.plan_step
        self._name = "plan=" if settings.plan_name is None else f"plan {settings.plan_name!r}"
        self._num_left = 0
        self._shapes: Shapes | None = None
        self._has_told = False

    @property
    def is_available(self) -> bool:
        """Whether there is one that specializations may still be given."""
        return self._plan is not None and self._num_left < _MOST_TRIES

    @property
    def waits(self) -> bool:
        """Whether it waits for the recording of the step that it is for."""
        return self.is_available and self._step is None

    def offer(self, entry: PlanEntry) -> None:
        """Give it to a specialization that is about to begin, if nothing is known of that."""
        if self._plan is None or self._step is None or not self.is_available:
            return
        is_new = entry.phase == "recording" and entry.graph is None and not entry.has_left_imported
        if is_new and self._shapes in (None, entry.input_shapes):
            take_imported(entry, self._plan, self._step)

    def offer_recorded(self, entry: PlanEntry) -> None:
        """Give it to a specialization that was recorded, where it is for that and came without a step of its own."""
        plan, graph = self._plan, entry.graph
        if plan is None or self._step is not None or graph is None or not self.is_available:
            return
        if entry.phase != "verifying" or isinstance(entry.source, Imported) or entry.has_left_imported:
            return
        if plan.graph_digest == graph.digest():
            take_imported(entry, plan, None)
            return
        entry.has_left_imported = True
        self._num_left += 1
        self._tell(
            f"is for another step than the recorded one (graph {plan.graph_digest}, here {graph.digest()}), and came "
            "without its step, which `plan --output` writes beside it"
        )

    def note(self, entry: PlanEntry, how: str) -> None:
        """A step has ended under it.

        Args:
            entry: The specialization.
            how: How it left the plan; "" where it did not.
        """
        if not how:
            self._shapes = entry.input_shapes
            return
        leave_imported(entry)
        self._num_left += 1
        self._tell(f"does not match the training step: {how}")

    def refuse(self, entry: PlanEntry, why: str) -> None:
        """It cannot be carried out, or not within the budget.

        Args:
            entry: The specialization.
            why: What is wrong.
        """
        leave_imported(entry)
        self._num_left = _MOST_TRIES
        self._tell(f"is not used: {why}")

    def _tell(self, what: str) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning("%s %s; the step is recorded and planned here instead", self._name, what)
