"""Cheaper lower bounds: for steps too large for a linear program, and for plans that take one kind of action alone.

Proof idea: at any tick a feasible plan must have the excess over the budget in storages that are then absent. One
that is absent by swapping costs at least the compute that its copies take, ``copy_interference`` of their duration
(time that compute spends waiting for them instead costs more, as that share is at most 1); one that is absent by
recomputation costs at least the ops that run whenever its producer is replayed, each shared by bytes among all whose
replay runs it. Taking the cheapest bytes first, and a fraction of the last storage, relaxes the choice, so no plan is
cheaper. Where only swaps are allowed, the excess is copied out between the first pack and that tick, and back between
it and the last read, over a link of each direction, however the copies are arranged.

Assumptions: replays and copies take the modelled time. Shortfall: links are otherwise taken to be infinitely fast, and
what one replay may share with others counts as shared; so it is loose where either dominates; and it looks at the
peak's tick alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.links import Rates, in_rates, out_rates
from lightning_offload.planning.relaxation.facts import Case, Item
from lightning_offload.planning.relaxation.program import Floats


def knapsack(case: Case) -> tuple[float, dict[int, float], dict[int, float]]:
    """Solve it.

    Returns:
        Seconds of the step, and by storage the fractions swapped and recomputed.
    """
    excess, absent = _at_peak(case)
    replay = _replay_prices(case.items, case.problem.op_seconds)
    swap: dict[int, float] = {}
    recompute: dict[int, float] = {}
    seconds = case.plain.step_seconds
    priced = [(*_price(item, replay[place], case.device), item) for place, item in absent]
    for price, is_swap, item in sorted(priced, key=lambda row: (row[0], row[1], row[2].candidate.storage)):
        if excess <= 0:
            break
        c = item.candidate
        taken = min(c.num_bytes, excess)
        (swap if is_swap else recompute)[c.storage] = taken / c.num_bytes
        seconds += price * taken
        excess -= taken
    return seconds, swap, recompute


def least_seconds(case: Case, action: Action) -> float:
    """A lower bound on the duration of any plan that takes one action alone, "swap" or "recompute".

    Returns:
        Seconds; infinite where no such plan fits.
    """
    excess, absent = _at_peak(case)
    excess -= sum(item.candidate.num_bytes for _, item in absent if not item.is_read)
    if excess <= 0:
        return case.plain.step_seconds
    read = [(place, item) for place, item in absent if item.is_read]
    if action == "recompute":
        return _by_replays(case, excess, read)
    return _by_swaps(case, excess, [item for _, item in read if item.candidate.can_swap])


def _by_replays(case: Case, excess: int, absent: Sequence[tuple[int, Item]]) -> float:
    """The step where an excess at the peak is recomputed."""
    replay = _replay_prices(case.items, case.problem.op_seconds)
    seconds = case.plain.step_seconds
    for price, num_bytes in sorted((replay[place], item.candidate.num_bytes) for place, item in absent):
        taken = min(num_bytes, excess)
        seconds += price * taken
        excess -= taken
        if excess <= 0:
            break
    return seconds if excess <= 0 else math.inf


def _at_peak(case: Case) -> tuple[int, list[tuple[int, Item]]]:
    """Bytes over the budget at the peak of the plain step, and what can be absent then, with its place."""
    tick = case.plain.peak_tick
    absent = [(i, item) for i, item in enumerate(case.items) if item.candidate.death <= tick < item.until]
    return int(case.excess[tick]), absent


def _by_swaps(case: Case, excess: int, absent: Sequence[Item]) -> float:
    """The step where an excess at the peak is swapped: all of it out before, all of it back before its last read."""
    if sum(item.candidate.num_bytes for item in absent) < excess:
        return math.inf
    tick, starts, device = case.plain.peak_tick, case.starts, case.device
    out = excess / _bytes_per_second(out_rates(device), device)
    back = excess / _bytes_per_second(in_rates(device), device)
    first = min(item.candidate.pack_tick for item in absent)
    last = max(item.until for item in absent)
    peak_at = max(starts[tick], starts[first] + out)
    rest = max(starts[-1] - starts[tick], back + starts[-1] - starts[last])
    return max(case.plain.step_seconds, float(peak_at + rest))


def _bytes_per_second(rates: Rates, device: DeviceSpec) -> float:
    """Of one direction; a disk whose copies do not take the link works beside it."""
    is_parallel = device.has_disk and rates.link_under_disk == 0
    return 1 / rates.link + (1 / rates.disk if is_parallel else 0.0)


def _price(item: Item, replay_seconds_per_byte: float, device: DeviceSpec) -> tuple[float, bool]:
    """Seconds per byte, and whether that is for a swap."""
    if not item.is_read:
        return 0.0, item.candidate.can_swap
    rates = out_rates(device).link + in_rates(device).link
    swap = rates * device.copy_interference if item.candidate.can_swap else math.inf
    return min(swap, replay_seconds_per_byte), swap <= replay_seconds_per_byte


def _replay_prices(items: Sequence[Item], op_seconds: Floats) -> list[float]:
    """By item: seconds per byte of the ops of its replay, each shared by bytes; infinite where there is no replay."""
    num_bytes: dict[int, int] = {}
    for item in items:
        for op in item.ops:
            num_bytes[op] = num_bytes.get(op, 0) + item.candidate.num_bytes
    return [
        sum(float(op_seconds[op]) / num_bytes[op] for op in item.ops) if item.candidate.can_recompute else math.inf
        for item in items
    ]
