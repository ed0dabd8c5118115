"""The planner: keep, swap or recompute for each storage so that the step fits the budget and costs little.

Each family of choices prices a storage by its cheaper action, orders storages by price per byte, and bisects
the shortest prefix of that order that is feasible, every trial being simulated in full. The families differ in
the share of its copies' duration that a swap is priced at (how much of it may be hidden depends on all the
others) and in the bytes that a chain of replays may accumulate before it is broken by a storage that is
swapped, or kept. The best few results are then pruned: storages whose action turns out to be unnecessary are
kept again, and the largest ones of the best plan try the other actions. The floor's choice, waiting for each copy,
is the last resort, so a plan exists whenever the budget is at least the floor.

Where host memory is limited and there is no disk, an order swaps what fits the host, cheapest first, and
recomputes what it would have swapped beyond that. Where all swaps go to disk they are priced at the disk's rate;
where only some do, at the link's, and the simulation tells.

Shortfall: greedy, so no optimality is claimed; every plan reports its gap to :mod:`~.bound`.
"""

from __future__ import annotations

import dataclasses
import itertools

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, MemoryPlan, Tier
from lightning_offload.planning.chains import replay_cost
from lightning_offload.planning.lane_times import in_rates, out_rates
from lightning_offload.planning.plans import Setting, build_plan
from lightning_offload.planning.simulator import Timeline, simulate
from lightning_offload.planning.tiers import HostRoom, must_fit_host

_SWAP_WEIGHTS = (0.02, 0.1, 0.3, 1.0, 3.0)
_CHAIN_FRACTIONS = (1.0, 0.3, 0.1, 0.03, 0.01)
_BREAKS: tuple[Action, ...] = ("swap", "keep")
_NUM_PRUNED = 3
_MAX_PRUNE_TRIALS = 48
_MAX_EXCHANGES = 48
_MAX_ROUNDS = 4
_FEW = 16


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    actions: dict[int, Action]
    timeline: Timeline
    no_memo: frozenset[int] = frozenset()


def auto(setting: Setting) -> MemoryPlan:
    """Plan a step within a budget, as fast as the search finds.

    Raises:
        BudgetInfeasibleError: The budget is below the floor.
    """
    limit = setting.budget_bytes
    if limit is None or setting.plain.peak_bytes <= limit:
        return build_plan(setting, "auto", {}, setting.plain)
    setting.require_feasible()
    found = [choice for family in _families(setting) if (choice := _shortest_prefix(setting, family)) is not None]
    overlapped = _simulate(setting, setting.floor_actions)
    found.append(overlapped if _is_feasible(setting, overlapped) else _Choice(setting.floor_actions, setting.floor))
    found.sort(key=_seconds)
    pruned = sorted((_prune(setting, choice) for choice in found[:_NUM_PRUNED]), key=_seconds)
    few = len(setting.problem.candidates) <= _FEW
    best = min((_exchange(setting, choice) for choice in pruned[: _NUM_PRUNED if few else 1]), key=_seconds)
    return build_plan(setting, "auto", best.actions, best.timeline, best.no_memo)


def _seconds(choice: _Choice) -> float:
    return choice.timeline.step_seconds


Ordered = list[tuple[int, Action]]


def _families(setting: Setting) -> list[Ordered]:
    """Orders in which storages leave the device, cheapest bytes first."""
    seen: dict[tuple[tuple[int, Action], ...], None] = {}
    for weight, fraction, break_by in itertools.product(_SWAP_WEIGHTS, _CHAIN_FRACTIONS, _BREAKS):
        seen[tuple(_fit_host(setting, _order(setting, weight, fraction, break_by)))] = None
    return [list(order) for order in seen]


def _order(setting: Setting, swap_weight: float, chain_fraction: float, break_by: Action) -> Ordered:
    problem, device = setting.problem, setting.device
    assert setting.budget_bytes is not None
    chain_limit = chain_fraction * max(1, setting.plain.peak_bytes - problem.graph.persistent_bytes)
    rate = _swap_rate(device, swap_weight)
    chain_bytes: dict[int, float] = {}
    priced: list[tuple[float, int, Action]] = []
    for c in sorted(problem.candidates.values(), key=lambda c: c.value):
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


