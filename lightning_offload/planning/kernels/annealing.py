"""Improves a choice by small changes: simulated annealing, with a simulation for each trial.

What is changed is a *state*: by candidate 0 keep, 1 swap, 2 recompute, 3 recompute for each of its reads anew. What the
changes are, and why, says :mod:`~lightning_offload.planning.annealing`.

Random numbers are drawn before, since plain and compiled loops are to use the same ones.
"""

from __future__ import annotations

import math
from typing import Any

from lightning_offload.planning.arrays import KEEP, RECOMPUTE, SWAP, StepArrays
from lightning_offload.planning.kernels.buffers import Annealing, Links, Moves, Seen, Space
from lightning_offload.planning.kernels.needs import walk
from lightning_offload.planning.kernels.simulation import NEVER, ROUNDING, come_back, fill, least_seconds, leave, reset

NUM_STATES = 4  # of a storage: kept, swapped, recomputed once, recomputed for each read
ANEW = 3
"""The state of a storage that is recomputed for each of its reads."""
MAX_DRAWS = 24
"""Random numbers that one proposal takes at most."""

SINGLE = 0.2  # share of changes of one storage
BOTH = 0.1  # share of changes of two neighbours, each to anything
ALIKE = 0.4  # share of exchanges between two of the same size; the rest is between neighbours
NEIGHBOURHOOD = 12  # places in order of birth, either way, that count as near
MAX_PAIRS = 8  # that are looked at for two that can exchange their actions

NUM_TRIALS, NUM_PROPOSALS, NUM_DRAWN, KEY = 0, 1, 2, 3
"""Places in ``Annealing.counts``."""
CURRENT, BEST = 0, 1
"""Places in ``Annealing.costs``."""


def allows(moves: Moves, s: int, state: int) -> bool:
    """Whether a candidate may have a state."""
    if state == KEEP:
        return True
    is_allowed: bool = (moves.can_swap[s] if state == SWAP else moves.can_recompute[s]) == 1
    return is_allowed


def other_state(moves: Moves, s: int, state: int, draw: float) -> int:
    """Another state of a candidate, drawn evenly from those it may have."""
    count = 0
    for other in range(NUM_STATES):
        if other != state and allows(moves, s, other):
            count += 1
    left = int(draw * count)
    for other in range(NUM_STATES):
        if other != state and allows(moves, s, other):
            if left == 0:
                return other
            left -= 1
    return state


def near(count: int, place: int, draw: float) -> int:
    """Another place near one, of so many."""
    offset = int(draw * 2 * NEIGHBOURHOOD) - NEIGHBOURHOOD
    other = place + (offset if offset < 0 else offset + 1)
    return min(max(other, 0), count - 1)


def propose(moves: Moves, states: Any, draws: Any, at: int, changed: Any) -> int:
    """Change one state, or two.

    Args:
        moves: What may be changed.
        states: By candidate; written.
        draws: Random numbers from 0 to 1.
        at: Where those begin that are not used yet.
        changed: Filled in: the candidates, each with its state before; -1 for none.

    Returns:
        Where in ``draws`` those begin that are not used yet.
    """
    movable, alike = moves.movable, moves.alike
    count = len(movable)
    changed[0] = changed[2] = -1
    kind = draws[at]
    at += 1
    if kind >= SINGLE + BOTH:
        for _ in range(MAX_PAIRS):
            place = int(draws[at] * count)
            if kind >= 1.0 - ALIKE:
                begin = moves.alike_begin[place]
                other = alike[begin + int(draws[at + 1] * (moves.alike_end[place] - begin))]
            else:
                other = near(count, place, draws[at + 1])
            at += 2
            i, k = movable[place], movable[other]
            here, there = states[i], states[k]
            if here != there and allows(moves, i, there) and allows(moves, k, here):
                changed[0], changed[1], changed[2], changed[3] = i, here, k, there
                states[i], states[k] = there, here
                return at
    place = int(draws[at] * count)
    i = movable[place]
    changed[0], changed[1] = i, states[i]
    states[i] = other_state(moves, i, states[i], draws[at + 1])
    at += 2
    if SINGLE <= kind < SINGLE + BOTH:
        other = near(count, place, draws[at])
        if other != place:
            k = movable[other]
            changed[2], changed[3] = k, states[k]
            states[k] = other_state(moves, k, states[k], draws[at + 1])
        at += 2
    return at


