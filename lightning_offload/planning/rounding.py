"""Choices made whole from the fractions of a relaxation.

A relaxed plan keeps, swaps or recomputes fractions of storages; few of them are truly fractional, so most of it is a
choice already. It does not know two things: that copies back need room ahead of their need, and that a chain of
replays takes memory for all that is made on the way. For the first the relaxation is asked for less than the budget,
by several margins; for the second some storages, *anchors*, may not be recomputed, so that no chain is longer than a
number of bytes. What is missing after rounding is filled up in the order of the fractions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_offload.planning.arrays import KEEP, RECOMPUTE, SWAP, Codes
from lightning_offload.planning.chains import anchors
from lightning_offload.planning.orders import Order
from lightning_offload.planning.plans import Setting
from lightning_offload.planning.relaxation import Relaxation, relax

_MARGINS = (1.0, 0.9)
_CHAIN_FRACTIONS = (None, 0.1)
_HALF = 0.5


def roundings(setting: Setting) -> Iterator[tuple[Codes, Order]]:
    """Choices, each with the order in which to add to it until it fits.

    Args:
        setting: The step, the device and the budget.
    """
    assert setting.budget_bytes is not None
    problem, floor_bytes = setting.problem, setting.floor.peak_bytes
    span = setting.plain.peak_bytes - floor_bytes
    seen: set[frozenset[int]] = set()
    for fraction in _CHAIN_FRACTIONS:
        fixed = frozenset() if fraction is None else frozenset(anchors(problem, fraction * span))
        if fixed in seen:
            continue
        seen.add(fixed)
        for margin in _MARGINS:
            budget = floor_bytes + int(margin * (setting.budget_bytes - floor_bytes))
            if margin == 1.0 and not fixed:
                yield _round(setting, setting.relaxed)
            else:
                yield _round(setting, relax(problem, setting.device, budget, no_recompute=fixed))


def _round(setting: Setting, relaxed: Relaxation) -> tuple[Codes, Order]:
    problem = setting.problem
    count = len(problem.candidates)
    swap, recompute = np.zeros(count), np.zeros(count)
    for fractions, column in ((relaxed.swap, swap), (relaxed.recompute, recompute)):
        for storage, fraction in fractions.items():
            column[problem.number[storage]] = fraction
    away = swap + recompute
    action = np.where(swap >= recompute, SWAP, RECOMPUTE)
    codes = np.where(away >= _HALF, action, KEEP).astype(np.int8)
    size = [c.num_bytes for c in problem.candidates.values()]
    rest: Order = []
    for i in np.lexsort((np.arange(count), np.negative(size), -away)).tolist():
        candidate = problem.candidates[int(problem.order[i])]
        if codes[i] != KEEP or not (candidate.can_swap or candidate.can_recompute):
            continue
        swaps = candidate.can_swap and (away[i] == 0 or action[i] == SWAP or not candidate.can_recompute)
        rest.append((candidate.storage, "swap" if swaps else "recompute"))
    return codes, rest
