"""When copies back are issued: the second of two passes that place swaps.

Columns are those of :class:`~lightning_offload.planning.arrays.StepArrays`.
"""

from __future__ import annotations

from typing import Any

from lightning_offload.planning.arrays import SWAP, StepArrays
from lightning_offload.planning.kernels.buffers import Events, Gaps, Links, Needs, Room, Transfers

BLOCK = 32
"""Gaps between unpacks whose maximum is known, so that long ways back are short."""


def issue_by(deadlines: Any, rates: Any, overhead: float, on_disk: int, num_bytes: int, need: float) -> Any:
    """The latest time for a copy, given those that are needed later."""
    if on_disk == 0:
        deadlines[0] = min(need, deadlines[0]) - num_bytes * rates[0] - overhead
        return deadlines[0]
    deadlines[1] = min(need, deadlines[1]) - num_bytes * rates[1] - overhead
    if rates[2] > 0.0:
        deadlines[0] = min(need, deadlines[0]) - num_bytes * rates[2]
        deadlines[1] = min(deadlines[1], deadlines[0])
    return deadlines[1]


def fill(ticks: Any, heads: Any, nexts: Any) -> None:
    """Make the lists of :class:`Buckets` from the ticks."""
    for place in range(len(ticks) - 1, -1, -1):
        tick = ticks[place]
        if tick >= 0:
            nexts[place] = heads[tick]
            heads[tick] = place


def fill_needs(step: StepArrays, codes: Any, needs: Needs, events: Events) -> None:
    """List the swapped storages by the tick of their need."""
    ticks, by_pack, need = events.needed.ticks, step.by_pack, needs.needed
    for place in range(len(by_pack)):
        ticks[place] = need[by_pack[place]] if codes[by_pack[place]] == SWAP else -1
    fill(ticks, events.needed.heads, events.needed.nexts)