def key_after(marks: Any, key: int, states: Any, changed: Any) -> int:
    """The key of states after a change; the same again undoes it."""
    for n in range(0, 4, 2):
        if changed[n] >= 0:
            first = NUM_STATES * changed[n]
            key = key ^ marks[first + changed[n + 1]] ^ marks[first + states[changed[n]]]
    return key


def excess_cost(run: Annealing, limit: int, peak: int, overflow: int) -> float:
    """The penalty for what a choice does not fit by."""
    penalty: float = run.seconds_per_byte * (max(0, peak - limit) + overflow)
    return penalty


def price(
    step: StepArrays, space: Space, links: Links, limit: int, plain_seconds: float, run: Annealing, useless: float
) -> tuple[float, bool, bool]:
    """What the states of a search cost, as far as that matters.

    Args:
        step: The step.
        space: Columns of its simulation.
        links: Figures of the device.
        limit: Of memory.
        plain_seconds: Of the step's own ops.
        run: The search; only read.
        useless: A choice that costs more is not looked at any further.

    Returns:
        The cost; whether it is that, or the choice costs at least as much; whether the choice fits.
    """
    codes, no_memo, needs, scratch = space.walk.codes, space.walk.no_memo, space.walk.needs, space.walk.scratch
    reset(space.resets_of_walk)
    for s in range(len(run.states)):
        codes[s] = min(run.states[s], RECOMPUTE)
        no_memo[s] = run.states[s] == ANEW
    if not walk(step, codes, no_memo, needs, scratch, run.hopeless * run.costs[BEST] - plain_seconds):
        return NEVER, True, False
    least = least_seconds(step, space, links, plain_seconds)
    if least > useless:
        return least, False, False
    reset(space.resets)
    peak, overflow = leave(step, space, links, limit, run.is_given)
    least += (1.0 - ROUNDING) * excess_cost(run, limit, peak, overflow)
    if least > useless:
        return least, False, False
    _, _, peak, seconds, _ = come_back(step, space, links, limit, run.is_given)
    if peak > limit or overflow > 0:
        return seconds + excess_cost(run, limit, peak, overflow), True, False
    return seconds, True, True


def anneal(
    step: StepArrays, space: Space, links: Links, limit: int, plain_seconds: float, moves: Moves, seen: Seen,
    run: Annealing, draws: Any, until: int,
) -> None:  # fmt: skip
    """Go on with a search, as far as the random numbers reach.

    Whether a change is accepted is drawn before it is simulated. So a simulation ends where it is sure that the choice
    is neither accepted nor the best, which is soon for most.

    Args:
        step: The step.
        space: Columns of its simulation.
        links: Figures of the device.
        limit: Of memory.
        plain_seconds: Of the step's own ops.
        moves: What may be changed.
        seen: What was simulated before.
        run: The search; written.
        draws: Random numbers from 0 to 1.
        until: Trials in all after which it pauses.
    """
    states, best, changed, counts, costs = run.states, run.best, run.changed, run.counts, run.costs
    num_slots = len(seen.keys)
    at = 0
    while (
        at + MAX_DRAWS <= len(draws)
        and counts[NUM_TRIALS] < until
        and counts[NUM_PROPOSALS] < run.max_proposals
        and costs[BEST] > run.enough_seconds
    ):
        temperature = run.hot_seconds * run.cooling ** (counts[NUM_TRIALS] / run.max_trials)
        counts[NUM_PROPOSALS] += 1
        at = propose(moves, states, draws, at, changed)
        key = key_after(seen.marks, counts[KEY], states, changed)
        slot = key % num_slots
        draw = draws[at]
        bar = costs[CURRENT] - temperature * math.log(draw) if draw > 0.0 else NEVER
        useless = (1.0 + ROUNDING) * max(bar, costs[BEST])
        is_known = seen.keys[slot] == key
        if is_known and (seen.costs[slot] >= 0.0 or -seen.costs[slot] > useless):
            cost = abs(seen.costs[slot])
        else:
            if not is_known:
                counts[NUM_TRIALS] += 1
            cost, is_exact, fits = price(step, space, links, limit, plain_seconds, run, useless)
            if fits and cost < costs[BEST]:
                costs[BEST] = cost
                fill(best, states)
            seen.keys[slot] = key
            seen.costs[slot] = cost if is_exact else -cost
        harm = cost - costs[CURRENT]
        if harm <= 0.0 or (temperature > 0.0 and draw < math.exp(-harm / temperature)):
            costs[CURRENT] = cost
            counts[KEY] = key
        else:
            for n in range(0, 4, 2):
                if changed[n] >= 0:
                    states[changed[n]] = changed[n + 1]
        at += 1
    counts[NUM_DRAWN] = at