def _fit_host(setting: Setting, order: Ordered) -> Ordered:
    """Swap only what the host has room for, so that each prefix fits; recompute or keep the rest."""
    problem, device = setting.problem, setting.device
    if device.host_memory_bytes is None or not must_fit_host(device):
        return order
    candidates = problem.candidates
    room = HostRoom(problem, device.host_memory_bytes, (s for s, c in candidates.items() if c.can_recompute))
    fitting: Ordered = []
    for s, action in order:
        if action == "recompute" or room.take(s):
            fitting.append((s, action))
        elif candidates[s].can_recompute:
            fitting.append((s, "recompute"))
    return fitting


def _simulate(setting: Setting, actions: dict[int, Action]) -> _Choice:
    limit = setting.budget_bytes
    return _Choice(actions, simulate(setting.problem, actions, setting.device, limit_bytes=limit))


def _is_feasible(setting: Setting, choice: _Choice) -> bool:
    if choice.timeline.overflow_bytes:
        return False
    return setting.budget_bytes is None or choice.timeline.peak_bytes <= setting.budget_bytes


def _shortest_prefix(setting: Setting, order: Ordered) -> _Choice | None:
    """The shortest feasible prefix of an order; chains may make a longer one worse, so the end is tried too."""
    best: _Choice | None = None
    low, high = 1, len(order)
    whole = _simulate(setting, dict(order))
    if _is_feasible(setting, whole):
        best = whole
    while low < high:
        middle = (low + high) // 2
        choice = _simulate(setting, dict(order[:middle]))
        if _is_feasible(setting, choice):
            best, high = choice, middle
        else:
            low = middle + 1
    return best


def _prune(setting: Setting, choice: _Choice) -> _Choice:
    """Keep storages again where the plan stays feasible and gets no slower, largest blocks first."""
    by_size = sorted(choice.actions, key=lambda s: -setting.problem.candidates[s].num_bytes)
    trials = 0
    pending = [by_size[i : i + max(1, len(by_size) // 16)] for i in range(0, len(by_size), max(1, len(by_size) // 16))]
    while pending and trials < _MAX_PRUNE_TRIALS:
        group = pending.pop()
        trial = _simulate(setting, {s: a for s, a in choice.actions.items() if s not in group})
        trials += 1
        if _is_feasible(setting, trial) and trial.timeline.step_seconds <= choice.timeline.step_seconds:
            choice = trial
        elif len(group) > 1:
            pending.extend((group[: len(group) // 2], group[len(group) // 2 :]))
    return choice


def _exchange(setting: Setting, choice: _Choice) -> _Choice:
    """Give storages the other action, or leave them be, where the plan stays feasible and gets faster."""
    candidates = sorted(setting.problem.candidates.values(), key=lambda c: -c.num_bytes)[:_MAX_EXCHANGES]
    for _ in range(_MAX_ROUNDS if len(candidates) <= _FEW else 1):
        before = choice
        for c in candidates:
            options: list[Action] = ["keep"]
            options += ["swap"] if c.can_swap else []
            options += ["recompute"] if c.can_recompute else []
            for action in options:
                if action != choice.actions.get(c.storage, "keep"):
                    choice = _better(setting, choice, _simulate(setting, _with(choice.actions, c.storage, action)))
        if choice is before:
            break
    return choice


def _with(actions: dict[int, Action], storage: int, action: Action) -> dict[int, Action]:
    rest = {s: a for s, a in actions.items() if s != storage}
    return rest if action == "keep" else {**rest, storage: action}


def _better(setting: Setting, choice: _Choice, trial: _Choice) -> _Choice:
    return trial if _is_feasible(setting, trial) and _seconds(trial) < _seconds(choice) else choice
