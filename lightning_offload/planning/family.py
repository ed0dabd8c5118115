"""Plans steps of one structure and many sizes, each in milliseconds.

A step whose sizes were never seen is planned before its first op, so that its plan must not take longer than what it
saves. What does not depend on sizes is worked out once, for the largest step that was recorded: which storages may
leave the device, what replays read, in which order things happen. Where a plan was searched for thoroughly at one size,
what leaves the device there is what leaves it first at another: the shortest prefix that fits is taken, the cheapest
bytes first, and where all of it is not enough, of what is left. The same is tried with the orders of prices
(:func:`~.search.order_of`) that was the best at a size that exceeded the budget by as much.

Shortfalls: no search by small changes and no relaxation, so a plan costs somewhat more than one that took a second, and
its lower bound is the plain step's duration. Policies other than "auto" plan as they always do.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.auto import auto, shortest_prefix
from lightning_offload.planning.kernels import expect
from lightning_offload.planning.planner import sparing_the_mode
from lightning_offload.planning.problem import Problem, min_bytes, replay_cost
from lightning_offload.planning.request import PlanRequest, build_plan, choice_of
from lightning_offload.planning.search import FEW_FAMILIES, Choice, Family, Order, Search, order_of, swap_rate, written
from lightning_offload.planning.simulator import Simulator
from lightning_offload.planning.step_model import Figures, StepModel

_T = TypeVar("_T")
_NUM_REMEMBERED = 2  # choices of thorough searches, the latest
_NUM_EXPECTED = 1000  # simulations of sizes to come: some fifty, each by bisections of several orders
_SMALLER = 4  # times smaller than where a choice is worth it: at other sizes it may be


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
        self._keep = keep
        self._keeping: FamilyPlanner | None = None
        self._problem = Problem(model.structure, keep, max(1, min_bytes(model.structure) // _SMALLER))
        self._best: dict[int, Family | None] = {}
        self._best_quiet: dict[int, int | None] = {}
        self._thorough: OrderedDict[_Leaving, None] = OrderedDict()
        self._taken = 1.0  # bytes that leave the device for each byte too many, as it was last
        expect(_NUM_EXPECTED * self._problem.num_rows)

    def keeping(self, keep: frozenset[int]) -> FamilyPlanner:
        """What plans the same steps with these storages kept."""
        if keep == self._keep:
            return self
        if self._keeping is None or self._keeping._keep != keep:
            self._keeping = FamilyPlanner(self.model, keep)
        return self._keeping

    def plan(
        self,
        graph: StepGraph,
        figures: Figures,
        device: DeviceSpec,
        budget_bytes: int | None,
        *,
        is_thorough: bool = False,
    ) -> MemoryPlan:
        """Plan a step.

        Args:
            graph: The step at a size, as the model gives it; its ops' own figures are not read.
            figures: What depends on its size.
            device: Where it runs.
            budget_bytes: Peak of live device bytes allowed, None for no limit.
            is_thorough: Whether to search as for a step that was recorded, and to learn from that for other sizes.

        Raises:
            BudgetInfeasibleError: The budget is below the floor.
        """
        problem = self._problem.resized(graph, figures.workspace_bytes, figures.seconds)
        problem.is_urgent = not is_thorough
        request = PlanRequest(problem, device, budget_bytes, is_provisional=not is_thorough, is_hasty=not is_thorough)
        if budget_bytes is None or request.plain.peak_bytes <= budget_bytes:
            return build_plan(request, "auto", {}, request.plain)
        request.require_feasible()
        search = Search(request)
        made = self._search(search) if is_thorough else self._hasten(search)

        place = _excess(request)
        is_new, known = _nearby(self._best_quiet, place)
        tried = (0, 1) if is_new else () if known is None else (known,)
        choices: dict[int, Choice] = {}

        def quiet() -> MemoryPlan | None:
            orders = _swaps_alone(problem)
            found = {i: shortest_prefix(search, orders[i]) for i in tried}
            choices.update((i, choice) for i, choice in found.items() if choice is not None)
            return written(request, min(choices.values(), key=lambda choice: choice.seconds)) if choices else None

        spared = sparing_the_mode(problem, made, device, budget_bytes, quiet) if tried else made
        if choices and is_new:
            fastest = min(choices, key=lambda i: choices[i].seconds)
            self._best_quiet[place] = fastest if spared is not made else None
        return spared

    def peak_bytes(self, plan: MemoryPlan, graph: StepGraph, figures: Figures, device: DeviceSpec) -> int:
        """The peak of a step under a plan that was made for a larger one.

        Args:
            plan: The plan, whoever made it: it may move storages about which there is no choice here.
            graph: The step at a size, as the model gives it; its ops' own figures are not read.
            figures: What depends on its size.
            device: Where it runs.
        """
        moved, no_memo = choice_of(plan.decisions)
        problem = self._problem if moved.keys() <= self._problem.number.keys() else self._whole
        problem = problem.resized(graph, figures.workspace_bytes, figures.seconds)
        problem.is_urgent = True
        simulator = Simulator(problem, device, plan.budget_bytes)
        return simulator.timeline(problem.codes(moved), problem.flags(no_memo)).peak_bytes

    @functools.cached_property
    def _whole(self) -> Problem:
        """The step with a choice about each storage that may leave at all."""
        return Problem(self.model.structure, smallest=1)

    def _search(self, search: Search) -> MemoryPlan:
        made = auto(search.request)
        actions, no_memo = choice_of(made.decisions)
        leaving = _Leaving(tuple(actions.items()), no_memo)
        self._thorough[leaving] = None
        self._thorough.move_to_end(leaving)
        while len(self._thorough) > _NUM_REMEMBERED:
            self._thorough.popitem(last=False)
        return made

    def _hasten(self, search: Search) -> MemoryPlan:
        request, problem = search.request, search.request.problem
        search.try_(problem.codes(request.floor_actions))
        for leaving in self._thorough:
            search.try_(problem.codes(dict(leaving.actions)), problem.flags(leaving.no_memo))
        place = _excess(request)
        is_new, best = _nearby(self._best, place)
        order = order_of(request, best) if best is not None else []
        if is_new or (best is not None and not self._shortest(search, order)):
            best = self._best[place] = self._try_all(search)
            order = order_of(request, best) if best is not None else []
        if best is not None:
            for leaving in self._thorough:
                self._shortest(search, _leaving_first(request, leaving, order))
        if search.best is None:  # each copy is waited for
            return build_plan(request, "auto", request.floor_actions, request.floor)
        return written(request, search.best)

    def _shortest(self, search: Search, order: Order) -> Choice | None:
        """The shortest feasible prefix of an order, looked for where it was at the sizes before."""
        request, candidates = search.request, search.request.problem.candidates
        assert request.budget_bytes is not None
        taken = list(itertools.accumulate(candidates[storage].num_bytes for storage, _ in order))
        excess = request.plain.peak_bytes - request.budget_bytes
        guess = bisect.bisect_left(taken, self._taken * excess) + 1
        choice = shortest_prefix(search, order, guess=guess)
        if choice is not None and (length := np.count_nonzero(choice.codes)):
            self._taken = taken[length - 1] / excess
        return choice

    @staticmethod
    def _try_all(search: Search) -> Family | None:
        found = {family: shortest_prefix(search, order_of(search.request, family)) for family in FEW_FAMILIES}
        fitting = {family: choice.seconds for family, choice in found.items() if choice is not None}
        return min(fitting, key=lambda family: fitting[family], default=None)


def _excess(request: PlanRequest) -> int:
    """By how much a step is too large, in eighths of what it needs plainly: what is best there is so nearby."""
    assert request.budget_bytes is not None
    plain = request.plain.peak_bytes
    return -(-8 * (plain - request.budget_bytes) // max(1, plain))


def _nearby(known: Mapping[int, _T | None], place: int) -> tuple[bool, _T | None]:
    """Whether nothing is known yet, and what is known of the place nearest to this one."""
    if not known:
        return True, None
    return False, known[min(known, key=lambda other: abs(other - place))]


class _Leaving(NamedTuple):
    """What leaves the device under a plan that was searched for: with its actions, and what is not memoised."""

    actions: tuple[tuple[int, Action], ...]
    no_memo: frozenset[int]


def _leaving_first(request: PlanRequest, leaving: _Leaving, rest: Order) -> Order:
    """An order in which what leaves the device at another size goes first, the cheapest bytes first."""
    candidates, rate = request.problem.candidates, swap_rate(request.device, 1.0)

    def price(storage: int, action: Action) -> float:
        candidate = candidates[storage]
        if action == "swap":
            return rate
        return replay_cost(request.problem, candidate, {})[0] / candidate.num_bytes

    first = sorted(leaving.actions, key=lambda pair: (price(*pair), pair[0]))
    known = {storage for storage, _ in first}
    return [*first, *((storage, action) for storage, action in rest if storage not in known)]


def _swaps_alone(problem: Problem) -> tuple[Order, Order]:
    """Orders in which nothing is recomputed: the largest storages first, and those that were saved first."""
    leaving = [c for c in problem.candidates.values() if c.can_swap]
    by_size = sorted(leaving, key=lambda c: (-c.num_bytes, c.storage))
    by_pack = sorted(leaving, key=lambda c: (c.pack_tick, c.storage))
    return [(c.storage, "swap") for c in by_size], [(c.storage, "swap") for c in by_pack]
