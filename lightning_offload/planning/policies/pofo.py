"""POFO: dynamic programming over a chain of blocks, each kept, offloaded or rematerialized.

Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
NeurIPS 2021, combine both optimally for a chain of blocks; Zhao, Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate",
ICML 2023, arXiv 2307.01236, give each block several ways of being saved and choose among them by the same kind of
program. Between forward and backward a block holds what its way keeps; in its own backward it holds all that it saves
besides what the blocks before it hold. The program minimises added time over the bytes that are held.

Departures. A chain is the network's repeated blocks and what lies between them (:mod:`~.segments`). Ways are fixed:
keep all; recompute all but the block's results; recompute what is cheap; offload all; offload what is dear and
recompute the rest; offload the results and recompute the rest. Blocks are recomputed at most once, where the papers
nest. Copies cost what is not hidden, which a chain cannot tell: several prices are tried, as are several budgets of
the chain (which knows no lifetimes within a block), each simulated; the fastest step that fits counts. A host of
limited size holds what comes first. Without a budget nothing is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.links import in_rates, out_rates
from lightning_offload.planning.policies.fitting import Fitting, Tried, fit_host, num_tried, spaced
from lightning_offload.planning.policies.kinds import DEAR
from lightning_offload.planning.policies.layers import Layers, layers_of
from lightning_offload.planning.policies.segments import by_block, equal_parts
from lightning_offload.planning.request import PlanRequest

_SLOTS = 192  # of memory
_MAX_BUDGETS = 48  # that are tried
_PRICES = (0.02, 0.2, 1.0)  # of a second of copies, in seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way of saving a block.

    Attributes:
        actions: Of its storages that are not kept.
        held_bytes: What it holds between forward and backward.
        replay_seconds: What its replays take.
        copy_seconds: What its copies take, out and back.
    """

    actions: dict[int, Action]
    held_bytes: int
    replay_seconds: float
    copy_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A link of the chain.

    Attributes:
        saved_bytes: All that it saves.
        ways: Of saving it.
    """

    saved_bytes: int
    ways: tuple[Way, ...]


def pofo(request: PlanRequest) -> MemoryPlan:
    """Choose a way for each block of the chain."""
    fitting = Fitting(request, "pofo").one(Tried(actions={}))
    if request.budget_bytes is not None and request.plain.peak_bytes > request.budget_bytes:
        found = blocks_of(request)
        total = sum(block.saved_bytes for block in found)
        budgets = spaced(0, _SLOTS + len(found), min(_MAX_BUDGETS, num_tried(request)))  # bytes are rounded up to slots
        chosen = [actions for slot in budgets for actions in choose(found, total * slot // _SLOTS, _PRICES) if actions]
        for actions in {tuple(sorted(actions.items())): actions for actions in chosen}.values():
            fitting.one(Tried(actions=_fit_host(request, actions)))
        offloaded = fit_host(request, layers_of(request.problem).swappable())
        fitting.resort_to([(s, "swap") for s in offloaded])
    return fitting.plan()


def blocks_of(request: PlanRequest) -> list[Block]:
    """The chain of a step."""
    layers = layers_of(request.problem)
    label = by_block(request.problem) or equal_parts(layers)
    groups: list[list[int]] = []
    last: int | None = None
    for s, layer in layers.by_storage.items():
        here = label[layer.producer] if layer.producer >= 0 else None
        if here != last or not groups:
            groups.append([])
        groups[-1].append(s)
        last = here
    return [_block(request, layers, group) for group in groups]


def _block(request: PlanRequest, layers: Layers, storages: list[int]) -> Block:
    by_storage, inside = layers.by_storage, set(storages)
    read_later = {
        source for s, layer in by_storage.items() if s not in inside and layer.can_recompute for source in layer.sources
    }
    again = [s for s in storages if by_storage[s].can_recompute]
    results = [s for s in storages if s in read_later or s not in again]
    cheap = [s for s in again if by_storage[s].kind not in DEAR]
    movable = [s for s in storages if by_storage[s].can_swap]
    ways = [
        ((), ()),
        ((), [s for s in again if s not in results]),
        ((), [s for s in cheap if s not in results]),
        (movable, [s for s in again if s not in movable]),
        ([s for s in movable if s not in cheap or s in results], [s for s in cheap if s not in results]),
        ([s for s in results if s in movable], [s for s in again if s not in results]),
    ]
    return Block(
        saved_bytes=sum(by_storage[s].num_bytes for s in storages),
        ways=tuple(_way(request, layers, storages, swapped, again) for swapped, again in ways),
    )


def _way(
    request: PlanRequest, layers: Layers, storages: list[int], swapped: Iterable[int], again: Iterable[int]
) -> Way:
    by_storage, swapped, again = layers.by_storage, list(swapped), list(again)
    rate = out_rates(request.device).link + in_rates(request.device).link
    away = {*swapped, *again}
    ops = {op for s in again for op in by_storage[s].chain}
    return Way(
        actions={**dict.fromkeys(swapped, "swap"), **dict.fromkeys(again, "recompute")},
        held_bytes=sum(by_storage[s].num_bytes for s in storages if s not in away),
        replay_seconds=float(request.problem.op_seconds[sorted(ops)].sum()) if ops else 0.0,
        copy_seconds=rate * sum(by_storage[s].num_bytes for s in swapped),
    )


def choose(chain: list[Block], budget_bytes: int, prices: Sequence[float]) -> list[dict[int, Action]]:
    """The actions that add the least time within a budget for what the chain holds.

    Args:
        chain: The blocks, in the order of forward.
        budget_bytes: The most that may be held: by the blocks before one, and by that one in its backward.
        prices: Of a second of copies.

    Returns:
        By price; nothing where nothing fits.
    """
    unit = max(1, -(-budget_bytes // _SLOTS))
    num_slots = budget_bytes // unit + 1
    slots, price = np.arange(num_slots), np.array(prices, dtype=np.float64)
    cost = np.full((len(prices), num_slots), np.inf)  # by price, and by slots that the blocks so far hold
    cost[:, 0] = 0.0
    taken: list[npt.NDArray[np.int64]] = []
    for block in chain:
        reachable = np.where(slots * unit + block.saved_bytes <= budget_bytes, cost, np.inf)
        moved = np.full((len(block.ways), *cost.shape), np.inf)
        for number, way in enumerate(block.ways):
            step = -(-way.held_bytes // unit)
            if step < num_slots:
                added = way.replay_seconds + price * way.copy_seconds
                moved[number, :, step:] = reachable[:, : num_slots - step] + added[:, None]
        way_of = moved.argmin(axis=0)
        cost = np.take_along_axis(moved, way_of[None], axis=0)[0]
        taken.append(way_of)
    if not np.isfinite(cost).any():  # whatever the price
        return []
    return [_actions(chain, [way_of[i] for way_of in taken], int(slot), unit) for i, slot in enumerate(cost.argmin(1))]


def _actions(chain: list[Block], way_of: list[npt.NDArray[np.int64]], slot: int, unit: int) -> dict[int, Action]:
    """Follow the ways back from what the whole chain holds."""
    actions: dict[int, Action] = {}
    for block, numbers in zip(reversed(chain), reversed(way_of), strict=True):
        way = block.ways[int(numbers[slot])]
        actions |= way.actions
        slot -= -(-way.held_bytes // unit)
    return actions


def _fit_host(request: PlanRequest, actions: dict[int, Action]) -> dict[int, Action]:
    """The same without those swaps that the host has no room for."""
    room = set(fit_host(request, [s for s, action in actions.items() if action == "swap"]))
    return {s: action for s, action in sorted(actions.items()) if action != "swap" or s in room}
