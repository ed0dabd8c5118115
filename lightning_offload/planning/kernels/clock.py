"""Time: when ticks begin, when copies end, and how long the step takes.

Lanes are (time from which the link is free, time from which the disk is free). Rates of a direction are seconds per
byte of the link, of the disk, and of the link under a disk copy; :mod:`~lightning_offload.planning.links` says
what they mean.

Columns are those of :class:`~lightning_offload.planning.arrays.StepArrays`.
"""

from __future__ import annotations

from typing import Any

from lightning_offload.planning.arrays import SWAP, StepArrays
from lightning_offload.planning.kernels.buffers import Events, Lanes, Links, Needs, Transfers

CLOCK_NOISE = 1e-12
"""Seconds; what sums of the same durations in another order differ by."""


def begin_ticks(step: StepArrays, needs: Needs, overhead: float, starts: Any) -> None:
    """Fill in when each tick begins if no copy is waited for: zeros in, one more than there are ticks."""
    for k in range(len(step.wanted)):
        if needs.num_calls[k] > 0:
            starts[step.wanted_tick[k] + 1] = needs.seconds[k] + overhead
    seconds = step.seconds
    now = 0.0
    for t in range(len(seconds)):
        now += seconds[t] + starts[t + 1]
        starts[t + 1] = now


def run_copy(lanes: Any, rates: Any, on_disk: int, num_bytes: int, now: float, after: float) -> Any:
    """Issue a copy that must not begin before ``after``; the time of its end."""
    if on_disk == 0:
        lanes[0] = max(now, lanes[0], after) + num_bytes * rates[0]
        return lanes[0]
    start = max(now, lanes[1], after)
    if rates[2] > 0.0:
        link_start = max(now, lanes[0])
        lanes[0] = link_start + num_bytes * rates[2]
        start = max(start, link_start)
    lanes[1] = start + num_bytes * rates[1]
    return lanes[1]


def first_from(starts: Any, seconds: float) -> int:
    """The first tick that begins at a time or later."""
    low = 0
    high = len(starts)
    while low < high:
        middle = (low + high) // 2
        if starts[middle] < seconds:
            low = middle + 1
        else:
            high = middle
    return low


def copies_out_end(step: StepArrays, codes: Any, starts: Any, links: Links, transfers: Transfers, lanes: Any) -> None:
    """Fill in, as releases, the first op to begin after each copy out has ended; lanes are free at first."""
    for s in step.by_pack:
        if codes[s] == SWAP:
            now = starts[step.pack[s]]
            end = run_copy(lanes, links.out_rates, transfers.on_disk[s], step.size[s], now, 0.0)
            transfers.release[s] = step.next_op[first_from(starts, end)]


def run_step(
    step: StepArrays, codes: Any, starts: Any, links: Links, transfers: Transfers, events: Events, lanes: Lanes
) -> tuple[float, float]:
    """Seconds of the step, and of those the ones that compute waited for copies.

    Args:
        step: The step.
        codes: Actions.
        starts: Seconds at which ticks begin if nothing is waited for.
        links: Figures of the device.
        transfers: When copies are made.
        events: The same by tick.
        lanes: Filled in.
    """
    by_pack, pack, size, on_disk = step.by_pack, step.pack, step.size, transfers.on_disk
    out_end, in_end, out_lanes, in_lanes, busy = lanes.out_end, lanes.in_end, lanes.out, lanes.back, lanes.busy
    released, issued, needed = events.released.heads, events.issued.heads, events.needed.heads
    next_released, next_issued, next_needed = events.released.nexts, events.issued.nexts, events.needed.nexts
    out_rates, in_rates = links.out_rates, links.in_rates
    overheads = mark_busy(step, codes, events, links.overheads, busy)
    now = 0.0
    stall = 0.0
    copied = 0.0
    previous = 0
    packed = 0
    for tick in range(len(busy)):
        if busy[tick] == 0:
            continue
        now += starts[tick] - starts[previous]
        previous = tick
        while packed < len(by_pack) and pack[by_pack[packed]] <= tick:
            s = by_pack[packed]
            packed += 1
            if codes[s] == SWAP:
                out_end[s] = run_copy(out_lanes, out_rates, on_disk[s], size[s], now, 0.0)
                copied += size[s] * out_rates[0]
        place = released[tick]
        while place >= 0:
            wait = out_end[by_pack[place]] - now
            stall += wait if wait > CLOCK_NOISE else 0.0
            now = max(now, out_end[by_pack[place]])
            place = next_released[place]
        place = issued[tick]
        while place >= 0:
            s = by_pack[place]
            in_end[s] = run_copy(in_lanes, in_rates, on_disk[s], size[s], now, out_end[s])
            copied += size[s] * in_rates[0]
            place = next_issued[place]
        place = needed[tick]
        while place >= 0:
            s = by_pack[place]
            if in_end[s] < 0.0:
                in_end[s] = run_copy(in_lanes, in_rates, on_disk[s], size[s], now, out_end[s])
                copied += size[s] * in_rates[0]
            place = next_needed[place]
        place = needed[tick]
        while place >= 0:
            wait = in_end[by_pack[place]] - now
            stall += wait if wait > CLOCK_NOISE else 0.0
            now = max(now, in_end[by_pack[place]])
            place = next_needed[place]
    now += starts[len(starts) - 1] - starts[previous]
    slowed = max(0.0, copied - stall) * links.interference
    return now + slowed + 2 * overheads, stall


def mark_busy(step: StepArrays, codes: Any, events: Events, overheads: Any, busy: Any) -> float:
    """Mark the ticks at which something happens to a swapped storage; the overheads of a copy of each of them."""
    by_pack, pack = step.by_pack, step.pack
    released, issued, needed = events.released.ticks, events.issued.ticks, events.needed.ticks
    seconds = 0.0
    for place in range(len(by_pack)):
        s = by_pack[place]
        if codes[s] == SWAP:
            seconds += overheads[s]
            busy[pack[s]] = 1
            busy[released[place]] = 1
            if issued[place] >= 0:
                busy[issued[place]] = 1
            if needed[place] >= 0:
                busy[needed[place]] = 1
    return seconds
