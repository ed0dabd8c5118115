"""Fits a policy to a budget: the fastest of the choices that its paper allows, or by how much none fits.

Most policies take more and more actions in an order of their own while memory is short. The shortest prefix of such an
order that fits is rarely the fastest: it leaves no room to prefetch. So every prefix is simulated within the budget,
and the fastest counts (:class:`Fitting`). Where none fits so, every copy is waited for, and again the fastest counts.
A policy with a discipline of its own gets its copies at the times that it asks for.

Shortfall: of steps that take long to simulate only some prefixes are tried, evenly spaced and then those around the
best one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.floor import swap_everything, swap_what_fits
from lightning_offload.planning.kernels import is_compilable
from lightning_offload.planning.request import PlanRequest, build_plan, describe
from lightning_offload.planning.simulator import ON_DEMAND, Actions, Schedule, Timeline
from lightning_offload.planning.tiers import HostRoom, short_host_bytes

Ordered = Sequence[tuple[int, Action]]
"""Actions in the order in which a policy takes them while memory is short."""

_MAX_ROWS = 40_000_000  # that one order's prefixes may take to simulate, in all: some seconds' worth
_MAX_PLAIN_ROWS = 4_000_000  # the same where the simulation cannot be compiled
_MIN_PREFIXES = 48  # however long the step is


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A choice that a policy allows.

    Attributes:
        actions: By storage; others are kept.
        no_memo: Recomputed storages that are not memoised.
        schedule: When copies are made; None where the simulator chooses.
    """

    actions: Actions
    no_memo: frozenset[int] = frozenset()
    schedule: Schedule | None = None


_Scan = tuple[int, Callable[[int], Tried]]


class Fitting:
    """Tries what a policy allows and remembers the fastest that fits.

    Args:
        request: The step and its budget.
        policy: Whose choices they are.
    """

    def __init__(self, request: PlanRequest, policy: str) -> None:
        self._request = request
        self._policy = policy
        self._scans: list[_Scan] = []
        self._resort: list[_Scan] = []

    def one(self, tried: Tried) -> Fitting:
        """Allow a choice; itself, for the next one."""
        return self.scan(0, lambda _: tried)

    def prefixes(self, order: Ordered, always: Actions | None = None, no_memo: frozenset[int] = frozenset()) -> Fitting:
        """Allow each prefix of an order; none of it where there is no budget.

        Args:
            order: Actions, the first to be taken first.
            always: Actions that are taken whatever the budget.
            no_memo: Recomputed storages that are not memoised.
        """
        base = dict(always or {})
        longest = len(order) if self._request.budget_bytes is not None else 0
        return self.scan(longest, lambda num: Tried(actions=base | dict(order[:num]), no_memo=no_memo))

    def scan(self, longest: int, make: Callable[[int], Tried]) -> Fitting:
        """Allow what a function makes of each number from 0 to the longest prefix's."""
        self._scans.append((longest, make))
        return self

    def up_to(self, longest: int, make: Callable[[int], Tried]) -> Fitting:
        """Allow what a function makes of the longest prefix and, where there is a budget, of each shorter one."""
        return self.scan(longest, make) if self._request.budget_bytes is not None else self.one(make(longest))

    def resort_to(self, order: Ordered) -> Fitting:
        """Allow each prefix of an order where nothing else fits; the smallest peak of these is what an error names.

        For choices that depend on durations, which differ from one recording to the next: what is named must work then.
        """
        self._resort.append((len(order), lambda num: Tried(actions=dict(order[:num]))))
        return self

    def found(self) -> tuple[Tried, Timeline]:
        """The fastest choice that fits, and the step under it.

        Raises:
            BudgetInfeasibleError: None fits even where each copy is waited for; names the smallest peak.
        """
        smallest: list[Timeline] = []
        for scans in filter(None, (self._scans, self._resort)):
            smallest.clear()
            for schedule in (None, ON_DEMAND):
                best = _Best(self._request, schedule)
                for longest, make in scans:
                    best.scan(longest, make)
                if best.tried is not None:
                    return best.tried, best.timeline(best.tried)
                smallest += [best.smallest] if best.smallest is not None else []
                if not best.is_free:
                    break  # each copy has its time already
        lowest = min(smallest, key=lambda timeline: timeline.peak_bytes)
        op = self._request.problem.graph.op_at(lowest.peak_tick)
        raise self._request.infeasible(lowest.peak_bytes, describe(op) if op else "persistent state", self._policy)

    def plan(self) -> MemoryPlan:
        """The plan of the fastest choice.

        Raises:
            BudgetInfeasibleError: None fits.
        """
        tried, timeline = self.found()
        return build_plan(self._request, self._policy, tried.actions, timeline, tried.no_memo)


