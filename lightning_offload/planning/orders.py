"""Orders in which storages leave the device, cheapest bytes first: parametric families of them.

Each family prices a storage by its cheaper action. They differ in the share of its copies' duration that a swap is
priced at (how much of it may be hidden depends on all the others) and in the bytes that a chain of replays may
accumulate before it is broken by a storage that is swapped, or kept.

Where host memory is limited and there is no disk, an order swaps what fits the host, cheapest first, and recomputes
what it would have swapped beyond that. Where all swaps go to disk they are priced at the disk's rate; where only some
do, at the link's, and the simulation tells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, Tier
from lightning_offload.planning.chains import replay_cost
from lightning_offload.planning.lane_times import in_rates, out_rates
from lightning_offload.planning.plans import Setting
from lightning_offload.planning.problem import Candidate
from lightning_offload.planning.tiers import HostRoom, must_fit_host

Order = list[tuple[int, Action]]
"""Storages with their actions."""

_SWAP_WEIGHTS = (0.02, 0.1, 0.3, 1.0, 3.0)
_CHAIN_FRACTIONS = (1.0, 0.3, 0.1, 0.03, 0.01)
_BREAKS: tuple[Action, ...] = ("swap", "keep")
_FEW_WEIGHTS = (0.02, 0.3, 3.0)
_FEW_FRACTIONS = (1.0, 0.1, 0.01)


def families(setting: Setting, *, few: bool = False) -> Iterator[Order]:
    """Different orders.

    Args:
        setting: The step, the device and the budget.
        few: Whether to leave out those between others, for steps that take long to simulate.
    """
    weights, fractions = (_FEW_WEIGHTS, _FEW_FRACTIONS) if few else (_SWAP_WEIGHTS, _CHAIN_FRACTIONS)
    candidates = sorted(setting.problem.candidates.values(), key=lambda c: c.value)
    seen: set[tuple[tuple[int, Action], ...]] = set()
    for weight, fraction, break_by in itertools.product(weights, fractions, _BREAKS):
        order = _fit_host(setting, _order(setting, candidates, weight, fraction, break_by))
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield order


def _order(
    setting: Setting, candidates: Sequence[Candidate], swap_weight: float, chain_fraction: float, break_by: Action
) -> Order:
    problem, device = setting.problem, setting.device
    chain_limit = chain_fraction * max(1, setting.plain.peak_bytes - problem.graph.persistent_bytes)
    rate = _swap_rate(device, swap_weight)
    chain_bytes: dict[int, float] = {}
    priced: list[tuple[float, int, Action]] = []
    for c in candidates:
        swap = c.num_bytes * rate + device.overhead_seconds
        replay, chain = replay_cost(problem, c, chain_bytes)
        replay += device.overhead_seconds
        can_replay = c.can_recompute and (chain <= chain_limit or not c.can_swap)
        if not can_replay and (not c.can_swap or (break_by == "keep" and c.can_recompute)):
            chain_bytes[c.value] = 0.0
            continue
        action: Action = "recompute" if can_replay and (replay <= swap or not c.can_swap) else "swap"
        chain_bytes[c.value] = chain if action == "recompute" else 0.0
        priced.append(((replay if action == "recompute" else swap) / c.num_bytes, c.storage, action))
    priced.sort(key=lambda row: row[:2])
    return [(storage, action) for _, storage, action in priced]


def _swap_rate(device: DeviceSpec, weight: float) -> float:
    """Seconds that a swap is priced at per byte: what compute loses to it, or a share of its copies' duration."""
    out, back = out_rates(device), in_rates(device)
    tier: Tier = "disk" if device.host_memory_bytes == 0 and device.has_disk else "host"
    return max((out.link + back.link) * device.copy_interference, (out.of(tier) + back.of(tier)) * weight)


def _fit_host(setting: Setting, order: Order) -> Order:
    """Swap only what the host has room for, so that each prefix fits; recompute or keep the rest."""
    problem, device = setting.problem, setting.device
    if device.host_memory_bytes is None or not must_fit_host(device):
        return order
    candidates = problem.candidates
    room = HostRoom(problem, device.host_memory_bytes, (s for s, c in candidates.items() if c.can_recompute))
    fitting: Order = []
    for s, action in order:
        if action == "recompute" or room.take(s):
            fitting.append((s, action))
        elif candidates[s].can_recompute:
            fitting.append((s, "recompute"))
    return fitting
