"""One simulation, from a choice to its duration: the passes of the other modules, one after the other.

By these functions compiled loops are entered. To hand the columns over takes as long as the shorter loops do, so there
is one call up to where the tiers must be chosen, and one for all that comes then.
"""

from __future__ import annotations

from typing import Any

from lightning_offload.planning.arrays import StepArrays
from lightning_offload.planning.kernels.buffers import Copies, Links, Needs, Room, Scratch, Transfers
from lightning_offload.planning.kernels.clock import begin_ticks, copies_out_end, run_step
from lightning_offload.planning.kernels.needs import find_needs
from lightning_offload.planning.kernels.prefetches import place_prefetches
from lightning_offload.planning.kernels.releases import place_releases


def begin(
    step: StepArrays, codes: Any, no_memo: Any, needs: Needs, scratch: Scratch, starts: Any, overhead: float,
    max_replay_seconds: float,
) -> bool:  # fmt: skip
    """Fill in what backward needs and when ticks begin; False, and not all of it, where replays take too long.

    Args:
        step: The step.
        codes: Actions.
        no_memo: Which replayed values do not stay.
        needs: Filled in.
        scratch: Buffers.
        starts: Filled in: seconds at which ticks begin if nothing is waited for.
        overhead: Seconds of a replay's overhead.
        max_replay_seconds: The longest that replays may take in all.
    """
    if not find_needs(step, codes, no_memo, needs, scratch, max_replay_seconds):
        return False
    begin_ticks(step, needs, overhead, starts)
    return True


def finish(
    step: StepArrays, codes: Any, needs: Needs, starts: Any, links: Links, transfers: Transfers, room: Room,
    out_lanes: Any, copies: Copies, limit: int, is_given: bool, in_order: bool,
) -> tuple[int, float, float]:  # fmt: skip
    """Place the copies and run the clock; copies back from the last need to the first, or, once more, in order.

    Args:
        step: The step.
        codes: Actions.
        needs: What backward needs.
        starts: Seconds at which ticks begin if nothing is waited for.
        links: Figures of the device.
        transfers: ``release`` is filled in, if it is not given.
        room: ``memory`` is filled in, without copies back.
        out_lanes: From when the link and the disk are free for copies out.
        copies: Filled in: when copies back are made, memory with them, and the clock.
        limit: Bytes that memory stays below where it can.
        is_given: Whether releases and prefetches are given.
        in_order: Whether copies out are placed already, and for those back the first need chooses first.

    Returns:
        The tick of the peak, the step's seconds, and those of them that compute waits for copies.
    """
    if not in_order:
        if not is_given:
            copies_out_end(step, codes, starts, links, transfers, out_lanes)
        place_releases(step, codes, needs, transfers, room, limit, is_given)
    for i in range(len(transfers.prefetch)):
        copies.prefetch[i] = transfers.prefetch[i]
    for tick in range(len(room.memory)):
        copies.room.memory[tick] = room.memory[tick]
    made = Transfers(transfers.on_disk, transfers.release, copies.prefetch)
    peak_tick = place_prefetches(
        step, codes, needs, starts, links, made, copies.events, copies.room, limit, is_given, in_order
    )
    seconds, stall = run_step(step, codes, starts, links, made, copies.events, copies.lanes)
    return peak_tick, seconds, stall
