"""The smallest peak that a planner can promise, and the choice of actions that has it.

Where the tiers hold all that may be swapped, that is everything swapped, waiting for each copy, or recomputed where
swapping makes no sense: no choice has a smaller peak. Where host memory is short and there is no disk, what cannot
be recomputed is swapped first, then what saves most, until the host is full; the rest is recomputed. A long chain of
replays can take as much memory as was saved, so choices in which chains are broken are simulated too: with storages
that must be at hand so that no chain takes more than a half, a quarter, ... of what is saved, swapped before others
or else kept. From the one with the smallest peak single changes, and exchanges of what is swapped, lead further down.

Shortfall: with a short host the floor is where these changes end, not the lowest of all choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.kernels import kernels_for
from lightning_offload.planning.kernels.releases import NO_LIMIT
from lightning_offload.planning.problem import Problem, anchors
from lightning_offload.planning.simulator import ON_DEMAND, Simulator, Timeline, simulate
from lightning_offload.planning.tiers import HostRoom

_MAX_HALVINGS = 10  # of all bytes: parts between two anchors; below a thousandth nothing changes
_SHARES = (1.0, 0.5, 0.25, 0.0)  # of the host that choices fill: with more to swap, changes may end higher
_MAX_ROWS = 250_000  # that changes of a choice simulate: some hundredths of a second's worth, compiled
_MIN_TRIALS = 16
_TRIALS_OF_EACH = 8  # of a storage, about
_MOST_EXCHANGED = 4  # storages that make room on the host for another, one at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """Actions and their timeline, in which each copy is waited for.

    Attributes:
        actions: The choice with the smallest peak.
        timeline: The step under it.
        is_host_short: Whether more host memory, or a disk, might make it smaller.
    """

    actions: dict[int, Action]
    timeline: Timeline
    is_host_short: bool = False


def find_floor(problem: Problem, device: DeviceSpec, plain: Timeline) -> Floor:
    """Find the floor of a step.

    Args:
        problem: The step.
        device: The device and its tiers.
        plain: The step with everything kept.
    """
    found = [_tight(problem, device, swap_everything(problem))]
    is_host_short = found[0].timeline.overflow_bytes > 0
    if is_host_short:
        assert device.host_memory_bytes is not None
        found = [_lowest_on(problem, device, int(share * device.host_memory_bytes)) for share in _SHARES]
    found.append(Floor({}, plain))
    best = min(found, key=lambda floor: floor.timeline.peak_bytes)
    return dataclasses.replace(best, is_host_short=is_host_short)


def peaks_without_plan(graph: StepGraph, device: DeviceSpec) -> tuple[int, int]:
    """The smallest peak of a step, and the one with everything kept, in bytes.

    Args:
        graph: The step.
        device: The device; its host is taken to be large enough.
    """
    problem = Problem(graph)
    plain = simulate(problem, {}, device)
    large = dataclasses.replace(device, host_memory_bytes=None)
    return find_floor(problem, large, plain).timeline.peak_bytes, plain.peak_bytes


def swap_everything(problem: Problem) -> dict[int, Action]:
    """Everything off the device at once: swapped, or recomputed where swapping makes no sense."""
    leaving = {s: c for s, c in problem.candidates.items() if c.can_swap or c.can_recompute}
    return {s: "swap" if c.can_swap else "recompute" for s, c in leaving.items()}


def swap_what_fits(problem: Problem, limit_bytes: int) -> dict[int, Action]:
    """The same on a host of limited size: the largest first, and what does not fit is kept."""
    return _fill(problem, limit_bytes, problem.candidates.keys())


def _tight(problem: Problem, device: DeviceSpec, actions: dict[int, Action]) -> Floor:
    return Floor(actions, simulate(problem, actions, device, schedule=ON_DEMAND))


def _lowest_on(problem: Problem, device: DeviceSpec, limit_bytes: int) -> Floor:
    """The smallest peak that is found with so much of the host, by changes that each lower it.

    Of one storage, or of two of which one is swapped.
    """
    num_left = max(_MIN_TRIALS, _MAX_ROWS // max(1, problem.num_rows))
    expected = problem.num_rows * min(num_left, _TRIALS_OF_EACH * len(problem.candidates))
    kernels = kernels_for(expected, is_urgent=problem.is_urgent)
    simulator = Simulator(problem, dataclasses.replace(device, host_memory_bytes=limit_bytes), kernels=kernels)

    def peak_of(actions: dict[int, Action]) -> int:
        outcome = simulator.run(problem.codes(actions), schedule=ON_DEMAND)
        return outcome.peak_bytes if not outcome.overflow_bytes else NO_LIMIT

    lowest, actions = min(((peak_of(each), each) for each in _choices(problem, limit_bytes)), key=lambda pair: pair[0])
    largest_first = sorted(problem.candidates.values(), key=lambda c: (-c.num_bytes, c.storage))
    num_idle = 0  # storages of which no change lowered the peak, in a row
    while num_left > 0 and num_idle < len(largest_first):
        candidate = largest_first.pop(0)
        largest_first.append(candidate)
        num_idle += 1
        for changed in _changes(problem, actions, candidate.storage):
            num_left -= 1
            peak_bytes = peak_of(changed)
            if peak_bytes < lowest:
                lowest, actions, num_idle = peak_bytes, changed, 0
                break
    return _tight(problem, device, actions)


def _changes(problem: Problem, actions: dict[int, Action], storage: int) -> Iterator[dict[int, Action]]:
    """The same choice with another action for one storage; what is swapped now may be swapped in place of another."""
    rest: dict[int, Action] = {s: action for s, action in actions.items() if s != storage}
    candidate = problem.candidates[storage]
    if storage in actions:
        yield rest
    if candidate.can_recompute and actions.get(storage) != "recompute":
        yield {**rest, storage: "recompute"}
    if candidate.can_swap and actions.get(storage) != "swap":
        with_it: dict[int, Action] = {**rest, storage: "swap"}
        yield with_it
        swapped = sorted(
            (s for s, action in rest.items() if action == "swap"), key=lambda s: -problem.candidates[s].num_bytes
        )
        for other in swapped[:_MOST_EXCHANGED]:
            if problem.candidates[other].can_recompute:
                yield {**with_it, other: "recompute"}
            yield {s: action for s, action in with_it.items() if s != other}


def _choices(problem: Problem, limit_bytes: int) -> Iterator[dict[int, Action]]:
    yield _fill(problem, limit_bytes, ())
    yield swap_what_fits(problem, limit_bytes)
    total = sum(c.num_bytes for c in problem.candidates.values())
    seen: set[frozenset[int]] = set()
    for halvings in range(1, _MAX_HALVINGS):
        at_hand = frozenset(anchors(problem, total / 2**halvings))
        if at_hand not in seen:
            seen.add(at_hand)
            yield _fill(problem, limit_bytes, at_hand)


def _fill(problem: Problem, limit_bytes: int, at_hand: Collection[int]) -> dict[int, Action]:
    """Fill the host with what cannot be recomputed, then what should be at hand, then the rest; largest first.

    What should be at hand and has no room is kept, unless it cannot be swapped anyway; others are recomputed if they
    can be.
    """
    candidates = problem.candidates
    recomputed = {s for s, c in candidates.items() if c.can_recompute and not (s in at_hand and c.can_swap)}
    room = HostRoom(problem, limit_bytes, recomputed)
    first_to_last = sorted(candidates, key=lambda s: (s in recomputed, s not in at_hand, -candidates[s].num_bytes, s))
    actions: dict[int, Action] = {}
    for s in first_to_last:
        if candidates[s].can_swap and room.take(s):
            actions[s] = "swap"
        elif s in recomputed:
            actions[s] = "recompute"
    return dict(sorted(actions.items()))