def find_peaks(step: StepArrays, memory: Any, gaps: Gaps) -> None:
    """Fill in the most bytes between each unpack and the next one."""
    ticks, peaks, tops = step.unpack_tick, gaps.peaks, gaps.tops
    for ordinal in range(len(ticks) - 1):
        peak = 0
        for t in range(ticks[ordinal], ticks[ordinal + 1]):
            if memory[t] > peak:
                peak = memory[t]
        peaks[ordinal] = peak
        tops[ordinal // BLOCK] = max(tops[ordinal // BLOCK], peak)


def find_latest(step: StepArrays, starts: Any, links: Links, on_disk: Any, events: Events, room: Room) -> None:
    """Fill in when each copy back must be issued at the latest, so that it and all that are needed later are hidden."""
    ticks, size, by_pack, latest = step.unpack_tick, step.size, step.by_pack, room.latest
    heads, nexts = events.needed.heads, events.needed.nexts
    for unpack in range(len(ticks) - 1, -1, -1):
        need = ticks[unpack]
        place = heads[need]
        while place >= 0:
            s = by_pack[place]
            latest[s] = issue_by(room.deadlines, links.in_rates, links.overheads[s], on_disk[s], size[s], starts[need])
            place = nexts[place]


def choose_prefetches(
    step: StepArrays, starts: Any, transfers: Transfers, limit: int, events: Events, room: Room, in_order: bool
) -> None:
    """Issue each copy back as late as hides all of them, as early as memory allows.

    Args:
        step: The step.
        starts: Seconds at which ticks begin.
        transfers: ``prefetch`` is filled in.
        limit: Bytes.
        events: Swapped storages by their need.
        room: Memory, and the latest times; what copies back add is noted in ``fetched``.
        in_order: Whether the first need chooses first, and none is issued before one that is needed earlier: lanes
            make copies in the order in which they are issued. Else the last need chooses first.
    """
    ticks, size, by_pack, death, latest = step.unpack_tick, step.size, step.by_pack, step.death, room.latest
    heads, nexts, fetched = events.needed.heads, events.needed.nexts, room.fetched
    release, prefetch = transfers.release, transfers.prefetch
    previous = 0
    for n in range(len(ticks)):
        unpack = n if in_order else len(ticks) - 1 - n
        need = ticks[unpack]
        place = heads[need]
        while place >= 0:
            s = by_pack[place]
            away = max(death[s], release[s], previous)
            ordinal = issue(ticks, starts, room.gaps, limit, unpack, latest[s], size[s], away)
            prefetch[s] = ordinal
            if ordinal >= 0:
                fetched[ticks[ordinal]] += size[s]
                fetched[need] -= size[s]
            if in_order:
                previous = ticks[ordinal] if ordinal >= 0 else need
            place = nexts[place]


def issue(ticks: Any, starts: Any, gaps: Gaps, limit: int, unpack: int, by: float, num_bytes: int, away: int) -> int:
    """The unpack at which the copy for a later one is issued; -1 for none: memory must allow it from there on.

    That is the last one that is early enough. Where there is none, it is the first that is not before the device
    copy is away.
    """
    peaks, tops, extra = gaps.peaks, gaps.tops, gaps.extra
    low = 0
    high = unpack
    while low < high:
        middle = (low + high) // 2
        if ticks[middle] < away:
            low = middle + 1
        else:
            high = middle
    wished = low
    high = unpack
    while low < high:
        middle = (low + high) // 2
        if starts[ticks[middle]] <= by:
            wished = middle
            low = middle + 1
        else:
            high = middle
    chosen = unpack
    while chosen > wished:
        block = (chosen - 1) // BLOCK
        begin = block * BLOCK
        if chosen == begin + BLOCK and begin >= wished and tops[block] + num_bytes <= limit:
            tops[block] += num_bytes
            extra[block] += num_bytes
            chosen = begin
        elif peaks[chosen - 1] + extra[block] + num_bytes <= limit:
            chosen -= 1
            peaks[chosen] += num_bytes
            tops[block] = max(tops[block], peaks[chosen] + extra[block])
        else:
            break
    return chosen if chosen < unpack else -1


def fill_events(step: StepArrays, codes: Any, transfers: Transfers, events: Events) -> None:
    """List the swapped storages by the tick of their release, and of the issue of their copy back.

    Copies issued at the same tick go by their needs, and for the same need what was packed last goes first.
    """
    by_pack, pack, unpack_tick = step.by_pack, step.pack, step.unpack_tick
    release, prefetch, released, issued = transfers.release, transfers.prefetch, events.released, events.issued
    needed, next_needed = events.needed.heads, events.needed.nexts
    for place in range(len(by_pack)):
        s = by_pack[place]
        released.ticks[place] = issued.ticks[place] = -1
        if codes[s] == SWAP:
            released.ticks[place] = release[s] if release[s] >= 0 else pack[s]
    fill(released.ticks, released.heads, released.nexts)
    for ordinal in range(len(unpack_tick) - 1, -1, -1):
        place = needed[unpack_tick[ordinal]]
        while place >= 0:
            s = by_pack[place]
            if prefetch[s] >= 0:
                tick = issued.ticks[place] = unpack_tick[prefetch[s]]
                issued.nexts[place] = issued.heads[tick]
                issued.heads[tick] = place
            place = next_needed[place]


def place_prefetches(
    step: StepArrays, codes: Any, needs: Needs, starts: Any, links: Links, transfers: Transfers, events: Events,
    room: Room, limit: int, is_given: bool, in_order: bool,
) -> int:  # fmt: skip
    """All passes of this module; the tick of the peak.

    Args:
        step: The step.
        codes: Actions.
        needs: When storages are needed.
        starts: Seconds at which ticks begin.
        links: Figures of the device.
        transfers: ``prefetch`` is filled in, if it is not given.
        events: Filled in.
        room: ``memory`` is raised accordingly.
        limit: Prefetches are chosen so that memory stays below it where they can.
        is_given: Whether prefetches are given.
        in_order: Cf. :func:`choose_prefetches`.
    """
    memory, fetched = room.memory, room.fetched
    fill_needs(step, codes, needs, events)
    if not is_given:
        find_peaks(step, memory, room.gaps)
        find_latest(step, starts, links, transfers.on_disk, events, room)
        choose_prefetches(step, starts, transfers, limit, events, room, in_order)
    fill_events(step, codes, transfers, events)
    peak = 0
    total = 0
    most = memory[0]
    for tick in range(len(step.base)):
        total += fetched[tick]
        memory[tick] += total
        if memory[tick] > most:
            peak = tick
            most = memory[tick]
    return peak
