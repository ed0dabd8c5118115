"""When device copies are released, and the memory that follows: the first of two passes that place swaps.

Columns are those of :class:`~lightning_offload.planning.arrays.StepArrays`; what storages need comes from
:mod:`~.needs`, when their copies out end from :mod:`~.clock`.
"""

from __future__ import annotations

from typing import Any

from lightning_offload.planning.arrays import KEEP, SWAP, StepArrays
from lightning_offload.planning.kernels.buffers import Needs, Room, Transfers

NO_LIMIT = 1 << 62
"""More bytes than there are."""


def occupy(memory: Any, begin: int, end: int, num_bytes: int) -> None:
    """Note bytes that are there from one tick up to another."""
    if begin < end:
        memory[begin] += num_bytes
        memory[end] -= num_bytes


def occupy_saved(step: StepArrays, codes: Any, needs: Needs, memory: Any) -> None:
    """Note the saved storages, with every swap released at its pack and brought back on demand.

    Those that are always kept are in the base until autograd drops them; replays may hold them for longer.
    """
    death, release, size, needed, held = step.death, step.release, step.size, needs.needed, needs.held
    for s in range(step.num_candidates[0]):
        begin = death[s] if codes[s] == KEEP else needed[s]
        if begin >= 0:
            occupy(memory, begin, held[s], size[s])
    for s in range(step.num_candidates[0], len(size)):
        occupy(memory, max(death[s], release[s]), held[s], size[s])


def add_up(step: StepArrays, needs: Needs, memory: Any) -> int:
    """Turn what was noted into the bytes at each tick; the most there are."""
    base, ticks, transient = step.base, step.wanted_tick, needs.transient
    total = 0
    peak = 0
    for t in range(len(base)):
        total += memory[t]
        memory[t] = base[t] + total
        if memory[t] > peak:
            peak = memory[t]
    for k in range(len(ticks)):
        if transient[k] > 0:
            memory[ticks[k]] += transient[k]
            peak = max(peak, memory[ticks[k]])
    return peak


def follow(step: StepArrays, codes: Any, needs: Needs, transfers: Transfers, memory: Any) -> None:
    """Release and prefetch as was said, where that is possible."""
    death, size, pack, ticks = step.death, step.size, step.pack, step.unpack_tick
    release, prefetch, needed = transfers.release, transfers.prefetch, needs.needed
    for s in range(step.num_candidates[0]):
        if codes[s] != SWAP:
            continue
        need = needed[s] if needed[s] >= 0 else max(step.release[s], death[s])  # the program may hold it for longer
        release[s] = min(release[s], need) if release[s] >= pack[s] else -1
        occupy(memory, death[s], release[s], size[s])
        tick = ticks[prefetch[s]] if prefetch[s] >= 0 else -1
        if needed[s] >= 0 and max(death[s], release[s], 0) <= tick < need:
            occupy(memory, tick, need, size[s])
        else:
            prefetch[s] = -1


def choose_releases(
    step: StepArrays, codes: Any, needs: Needs, transfers: Transfers, memory: Any, is_limited: bool
) -> None:
    """Release each device copy when its copy out has ended; if it is needed before that, as late or as early as can be.

    Args:
        step: The step.
        codes: Actions.
        needs: When storages are needed.
        transfers: ``release`` holds the op at which the copy out has ended, and is filled in.
        memory: Bytes, as they are noted.
        is_limited: Whether copies are waited for where memory would exceed a limit, the oldest first, and so not
            before that; else memory is to be as low as it can be.
    """
    death, size, pack, last_op = step.death, step.size, step.pack, step.last_op
    release, needed = transfers.release, needs.needed
    for s in range(step.num_candidates[0]):
        if codes[s] == SWAP:
            need = needed[s] if needed[s] >= 0 else step.release[s]
            if release[s] >= need:
                release[s] = wait_at(last_op, pack[s], max(need, death[s]) if is_limited else death[s])
            occupy(memory, death[s], release[s], size[s])


def wait_at(last_op: Any, pack: int, until: int) -> int:
    """The last op after a pack, up to a tick, before which the copy out may be waited for; -1 for none."""
    return last_op[until] if last_op[until] > pack else -1


def release_earlier(step: StepArrays, codes: Any, transfers: Transfers, room: Room, limit: int) -> None:
    """Where memory exceeds the limit, wait for the oldest copies first: lowers ``release``, and memory accordingly."""
    death, size, pack, last_op = step.death, step.size, step.pack, step.last_op
    by_pack, by_death, rank = step.by_pack, step.by_death, step.rank
    release, memory, later, heap = transfers.release, room.memory, room.later, room.heap
    num_waiting = 0
    num_seen = 0
    gone = 0
    for tick in range(len(step.base)):
        gone -= later[tick]
        memory[tick] -= gone
        while num_seen < len(by_death) and death[by_death[num_seen]] <= tick:
            s = by_death[num_seen]
            num_seen += 1
            if codes[s] == SWAP and release[s] > tick:
                num_waiting = push(heap, num_waiting, rank[s])
        while num_waiting > 0 and memory[tick] > limit:
            s = by_pack[heap[0]]
            num_waiting = pop(heap, num_waiting)
            if release[s] > tick:
                earlier = wait_at(last_op, pack[s], tick)
                for t in range(max(earlier, death[s]), tick + 1):
                    memory[t] -= size[s]
                gone += size[s]
                later[release[s]] += size[s]
                release[s] = earlier


def push(heap: Any, count: int, item: int) -> int:
    """Add to a heap whose least item comes first; its new size."""
    place = count
    while place > 0 and heap[(place - 1) // 2] > item:
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = item
    return count + 1


def pop(heap: Any, count: int) -> int:
    """Take the first item off a heap; its new size."""
    count -= 1
    item = heap[count]
    place = 0
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= item:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = item
    return count


def place_releases(
    step: StepArrays, codes: Any, needs: Needs, transfers: Transfers, room: Room, limit: int, is_given: bool
) -> int:
    """All passes of this module; the peak.

    Args:
        step: The step.
        codes: Actions.
        needs: When storages are needed.
        transfers: ``release`` holds the first op to begin after each copy out has ended, and is filled in; where both
            columns are given, they are followed as far as that is possible.
        room: ``memory`` is filled in.
        limit: Releases are chosen so that memory stays below it where they can.
        is_given: Whether to follow the transfers.
    """
    occupy_saved(step, codes, needs, room.memory)
    if is_given:
        follow(step, codes, needs, transfers, room.memory)
    else:
        choose_releases(step, codes, needs, transfers, room.memory, limit < NO_LIMIT)
    peak = add_up(step, needs, room.memory)
    if peak > limit and not is_given:
        release_earlier(step, codes, transfers, room, limit)
        peak = 0
        for tick in range(len(step.base)):
            peak = max(peak, room.memory[tick])
    return peak
