"""What the planner's search begins with: simulated choices, orders, roundings.

A :class:`Search` simulates choices, remembers the best ones and says when to stop.

Orders in which storages leave the device, cheapest bytes first: parametric families of them.

Each family prices a storage by its cheaper action. They differ in the share of its copies' duration that a swap is
priced at (how much of it may be hidden depends on all the others) and in the bytes that a chain of replays may
accumulate before it is broken by a storage that is swapped, or kept.

Where host memory is limited and there is no disk, an order swaps what fits the host, cheapest first, and recomputes
what it would have swapped beyond that. Where all swaps go to disk they are priced at the disk's rate; where only some
do, at the link's, and the simulation tells.

Choices made whole from the fractions of a relaxation.

A relaxed plan keeps, swaps or recomputes fractions of storages; few of them are truly fractional, so most of it is a
choice already. It does not know two things: that copies back need room ahead of their need, and that a chain of
replays takes memory for all that is made on the way. For the first the relaxation is asked for less than the budget,
by several margins; for the second some storages, *anchors*, may not be recomputed, so that no chain is longer than a
number of bytes. What is missing after rounding is filled up in the order of the fractions.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, MemoryPlan, Tier
from lightning_offload.planning.arrays import KEEP, RECOMPUTE, SWAP, Codes
from lightning_offload.planning.links import in_rates, out_rates
from lightning_offload.planning.problem import anchors, replay_cost
from lightning_offload.planning.relaxation import Relaxation, relax
from lightning_offload.planning.request import PlanRequest, build_plan
from lightning_offload.planning.simulator import Outcome
from lightning_offload.planning.tiers import HostRoom, short_host_bytes

_AS_GOOD = 1.0005  # of the lower bound
HOPELESS = 2.0
"""As slow as that multiple of the best, a choice need not be simulated to its end."""

_MAX_SEEN_BYTES = 32 << 20  # of choices that are remembered, several times that in all

Flags = npt.NDArray[np.bool_]


class Choice(NamedTuple):
    """A choice of actions that was simulated.

    Attributes:
        codes: By candidate: the action's code.
        no_memo: By candidate: whether it is not memoised.
        outcome: What the simulation said.
        is_feasible: Whether it fits the budget and the tiers.
    """

    codes: Codes
    no_memo: Flags
    outcome: Outcome
    is_feasible: bool

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.outcome.step_seconds


class Search:
    """Simulates choices, remembers the best ones, and says when to stop.

    Args:
        request: The step, the device, the budget, and how long to search.

    Attributes:
        request: The step, the device, the budget, and how long to search.
        best: The fastest feasible choice so far, None before there is one.
        num_trials: Simulations so far.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.best: Choice | None = None
        self.num_trials = 0
        self._limit = request.budget_bytes
        self._deadline = None if request.seconds is None else time.perf_counter() + request.seconds
        self._seen: dict[bytes, Choice] = {}
        self._memoised = np.zeros(len(request.problem.candidates), dtype=np.bool_)

    @property
    def is_over(self) -> bool:
        """Whether to stop with what there is: time is up, or the best is as good as the lower bound."""
        is_late = self._deadline is not None and time.perf_counter() >= self._deadline
        return is_late or (self.best is not None and self.best.seconds <= self.enough_seconds)

    @property
    def enough_seconds(self) -> float:
        """As good as the lower bound: a choice as fast as that ends the search."""
        return _AS_GOOD * self.request.bound_seconds

    @property
    def gap(self) -> float:
        """What the best takes beyond the lower bound, as a share of that; infinite before there is one."""
        if self.best is None or self.request.bound_seconds <= 0:
            return math.inf
        return self.best.seconds / self.request.bound_seconds - 1

    def is_within(self, ratio: float) -> bool:
        """Whether the best is at most this multiple of the lower bound."""
        return self.best is not None and self.best.seconds <= ratio * self.request.bound_seconds

    def try_(self, codes: Codes, no_memo: Flags | None = None) -> Choice:
        """Simulate a choice, once."""
        no_memo = self._memoised if no_memo is None else no_memo
        key = codes.tobytes() + np.packbits(no_memo).tobytes()
        choice = self._seen.get(key)
        if choice is None:
            self.num_trials += 1
            most = HOPELESS * self.best.seconds if self.best is not None else math.inf
            outcome = self.request.simulator.run(codes, no_memo if no_memo.any() else None, max_seconds=most)
            fits = self._limit is None or outcome.peak_bytes <= self._limit
            fits = fits and outcome.overflow_bytes == 0 and outcome.step_seconds < math.inf
            if len(self._seen) * len(key) > _MAX_SEEN_BYTES:
                self._seen.clear()
            choice = self._seen[key] = Choice(codes.copy(), no_memo.copy(), outcome, fits)
            if fits and (self.best is None or choice.seconds < self.best.seconds):
                self.best = choice
        return choice


def written(request: PlanRequest, choice: Choice) -> MemoryPlan:
    """A choice as a plan of the planner's own."""
    problem = request.problem
    timeline = request.simulator.timeline(choice.codes, choice.no_memo)
    no_memo = frozenset(problem.order[choice.no_memo].tolist())
    return build_plan(request, "auto", problem.actions(choice.codes), timeline, no_memo)


Order = list[tuple[int, Action]]
"""Storages with their actions."""

# Share of its duration that a copy is priced at in an order: mostly hidden, to more than all of it.
_SWAP_WEIGHTS = (0.02, 0.1, 0.3, 1.0, 3.0)
_CHAIN_FRACTIONS = (1.0, 0.3, 0.1, 0.03, 0.01)  # of a replay that a storage is priced at where others share it
_BREAKS: tuple[Action, ...] = ("swap", "keep")
_FEW_WEIGHTS = (0.02, 0.3, 3.0)  # the same for long steps
_FEW_FRACTIONS = (1.0, 0.1, 0.01)  # the same for long steps