class _Best:
    """The fastest of some choices that fits.

    Args:
        request: The step and its budget.
        schedule: When copies are made where a choice does not say so; None where the simulator chooses.

    Attributes:
        tried: That choice; None before there is one.
        seconds: Its duration.
        is_free: Whether there was a choice that does not say when copies are made.
    """

    def __init__(self, request: PlanRequest, schedule: Schedule | None) -> None:
        self._request = request
        self._schedule = schedule
        self.is_free = False
        self.tried: Tried | None = None
        self.seconds = math.inf
        self._lowest: tuple[int, Tried] | None = None

    @property
    def smallest(self) -> Timeline | None:
        """The step with the smallest peak."""
        return None if self._lowest is None else self.timeline(self._lowest[1])

    def timeline(self, tried: Tried) -> Timeline:
        """The step under a choice."""
        request = self._request
        codes, flags = request.problem.codes(tried.actions), request.problem.flags(tried.no_memo)
        return request.simulator.timeline(codes, flags, schedule=tried.schedule or self._schedule)

    def scan(self, longest: int, make: Callable[[int], Tried]) -> None:
        """Try numbers from 0 to a longest one: all of them, or some, and then those around the fastest."""
        most = num_tried(self._request)
        seconds = {num: self._try(make(num)) for num in spaced(0, longest, most)}
        while True:
            best = min(seconds, key=lambda num: (seconds[num], num))
            tried = sorted(seconds)
            place = tried.index(best)
            low, high = tried[max(0, place - 1)], tried[min(place + 1, len(tried) - 1)]
            between = [num for num in spaced(low, high, most) if num not in seconds]
            if not between or seconds[best] == math.inf:
                return
            seconds.update((num, self._try(make(num))) for num in between)

    def _try(self, tried: Tried) -> float:
        """Seconds of a step, infinite where it does not fit."""
        request = self._request
        codes, flags = request.problem.codes(tried.actions), request.problem.flags(tried.no_memo)
        outcome = request.simulator.run(codes, flags, schedule=tried.schedule or self._schedule)
        self.is_free |= tried.schedule is None
        if self._lowest is None or outcome.peak_bytes < self._lowest[0]:
            self._lowest = outcome.peak_bytes, tried
        if request.budget_bytes is not None and outcome.peak_bytes > request.budget_bytes:
            return math.inf
        if self.tried is None or outcome.step_seconds < self.seconds:
            self.tried, self.seconds = tried, outcome.step_seconds
        return outcome.step_seconds


def num_tried(request: PlanRequest) -> int:
    """How many prefixes of an order are tried, before those around the best one."""
    if request.max_prefixes is not None:
        return request.max_prefixes
    rows = _MAX_ROWS if is_compilable() else _MAX_PLAIN_ROWS
    return max(_MIN_PREFIXES, rows // max(1, request.problem.num_rows))


def spaced(low: int, high: int, most: int) -> list[int]:
    """Numbers from a low one to a high one, both included, at most as many as is said, evenly spaced.

    >>> spaced(0, 4, 10), spaced(0, 100, 3)
    ([0, 1, 2, 3, 4], [0, 50, 100])
    """
    if high - low < most:
        return list(range(low, high + 1))
    return sorted({low + round(i * (high - low) / (most - 1)) for i in range(most)})


def everything_swapped(request: PlanRequest) -> dict[int, Action]:
    """Everything off the device; where the tiers are too small for all of it, the smallest are kept."""
    problem, limit = request.problem, short_host_bytes(request.device)
    return swap_everything(problem) if limit is None else swap_what_fits(problem, limit)


def fit_host(request: PlanRequest, storages: Iterable[int], recomputed: Iterable[int] = ()) -> list[int]:
    """Those of some storages that the host has room for if it is asked for them in this order; all where it has no end.

    Args:
        request: The step and the host.
        storages: What may be swapped.
        recomputed: All storages that may be recomputed.
    """
    limit = short_host_bytes(request.device)
    if limit is None:
        return list(storages)
    room = HostRoom(request.problem, limit, recomputed)
    return [s for s in storages if room.take(s)]


def swap(storages: Iterable[int]) -> dict[int, Action]:
    """Swap them."""
    return dict.fromkeys(storages, "swap")
