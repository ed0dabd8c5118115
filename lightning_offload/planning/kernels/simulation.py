"""One simulation, from a choice to its duration: the passes of the other modules, one after the other."""

from __future__ import annotations

from typing import Any

from lightning_offload.planning.arrays import SWAP, StepArrays
from lightning_offload.planning.kernels.buffers import Copies, Links, Resets, Space, Transfers
from lightning_offload.planning.kernels.clock import begin_ticks, copies_out_end, run_step
from lightning_offload.planning.kernels.needs import hold_inputs, walk
from lightning_offload.planning.kernels.prefetches import place_prefetches
from lightning_offload.planning.kernels.releases import NO_LIMIT, place_releases
from lightning_offload.planning.kernels.tiers import choose_tiers

NOTEWORTHY = 1e-3
"""Share of the step that compute waits, above which other prefetches are tried."""
ROUNDING = 1e-9
"""Share of the step by which its duration may differ for no reason but the order of sums."""
NEVER = float("inf")
"""Seconds of a step that was not simulated to its end."""


def reset(resets: Resets) -> None:
    """Make columns what they were at first."""
    for i in range(len(resets.whole)):
        fill(resets.whole[i], resets.whole_at_first[i])
    for i in range(len(resets.real)):
        fill(resets.real[i], resets.real_at_first[i])


def fill(column: Any, source: Any) -> None:
    """Copy a column of the same length; as :func:`fill_one_by_one` where this is compiled."""
    column[:] = source


def fill_one_by_one(column: Any, source: Any) -> None:
    """The same; compiled it takes no longer, and comes without the strings of the error that a slice may raise."""
    for i in range(len(column)):
        column[i] = source[i]


def simulate(
    step: StepArrays, space: Space, links: Links, limit: int, max_replay_seconds: float, is_given: bool
) -> tuple[bool, int, int, float, float, int]:
    """Simulate a choice.

    Args:
        step: The step.
        space: The columns: the choice is in ``walk``, all else is as it was at first, but for what of ``transfers`` is
            given.
        links: Figures of the device.
        limit: Bytes that memory stays below where it can.
        max_replay_seconds: Where replays take longer, the simulation is given up.
        is_given: Whether releases and prefetches are given.

    Returns:
        Whether the second of the space's copies are those that were taken, the tick of the peak, the peak, the step's
        seconds (infinite where it was given up), those of them that compute waits for copies, and by how many bytes
        the host would have to be larger.
    """
    if not walk(step, space.walk.codes, space.walk.no_memo, space.walk.needs, space.walk.scratch, max_replay_seconds):
        return False, 0, NO_LIMIT, NEVER, NEVER, 0
    _, overflow = leave(step, space, links, limit, is_given)
    is_second, tick, peak, seconds, stall = come_back(step, space, links, limit, is_given)
    return is_second, tick, peak, seconds, stall, overflow


def least_seconds(step: StepArrays, space: Space, links: Links, plain_seconds: float) -> float:
    """What a step takes at least, whenever its copies are made, once what backward needs is known.

    Compute either waits for copies or is slowed down by them.
    """
    codes, needs = space.walk.codes, space.walk.needs
    seconds = plain_seconds
    for k in range(len(step.wanted)):
        if needs.num_calls[k] > 0:
            seconds += needs.seconds[k] + links.replay_overhead
    copied = 0.0
    for s in range(step.num_candidates[0]):
        if codes[s] == SWAP:
            seconds += 2 * links.overheads[s]
            copied += step.size[s] * links.out_rates[0]
            if needs.needed[s] >= 0:
                copied += step.size[s] * links.in_rates[0]
    return (1.0 - ROUNDING) * (seconds + min(1.0, links.interference) * copied)


def leave(step: StepArrays, space: Space, links: Links, limit: int, is_given: bool) -> tuple[int, int]:
    """Place what leaves the device, once what backward needs is known.

    Returns:
        The peak, but for what copies back add before their need, and by how many bytes the host would have to be
        larger.
    """
    columns, codes, needs = space.columns, space.walk.codes, space.walk.needs
    starts, transfers = columns.starts, columns.transfers
    hold_inputs(step, codes, needs, space.walk.scratch)
    begin_ticks(step, needs, links.replay_overhead, starts)
    overflow = choose_tiers(step, codes, needs, starts, links, transfers.on_disk, columns.tiers)
    if is_given:
        for s in range(len(transfers.given)):
            if transfers.given[s] >= 0:
                transfers.on_disk[s] = transfers.given[s]
    else:
        copies_out_end(step, codes, starts, links, transfers, columns.out_lanes)
    return place_releases(step, codes, needs, transfers, columns.room, limit, is_given), overflow


def come_back(
    step: StepArrays, space: Space, links: Links, limit: int, is_given: bool
) -> tuple[bool, int, int, float, float]:
    """Place what comes back, and run the clock, once it is known what leaves.

    Returns:
        As :func:`simulate`, but for what the host lacks.
    """
    reset(space.resets_of_first)
    tick, seconds, stall = fetch(step, space, space.first, links, limit, is_given, space.in_order[0])
    if not is_given and stall > NOTEWORTHY * seconds:
        reset(space.resets_of_second)
        other_tick, other_seconds, other_stall = fetch(
            step, space, space.second, links, limit, is_given, space.in_order[1]
        )
        if other_seconds < (1.0 - ROUNDING) * seconds:
            # no prefetch exceeds the limit, so that no order does better there than another
            return True, other_tick, space.second.room.memory[other_tick], other_seconds, other_stall
    return False, tick, space.first.room.memory[tick], seconds, stall


def fetch(
    step: StepArrays, space: Space, copies: Copies, links: Links, limit: int, is_given: bool, in_order: bool
) -> tuple[int, float, float]:
    """Place the copies back and run the clock.

    Args:
        step: The step.
        space: With all that comes before.
        copies: Filled in.
        links: Figures of the device.
        limit: Bytes that memory stays below where it can.
        is_given: Whether prefetches are given.
        in_order: Whether the first need chooses first, or the last one.

    Returns:
        The tick of the peak, the step's seconds, and those of them that compute waits for copies.
    """
    columns, codes, needs, starts = space.columns, space.walk.codes, space.walk.needs, space.columns.starts
    for s in range(len(copies.prefetch)):
        copies.prefetch[s] = columns.transfers.prefetch[s]
    for tick in range(len(columns.room.memory)):
        copies.room.memory[tick] = columns.room.memory[tick]
    made = Transfers(columns.transfers.on_disk, columns.transfers.release, copies.prefetch, columns.transfers.given)
    peak_tick = place_prefetches(
        step, codes, needs, starts, links, made, copies.events, copies.room, limit, is_given, in_order
    )
    seconds, stall = run_step(step, codes, starts, links, made, copies.events, copies.lanes)
    return peak_tick, seconds, stall
