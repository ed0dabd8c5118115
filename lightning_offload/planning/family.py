"""Plans steps of one structure and many sizes, each in milliseconds.

A step whose sizes were never seen is planned before its first op, so that its plan must not take longer than what it
saves. What does not depend on sizes is worked out once, for the largest step that was recorded: which storages may
leave the device, what replays read, in which order things happen. Of the orders in which storages can leave
(:func:`~.search.order_of`), those that were the best for other sizes of the family are tried, and the shortest prefix
that fits is taken. All of them are tried at the first size, and where those that were the best so far do not fit.

Shortfalls: no search by small changes and no relaxation, so a plan costs some tenths of a per cent more than one that
took a second, and its lower bound is the plain step's duration. Policies other than "auto" plan as they always do.
"""

from __future__ import annotations

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.auto import shortest_prefix
from lightning_offload.planning.planner import sparing_the_mode
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest, build_plan
from lightning_offload.planning.search import FEW_FAMILIES, Choice, Family, Order, Search, order_of
from lightning_offload.planning.step_model import Figures, StepModel

_NUM_REMEMBERED = 2


class FamilyPlanner:
    """Plans any size of a family of steps.

    Args:
        model: The step at any size.
        keep: Storages that must stay on the device.

    Attributes:
        model: The step at any size.
    """

    def __init__(self, model: StepModel, keep: frozenset[int] = frozenset()) -> None:
        self.model = model
        self._problem = Problem(model.structure, keep)
        self._best: tuple[Family, ...] = ()

    def plan(self, graph: StepGraph, figures: Figures, device: DeviceSpec, budget_bytes: int | None) -> MemoryPlan:
        """Plan a step.

        Args:
            graph: The step at a size, as the model gives it; its ops' own figures are not read.
            figures: What depends on its size.
            device: Where it runs.
            budget_bytes: Peak of live device bytes allowed, None for no limit.

        Raises:
            BudgetInfeasibleError: The budget is below the floor.
        """
        problem = self._problem.resized(graph, figures.workspace_bytes, figures.seconds)
        request = PlanRequest(problem, device, budget_bytes, is_provisional=True, is_hasty=True)
        if budget_bytes is None or request.plain.peak_bytes <= budget_bytes:
            return build_plan(request, "auto", {}, request.plain)
        request.require_feasible()
        search = Search(request)
        best = self._remembered(search) or self._of_all(search)
        if best is None:  # each copy is waited for
            return build_plan(request, "auto", request.floor_actions, request.floor)

        def quiet() -> MemoryPlan | None:
            return _written(request, shortest_prefix(search, _swaps_alone(problem)))

        made = _written(request, best)
        assert made is not None
        return sparing_the_mode(problem, made, device, budget_bytes, quiet)

    def _remembered(self, search: Search) -> Choice | None:
        """The best of the orders that were the best before."""
        return _fastest([shortest_prefix(search, order_of(search.request, family)) for family in self._best])

    def _of_all(self, search: Search) -> Choice | None:
        found = {family: shortest_prefix(search, order_of(search.request, family)) for family in FEW_FAMILIES}
        fitting = {family: choice.seconds for family, choice in found.items() if choice is not None}
        self._best = tuple(sorted(fitting, key=lambda family: fitting[family])[:_NUM_REMEMBERED])
        return _fastest(list(found.values()))


def _fastest(found: list[Choice | None]) -> Choice | None:
    return min((choice for choice in found if choice is not None), key=lambda choice: choice.seconds, default=None)


def _written(request: PlanRequest, choice: Choice | None) -> MemoryPlan | None:
    if choice is None:
        return None
    return build_plan(request, "auto", request.problem.actions(choice.codes), request.simulator.timeline(choice.codes))


def _swaps_alone(problem: Problem) -> Order:
    """An order in which nothing is recomputed: the largest storages first."""
    leaving = [c for c in problem.candidates.values() if c.can_swap]
    return [(c.storage, "swap") for c in sorted(leaving, key=lambda c: (-c.num_bytes, c.storage))]
