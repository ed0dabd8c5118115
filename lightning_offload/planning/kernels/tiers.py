"""Which tier each swapped storage goes to, and whether the tiers have room.

All of it goes to the host where that has room. Where it has not, and there is a disk, the storages that are away
longest go to disk, until what is on the host at once fits: a slow tier is hidden best behind a long absence. Without a
disk a choice that does not fit is infeasible.

Columns are those of :class:`~lightning_offload.planning.arrays.StepArrays`.
"""

from __future__ import annotations

from typing import Any

from lightning_offload.planning.arrays import SWAP, StepArrays
from lightning_offload.planning.kernels.buffers import Links, Needs, Tiers


def stored_peak(step: StepArrays, ends: Any, swapped: Any, first: int, last: int, delta: Any) -> int:
    """Most bytes of a slice of a list of candidates at once, on their tier.

    Args:
        step: The step.
        ends: By candidate: first tick at which its copy is not needed any more.
        swapped: The list.
        first: Where the slice begins.
        last: Where it ends.
        delta: By tick: a buffer.
    """
    for tick in range(len(delta)):
        delta[tick] = 0
    for n in range(first, last):
        s = swapped[n]
        delta[step.pack[s]] += step.stored_size[s]
        delta[ends[s]] -= step.stored_size[s]
    peak = 0
    total = 0
    for tick in range(len(delta)):
        total += delta[tick]
        peak = max(peak, total)
    return peak


def leaves_before(away: Any, storages: Any, one: int, other: int) -> bool:
    """Whether one candidate is to go to disk rather than another: it is away longer, or as long and a lower number."""
    is_longer: bool = away[one] > away[other]
    is_first: bool = away[one] == away[other] and storages[one] < storages[other]
    return is_longer or is_first


def sort(swapped: Any, count: int, away: Any, storages: Any) -> None:
    """Sort the first candidates of a list, those that leave first to the front: a heap sort."""
    for end in range(1, count):
        place = end
        while place > 0 and leaves_before(away, storages, swapped[(place - 1) // 2], swapped[place]):
            swapped[place], swapped[(place - 1) // 2] = swapped[(place - 1) // 2], swapped[place]
            place = (place - 1) // 2
    for end in range(count - 1, 0, -1):
        swapped[0], swapped[end] = swapped[end], swapped[0]
        place = 0
        while 2 * place + 1 < end:
            child = 2 * place + 1
            if child + 1 < end and leaves_before(away, storages, swapped[child], swapped[child + 1]):
                child += 1
            if not leaves_before(away, storages, swapped[place], swapped[child]):
                break
            swapped[place], swapped[child] = swapped[child], swapped[place]
            place = child


def choose_tiers(
    step: StepArrays, codes: Any, needs: Needs, starts: Any, links: Links, on_disk: Any, tiers: Tiers
) -> int:
    """Choose tiers; by how much the host would have to be larger, where there is no disk.

    Args:
        step: The step.
        codes: Actions.
        needs: When storages are needed.
        starts: Seconds at which ticks begin if nothing is waited for.
        links: Figures of the device.
        on_disk: Filled in; zeros.
        tiers: Buffers.
    """
    swapped, away, delta = tiers.swapped, tiers.away, tiers.delta
    count = 0
    total = 0
    for s in range(step.num_candidates[0]):
        if codes[s] == SWAP:
            until = needs.needed[s] if needs.needed[s] >= 0 else step.release[s]
            away[s] = starts[until] - starts[step.pack[s]]
            swapped[count] = s
            count += 1
            total += step.stored_size[s]
    if total <= links.host_bytes:
        return 0
    if not links.has_disk:
        return max(0, stored_peak(step, needs.stored, swapped, 0, count, delta) - links.host_bytes)
    sort(swapped, count, away, step.storage_of)
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if stored_peak(step, needs.stored, swapped, middle, count, delta) <= links.host_bytes:
            high = middle
        else:
            low = middle + 1
    for n in range(low):
        on_disk[swapped[n]] = 1
    return 0
