"""Random steps of every shape a recorder can see, and choices of actions for them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from lightning_offload.graph import StepGraph
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import ON_DEMAND, Schedule
from tests.graph.building import GraphBuilder

SEEDS = st.integers(0, 2**32 - 1)
"""Steps and choices are drawn by Python's generator: hypothesis' own prefers simple ones, where nothing interferes."""


def odd_steps(*, unit: int = 1000) -> st.SearchStrategy[StepGraph]:
    """Steps with in-place ops, results saved several times, saved parameters, casts of them, and odd orders.

    Saves are read back in any order, several times or never; results may outlive forward, and ops may save nothing.
    """
    return st.builds(lambda seed: odd_step(random.Random(seed), unit), SEEDS)


def odd_step(rng: random.Random, unit: int = 1000) -> StepGraph:
    """One of :func:`odd_steps`."""
    b = GraphBuilder()

    def size() -> int:
        return unit * rng.randint(1, 50)

    given = [b.given(size()) for _ in range(rng.randint(1, 3))]
    live, saves = list(given), []
    for _ in range(rng.randint(1, 32)):
        inputs = tuple(dict.fromkeys(rng.choices(live, k=rng.randint(1, 3))))
        kind = rng.randrange(8)
        if kind == 0:
            made = b.op((rng.choice(given),), (size(),), name="aten._to_copy.default", seconds=0.5)
        else:
            writes = tuple(v for v in inputs if rng.random() < 0.5) if kind == 1 else ()
            sizes = tuple(size() for _ in range(rng.randint(0 if writes else 1, 2)))
            made = b.op(
                inputs, sizes, writes=writes, seconds=rng.choice([0.0, 0.5, 1.0, 4.0]),
                replayable=rng.random() < 0.93, workspace_bytes=rng.choice([0, 0, 0, unit, 20 * unit]),
            )  # fmt: skip
            live = [v for v in live if v not in writes]
            given = [v for v in given if v not in writes] or [b.given(size())]
        live += made
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            saves.append(b.pack(rng.choice([*made, *made, *live]), must_keep=rng.random() < 0.08))
        for v in live[:-1]:
            if v not in given and rng.random() < 0.4:
                live.remove(v)
                b.drop(v)
    b.backward()
    _read_back(b, rng, saves, [v for v in live if v not in given], size)
    b.op((), (), seconds=0.25)
    return b.build()


def _read_back(b: GraphBuilder, rng: random.Random, saves: list[int], live: list[int], size: Callable[[], int]) -> None:
    order = list(reversed(saves))
    if rng.random() < 0.5:
        rng.shuffle(order)
    pending: list[int] = []
    for save in order:
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
            b.unpack(save)
            b.drop(b.make(size(), seconds=rng.choice([0.0, 1.0])))
        pending.append(save)
        while pending and rng.random() < 0.7:
            b.release(pending.pop(0))
        if live and rng.random() < 0.4:
            b.drop(live.pop())
    for save in pending[1:]:
        b.release(save)
    if live and rng.random() < 0.8:
        b.drop(*live)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a simulation is asked."""

    actions: dict[int, Action]
    no_memo: frozenset[int]
    limit_bytes: int | None
    schedule: Schedule | None


def random_choice(problem: Problem, rng: random.Random) -> Choice:
    """Any actions that the candidates allow, under any limit."""
    actions: dict[int, Action] = {}
    for s, c in problem.candidates.items():
        action = rng.choice(["keep"] + ["swap"] * c.can_swap + ["recompute"] * c.can_recompute)
        if action != "keep":
            actions[s] = action
    highest = int(np.max(problem.base))
    return Choice(
        actions=actions,
        no_memo=frozenset(s for s in actions if rng.random() < 0.3),
        limit_bytes=rng.choice([None, rng.randint(highest // 2, 2 * highest + 1)]),
        schedule=rng.choice([*[None] * 10, ON_DEMAND, ON_DEMAND, *[_random_schedule(problem, actions, rng)] * 4]),
    )


def _random_schedule(problem: Problem, actions: dict[int, Action], rng: random.Random) -> Schedule:
    swapped = [s for s, action in actions.items() if action == "swap" and rng.random() < 0.8]
    return Schedule(
        release={s: rng.randint(-1, problem.graph.num_ticks) for s in swapped},
        prefetch={s: rng.randint(-1, len(problem.unpacks) - 1) for s in swapped},
    )