class Family(NamedTuple):
    """How storages are priced for an order.

    Attributes:
        swap_weight: Share of its copies' duration that a swap is priced at.
        chain_fraction: Share of the step's bytes that a chain of replays may accumulate.
        break_by: What happens to the storage at which a longer one is broken.
    """

    swap_weight: float
    chain_fraction: float
    break_by: Action


FEW_FAMILIES = tuple(itertools.starmap(Family, itertools.product(_FEW_WEIGHTS, _FEW_FRACTIONS, _BREAKS)))
_FAMILIES = tuple(itertools.starmap(Family, itertools.product(_SWAP_WEIGHTS, _CHAIN_FRACTIONS, _BREAKS)))


def families(request: PlanRequest, *, few: bool = False) -> Iterator[Order]:
    """Different orders.

    Args:
        request: The step, the device and the budget.
        few: Whether to leave out those between others, for steps that take long to simulate.
    """
    seen: set[tuple[tuple[int, Action], ...]] = set()
    for family in FEW_FAMILIES if few else _FAMILIES:
        order = order_of(request, family)
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield order


def order_of(request: PlanRequest, family: Family) -> Order:
    """The order in which storages leave the device by a family's prices, as far as the tiers hold them."""
    problem, device = request.problem, request.device
    candidates = sorted(problem.candidates.values(), key=lambda c: c.value)
    chain_limit = family.chain_fraction * request.step_bytes
    rate = swap_rate(device, family.swap_weight)
    chain_bytes: dict[int, float] = {}
    priced: list[tuple[float, int, Action]] = []
    for c in candidates:
        swap = c.num_bytes * rate + device.copy_overhead(c.num_bytes)
        replay, chain = replay_cost(problem, c, chain_bytes)
        replay += device.replay_overhead
        can_replay = c.can_recompute and (chain <= chain_limit or not c.can_swap)
        if not can_replay and (not c.can_swap or (family.break_by == "keep" and c.can_recompute)):
            chain_bytes[c.value] = 0.0
            continue
        action: Action = "recompute" if can_replay and (replay <= swap or not c.can_swap) else "swap"
        chain_bytes[c.value] = chain if action == "recompute" else 0.0
        priced.append(((replay if action == "recompute" else swap) / c.num_bytes, c.storage, action))
    priced.sort(key=lambda row: row[:2])
    return _fit_host(request, [(storage, action) for _, storage, action in priced])


def swap_rate(device: DeviceSpec, weight: float) -> float:
    """Seconds that a swap is priced at per byte: what compute loses to it, or a share of its copies' duration."""
    out, back = out_rates(device), in_rates(device)
    tier: Tier = "disk" if device.host_memory_bytes == 0 and device.has_disk else "host"
    return max((out.link + back.link) * device.copy_interference, (out.of(tier) + back.of(tier)) * weight)


def _fit_host(request: PlanRequest, order: Order) -> Order:
    """Swap only what the host has room for, so that each prefix fits; recompute or keep the rest."""
    limit, candidates = short_host_bytes(request.device), request.problem.candidates
    if limit is None:
        return order
    room = HostRoom(request.problem, limit, (s for s, c in candidates.items() if c.can_recompute))
    fitting: Order = []
    for s, action in order:
        if action == "recompute" or room.take(s):
            fitting.append((s, action))
        elif candidates[s].can_recompute:
            fitting.append((s, "recompute"))
    return fitting


_MARGINS = (1.0, 0.9)  # of the budget: rounding adds memory, so less may be asked for
_ROUNDED_CHAIN_FRACTIONS = (None, 0.1)
_HALF = 0.5  # of a storage: what is away for more of it goes


def roundings(request: PlanRequest) -> Iterator[tuple[Codes, Order]]:
    """Choices, each with the order in which to add to it until it fits.

    Args:
        request: The step, the device and the budget.
    """
    assert request.budget_bytes is not None
    problem, floor_bytes = request.problem, request.floor.peak_bytes
    span = request.plain.peak_bytes - floor_bytes
    seen: set[frozenset[int]] = set()
    for fraction in _ROUNDED_CHAIN_FRACTIONS:
        fixed = frozenset() if fraction is None else frozenset(anchors(problem, fraction * span))
        if fixed in seen:
            continue
        seen.add(fixed)
        for margin in _MARGINS:
            budget = floor_bytes + int(margin * (request.budget_bytes - floor_bytes))
            if margin == 1.0 and not fixed:
                yield _round(request, request.relaxed)
            else:
                yield _round(request, relax(problem, request.device, budget, no_recompute=fixed))


def _round(request: PlanRequest, relaxed: Relaxation) -> tuple[Codes, Order]:
    problem = request.problem
    count = len(problem.candidates)
    swap, recompute = np.zeros(count), np.zeros(count)
    for fractions, column in ((relaxed.swap, swap), (relaxed.recompute, recompute)):
        for storage, fraction in fractions.items():
            column[problem.number[storage]] = fraction
    away = swap + recompute
    action = np.where(swap >= recompute, SWAP, RECOMPUTE)
    codes = np.where(away >= _HALF, action, KEEP).astype(np.int8)
    size = [c.num_bytes for c in problem.candidates.values()]
    rest: Order = []
    for i in np.lexsort((np.arange(count), np.negative(size), -away)).tolist():
        candidate = problem.candidates[int(problem.order[i])]
        if codes[i] != KEEP or not (candidate.can_swap or candidate.can_recompute):
            continue
        swaps = candidate.can_swap and (away[i] == 0 or action[i] == SWAP or not candidate.can_recompute)
        rest.append((candidate.storage, "swap" if swaps else "recompute"))
    return codes, rest
